"""A tiny target with its corpus and store, and runs on them: alone, killed on the way, and of several ranks.

As a script it is the process that runs are forked from: torch is imported once, and no thread of it has started.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from eyas.config import TrainConfig, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.errors import EyasError
from eyas.extract.runner import extract
from eyas.train.run import TrainSummary, train
from servers import free_port
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

ROWS, PROMPT, ANSWER = 40, 6, 14
SETTINGS: dict[str, Any] = {
    "dtype": "f64",
    "vocab_coverage": 1.0,
    "steps": 3,
    "batch_tokens": 64,
    "epochs": 3,
    "lr": 3e-3,
    "eval_share": 0.2,
    "eval_every": 10,
    "save_every": 4,
    "log_every": 1,
    "readers": 1,
    "device": "cpu",
    "timeout_s": 60.0,
}


def make_inputs(folder: Path, rows: int = ROWS) -> Path:
    """`folder` with model/, corpus.parquet and store/: greedy answers of a tiny Llama to random prompts."""
    model = tiny_llama(folder / "model", hidden_size=32)
    rng, target = np.random.default_rng(0), AutoModelForCausalLM.from_pretrained(model)
    prompts = torch.from_numpy(rng.integers(6, VOCAB_SIZE, (rows, PROMPT)))
    with torch.inference_mode():
        texts = target.generate(prompts, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
    meta = CorpusMeta(model=str(model), tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)
    with CorpusWriter(folder / "corpus.parquet", meta) as writer:
        for row, text in enumerate(texts.numpy()):
            length = PROMPT + ANSWER - int(rng.integers(0, 6))
            writer.add(str(row), text[:length], np.arange(length) >= PROMPT)
    cfg = load(overrides=["extract.engine=hf", "store.reserve_bytes=0", "store.shard_bytes=40KB"])
    extract(folder / "corpus.parquet", folder / "store", cfg=cfg, console=Console(file=io.StringIO()))
    return folder


def settings(inputs: Path, out: Path, **changes: Any) -> TrainConfig:
    places = {"store": inputs / "store", "corpus": inputs / "corpus.parquet", "out": out}
    return TrainConfig(**{**SETTINGS, **places, **changes})


def run(inputs: Path, out: Path, **changes: Any) -> TrainSummary:
    return train(settings(inputs, out, **changes), console=Console(file=io.StringIO()))


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    """All sessions' events of a kind, in order; a line that was cut off by a kill is left out."""
    found = []
    for path in sorted((out / "events").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
    return found


def curve(out: Path) -> dict[int, tuple[Any, ...]]:
    """Step -> its numbers. A step that two sessions took must have given the same to both."""
    found: dict[int, tuple[Any, ...]] = {}
    for event in events(out, "train"):
        numbers = tuple(json.dumps(event[key]) for key in ("loss", "norm", "lr", "tokens", "rows", "accuracy"))
        assert found.setdefault(event["step"], numbers) == numbers, f"step {event['step']} differs between sessions"
    return found


# --- in a process of its own ------------------------------------------------------------------------------------------


def driven(program: str, *words: object, timeout_s: float = 120) -> Any:
    """What a function of this module, run by name in a fresh process, gives; JSON."""
    done = subprocess.run(
        [sys.executable, __file__, program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def forked(work: Callable[[], object]) -> int:
    """A child that does the work; exit code 0, or that of an EyasError, whose text it leaves on stderr."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except EyasError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code; of a killed one the signal's number, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_steps(out: Path, count: int, child: int, session: int = 0) -> None:
    """Until the log of a session, by number, tells of so many steps, as long as the child lives."""
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        started = [event["step"] for event in events(out, "start")]
        taken = [event["step"] for event in events(out, "train")]
        if len(started) > session and taken and taken[-1] >= started[session] + count:
            return
        time.sleep(0.002)
    raise AssertionError("the run ended before it could be disturbed")


def die_at_file(count: int, folder: Path, event: str) -> None:
    """Kill this process at its `count`-th operation of a kind on files under `folder`."""
    seen = 0

    def hook(name: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if name == event and args and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_and_resume(inputs: Path, folder: Path) -> dict[str, list[int]]:
    """`run`: killed between steps, stopped by SIGTERM, killed in two saves; then to its end. `whole`: undisturbed.

    `second`: a run into a folder into which another one trains.
    """
    out = folder / "run"

    def whole() -> None:
        run(inputs, out)

    def dies(event: str, count: int) -> Callable[[], None]:
        def work() -> None:
            die_at_file(count, out / "checkpoints", event)
            run(inputs, out)

        return work

    codes = []
    for session, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
        child = forked(whole)
        wait_for_steps(out, 5, child, session)
        os.kill(child, number)
        codes.append(ended(child))
    codes += [ended(forked(dies("os.rename", 3))), ended(forked(dies("open", 9))), ended(forked(whole))]
    long = forked(lambda: run(inputs, folder / "long", epochs=10_000))
    wait_for_steps(folder / "long", 1, long)
    second = ended(forked(lambda: run(inputs, folder / "long")))
    os.kill(long, signal.SIGKILL)
    return {"run": codes, "whole": [ended(forked(lambda: run(inputs, folder / "whole")))], "second": [second]}


def ranks(inputs: Path, out: Path, changes: Sequence[dict[str, Any]]) -> list[int]:
    """Children of one run, by rank, whose words go to `out`.rank-N; `changes` of each rank's settings."""
    port, count, children = free_port(), len(changes), []
    for rank in range(count):

        def work(rank: int = rank) -> None:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            words = os.open(f"{out}.rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(words, 2)
            run(inputs, out, **changes[rank])

        children.append(forked(work))
    return children


def two_ranks(inputs: Path, folder: Path) -> dict[str, list[Any]]:
    """Exit codes of: one rank that accumulates two batches a step (`one`); two ranks in both ways, of which `fsdp` is
    killed and gone on with; two whose rank 1 is killed (`lost`, with the seconds to the end); and two whose rank 1 has
    no store (`failing`)."""
    codes: dict[str, list[Any]] = {"one": [ended(forked(lambda: run(inputs, folder / "one", accumulate=2)))]}
    codes["ddp"] = [ended(child) for child in ranks(inputs, folder / "ddp", [{}] * 2)]
    children = ranks(inputs, folder / "fsdp", [{"parallel": "fsdp"}] * 2)
    wait_for_steps(folder / "fsdp", 5, children[0])
    for child in children:
        os.kill(child, signal.SIGKILL)
    children += ranks(inputs, folder / "fsdp", [{"parallel": "fsdp"}] * 2)
    codes["fsdp"] = [ended(child) for child in children]
    children = ranks(inputs, folder / "lost", [{"epochs": 10_000}] * 2)
    wait_for_steps(folder / "lost", 3, children[0])
    began_s = time.monotonic()
    os.kill(children[1], signal.SIGKILL)
    time.sleep(0.5)
    for _ in range(2):  # as torchrun does to the others
        os.kill(children[0], signal.SIGTERM)
        time.sleep(0.5)
    codes["lost"] = [ended(children[0]), ended(children[1]), time.monotonic() - began_s]
    children = ranks(inputs, folder / "failing", [{}, {"store": folder / "nowhere"}])
    codes["failing"] = [ended(child) for child in children]
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    program, *places = sys.argv[1:]
    print(json.dumps(globals()[program](*map(Path, places))))
