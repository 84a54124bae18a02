"""Cost grows as rows do. Counted are lines of our code that run and bytes that go over files, never seconds."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from costs import Cost, linear, opened
from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract.runner import extract, plan
from eyas.store.check import verify_store
from eyas.store.documents import describe_store
from eyas.store.reader import StoreDataset, StoreReader

ROWS = 80
#: Bytes of a shard. A large target's shards hold few rows, here one; a small target's holds all of them.
LAYOUTS = {"many": 1, "one": 10**9}

Step = Callable[[Path, Path, int], object]


def write_corpus(path: Path, rows: int) -> Path:
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(path, meta) as writer:
        for row in range(rows):
            tokens = np.random.default_rng(row).integers(0, 1000, 12)
            writer.add(f"r{row}", tokens, np.arange(12) >= 4)
    return path


def run(corpus: Path, store: Path, shard_bytes: int, *settings: str, retry_failed: bool = False) -> None:
    fixed = ["extract.engine=fake", "fake.hidden_size=8", "store.reserve_bytes=0", f"store.shard_bytes={shard_bytes}"]
    console = Console(file=io.StringIO())
    extract(corpus, store, cfg=load(overrides=[*fixed, *settings]), retry_failed=retry_failed, console=console)


def all_but_one(corpus: Path, store: Path, shard_bytes: int, rows: int) -> None:
    run(corpus, store, shard_bytes, f"fake.failing_rows=[{rows - 1}]")


def costs(step: Step, prepare: Step | None, folder: Path, shard_bytes: int) -> list[Cost]:
    """Of ROWS rows, of twice and of four times as many."""
    found = []
    for rows in (ROWS, 2 * ROWS, 4 * ROWS):
        corpus, store = write_corpus(folder / f"{rows}.parquet", rows), folder / f"store-{rows}"
        if prepare is not None:
            prepare(corpus, store, rows)
        with Cost() as cost:
            step(corpus, store, rows)
        found.append(cost)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plan", "extract", "resume", "again", "verify", "info", "reader", "epoch"])
def test_twice_the_rows_cost_at_most_twice(name: str, layout: str, tmp_path: Path) -> None:
    size = LAYOUTS[layout]

    def complete(corpus: Path, store: Path, rows: int) -> None:
        run(corpus, store, size)

    def unfinished(corpus: Path, store: Path, rows: int) -> None:
        all_but_one(corpus, store, size, rows)

    steps: dict[str, tuple[Step, Step | None]] = {
        "plan": (lambda corpus, store, rows: plan(corpus, store, cfg=load(overrides=["extract.engine=fake"])), None),
        "extract": (complete, None),
        "resume": (lambda corpus, store, rows: run(corpus, store, size, retry_failed=True), unfinished),
        "again": (complete, complete),
        "verify": (lambda corpus, store, rows: verify_store(store), complete),
        "info": (lambda corpus, store, rows: describe_store(store), complete),
        "reader": (lambda corpus, store, rows: StoreReader(store)[0], complete),
        "epoch": (lambda corpus, store, rows: list(StoreDataset(store)), complete),
    }
    found = costs(*steps[name], tmp_path, size)
    lines, moved = [cost.lines for cost in found], [cost.bytes for cost in found]
    assert linear(lines), lines
    assert linear(moved), moved


@pytest.mark.parametrize("rows", [4, 40])
def test_resume_opens_a_finished_shards_sidecar_once_and_its_states_never(rows: int, tmp_path: Path) -> None:
    corpus, store = write_corpus(tmp_path / "corpus.parquet", rows), tmp_path / "store"
    run(corpus, store, LAYOUTS["many"])
    *finished, last = sorted(path.stem for path in store.glob("*.safetensors"))
    assert len(finished) == rows - 1
    for name in (f"{last}.safetensors", f"{last}.json"):
        (store / name).unlink()
    with opened() as paths:
        run(corpus, store, LAYOUTS["many"])
    until_leased = paths[: paths.index(f"{last}.safetensors.part")]
    counts = Counter(until_leased)
    assert {name: counts[f"{name}.json"] for name in finished} == dict.fromkeys(finished, 1)
    assert not [name for name in paths if name.endswith((".safetensors", ".journal")) and not name.startswith(last)]
    assert counts["store.json"] <= 3  # the forecast, the run and its worker
