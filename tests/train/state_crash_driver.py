"""Saves checkpoints in children that are killed (SIGKILL) at their n-th file operation, for every n.

Run as a script: `python state_crash_driver.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from eyas.train.distributed import World
from eyas.train.optimizer import make_adamw
from eyas.train.state import Checkpoints, Progress

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.listdir", "os.scandir")


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Linear(4, 3)
    optimizer = make_adamw(module, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def die_at(count: int, folder: Path) -> None:
    """Kill this process at its `count`-th operation on files under `folder`."""
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _FILE_EVENTS and args and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, {"lr": 1e-2}, {"store": "s"}, keep_last=1)


def fresh(folder: Path) -> None:
    """Two checkpoints, of which the next save removes the second."""
    shutil.rmtree(folder, ignore_errors=True)
    for step, metric in ((1, 2.0), (2, None)):
        checkpoints(folder).save(*made(step), Progress(step, metric=metric), World())


def judge(folder: Path) -> list[int]:
    """Steps of what a killed save left, each of which must be whole."""
    found = checkpoints(folder)
    found.sweep()
    steps = found.steps()
    assert sorted(path.name for path in folder.iterdir()) == [found.path(step).name for step in steps]
    for step in steps:
        module, optimizer = made(99)
        assert found.load(found.path(step), module, optimizer, World()).step == step
        for mine, theirs in zip(module.parameters(), made(step)[0].parameters(), strict=True):
            assert torch.equal(mine, theirs), step
    return steps


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    seen: list[list[int]] = []
    for count in range(1, 1000):
        fresh(folder)
        child = os.fork()
        if child == 0:
            module, optimizer = made(3)
            die_at(count, folder)
            checkpoints(folder).save(module, optimizer, Progress(3, metric=1.0), World())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.append(judge(folder))
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
