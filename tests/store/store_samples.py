"""Synthetic rows: everything about row r follows from r alone, so that any process can write or expect it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from eyas.capture.contract import CaptureSpec
from eyas.capture.encoding import encode
from eyas.positions import kept_positions
from eyas.store.plan import Shard
from eyas.store.shard_writer import ShardWriter
from eyas.store.writer import StoreWriter

SPEC = CaptureSpec((1, 2, 4), "loss", "bf16", 16, 100, 8, "0" * 32)
CORPUS = {"digest": "c" * 32, "tokenizer": "t" * 32}
PROVENANCE = {"engine": "synthetic", "version": "1"}
SHARD_BYTES = 12_000


def row_contents(row: int, spec: CaptureSpec = SPEC) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([1, row])
    length = int(rng.integers(1, 40))
    tokens = rng.integers(0, spec.vocab_size, length, dtype=np.int32)
    mask = rng.integers(0, 2, length, dtype=np.uint8)
    return tokens, mask, kept_positions(mask, spec.last)


def row_states(row: int, spec: CaptureSpec = SPEC) -> tuple[np.ndarray, np.ndarray]:
    """aux [T, A, H], last [L, H] as raw numbers of the dtype's width (fp8: bytes [.., H + 4]), all finite."""
    tokens, _, positions = row_contents(row, spec)
    rng = np.random.default_rng([2, row])
    made = []
    for shape in ((len(tokens), len(spec.layers), spec.hidden_size), (len(positions), spec.hidden_size)):
        values = rng.standard_normal(shape).astype(np.float32)
        match spec.dtype:
            case "bf16":
                made.append((values.view(np.uint32) >> 16).astype(np.uint16))
            case "f16":
                made.append(values.astype(np.float16).view(np.uint16))
            case "fp8_e4m3":
                made.append(encode(torch.from_numpy(values), spec.dtype).numpy())
            case _:
                made.append(values.view(np.uint32))
    return made[0], made[1]


def contents(shard: Shard, spec: CaptureSpec = SPEC) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    return (row_contents(row, spec) for row in range(shard.start, shard.stop))


def open_store(root: Path, rows: int = 40, **changes: object) -> StoreWriter:
    spec = changes.get("spec", SPEC)
    known = [row_contents(row, spec) for row in range(rows)]  # type: ignore[arg-type]
    arguments = {
        "spec": spec,
        "corpus": CORPUS,
        "tokens_N": [len(tokens) for tokens, _, _ in known],
        "positions_N": [len(positions) for _, _, positions in known],
        "shard_bytes": SHARD_BYTES,
        "provenance": PROVENANCE,
    }
    return StoreWriter.open(root, **(arguments | changes))  # type: ignore[arg-type]


def fill(lease: ShardWriter, failing: set[int] | frozenset[int] = frozenset(), spec: CaptureSpec = SPEC) -> None:
    for row in lease.pending:
        if row in failing:
            lease.fail(row, "retracted", "synthetic")
        else:
            lease.put(row, *row_states(row, spec))


def write_all(writer: StoreWriter, failing: set[int] | frozenset[int] = frozenset()) -> None:
    spec = writer.info.spec
    for shard in writer.plan.shards:
        lease = writer.lease(shard, lambda s: contents(s, spec))
        if lease is not None:
            with lease:
                fill(lease, failing, spec)
                lease.finish()
    writer.write_manifest()


def write_store(
    root: Path, rows: int = 40, failing: set[int] | frozenset[int] = frozenset(), **changes: object
) -> StoreWriter:
    writer = open_store(root, rows, **changes)
    write_all(writer, failing)
    return writer


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file's bytes by name, links followed."""
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


if __name__ == "__main__":  # a worker process of the tests: python store_samples.py ROOT ROWS [failing rows]
    write_store(Path(sys.argv[1]), int(sys.argv[2]), {int(row) for row in sys.argv[3:]})
