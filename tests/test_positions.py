from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.contract import runs_of
from eyas.positions import kept_counts, kept_positions, kept_runs, loss_positions

masks = st.lists(st.integers(0, 1), max_size=60)


@given(masks)
def test_loss_positions_are_those_whose_next_token_is_trained_too(mask: list[int]) -> None:
    expected = [s for s in range(len(mask) - 1) if mask[s] and mask[s + 1]]
    assert loss_positions(mask).tolist() == expected


@given(masks)
def test_loss_positions_hold_every_teacher_row(mask: list[int]) -> None:
    """valid(t, k) reads last[t + 1 + k]; see the module's text."""
    read = {
        t + 1 + k
        for t in range(len(mask))
        for k in range(len(mask))
        if all(mask[t + 1 : t + 3 + k]) and t + 2 + k < len(mask)
    }
    assert read <= set(loss_positions(mask).tolist())


@given(masks, st.sampled_from(["loss", "all"]))
def test_runs_are_the_positions(mask: list[int], last: str) -> None:
    positions = kept_positions(mask, last).tolist()
    assert kept_runs(mask, last) == runs_of(positions)
    counts = kept_counts(np.array([len(mask)], np.int32), np.array([len(loss_positions(mask))], np.int32), last)
    assert counts.tolist() == [len(positions)]
