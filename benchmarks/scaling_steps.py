"""What scaling.py measures: each step is a function of where to work, run in a forked process of its own.

The parent has imported everything and started nothing: no thread, no pool. What an interpreter needs to come up is
measured apart, as it does not depend on rows.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

import eyas.extract
from eyas.capture.contract import CaptureSpec
from eyas.config import Config, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract import runner
from eyas.extract.engine import Captured, CaptureRequest, Failed
from eyas.extract.fake import FakeEngine
from eyas.store.documents import describe_store
from eyas.store.files import read_journal
from eyas.store.journal import decode_journal
from eyas.store.reader import StoreDataset, StoreReader
from eyas.verify.run import verify

HIDDEN: Final = 8
_STATUS, _IO, _CLEAR = Path("/proc/self/status"), Path("/proc/self/io"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Job:
    """Where a step works.

    Attributes:
        corpus: the corpus file, of `rows` rows. store: the store's folder.
        shard_bytes: its largest shard.
        until: for `killed`: rows its session stores before it is killed.
    """

    corpus: Path
    store: Path
    rows: int
    shard_bytes: int
    until: int = 0

    @property
    def cfg(self) -> Config:
        return load(
            overrides=[
                "extract.engine=fake",
                f"fake.hidden_size={HIDDEN}",
                f"store.shard_bytes={self.shard_bytes}",
                "store.reserve_bytes=0",
            ]
        )

    def extract(self) -> runner.Summary:
        return runner.extract(self.corpus, self.store, cfg=self.cfg, console=Console(file=io.StringIO()))


#: Takes a step's figures.
Tell = Callable[[dict[str, float]], None]
_FORK: Final = multiprocessing.get_context("fork")


class Clock:
    """Time, processor time, memory and system calls since it was made."""

    def __init__(self) -> None:
        _CLEAR.write_text("5")  # the peak of the resident set starts anew
        self._memory = _kib("VmRSS")
        self._io = _io()
        self._cpu_s, self._began_s = _cpu_s(), time.monotonic()

    def figures(self, **more: float) -> dict[str, float]:
        """What was used until now; `own_mb` is what memory grew by at its peak, `rss_mb` the peak itself."""
        wall_s, cpu_s, now = time.monotonic() - self._began_s, _cpu_s() - self._cpu_s, _io()
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "rss_mb": _kib("VmHWM") / 1024,
            "own_mb": (_kib("VmHWM") - self._memory) / 1024,
            "reads": now["syscr"] - self._io["syscr"],
            "writes": now["syscw"] - self._io["syscw"],
            "read_mb": (now["rchar"] - self._io["rchar"]) / 1e6,
            "written_mb": (now["wchar"] - self._io["wchar"]) / 1e6,
        } | more


def _kib(name: str) -> int:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def _io() -> dict[str, int]:
    return {key: int(value) for key, value in (line.split(":") for line in _IO.read_text().splitlines())}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _on_stored(stored: Callable[[int], None]) -> None:
    """Has `stored` called, with the count so far, for every row that this process's fake engine sees stored."""

    class Watched(FakeEngine):
        def __init__(self, spec: CaptureSpec, **settings: Any) -> None:
            super().__init__(spec, **settings)
            self._count = 0

        async def capture(self, request: CaptureRequest) -> Captured | Failed:
            states = await super().capture(request)
            return replace(states, release=self._released) if isinstance(states, Captured) else states

        def _released(self) -> None:
            self._count += 1
            stored(self._count)

    eyas.extract.FakeEngine = Watched  # pyright: ignore[reportAttributeAccessIssue]


def corpus(job: Job, clock: Clock, tell: Tell) -> None:
    """Writes the corpus: rows of 4 to 40 random tokens, the last two thirds of each are trained."""
    rng = np.random.default_rng(0)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(job.corpus, meta) as writer:
        for row in range(job.rows):
            length = int(rng.integers(4, 41))
            mask = np.zeros(length, np.uint8)
            mask[length // 3 :] = 1
            writer.add(f"r{row}", rng.integers(0, 1000, length), mask)
    tell(clock.figures())


def plan(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas extract --plan`."""
    planned = runner.plan(job.corpus, job.store, cfg=job.cfg)
    tell(clock.figures(shards=planned.shards))


def extract(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas extract` into an empty folder, to its end."""
    summary = job.extract()
    assert summary.complete
    tell(clock.figures())


def again(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas extract` of a store that is complete."""
    summary = job.extract()
    assert summary.complete
    assert not summary.rows_now
    tell(clock.figures())


def killed(job: Job, _: Clock, tell: Tell) -> None:
    """Killed once `job.until` more rows are stored."""

    def stored(count: int) -> None:
        if count >= job.until:
            os.kill(os.getpid(), signal.SIGKILL)

    _on_stored(stored)
    job.extract()


def resume(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas extract` of an unfinished store until its first new row is stored; killed there."""
    once = threading.Lock()

    def stored(_: int) -> None:
        once.acquire()  # several threads store rows: the first one ends the process
        tell(clock.figures())
        os.kill(os.getpid(), signal.SIGKILL)

    _on_stored(stored)
    job.extract()


def journal(job: Job, clock: Clock, tell: Tell) -> None:
    """Reading and decoding the journals that open shards have."""
    rows = 0
    for path in sorted(job.store.glob("*.journal")):
        rows += sum(len(session.rows) for session in decode_journal(read_journal(path)).sessions)
    tell(clock.figures(journalled=rows))


def check(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas verify STORE`: structure, checksums, finiteness."""
    report = verify(job.store, console=Console(file=io.StringIO()))
    assert not report.problems, report.problems[:3]
    tell(clock.figures())


def identity(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas verify STORE --corpus CORPUS`: the same, and tokens, masks and positions."""
    report = verify(job.store, corpus=job.corpus, console=Console(file=io.StringIO()))
    assert not report.problems, report.problems[:3]
    tell(clock.figures())


def info(job: Job, clock: Clock, tell: Tell) -> None:
    """`eyas store info`."""
    assert describe_store(job.store)
    tell(clock.figures())


def reader(job: Job, clock: Clock, tell: Tell) -> None:
    """Opening a StoreReader, and its first row."""
    assert StoreReader(job.store)[0].row == 0
    tell(clock.figures())


def dataset(job: Job, clock: Clock, tell: Tell) -> None:
    """The first row of a shuffled epoch of a StoreDataset, opening included."""
    assert next(iter(StoreDataset(job.store))).aux.numel()
    tell(clock.figures())


def measured(step: Callable[[Job, Clock, Tell], None], job: Job) -> dict[str, float] | None:
    """A step's figures from a process of its own; None of one that was killed first.

    Raises:
        SystemExit: it failed.
    """
    mine, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(step, job, theirs))
    process.start()
    theirs.close()
    try:
        found = mine.recv()
    except EOFError:
        found = None
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL) or (found is None) != (step is killed):
        raise SystemExit(f"{step.__name__} of {job.rows} rows ended with {process.exitcode}")
    return found


def _child(step: Callable[[Job, Clock, Tell], None], job: Job, link: Connection) -> None:
    step(job, Clock(), link.send)
