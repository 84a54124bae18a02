"""Which rows made a step's loss or gradient something that is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.train.batch import Batch


@dataclass(frozen=True, slots=True)
class Suspects:
    """Corpus rows of one rank's step.

    Attributes:
        rows: all of them.
        bad_states: those whose stored states hold something that is no number.
        bad_loss: all of them if this rank's own loss is no number, else none.
    """

    rows: tuple[int, ...]
    bad_states: tuple[int, ...]
    bad_loss: tuple[int, ...]


def suspects(batches: Sequence[Batch], *, loss: float) -> Suspects:
    """Look at a step's batches on the host, after its loss was found to be no number."""
    rows = tuple(row for batch in batches for row in batch.samples)
    bad = tuple(row for batch in batches for row in _bad_states(batch))
    return Suspects(rows, bad, () if math.isfinite(loss) else rows)


def _bad_states(batch: Batch) -> list[int]:
    """Rows with a state, read by fc or by the teacher, that holds something that is no number."""
    bad_N = ~torch.isfinite(batch.aux).all(dim=1)
    taught_N = batch.teacher_at >= 0
    bad_N[taught_N] |= ~torch.isfinite(batch.last).all(dim=1)[batch.teacher_at[taught_N]]
    documents = batch.document[bad_N].unique().tolist()
    return [batch.samples[number] for number in documents if number >= 0]
