from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import Cost
from eyas.capture.contract import DTYPES, CaptureSpec
from eyas.store.format import shard_layout
from eyas.store.plan import HEADER_BYTES, Plan, Shard, make_plan

SPEC = CaptureSpec((1, 3), "loss", "bf16", 8, 100, 8, "0" * 32)


def total_of(shards: tuple[Shard, ...]) -> list[int]:
    return [row for shard in shards for row in range(shard.start, shard.stop)]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    tokens = draw(st.lists(st.integers(1, 200), max_size=60))
    return tokens, [draw(st.integers(0, t)) for t in tokens]


@given(corpora(), st.integers(1, 60_000), st.sampled_from(sorted(DTYPES)))
def test_every_row_is_in_exactly_one_shard_in_order_and_within_the_bound(corpus, shard_bytes, dtype):
    tokens, positions = corpus
    spec = CaptureSpec((1, 3), "loss", dtype, 8, 100, 8, "0" * 32)
    plan = make_plan(tokens, positions, spec, shard_bytes)
    assert total_of(plan.shards) == list(range(len(tokens)))
    assert [s.index for s in plan.shards] == list(range(len(plan.shards)))
    files = [shard_layout(s, spec, "c" * 32, plan.digest) for s in plan.shards]
    for shard, file in zip(plan.shards, files, strict=True):
        assert shard.tokens == sum(tokens[shard.start : shard.stop])
        assert shard.positions == sum(positions[shard.start : shard.stop])
        assert len(file.header) <= HEADER_BYTES
        assert file.file_bytes <= shard_bytes or shard.rows == 1
    # The plan's arithmetic is the layout's.
    assert plan.total_bytes == sum(f.file_bytes - len(f.header) + HEADER_BYTES for f in files)


@given(corpora(), st.integers(5_000, 60_000))
def test_shards_are_as_full_as_the_bound_allows(corpus, shard_bytes):
    tokens, positions = corpus
    plan = make_plan(tokens, positions, SPEC, shard_bytes)
    for shard, following in zip(plan.shards, plan.shards[1:], strict=False):
        row = following.start
        longer = Shard(shard.index, shard.start, row + 1, shard.tokens + tokens[row], shard.positions + positions[row])
        file = shard_layout(longer, SPEC, "c" * 32, plan.digest)
        assert file.file_bytes - len(file.header) + HEADER_BYTES > shard_bytes


@given(corpora(), st.integers(1, 60_000))
def test_same_input_same_plan(corpus, shard_bytes):
    tokens, positions = corpus
    again = make_plan(np.array(tokens, dtype=np.int32), np.array(positions, dtype=np.uint16), SPEC, shard_bytes)
    assert make_plan(tokens, positions, SPEC, shard_bytes) == again


def test_digest_changes_with_everything_that_determines_the_layout():
    def digest(tokens=(3, 4), positions=(1, 2), spec=SPEC, shard_bytes=9000) -> str:
        return make_plan(tokens, positions, spec, shard_bytes).digest

    other_dtype = CaptureSpec((1, 3), "loss", "f16", 8, 100, 8, "0" * 32)
    other_width = CaptureSpec((1, 3), "loss", "bf16", 16, 100, 8, "0" * 32)
    other_layers = CaptureSpec((1, 2, 3), "loss", "bf16", 8, 100, 8, "0" * 32)
    variants = [
        digest(),
        digest(tokens=(4, 3)),
        digest(positions=(2, 1)),
        digest(shard_bytes=9001),
        digest(spec=other_dtype),
        digest(spec=other_width),
        digest(spec=other_layers),
        digest(tokens=(3,), positions=(1,)),
    ]
    assert len(set(variants)) == len(variants)


def test_no_line_runs_for_each_of_a_million_rows():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 8000, 1_000_000)
    spec = CaptureSpec((1, 29, 57), "loss", "bf16", 7168, 160_000, 61, "0" * 32)
    with Cost() as cost:
        plan = make_plan(tokens, tokens // 2, spec, 400 << 30)
    assert len(plan.shards) < 1000
    assert cost.lines < 100_000
    assert plan.shards[-1].stop == 1_000_000
    assert sum(s.tokens for s in plan.shards) == int(tokens.sum())


def test_no_rows_no_shards():
    assert make_plan([], [], SPEC, 1000).shards == ()


@pytest.mark.parametrize(
    ("tokens", "positions", "shard_bytes", "message"),
    [
        ([3, 0], [1, 0], 1000, "row 1 has no"),
        ([3, 4], [1, 5], 1000, "row 1 keeps more"),
        ([3, 4], [-1, 1], 1000, "row 0 keeps more"),
        ([2**31], [0], 1000, "row 0 has no or too many"),
        ([3, 4], [1], 1000, "equally long"),
        ([3, 4], [1, 1], 0, "shard_bytes"),
    ],
)
def test_impossible_counts_are_refused(tokens, positions, shard_bytes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tokens, positions, SPEC, shard_bytes)


def test_a_shard_never_has_more_tokens_than_its_int32_index_can_name():
    plan: Plan = make_plan([2**30] * 5, [0] * 5, SPEC, 1 << 60)
    assert [s.rows for s in plan.shards] == [1, 1, 1, 1, 1]
    assert max(s.tokens for s in plan.shards) < 2**31


def test_names_sort_like_indices():
    assert Shard(42, 0, 1, 1, 1).name == "shard-00042.safetensors"
