"""Stops an operation on a store at each of its file operations in turn, resumes, and compares with the undisturbed run.

    python crash_driver.py SCRATCH finish|resume|reopen|move|move-home

A process of its own, single-threaded, since it forks once per step. Python's audit events (open, rename, remove, ...)
are the steps; the child leaves by os._exit in the middle of one, so nothing is flushed, closed or cleaned up.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from store_samples import contents, open_store, row_states, snapshot, write_all, write_store

from eyas.errors import StoreError
from eyas.store.check import verify_store
from eyas.store.files import ShardPaths
from eyas.store.move import move_shards
from eyas.store.reader import StoreReader

ROWS, FAILING = 6, {2, 4}
STEPS = {"open", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "fcntl.flock", "os.mkdir"}


def other(root: Path) -> Path:
    return root.with_name(f"{root.name}-other")


def clear(root: Path) -> None:
    for folder in (root, other(root)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


# Each operation: what is there before, the operation, and how a later run picks it up.


def before_finish(root: Path) -> None:
    root.rmdir()  # creating the store is part of what is interrupted


def finish(root: Path) -> None:
    write_store(root, ROWS, FAILING)


def before_resume(root: Path) -> None:
    writer = open_store(root, ROWS)
    lease = writer.lease(writer.plan.shards[0], contents)
    assert lease is not None
    lease.put(1, *row_states(1))
    lease.fail(2, "retracted", "synthetic")
    lease.close()
    with ShardPaths(root, "shard-00000").journal.open("ab") as journal:
        journal.write(b"torn")


def before_reopen(root: Path) -> None:
    write_store(root, ROWS, FAILING)


def reopen(root: Path) -> None:
    writer = open_store(root, ROWS)
    for shard in writer.plan.shards:
        writer.reopen_failed(shard)
    write_all(writer)


def before_move(root: Path) -> None:
    write_store(root, ROWS, FAILING)


def move(root: Path) -> None:
    move_shards(root, None, other(root))


def before_move_home(root: Path) -> None:
    before_move(root)
    move(root)


def move_home(root: Path) -> None:
    move_shards(root, None, root)


OPERATIONS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "finish": (before_finish, finish),
    "resume": (before_resume, finish),
    "reopen": (before_reopen, reopen),
    "move": (before_move, move),
    "move-home": (before_move_home, move_home),
}


def crash_at(step: int, operation: Callable[[Path], None], root: Path) -> bool:
    """Run the operation in a child that stops at its `step`-th file operation; whether it stopped."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in STEPS:
            count += 1
            if count == step:
                os._exit(9)

    sys.addaudithook(hook)
    try:
        operation(root)
    except BaseException as error:
        print(f"operation itself failed: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def main(scratch: Path, name: str) -> None:
    before, operation = OPERATIONS[name]
    whole = scratch / "whole"
    clear(whole)
    before(whole)
    operation(whole)
    expected = [snapshot(whole), snapshot(other(whole))]
    states: set[tuple[str, ...]] = set()
    step = 0
    while True:
        step += 1
        root = scratch / "crashed"
        clear(root)
        before(root)
        if not crash_at(step, operation, root):
            break
        left = tuple(sorted(p.name for p in root.iterdir())) if root.exists() else ()
        states.add(left)
        if name == "reopen" or name.startswith("move"):
            check_readable(root, step)
        operation(root)
        found = [snapshot(root), snapshot(other(root))]
        assert found == expected, (step, left, [sorted(f) for f in found], [sorted(e) for e in expected])
        report = verify_store(root, contents)
        assert report.ok, (step, left, report.problems)
    print(json.dumps({"steps": step - 1, "states": len(states)}))


def check_readable(root: Path, step: int) -> None:
    """A store that is being moved or retried stays one: every row that can be read is right."""
    try:
        reader = StoreReader(root)
    except StoreError as error:
        assert "no complete shard" in str(error), (step, error)
        return
    for row in reader:
        aux, _ = row_states(row.row)
        assert row.aux.view(dtype=torch.uint16).numpy().tobytes() == aux.tobytes(), (step, row.row)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
