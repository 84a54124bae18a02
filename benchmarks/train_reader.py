"""What training reads: batches/s and GB/s from a store with cold and warm page cache, start-up time, memory. No GPU.

    python benchmarks/train_reader.py                                 4 GB, 2 cores: about two minutes
    python benchmarks/train_reader.py --gb 40 --threads 1 2 4 8       a real host
    python benchmarks/train_reader.py --folder /mnt/nvme --gb 40      the disk that is meant
    python benchmarks/train_reader.py --json results/train-reader.json

The store is of distinct bytes in the shape of an 8B target (three layers and `last`, H 4096, bfloat16), of rows of
unequal length of which two thirds are trained. Each round is a process of its own that opens the store, takes an epoch
of packed batches as the trainer does, and does nothing with them; so the numbers are what the reader can give, and a
trainer that needs less never waits.

    start_s        from nothing but imports to the epoch's order; first_s: to the first batch
    gb_per_s       states read, verified and packed over the time of the epoch (from the first request on)
    cpu_s_per_gb   processor time of the process, imports left out
    cached         share of the store in the page cache before the round: cold rounds drop it first
    own_mb         the process's own memory at its peak, over what it had after imports
    big_store      start_s of a store of --big-tb, its states left as holes: only indices are read
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.capture.contract import CaptureSpec
from eyas.positions import kept_positions
from eyas.store.files import ShardPaths, pwrite_all
from eyas.store.format import RowStatus, pack_contents
from eyas.store.journal import RowOk
from eyas.store.plan import Shard
from eyas.store.shardfile import read_index, sidecar_of
from eyas.store.source import flat
from eyas.store.writer import StoreWriter
from eyas.train.batch import pack
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling

SPEC = CaptureSpec((2, 16, 29), "loss", "bf16", 4096, 128_256, 32, "0" * 32)
PROVENANCE = {"engine": "benchmark"}


def contents_of(row: int, mean: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask and kept positions of a row, from its number alone."""
    rng = np.random.default_rng([1, row])
    length = int(np.clip(rng.lognormal(np.log(mean) - 0.25, 0.7), 16, 8192))
    tokens = rng.integers(0, SPEC.vocab_size, length, dtype=np.int32)
    mask = np.zeros(length, dtype=np.uint8)
    mask[length // 3 :] = 1
    return tokens, mask, kept_positions(mask, SPEC.last)


def rows_for(size: float, mean: int) -> list[tuple[int, int]]:
    """(tokens, positions) of as many rows as fill `size` bytes."""
    made, total = [], 0.0
    while total < size:
        tokens, _, positions = contents_of(len(made), mean)
        made.append((len(tokens), len(positions)))
        total += len(tokens) * SPEC.aux_bytes_per_token + len(positions) * SPEC.last_bytes_per_position
    return made


def open_writer(root: Path, rows: list[tuple[int, int]], shard_bytes: int) -> StoreWriter:
    return StoreWriter.open(
        root,
        spec=SPEC,
        corpus={"digest": "b" * 32},
        tokens_N=[tokens for tokens, _ in rows],
        positions_N=[positions for _, positions in rows],
        shard_bytes=shard_bytes,
        provenance=PROVENANCE,
    )


def write_store(root: Path, size: float, mean: int, shard_bytes: int) -> None:
    """A store of distinct finite bytes, by the product's own writer."""
    rows = rows_for(size, mean)
    writer = open_writer(root, rows, shard_bytes)

    def contents(shard: Shard) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return (contents_of(row, mean) for row in range(shard.start, shard.stop))

    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert lease is not None
        with lease:
            for row in lease.pending:
                tokens, positions = rows[row]
                lease.put(
                    row,
                    states(row, 0, tokens * SPEC.aux_bytes_per_token),
                    states(row, 1, positions * SPEC.last_bytes_per_position),
                )
            lease.finish()
    writer.write_manifest()


def states(row: int, field: int, size: int) -> np.ndarray:
    words: Any = np.random.SFC64(np.random.SeedSequence([row, field])).random_raw(-(-size // 8))
    words &= np.uint64(0x83FF_83FF_83FF_83FF)  # finite bfloat16
    words |= np.uint64(0x3C00_3C00_3C00_3C00)
    return words.view(np.uint8)[:size]


def sparse_store(root: Path, size: float, mean: int, shard_bytes: int) -> None:
    """A store whose states are holes: everything that starting up reads is as in a real one."""
    known = rows_for(min(size, 64e9), mean)
    rows = (known * (int(size // 64e9) + 1))[: int(len(known) * max(1.0, size / 64e9))]
    writer = open_writer(root, rows, shard_bytes)
    for shard in writer.plan.shards:
        paths, layout = ShardPaths(root, shard.stem), writer.info.layout(shard)
        table = pack_contents(shard, (made_up(row, *rows[row]) for row in range(shard.start, shard.stop)))
        hashes = np.zeros((shard.rows, 4), dtype="<u8")
        hashes[:, :2] = table.xxh3
        fd = os.open(paths.final, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, layout.file_bytes)
        pwrite_all(fd, layout.header, 0)
        for name, values in (
            ("row_offsets", table.row_offsets),
            ("row_xxh3", hashes),
            ("last_index", table.last_index),
            ("tokens", table.tokens),
            ("loss_mask", table.loss_mask),
            ("row_status", np.full(shard.rows, RowStatus.OK, dtype="u1")),
        ):
            pwrite_all(fd, flat(values), layout.tensors[name].start)
        session = writer.info.session([PROVENANCE])
        session.rows = {row: RowOk(row, 0, 0) for row in range(shard.start, shard.stop)}
        paths.sidecar.write_text(sidecar_of(read_index(fd, paths.final), [session]).to_json())
        os.fsync(fd)
        os.close(fd)


def made_up(row: int, length: int, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.full(length, row % SPEC.vocab_size, dtype=np.int32)
    return tokens, np.ones(length, np.uint8), np.arange(length - kept, length, dtype=np.int32)


# --- page cache ---


def drop_cache(root: Path) -> None:
    """Give the store's clean pages back to the kernel."""
    os.sync()
    for path in root.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cached_share(root: Path) -> float:
    """Share of the store's pages that are in memory, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    there = total = 0
    for path in root.glob("*.safetensors"):
        size = path.stat().st_size
        fd = os.open(path, os.O_RDONLY)
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(mapped)
        if libc.mincore(ctypes.addressof(anchor), size, ctypes.addressof(found)):
            raise OSError(ctypes.get_errno(), "mincore")
        there += int((np.frombuffer(found, np.uint8) & 1).sum())
        total += pages
        del anchor
        mapped.close()
    return there / total


# --- one round, in a process of its own ---


def own_mb(field: str) -> float:
    """VmHWM (peak) or VmRSS without the pages of files: what is this process's alone."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def one_round(args: argparse.Namespace) -> dict[str, float]:
    packed = functools.partial(pack, steps=7, budget=args.budget)
    reading = Reading(threads=args.round_threads, prefetch=args.prefetch, verify=not args.unverified, pin=False)
    before = own_mb("RssAnon")
    peak, spent = before, os.times()
    began = time.perf_counter()
    with TrainReader(args.store, Sampling(args.budget), packed, reading=reading) as reader:
        batches = reader.batches(0)
        start_s = time.perf_counter() - began
        if args.start_only:
            return {"start_s": start_s, "batches": float(batches or 0), "own_mb": own_mb("RssAnon") - before}
        with reader.epoch(0) as epoch:
            first_s = 0.0
            for _ in epoch:
                first_s = first_s or time.perf_counter() - began
                peak = max(peak, own_mb("RssAnon"))
            stats, counts = epoch.stats, reader.counts(0)
    cpu = os.times()
    return {
        "start_s": start_s,
        "first_s": first_s,
        "seconds": stats.wall_s,
        "gb": stats.bytes / 1e9,
        "gb_per_s": stats.bytes / 1e9 / stats.wall_s,
        "rows_per_s": stats.rows / stats.wall_s,
        "tokens_per_s": stats.tokens / stats.wall_s,
        "filled": counts.tokens / (counts.batches * args.budget),
        "cpu_s_per_gb": (cpu.user + cpu.system - spent.user - spent.system) / (stats.bytes / 1e9),
        "own_mb": peak - before,
    }


def measured(args: argparse.Namespace, store: Path, threads: int, *more: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--store", str(store), "--round-threads", str(threads)]
    command += ["--budget", str(args.budget), "--prefetch", str(args.prefetch), *more]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rounds(args: argparse.Namespace, store: Path) -> Iterator[dict[str, Any]]:
    for threads in args.threads:
        for cache in ("cold", "warm"):
            found, shares = [], []
            for _ in range(args.rounds):
                if cache == "cold":
                    drop_cache(store)
                shares.append(cached_share(store))
                found.append(measured(args, store, threads))
            yield {"cache": cache, "threads": threads, "cached": statistics.median(shares)} | medians(found)
    more = {"cache": "warm", "threads": args.threads[-1], "verify": False, "cached": cached_share(store)}
    yield more | measured(args, store, args.threads[-1], "--unverified")


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def shown(result: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
    )


def document(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """As `make docs` takes it."""
    columns = ("cache", "threads", "verify", "gb_per_s", "rows_per_s", "tokens_per_s")
    columns += ("cpu_s_per_gb", "start_s", "first_s", "own_mb", "cached", "filled")
    rounds_ = [result for result in results if "gb_per_s" in result]
    big = [
        f"start_s of a store of {result['big_store_tb']:g} TB whose states are holes, {result['cache']} cache: "
        f"{result['start_s']:.2f}; {result['batches']:,.0f} batches; {result['own_mb']:.1f} MB"
        for result in results
        if "big_store_tb" in result
    ]
    return {
        "title": "What training reads",
        "what": f"An epoch of packed batches of {args.budget:,} tokens from {args.gb:g} GB in the shape of an 8B "
        f"target, read, verified, packed and dropped; median of {args.rounds}. `benchmarks/train_reader.py` "
        "says what is what.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU; load average of the last "
        f"quarter of an hour {os.getloadavg()[2]:.1f}",
        "versions": f"torch {torch.__version__}",
        "command": "python benchmarks/train_reader.py " + " ".join(sys.argv[1:]),
        "rows": [{column: ({"verify": True} | result)[column] for column in columns} for result in rounds_],
        "notes": big,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where the store is made; default: the folder for temporary files")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a batch")
    parser.add_argument("--mean", type=int, default=1200, help="tokens of a row")
    parser.add_argument("--shard-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--big-tb", type=float, default=1.0, help="0 leaves it out")
    parser.add_argument("--json", type=Path)
    for hidden in ("--store", "--round-threads"):
        parser.add_argument(hidden, type=Path if hidden == "--store" else int, help=argparse.SUPPRESS)
    for hidden in ("--unverified", "--start-only"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store is not None:
        print(json.dumps(one_round(args)))
        return
    folder = Path(tempfile.mkdtemp(prefix="eyas-train-reader-", dir=args.folder))
    try:
        results = []
        began = time.perf_counter()
        write_store(folder / "store", args.gb * 1e9, args.mean, args.shard_mb << 20)
        print(f"store of {args.gb:g} GB written in {time.perf_counter() - began:.0f} s")
        for result in rounds(args, folder / "store"):
            results.append(result)
            print(shown(result))
        shutil.rmtree(folder / "store")
        if args.big_tb:
            sparse_store(folder / "big", args.big_tb * 1e12, args.mean, 2 << 30)
            drop_cache(folder / "big")
            for cache in ("cold", "warm"):
                result = {"big_store_tb": args.big_tb, "cache": cache} | measured(
                    args, folder / "big", 2, "--start-only"
                )
                results.append(result)
                print(shown(result))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json is not None:
        args.json.write_text(json.dumps(document(args, results), indent=1) + "\n")


if __name__ == "__main__":
    main()
