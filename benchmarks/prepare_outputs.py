"""What the preparations of `prepare_cpu.py` left on disk: read, counted, and compared row by row with Eyas's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eyas.data.corpus import Corpus

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids [T] and loss mask [T] of one row."""

CORPUS: Final = "corpus.parquet"


def eyas_rows(folder: Path) -> Iterator[Row]:
    """The corpus of `eyas prepare --out folder`."""
    for row in Corpus.open(folder / CORPUS).rows():
        yield row.tokens, row.loss_mask.astype(np.bool_)


def specforge_rows(folder: Path) -> Iterator[Row]:
    """The cache of SpecForge's `build_eagle3_dataset`: each row a batch of one."""
    for path in sorted(folder.glob("prepared*.pkl")):
        for batch in _batches(path):
            ids, masks = (_inner(batch[name]) for name in ("input_ids", "loss_mask"))
            for row in _rows(ids, masks):
                if row[1].any():  # those without are filtered by an index beside the cache
                    yield row


def speculators_rows(folder: Path) -> Iterator[Row]:
    """The data set that `speculators prepare-data --output folder` saves: a row an answer."""
    for path in sorted(folder.glob("data-*.arrow")):
        for batch in _batches(path):
            yield from _rows(_list(batch["input_ids"]), _list(batch["loss_mask"]))


@dataclass(slots=True)
class Count:
    """Rows, tokens and trained tokens of an output."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0


def count(rows: Iterator[Row]) -> Count:
    """Counts an output, one row in memory at a time."""
    total = Count()
    for tokens, mask in rows:
        total.rows += 1
        total.tokens += len(tokens)
        total.trained += int(mask.sum())
    return total


@dataclass(slots=True)
class Agreement:
    """How a peer's rows compare with Eyas's.

    Attributes:
        same_tokens: rows whose tokens are those of an Eyas row, or of its beginning up to the end of an answer.
        same_mask: of those, rows that train the same tokens.
        extra, missing: token id -> how often the peer trains it and Eyas does not, and the reverse.
    """

    rows: int = 0
    same_tokens: int = 0
    same_mask: int = 0
    extra: Counter[int] = field(default_factory=Counter)
    missing: Counter[int] = field(default_factory=Counter)


def compare(ours: Iterator[Row], theirs: Iterator[Row], *, row_per_answer: bool = False) -> Agreement:
    """Compares a peer's rows with Eyas's.

    Args:
        row_per_answer: each of the peer's rows trains one answer, the last it holds; else all answers of a
            conversation are trained in one row.
    """
    kept = list(ours)
    known = {_digest(tokens[:end]): (number, end) for number, (tokens, mask) in enumerate(kept) for end in _ends(mask)}
    result = Agreement()
    for tokens, mask in theirs:
        result.rows += 1
        if (place := known.get(_digest(tokens))) is None:
            continue
        result.same_tokens += 1
        number, end = place
        expected = kept[number][1][:end].copy()
        if row_per_answer:
            starts = np.flatnonzero(np.diff(expected, prepend=False) & expected)
            expected[: starts[-1]] = False
        result.same_mask += bool((mask == expected).all())
        result.extra.update(tokens[mask & ~expected].tolist())
        result.missing.update(tokens[expected & ~mask].tolist())
    return result


def _ends(mask: npt.NDArray[np.bool_]) -> set[int]:
    """Where a row may be cut for one answer: after its last trained token, or one further (ChatML's line break)."""
    after = np.flatnonzero(np.diff(mask, append=False) & mask) + 1
    return {int(end) for last in after for end in (last, min(last + 1, len(mask)))}


def _digest(tokens: npt.NDArray[np.int32]) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        yield from stream


def _inner(column: pa.Array) -> pa.ListArray:
    return _list(_list(column).flatten())


def _list(column: pa.Array) -> pa.ListArray:
    if not isinstance(column, pa.ListArray | pa.LargeListArray):
        raise TypeError(f"a list column was expected, not {column.type}")
    return column  # pyright: ignore[reportReturnType]


def _rows(ids: pa.ListArray, masks: pa.ListArray) -> Iterator[Row]:
    for tokens, mask in zip(ids, masks, strict=True):
        yield (
            tokens.values.to_numpy(zero_copy_only=False).astype(np.int32),
            mask.values.to_numpy(zero_copy_only=False).astype(np.bool_),
        )
