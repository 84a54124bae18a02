"""Packing: who drafts at which step, by whom each row is taught, and where everything lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.positions import loss_positions
from eyas.train.batch import Batch, MaskRule, Sample, pack
from eyas.train.blocks import BLOCK

HIDDEN = 2


def made_sample(row: int, mask: list[bool], kept: list[int] | None = None) -> Sample:
    n = len(mask)
    at = loss_positions(mask).tolist() if kept is None else kept
    base = torch.arange(n, dtype=torch.float64)[:, None] + 1000 * row
    return Sample(
        row,
        torch.arange(n) + 100 * row + 1,
        torch.tensor(mask),
        base.repeat(1, 3 * HIDDEN),
        base[at].repeat(1, HIDDEN),
        torch.tensor(at, dtype=torch.int64),
    )


def counts(mask: list[bool], t: int, k: int, rule: MaskRule) -> bool:
    """The rule, read off its definition."""
    n = len(mask)
    match rule:
        case "serving":
            return t + 2 + k < n and all(mask[t + 1 : t + 3 + k])
        case "classic":
            return t + 1 + k < n and mask[t + k]
        case "shifted":
            return t + 1 + k < n and mask[t + 1 + k]


documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=5)
RULES: Any = st.sampled_from(["serving", "classic", "shifted"])


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(1, 7), st.integers(0, 9), RULES)
def test_rows_are_those_of_the_rule_and_each_step_works_on_a_prefix(
    masks: list[list[bool]], steps: int, spare: int, rule: MaskRule
) -> None:
    everything = None if rule == "serving" else "all"
    samples = [made_sample(i, m, None if everything is None else list(range(len(m)))) for i, m in enumerate(masks)]
    used = sum(map(len, masks))
    batch = pack(samples, steps=steps, budget=used + spare, mask=rule)
    starts = np.concatenate([[0], np.cumsum([len(m) for m in masks])])
    wanted = {
        (int(starts[d]) + t, k)
        for d, m in enumerate(masks)
        for t in range(len(m))
        for k in range(steps)
        if counts(m, t, k, rule)
    }
    got = {
        (t, k)
        for k in range(steps)
        for i, t in enumerate(batch.rows[: batch.counts[k]].tolist())
        if batch.scored is None or batch.scored[k, i]
    }
    assert got == wanted
    assert list(batch.valid_counts) == [sum(k == step for _, k in wanted) for step in range(steps)]
    assert list(batch.counts) == sorted(batch.counts, reverse=True) and batch.steps == steps
    if rule == "serving":
        assert batch.scored is None and batch.counts == batch.valid_counts
    lifetimes = {t: 1 + max(k for row, k in wanted if row == t) for t, _ in wanted}
    assert batch.rows.tolist() == sorted(lifetimes, key=lambda t: (-lifetimes[t], t))

    taught = {t + 1 + k for t, k in wanted}
    assert {p for p in range(used + spare) if batch.teacher_at[p] >= 0} == taught
    for p in taught:  # the state there is its own document's, at its own position
        d = int(batch.document[p])
        assert batch.last[batch.teacher_at[p]].tolist() == [1000.0 * d + float(batch.positions[p])] * HIDDEN
    assert len(batch.last) == len(taught)


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(0, 9))
def test_documents_lie_side_by_side_and_the_padding_belongs_to_none(masks: list[list[bool]], spare: int) -> None:
    samples = [made_sample(i + 3, m) for i, m in enumerate(masks)]
    used = sum(map(len, masks))
    batch = pack(samples, steps=3, budget=used + spare)
    assert batch.tokens.tolist() == [t for s in samples for t in s.tokens.tolist()] + [0] * spare
    assert batch.positions.tolist() == [t for m in masks for t in range(len(m))] + [0] * spare
    assert batch.document.tolist() == [d for d, m in enumerate(masks) for _ in m] + [-1] * spare
    assert torch.equal(batch.aux[:used], torch.cat([s.aux for s in samples])) and not batch.aux[used:].any()
    assert batch.samples == tuple(s.row for s in samples) and batch.tokens_used == used
    dtypes = (batch.tokens.dtype, batch.positions.dtype, batch.document.dtype, batch.teacher_at.dtype, batch.rows.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int32, torch.int64, torch.int64)


def test_a_span_covers_what_its_rows_may_read() -> None:
    rng = np.random.default_rng(0)
    masks = [(rng.random(n) < 0.8).tolist() for n in (90, 200, 150, 1, 3)]
    batch = pack([made_sample(i, m) for i, m in enumerate(masks)], steps=4)
    starts = batch.rows - batch.positions[batch.rows]
    assert len(batch.key_spans) == -(-len(batch.rows) // BLOCK) > 1
    for i, (low, high) in enumerate(batch.key_spans):
        block = slice(i * BLOCK, (i + 1) * BLOCK)
        assert low == starts[block].min() and high == batch.rows[block].max() + 1


def test_what_cannot_be_packed_is_refused() -> None:
    sample = made_sample(0, [True] * 5)
    for samples, steps, budget in (([], 1, 8), ([sample], 0, 8), ([sample, sample], 1, 9)):
        with pytest.raises(ValueError, match="budget"):
            pack(samples, steps=steps, budget=budget)


@pytest.mark.parametrize("kept", [[], [0, 1], [0, 1, 3, 4], [2, 3]])
def test_a_missing_state_names_its_row_and_what_to_do(kept: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"row 7.*last: all"):
        pack([made_sample(7, [True] * 6, kept)], steps=2, mask="serving" if len(kept) < 4 else "classic")


def test_the_classic_rule_needs_states_that_a_store_for_serving_lacks() -> None:
    mask = [False, True, True, True]
    pack([made_sample(0, mask)], steps=1)
    with pytest.raises(ConfigError, match="last: all"):
        pack([made_sample(0, mask)], steps=1, mask="classic")


def test_a_batch_moves_as_a_whole() -> None:
    batch = pack([made_sample(0, [True] * 5)], steps=2)
    moved: Batch = batch.to("meta")
    tensors = ("tokens", "positions", "document", "aux", "last", "teacher_at", "rows")
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)
    assert moved.counts == batch.counts and moved.scored is None
