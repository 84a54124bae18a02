"""From spool to store alone: GB/s, where the time goes, and whether memory stays flat. No GPU, no server.

    python benchmarks/spool_to_store.py                              2 cores, 24 GB: about two minutes
    python benchmarks/spool_to_store.py --gb 12 --rounds 5           a larger host
    python benchmarks/spool_to_store.py --cases 8b:2048 --threads 1 2 4 8
    python benchmarks/spool_to_store.py --store /mnt/disk            a store that is not on RAM disk

Record files lie ready on RAM disk, each with states and a header of its own. An engine without a server publishes a
row's record in the spool when the row is asked for; from there on all is the product's: inbox, header, one pass into
the shard, journal, removal, fsync, rename, sidecar. The clock runs from the first request until the last shard is
complete. Cases are SHAPE:LENGTHS, where LENGTHS is a number of tokens, `mixed` (50 to 8,000) or `short` (50 to 300).

    gb_per_s       states stored over the time of a round, median of the rounds
    cpu_s_per_gb   processor time of the whole process, event loop and all
    over_copies    that, over what the kernel's two copies (read a record, write a shard) take by themselves in this run
    tail_ms        from the last row's journal line to the last shard's sidecar
    own_mb         the process's own memory (anonymous pages) before the rounds, and the peak within the first and the
                   last round
    profile        one more round under timers: share of the process's processor time

The last round's store is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import xxhash
from shapes import SHAPES

from eyas.capture.contract import (
    RECORD_METADATA,
    SPEC_FILE,
    CaptureSpec,
    RecordHeader,
    RequestId,
    ServerHello,
    field_hash,
    runs_hash,
    token_hash,
)
from eyas.capture.tensorfile import layout
from eyas.config import ExtractConfig
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract import record, worker
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed
from eyas.extract.inbox import Inbox
from eyas.extract.record import open_record
from eyas.extract.worker import Report
from eyas.store import shard_writer
from eyas.store import writer as store_writer
from eyas.store.check import verify_store
from eyas.store.files import CHUNK_BYTES, pwrite_all
from eyas.store.writer import StoreWriter

CASES: Final = ("8b:2048", "1b:2048", "kimi:2048", "8b:mixed", "1b:short")
RUN, SESSION, VOCAB = "run00000", "session0", 1000
COPIED: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What is stored: rows of these lengths, of a target of this shape."""

    name: str
    spec: CaptureSpec
    lengths: list[int]

    @classmethod
    def parse(cls, text: str, budget: int) -> Case:
        """As many rows as the budget of bytes holds, at least one."""
        shape_name, _, wanted = text.partition(":")
        shape = SHAPES[shape_name]
        config = shape.config
        spec = CaptureSpec(
            shape.layers, "all", "bf16", config["hidden_size"], VOCAB, config["num_hidden_layers"], "f" * 32
        )
        rng, lengths, used = np.random.default_rng(0), list[int](), 0
        while not lengths or used < budget:
            match wanted:
                case "mixed":
                    length = int(rng.integers(50, 8001))
                case "short":
                    length = int(rng.integers(50, 301))
                case _:
                    length = int(wanted)
            lengths.append(length)
            used += spec.record_bytes(length, length)
        return cls(text, spec, lengths)

    @property
    def bytes(self) -> int:
        return sum(self.spec.record_bytes(length, length) for length in self.lengths)


class Records:
    """Makes a corpus's record files. States are parts of one pool of random finite numbers: each row has its own."""

    def __init__(self, case: Case, corpus: Corpus) -> None:
        size = (64 << 20) + max(case.spec.record_bytes(length, length) for length in case.lengths)
        words = np.random.default_rng(1).integers(0, 1 << 64, size // 8, dtype=np.uint64)
        words &= np.uint64(0x83FF_83FF_83FF_83FF)
        words |= np.uint64(0x3C00_3C00_3C00_3C00)
        pool = words.view(np.uint8).data
        self._parts: list[tuple[str, bytes, memoryview]] = []
        for row in corpus.rows(0, len(corpus)):
            rid, tokens = str(RequestId(RUN, SESSION, row.index, 0)), len(row.tokens)
            states = case.spec.record_bytes(tokens, tokens)
            at = row.index * 4096 % (len(pool) - states + 1) // 8 * 8
            whole, cut = pool[at : at + states], tokens * case.spec.aux_bytes_per_token
            runs = [0, tokens]
            header = RecordHeader(
                rid,
                case.spec.spec_id,
                token_hash(row.tokens.tolist()),
                tokens,
                tokens,
                f"{runs_hash(runs):016x}",
                [runs],
                f"{field_hash(whole[:cut]):016x}",
                f"{field_hash(whole[cut:]):016x}",
            )
            name = case.spec.stored_dtype
            tensors = [("aux", name, case.spec.aux_shape(tokens)), ("last", name, case.spec.last_shape(tokens))]
            self._parts.append((rid, layout(tensors, {RECORD_METADATA: header.to_json()}).header, whole))

    def write(self, folder: Path) -> None:
        """All of them, as files."""
        folder.mkdir()
        for rid, header, states in self._parts:
            with (folder / f"{rid}.safetensors").open("wb") as file:
                file.write(header)
                file.write(states)


class SpoolEngine:
    """The client's part of an engine with a server: a record appears in the spool when its row is asked for."""

    def __init__(self, spec: CaptureSpec, ready: Path, spool: Path) -> None:
        spool.mkdir(mode=0o700)
        (spool / SPEC_FILE).write_text(ServerHello(spec.to_dict(), spec.spec_id, {}, 1 << 20, 1 << 40).to_json())
        self._spec, self._ready, self._spool = spec, ready, spool
        self._inbox = Inbox(spool)
        self._inbox.hello()

    async def start(self) -> EngineInfo:
        return EngineInfo(self._spec, {"engine": "benchmark"})

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        rid = str(request.rid)
        (self._ready / f"{rid}.safetensors").rename(self._spool / f"{rid}.safetensors")
        path = await self._inbox.wait(rid, 60)
        if isinstance(path, Failed):
            return path
        release = functools.partial(self._inbox.remove, rid)
        return await asyncio.to_thread(open_record, path, request, self._spec, release, self._inbox.owners)

    async def reprobe(self) -> None:
        """No server restarts here."""

    async def close(self) -> None:
        await self._inbox.close()


class Memory(threading.Thread):
    """The process's own memory, every 50 ms while it is entered."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.peak = own_bytes()

    def run(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, own_bytes())

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def own_bytes() -> int:
    """Anonymous pages of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Profile:
    """Processor time by step, of the threads that take it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                with self._lock:
                    self.seconds[step] += time.thread_time() - began

        return call

    @contextlib.contextmanager
    def timers(self) -> Iterator[None]:
        """Timers around each step of the way."""
        profile = self

        class Digest:
            def __init__(self) -> None:
                digest = xxhash.xxh3_64()
                self.update, self.intdigest = profile.timed("hash", digest.update), digest.intdigest

        class Hashes:
            xxh3_64 = Digest

        check = shard_writer.finite_check
        with contextlib.ExitStack() as stack:
            for owner, name, step in (
                (record._RecordFile, "fill", "read"),
                (shard_writer, "pwrite_all", "write"),
                (shard_writer.ShardWriter, "_record", "journal"),
                (store_writer, "allocate", "reserve the shard's space"),
                (Inbox, "remove", "remove the record"),
                (Inbox, "_scan", "look into the spool"),
            ):
                stack.enter_context(patch.object(owner, name, self.timed(step, getattr(owner, name))))
            stack.enter_context(patch.object(shard_writer, "xxhash", Hashes))
            finite = patch.object(shard_writer, "finite_check", lambda spec: self.timed("finite", check(spec)))
            stack.enter_context(finite)
            yield


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the corpus."""

    seconds: float
    cpu: float
    tail_s: float
    peak: int


class Bench:
    """One case, ready to run again and again."""

    def __init__(self, case: Case, work: Path, store: Path, shard_bytes: int) -> None:
        self.case, self._work, self._store, self._shard_bytes = case, work, store, shard_bytes
        meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=VOCAB)
        rng = np.random.default_rng(2)
        with CorpusWriter(work / "corpus.parquet", meta) as writer:
            for row, length in enumerate(case.lengths):
                writer.add(str(row), rng.integers(0, VOCAB, length), np.ones(length, np.uint8))
        self._corpus = Corpus.open(work / "corpus.parquet")
        self._records = Records(case, self._corpus)

    def round(self, threads: int, *, profile: Profile | None = None, verify: bool = False) -> Round:
        """Into a new store, which is removed again."""
        ready, spool = self._work / "ready", self._work / "spool"
        self._records.write(ready)
        try:
            with profile.timers() if profile else contextlib.nullcontext(), Memory() as memory:
                began, cpu_before = time.perf_counter(), cpu_s()
                with patch.object(worker, "_STORE_THREADS", threads):
                    tail_s = asyncio.run(self._run(SpoolEngine(self.case.spec, ready, spool)))
                done = Round(time.perf_counter() - began, cpu_s() - cpu_before, tail_s, memory.peak)
            if verify:
                checked = verify_store(self._store)
                assert checked.ok, checked.problems
                assert checked.rows == len(self.case.lengths)
        finally:
            for folder in (ready, spool, self._store):
                shutil.rmtree(folder, ignore_errors=True)
        return done

    async def _run(self, engine: SpoolEngine) -> float:
        """Seconds between the last row and the last shard."""
        lengths, spec = self._corpus.n_tokens, self.case.spec
        store = StoreWriter.open(
            self._store,
            spec=spec,
            corpus={"digest": "0" * 32},
            tokens_N=lengths,
            positions_N=lengths,
            shard_bytes=self._shard_bytes,
            provenance={"engine": "benchmark"},
        )
        last = {"row": 0.0, "shard": 0.0}

        def report(news: Report) -> None:
            assert news.failure is None, news
            last["shard" if news.done else "row"] = time.perf_counter()

        cfg = ExtractConfig()
        working = worker.Worker(
            self._corpus,
            store,
            engine,
            spec,
            run=RUN,
            session=SESSION,
            cfg=cfg,
            window_bytes=cfg.window_bytes,
            report=report,
        )
        try:
            await working.run()
        finally:
            await engine.close()
        store.write_manifest()
        return last["shard"] - last["row"]


def two_copies(work: Path, store: Path) -> float:
    """Processor seconds a GB of reading a file on RAM disk and writing it where the store lies, and nothing else."""
    paths = work / "source", store.with_name("copy-target")
    with paths[0].open("wb") as file:
        file.write(np.random.default_rng(0).bytes(COPIED))
    source = os.open(paths[0], os.O_RDONLY)
    target = os.open(paths[1], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(target, 0, COPIED)  # as a shard's part
        buffer = memoryview(bytearray(CHUNK_BYTES))
        began = time.thread_time()
        for at in range(0, COPIED, CHUNK_BYTES):
            os.preadv(source, [buffer], at)
            pwrite_all(target, buffer, at)
        return (time.thread_time() - began) / COPIED * 1e9
    finally:
        for fd, path in zip((source, target), paths, strict=True):
            os.close(fd)
            path.unlink()


def measured(
    bench: Bench, threads: int, rounds: int, copies: list[float], copied: Callable[[], float]
) -> dict[str, Any]:
    """A case under a number of threads: its line of the result."""
    size, before = bench.case.bytes, own_bytes()
    done: list[Round] = []
    for number in range(rounds):
        copies.append(copied())
        done.append(bench.round(threads, verify=number == rounds - 1))
    profile = Profile()
    under = bench.round(threads, profile=profile)
    shares = {step: round(seconds / under.cpu, 3) for step, seconds in profile.seconds.most_common()}
    shares["all else"] = round(1 - sum(shares.values()), 3)
    cpu = statistics.median(one.cpu for one in done) / size * 1e9
    return {
        "case": bench.case.name,
        "threads": threads,
        "rows": len(bench.case.lengths),
        "tokens": sum(bench.case.lengths),
        "gb": round(size / 1e9, 3),
        "gb_per_s": round(statistics.median(size / one.seconds for one in done) / 1e9, 3),
        "gb_per_s_rounds": [round(size / one.seconds / 1e9, 3) for one in done],
        "rows_per_s": round(statistics.median(len(bench.case.lengths) / one.seconds for one in done), 1),
        "cpu_s_per_gb": round(cpu, 3),
        "over_copies": round(cpu / statistics.median(copies[-rounds:]), 2),
        "tail_ms": round(statistics.median(one.tail_s for one in done) * 1e3, 1),
        "own_mb": [round(x / 1e6, 1) for x in (before, done[0].peak, done[-1].peak)],
        "profile": shares,
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--threads", nargs="+", type=int, default=[8], help="that bring rows to their places")
    parser.add_argument("--gb", type=float, default=1.5, help="states of a round; twice that lies on RAM disk")
    parser.add_argument("--shard-mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spool", type=Path, default=Path("/dev/shm"), help="RAM disk")
    parser.add_argument("--store", type=Path, help="where the store is made; default: beside the spool")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/spool_to_store.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, copies = [], []
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eyas-spool-to-store-", dir=folder)))
            for folder in (args.spool, args.store or args.spool)
        ]
        work, store = folders[0], folders[1] / "store"
        copied = functools.partial(two_copies, work, store)
        for text in args.cases:
            bench = Bench(Case.parse(text, int(args.gb * 1e9)), work, store, args.shard_mb << 20)
            for threads in args.threads:
                results.append(measured(bench, threads, args.rounds, copies, copied))
                print(json.dumps(results[-1]), flush=True)
            del bench
    result = {
        "results": results,
        "copies_cpu_s_per_gb": round(statistics.median(copies), 3),
        "chunk_bytes": CHUNK_BYTES,
        "store_on": str(args.store or args.spool),
        "cpu": next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ""),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "xxhash": xxhash.VERSION,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
