"""Corpora of random prompts that are easily confused: equal lengths, duplicates, shared prefixes, critical lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eyas.data.corpus import CorpusMeta, CorpusWriter

_FIRST_PLAIN_TOKEN = 10  # below are the special ones


def make_corpus(path: Path, rows: int, *, model: Path, vocab_size: int, chunk: int, longest: int, seed: int) -> Path:
    """Write a corpus.

    Args:
        path: the Parquet file.
        rows: how many.
        model: the target that the corpus names.
        vocab_size: of the target.
        chunk: tokens of one prefill chunk; lengths just below, at and above its multiples occur.
        longest: most tokens the server admits; occurs, and so does one token less.
        seed: everything follows from it.
    """
    rng = np.random.default_rng(seed)
    critical = [1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, longest - 1, longest]
    prefix = rng.integers(_FIRST_PLAIN_TOKEN, vocab_size, longest)
    meta = CorpusMeta(model=str(model), tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    earlier: list[np.ndarray] = []
    with CorpusWriter(path, meta) as writer:
        for row in range(rows):
            kind = rng.choice(["equal", "any", "duplicate", "prefix", "critical"], p=[0.5, 0.24, 0.1, 0.1, 0.06])
            length = int(rng.choice([12, 24, 40])) if kind == "equal" else int(rng.integers(1, 90))
            if kind == "critical" or row < len(critical):
                length = critical[row % len(critical)]
            tokens = rng.integers(_FIRST_PLAIN_TOKEN, vocab_size, length)
            if kind == "prefix":
                shared = int(rng.integers(1, length + 1))
                tokens[:shared] = prefix[:shared]
            elif kind == "duplicate" and earlier:
                tokens = earlier[int(rng.integers(len(earlier)))]
            earlier.append(tokens)
            writer.add(str(row), tokens, _mask(rng, len(tokens)))
    return path


def _mask(rng: np.random.Generator, length: int) -> np.ndarray:
    """One or two trained spans, sometimes everything, sometimes nothing."""
    mask = np.zeros(length, np.uint8)
    match int(rng.integers(8)):
        case 0:
            mask[:] = 1
        case 1:
            pass
        case spans:
            for _ in range(1 + spans % 2):
                start, stop = sorted(rng.integers(0, length + 1, 2).tolist())
                mask[start:stop] = 1
    return mask
