"""Corpora and stores for the tests of the reader: rows of unequal length, some equal, states of the FakeEngine."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract.runner import Summary, extract

SETTINGS = (
    "extract.engine=fake",
    "fake.hidden_size=8",
    "fake.num_layers=8",
    "store.shard_bytes=6KB",
    "store.reserve_bytes=0",
)


def make_corpus(path: Path, rows: int = 90, seed: int = 1, longest: int = 40) -> Path:
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(path, meta) as writer:
        previous = np.array([1, 2, 3])
        for row in range(rows):
            tokens = previous if row % 17 == 5 else rng.integers(0, 1000, int(rng.integers(3, longest)))
            mask = np.zeros(len(tokens), np.uint8)
            mask[len(tokens) // 3 :] = 1
            writer.add(f"r{row}", tokens, mask)
            previous = tokens
    return path


def fill(corpus: Path, store: Path, *settings: str, workers: int = 1, retry_failed: bool = False) -> Summary:
    cfg = load(overrides=[*SETTINGS, *settings])
    console = Console(file=io.StringIO())
    return extract(corpus, store, cfg=cfg, workers=workers, retry_failed=retry_failed, console=console)


def command(corpus: Path, store: Path, *settings: str) -> list[str]:
    sets = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return [sys.executable, "-m", "eyas", "extract", str(corpus), str(store), *sets]
