"""Where the rows of each step are, what teaches them, what they may read: made on the CPU, moved in two pieces.

A batch has some eighty such vectors. Made on a GPU, each would cost the launches of several small kernels, and for a
small draft it is launches that a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.train.blocks import BlockTables, block_tables, padded_rows
from eyas.train.compiled import grows

_ALIGNED: Final = 32  # elements: compiled kernels copy inputs that do not lie on 16 bytes

_Ints = npt.NDArray[np.int64]
_Integers = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class RowsOfStep(NamedTuple):
    """The n rows of one step.

    Attributes:
        at: [n] int64, t + k, where the embedding half of row t lies.
        inverse: [N] int64, position p -> number of the row with t + k = p, or -1; may name rows beyond the n.
        positions: [n] int64 within the document plus k, where queries and keys are rotated to.
        tables: what attention may read.
    """

    at: Tensor
    inverse: Tensor
    positions: Tensor
    tables: BlockTables


class OpenIndex(NamedTuple):
    """The vectors, on the batch's device. S rows of all steps, one step after another; K' steps that have rows.

    Attributes:
        teacher_S: row of `Batch.last` that teaches.
        label_S: the token to predict, or -1 past the text's end (not a row of the serving rule).
        cell_S: k * R + the row's number, its place in a [K, R] table.
        scored_S: bool, whether it counts; None where all do.
        steps: [K'].
    """

    teacher_S: Tensor
    label_S: Tensor
    cell_S: Tensor
    scored_S: Tensor | None
    steps: tuple[RowsOfStep, ...]


@dataclass(frozen=True, slots=True)
class _Pile:
    """Arrays of one type that lie in one tensor."""

    flat: Tensor
    places: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Sequence[_Integers], dtype: type[np.int64 | np.int32]) -> Self:
        places: list[tuple[int, tuple[int, ...]]] = []
        size = 0
        for array in arrays:
            places.append((size, array.shape))
            size += -(-array.size // _ALIGNED) * _ALIGNED
        flat = np.zeros(size, dtype=dtype)
        for array, (start, _) in zip(arrays, places, strict=True):
            flat[start : start + array.size] = array.ravel()
        return cls(torch.from_numpy(flat), tuple(places))

    def views(self) -> list[Tensor]:
        return [self.flat[start : start + int(np.prod(shape))].view(shape) for start, shape in self.places]


@dataclass(frozen=True, slots=True)
class StepIndex:
    """See `OpenIndex`; this is how it travels."""

    counts: tuple[int, ...]
    all_score: bool
    longs: _Pile
    shorts: _Pile

    @classmethod
    def of(
        cls, rows_R: _Ints, counts: Sequence[int], scored_KR: npt.NDArray[np.bool_] | None, text: TextIndex
    ) -> Self | None:
        """None where no row drafts.

        Args:
            rows_R: positions of the rows, those that live longest first.
            counts: [K] rows of each step, falling.
            scored_KR: which of them count; None for all.
            text: of the batch's tokens.
        """
        counts = tuple(n for n in counts if n)
        if not counts:
            return None
        length = len(text.tokens)
        rows, starts = padded_rows(rows_R, rows_R - text.positions[rows_R], length)
        ats = [rows_R[:n] + k for k, n in enumerate(counts)]
        at_S, start_S = np.concatenate(ats), np.concatenate([rows_R[:n] for n in counts])
        following_S = np.minimum(at_S + 2, length - 1)
        followed_S = (at_S + 2 < length) & (text.document[following_S] == text.document[start_S])
        inverse = np.full(length + len(counts), -1, dtype=np.int64)
        inverse[rows_R + len(counts)] = np.arange(len(rows_R))
        score = np.concatenate([scored_KR[k, :n] for k, n in enumerate(counts)]) if scored_KR is not None else []
        longs: list[_Ints] = [
            np.maximum(text.teacher_at[at_S + 1], 0),  # -1 only where a row does not count
            np.where(followed_S, text.tokens[following_S], -1),
            np.concatenate([np.arange(n) + k * len(rows_R) for k, n in enumerate(counts)]),
            np.asarray(score, dtype=np.int64),
            rows,
            starts,
        ]
        for k, n in enumerate(counts):
            longs += [ats[k], inverse[len(counts) - k :][:length], text.positions[rows_R[:n]] + k]
        tables = block_tables(rows, starts, counts, length)
        shorts = [table for step in tables for table in step]
        return cls(counts, scored_KR is None, _Pile.of(longs, np.int64), _Pile.of(shorts, np.int32))

    def map(self, change: Callable[[Tensor], Any]) -> StepIndex:
        """With its tensors changed: to another device, say."""
        longs, shorts = (_Pile(change(pile.flat), pile.places) for pile in (self.longs, self.shorts))
        return StepIndex(self.counts, self.all_score, longs, shorts)

    def open(self) -> OpenIndex:
        """The vectors: views, without a copy."""
        teacher_S, label_S, cell_S, score_S, rows, starts, *each = self.longs.views()
        tables = self.shorts.views()
        steps = tuple(
            RowsOfStep(
                grows(each[3 * k]),
                each[3 * k + 1],
                grows(each[3 * k + 2]),
                BlockTables._make((*_open(tables[8 * k : 8 * k + 8]), rows, starts)),
            )
            for k in range(len(self.counts))
        )
        return OpenIndex(teacher_S, label_S, cell_S, None if self.all_score else score_S.bool(), steps)


class TextIndex(NamedTuple):
    """What a batch's tokens are: all [N], as in `eyas.train.batch.Batch`."""

    tokens: _Ints
    positions: _Ints
    document: npt.NDArray[np.int32]
    teacher_at: _Ints


def _open(tables: Sequence[Tensor]) -> list[Tensor]:
    """Eight tables whose number of query blocks differs from call to call."""
    by_query = [grows(table, 2) for table in tables[:4]]
    by_key = [table if table.ndim == 3 else grows(table, 3) for table in tables[4:]]
    return by_query + by_key
