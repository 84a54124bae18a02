"""Capture against plain prefill on a GPU, end to end: from the first request to the last shard complete.

    python benchmarks/extract_gpu.py all --work /dev/shm/bench --out extract.json      # everything, about 15 minutes
    python benchmarks/extract_gpu.py start --work W --shapes 1b                        # or in steps: servers stay up,
    python benchmarks/extract_gpu.py measure --work W --shapes 1b --out 1b.json        # several measurements,
    python benchmarks/extract_gpu.py stop --work W

Speed only: weights are dummies (`contract_gpu.py` proves rows). For each shape there is a server as SGLang comes
(`plain`: no capture flag, no plugin) and one with the plugin for each dtype. In every round they take turns on the same
prompts: plain prefill of the first, then capture through the others into a store. The median of the rounds counts.

Stores on RAM disk are checked and emptied while they grow: a process of its own reads each shard as soon as it is
complete, verifies every hash, and gives its pages back. So runs of any length fit, and every row is verified.

`--pythonpath`, `--python`, `--sglang`, `--flags` say how SGLang runs there; `--shapes tiny` rehearses on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import datetime
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import fleet
import httpx
import numpy as np
import torch
from fleet import Options, Running, Wanted
from prefill import plain
from rich.console import Console
from shapes import SHAPES, Shape
from training_batch import REAL_ROWS

from eyas.capture.contract import LAST_PARAM, REPLY_KEY, SPEC_FILE, SPEC_PARAM, RequestId, ServerHello
from eyas.config import load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.runner import extract
from eyas.store.check import verify_shard
from eyas.store.documents import read_sidecar

WINDOW = 64
SHORTEST, LONGEST = 50, 8000  # of mixed prompts
MODES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Measured(NamedTuple):
    """One run of capture."""

    tokens_per_s: float
    bytes: int
    seconds: float
    verified: int
    waits: int
    retries: int


# --- prompts ----------------------------------------------------------------------------------------------------------


def write_corpus(path: Path, lengths: Sequence[int], vocab_size: int, seed: int) -> Corpus:
    """Random token ids; the last two thirds of each row are trained."""
    if path.exists():
        return Corpus.open(path)
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="seeded", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for row, length in enumerate(lengths):
            mask = (np.arange(length) >= length // 3).astype(np.uint8)
            writer.add(str(row), rng.integers(10, vocab_size - 1, length), mask)
    return Corpus.open(path)


def mixed_lengths(tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths from 50 to `longest`, uniform in their logarithm, until they are `tokens` in all."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(round(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest)))))
    return lengths


def chat_lengths(tokens: int) -> list[int]:
    """Lengths of real chats, of about 350 tokens in the mean, until they are `tokens` in all."""
    lengths, total = itertools.cycle(length for length, _ in REAL_ROWS), 0
    found: list[int] = []
    while total < tokens:
        found.append(next(lengths))
        total += found[-1]
    return found


# --- capture ----------------------------------------------------------------------------------------------------------


def _tend(store: str, orders: Connection, keep: bool) -> None:
    """Verify each shard that is complete, and give its pages back unless `keep`; answers with rows and problems."""
    libc = ctypes.CDLL(None, use_errno=True)
    done: set[str] = set()
    rows, problems, last = 0, [], False
    while True:
        found = [path for path in sorted(Path(store).glob("shard-*.json")) if path.name not in done]
        for path in found:
            done.add(path.name)
            shard = path.with_suffix(".safetensors")
            report = verify_shard(shard, read_sidecar(path))
            rows += report.rows
            problems += [str(problem) for problem in report.problems]
            if not keep:
                with shard.open("r+b") as file:
                    size = ctypes.c_int64(shard.stat().st_size)
                    libc.fallocate(file.fileno(), _PUNCH_HOLE, ctypes.c_int64(0), size)
        if last and not found:
            orders.send((rows, problems))
            return
        last = last or orders.poll(0 if found else 0.05)


@contextmanager
def tending(store: Path, *, keep: bool = False) -> Iterator[Callable[[], int]]:
    """`_tend` beside the body; call what is yielded at the end: it waits, and returns how many rows were verified."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_tend, args=(str(store), theirs, keep))
    process.start()
    theirs.close()

    def finish() -> int:
        mine.send("the run is over")
        rows, problems = mine.recv()
        if problems:
            raise SystemExit(f"{len(problems)} problems in {store}: {problems[:3]}")
        return rows

    try:
        yield finish
    finally:
        process.terminate()
        process.join()


def captured(server: Running, corpus: Corpus, store: Path, *more: str, keep: bool = False) -> Measured:
    """One run of `eyas extract` into a new store, every row verified; the store is removed afterwards."""
    overrides = [f"server.spool={server.spool}", "store.reserve_bytes=0", f"extract.window_requests={WINDOW}"]
    spec = spec_of(server).spec
    overrides += [f"capture.dtype={spec['dtype']}", f"capture.layers={list(spec['layers'])}"]
    cfg = load(overrides=[*overrides, *more])
    store.mkdir(parents=True, exist_ok=True)
    with tending(store, keep=keep) as finish:
        console = Console(file=io.StringIO())
        run = extract(corpus.path, store, cfg=cfg, model=server.model, server=server.url, console=console)
        verified = finish()
    if not run.rows_done == verified == len(corpus):
        raise SystemExit(f"{run.rows_done} rows done, {verified} verified, of {len(corpus)}: {run.first_failures}")
    shutil.rmtree(store)
    return Measured(run.tokens_per_s, run.bytes, run.seconds, verified, run.waits, run.retries)


def spec_of(server: Running) -> ServerHello:
    return ServerHello.from_json((Path(server.spool) / SPEC_FILE).read_text())


def forward_cost(server: Running) -> dict[str, Any]:
    """What the plugin says of itself: numbers in the reply to one more request."""
    rid = RequestId("bench000", "bench000", int(time.time()) % 10**8, 0)
    params = {SPEC_PARAM: spec_of(server).spec_id, LAST_PARAM: [0, 1]}
    body = {"rid": str(rid), "input_ids": [11] * 16, "sampling_params": {"max_new_tokens": 1, "custom_params": params}}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"][REPLY_KEY][0]
    time.sleep(0.5)
    for path in Path(server.spool).glob(f"{rid}*"):
        path.unlink()
    return {key: value for key, value in reply.items() if isinstance(value, int | float) and key != "rows"}


async def states_in_replies(server: Running, prompts: Sequence[list[int]], window: int) -> float:
    """Tokens/s through SGLang's own `return_hidden_states`: JSON lists in the reply, parsed by the client."""
    gate = asyncio.Semaphore(window)
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(tokens: list[int]) -> None:
            async with gate:
                body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True}
                reply = await client.post(f"{server.url}/generate", json=body)
                json.loads(reply.content)["meta_info"]["hidden_states"]

        began = time.monotonic()
        await asyncio.gather(*(one(tokens) for tokens in prompts))
        return sum(map(len, prompts)) / (time.monotonic() - began)


# --- servers ----------------------------------------------------------------------------------------------------------


def wanted_servers(
    names: Sequence[str], modes: Sequence[str], work: Path, gpus: int, serve: dict[str, Any]
) -> list[Wanted]:
    """For each shape one server as SGLang comes, and one a mode with settings `serve`; spread over the GPUs."""
    wanted: list[Wanted] = []
    for name in names:
        shape = SHAPES[name]
        model = shape.write(work / "models" / name)
        flags = ("--load-format", "dummy", "--disable-radix-cache", "--chunked-prefill-size", "8192")
        flags += ("--max-total-tokens", str(shape.kv_tokens), "--max-running-requests", "256")
        settings: dict[str, Any] = {"layers": shape.layers, "quota_bytes": 16 << 30}
        settings |= serve
        for number, mode in enumerate(("plain", *modes)):
            gpu = (len(names) + number) % gpus if gpus > 1 else None
            with_dtype = settings | {"dtype": MODES.get(mode, "bf16")}
            wanted.append(Wanted(f"{name}-{mode}", model, flags, gpu, mode != "plain", with_dtype))
    return wanted


def warm_up(running: dict[str, Running], work: Path, names: Sequence[str]) -> None:
    """The first requests compile kernels, for a minute and more: all servers at once, chunks of all kinds."""

    def warm(server: Running, shape: Shape) -> None:
        lengths = [shape.prompt] * 12 + [min(LONGEST, shape.kv_tokens // 8), SHORTEST, 700]
        corpus = write_corpus(work / f"warm-{server.name}.parquet", lengths, shape.vocab_size, 99)
        began = time.monotonic()
        for _ in range(2):
            asyncio.run(plain(server.url, corpus, WINDOW))
        if server.capture:
            captured(server, corpus, work / f"warm-store-{server.name}")
        print(f"{server.name}: warm after {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(len(running)) as pool:
        for job in [
            pool.submit(warm, server, SHAPES[name])
            for name in names
            for server in running.values()
            if server.name.startswith(f"{name}-")
        ]:
            job.result()


def touch_ram_disk(folder: Path, size: int) -> None:
    """Write and remove files, so that a virtual machine has the memory before it is counted on."""
    block, parts = bytes(64 << 20), 8

    def fill(part: int) -> None:
        with (folder / f"touched.{part}").open("wb") as file:
            for _ in range(size // parts // len(block)):
                file.write(block)

    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(fill, range(parts)))
    for part in range(parts):
        (folder / f"touched.{part}").unlink()


def disk_rate(folder: Path, size: int = 8 << 30) -> float:
    """Bytes/s of four threads that write `size` bytes to a disk, sync included."""
    block, parts = np.random.default_rng(0).bytes(8 << 20), 4
    began = time.monotonic()

    def fill(part: int) -> None:
        with (folder / f"rate.{part}").open("wb") as file:
            for _ in range(size // parts // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(fill, range(parts)))
    rate = size / (time.monotonic() - began)
    for part in range(parts):
        (folder / f"rate.{part}").unlink()
    return rate


# --- measurements -----------------------------------------------------------------------------------------------------


class Bench:
    """Measures one shape after the other.

    Args:
        args: the command line. running: the servers.
    """

    def __init__(self, args: argparse.Namespace, running: dict[str, Running]) -> None:
        self._args, self._running, self._work = args, running, args.work
        self.entries: list[dict[str, Any]] = []
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        words = shlex.join("PATH" if "/" in word else word for word in sys.argv[1:])
        self._common = {
            "sglang": Options.of(args).release,
            "torch": torch.__version__,
            "gpu": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "none",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "command": f"python benchmarks/extract_gpu.py {words}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }

    def shape(self, shape: Shape) -> None:
        """Everything that the command line asks of one shape."""
        plain_server = self._running[f"{shape.name}-plain"]
        probe = self._corpus(shape, "probe", [shape.prompt] * (2 * WINDOW))
        rate = asyncio.run(plain(plain_server.url, probe, WINDOW))
        print(f"{shape.name}: plain about {rate:,.0f} tokens/s", flush=True)
        for what in self._args.what:
            match what:
                case "rounds":
                    self._rounds(shape, rate, "", self._equal(shape, rate, self._args.seconds))
                case "mixed":
                    lengths = mixed_lengths(int(rate * self._args.seconds), min(LONGEST, shape.kv_tokens // 8), 5)
                    self._rounds(shape, rate, "-mixed", lengths)
                case "short":
                    lengths = chat_lengths(int(rate * self._args.seconds))
                    self._rounds(shape, rate, "-short", lengths)
                case "sustained":
                    self._sustained(shape, rate)
                case "disk":
                    self._on_disk(shape, rate)
                case "serial":
                    self._serial(shape, rate)
                case _:
                    self._in_replies(shape)

    def _equal(self, shape: Shape, rate: float, seconds: float) -> list[int]:
        return [shape.prompt] * max(8, round(rate * seconds / shape.prompt))

    def _corpus(self, shape: Shape, name: str, lengths: Sequence[int]) -> Corpus:
        tag = f"{shape.name}-{name}-{len(lengths)}-{sum(lengths)}"
        return write_corpus(self._work / f"{tag}.parquet", lengths, shape.vocab_size, len(lengths))

    def _modes(self, shape: Shape) -> list[str]:
        return [mode for mode in self._args.modes if f"{shape.name}-{mode}" in self._running]

    def _plain(self, shape: Shape, corpus: Corpus) -> float:
        return asyncio.run(plain(self._running[f"{shape.name}-plain"].url, corpus, WINDOW))

    def _rounds(self, shape: Shape, rate: float, suffix: str, lengths: list[int]) -> None:
        """Plain and each mode in turns, and the plain requests of others on the first capturing server."""
        modes = self._modes(shape)
        runs: dict[str, list[Measured]] = {mode: [] for mode in modes}
        plains: list[float] = []
        others: list[float] = []
        corpus = self._corpus(shape, f"rounds{suffix}", lengths)
        for number in range(self._args.rounds):
            plains.append(self._plain(shape, corpus))
            others.append(asyncio.run(plain(self._running[f"{shape.name}-{modes[0]}"].url, corpus, WINDOW)))
            for mode in modes:
                runs[mode].append(captured(self._running[f"{shape.name}-{mode}"], corpus, self._work / "store"))
            last = {mode: runs[mode][-1] for mode in modes}
            told = ", ".join(
                f"{m} {r.tokens_per_s:,.0f} ({r.waits} waits, {r.retries} retries)" for m, r in last.items()
            )
            print(f"{shape.name}{suffix} round {number}: plain {plains[-1]:,.0f}, others {others[-1]:,.0f}, {told}")
        for mode in modes:
            self._add(shape, f"{mode}{suffix}", corpus, plains, runs[mode], others=others)

    def _sustained(self, shape: Shape, rate: float) -> None:
        """One long run, between two of plain prefill."""
        mode = self._modes(shape)[0]
        short = self._corpus(shape, "short", self._equal(shape, rate, self._args.seconds))
        corpus = self._corpus(shape, "long", self._equal(shape, rate, self._args.sustained))
        plains = [self._plain(shape, short)]
        run = captured(self._running[f"{shape.name}-{mode}"], corpus, self._work / "store")
        plains.append(self._plain(shape, short))
        self._add(shape, f"{mode}-sustained", corpus, plains, [run])

    def _on_disk(self, shape: Shape, rate: float) -> None:
        """The store on a disk, whose own rate is measured before and after."""
        folder = self._args.disk
        folder.mkdir(parents=True, exist_ok=True)
        corpus = self._corpus(shape, "disk", self._equal(shape, rate, self._args.seconds))
        for mode in self._modes(shape):
            plains, runs, rates = [], [], [disk_rate(folder)]
            for _ in range(self._args.rounds):
                plains.append(self._plain(shape, corpus))
                server = self._running[f"{shape.name}-{mode}"]
                runs.append(captured(server, corpus, folder / "store", keep=True))
                rates.append(disk_rate(folder))
            self._add(shape, f"{mode}-disk", corpus, plains, runs, disk_gb_per_s=[rate / 1e9 for rate in rates])

    def _serial(self, shape: Shape, rate: float) -> None:
        """One request in flight: what a protocol without identity is bound to."""
        corpus = self._corpus(shape, "serial", self._equal(shape, rate, self._args.seconds / 4))
        server = self._running[f"{shape.name}-{self._modes(shape)[0]}"]
        plains = [self._plain(shape, corpus) for _ in range(2)]
        run = captured(server, corpus, self._work / "store", "extract.window_requests=1")
        self._add(shape, "serial", corpus, plains, [run])

    def _in_replies(self, shape: Shape) -> None:
        """SGLang's own way, on few prompts: it takes seconds for each."""
        server = self._running[f"{shape.name}-{self._modes(shape)[0]}"]
        corpus = self._corpus(shape, "replies", [shape.prompt] * 2)
        rate = asyncio.run(states_in_replies(server, [row.tokens.tolist() for row in corpus.rows()], 2))
        plains = [self._plain(shape, self._corpus(shape, "probe", [shape.prompt] * (2 * WINDOW)))]
        run = Measured(rate, 0, sum(corpus.n_tokens) / rate, 0, 0, 0)
        self._add(shape, "return_hidden_states", corpus, plains, [run])

    def _add(
        self,
        shape: Shape,
        mode: str,
        corpus: Corpus,
        plains: Sequence[float],
        runs: Sequence[Measured],
        others: Sequence[float] = (),
        **more: Any,
    ) -> None:
        middle = statistics.median(plains)
        pairs = [run.tokens_per_s / each for run, each in zip(runs, plains, strict=False)]
        if len(pairs) != len(plains):
            pairs = [run.tokens_per_s / middle for run in runs]
        rate = statistics.median(run.tokens_per_s for run in runs)
        tokens = int(corpus.n_tokens.sum())
        entry: dict[str, Any] = {
            "shape": shape.name,
            "mode": mode,
            "prompts": len(corpus),
            "prompt_tokens": tokens,
            "plain_tokens_per_s": round(middle, 1),
            "eyas_tokens_per_s": round(rate, 1),
            "ratio": round(statistics.median(pairs), 4),
            "ratios": [round(pair, 4) for pair in pairs],
            "bytes_per_token": round(runs[0].bytes / tokens, 1),
            "gb_per_s": round(statistics.median(run.bytes / run.seconds for run in runs) / 1e9, 3),
            "seconds": [round(run.seconds, 2) for run in runs],
            "waits": sum(run.waits for run in runs),
            "retries": sum(run.retries for run in runs),
            "rows_verified": sum(run.verified for run in runs),
        }
        if others:
            pairs = [other / each for other, each in zip(others, plains, strict=True)]
            entry["others_ratio"] = round(statistics.median(pairs), 4)
        entry |= more
        base = mode.partition("-")[0]
        server = self._running.get(f"{shape.name}-{base if base in MODES else next(iter(self._modes(shape)))}")
        if server is not None and mode != "return_hidden_states":
            entry["forward"] = forward_cost(server)
        self.entries.append(entry | self._common)
        print(json.dumps(entry), flush=True)
        if self._args.out is not None:
            self._args.out.write_text(json.dumps(self.entries, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("all", "start", "measure", "stop"))
    parser.add_argument("--work", type=Path, required=True, help="folder on RAM disk: servers, spools, stores")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["8b", "1b", "kimi"])
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=["bf16", "fp8"])
    what = ("rounds", "mixed", "short", "sustained", "disk", "serial", "replies")
    parser.add_argument("--what", nargs="+", choices=what, default=list(what))
    parser.add_argument("--out", type=Path, help="JSON, rewritten after each figure")
    parser.add_argument("--seconds", type=float, default=10, help="of plain prefill in a round")
    parser.add_argument("--sustained", type=float, default=120, help="of the long run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("bench-disk"), help="folder on the disk to measure")
    parser.add_argument("--touch-gib", type=int, default=0, help="RAM disk to write to before anything is measured")
    parser.add_argument("--writers", default="", help="serve.writers of the servers")
    parser.add_argument("--writer-threads", type=int, default=0, help="serve.writer_threads of the servers")
    Options.add_to(parser)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.step in ("all", "start"):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        serve = {"writers": args.writers, "writer_threads": args.writer_threads}
        serve = {name: value for name, value in serve.items() if value}
        wanted = wanted_servers(args.shapes, args.modes, args.work, gpus, serve)
        try:
            running = fleet.start(Options.of(args), wanted, args.work)
            warm_up(running, args.work, args.shapes)
        except BaseException:
            for log in sorted(args.work.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}", flush=True)
            raise
    if args.step in ("all", "measure"):
        touch_ram_disk(args.work, args.touch_gib << 30)
        bench = Bench(args, fleet.read(args.work))
        for name in args.shapes:
            bench.shape(SHAPES[name])
    if args.step in ("all", "stop"):
        fleet.stop(args.work)


if __name__ == "__main__":
    main()
