"""The order of rows and their batches: every row once, equal steps for every rank, the same whatever is known when."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.store.rowfile import RowTable
from eyas.train.sampler import EpochOrder, Sampling, is_held_out, shard_of, shards_of, windows


def tables_of(lengths: list[list[int]]) -> list[RowTable]:
    """Shards of rows of these lengths; every row has another hash."""
    tables, start = [], 0
    for shard in lengths:
        rows = np.arange(start, start + len(shard))
        hashes = np.random.default_rng([7, start]).integers(0, 2**64, len(shard), dtype=np.uint64)
        tables.append(RowTable(rows, np.array(shard, dtype=np.int32), hashes))
        start += len(shard)
    return tables


def some_tables(shards: int = 12, rows: int = 9, longest: int = 60, seed: int = 0) -> list[RowTable]:
    rng = np.random.default_rng(seed)
    return tables_of([rng.integers(1, longest, rows).tolist() for _ in range(shards)])


def order_of(tables: list[RowTable], sampling: Sampling, epoch: int = 0, **options: object) -> EpochOrder:
    order = EpochOrder(sampling, epoch, **options)  # type: ignore[arg-type]
    for window in windows(len(tables), sampling, epoch):
        order.add([tables[shard] for shard in window])
    order.close()
    return order


def batches_of(order: EpochOrder) -> list[list[int]]:
    """In global order: every rank's batch of step 0, then of step 1, ..."""
    world = order.sampling.world_size
    return [order.rows(step, rank) for step in range(order.steps) for rank in range(world)]


def lengths_of(tables: list[RowTable]) -> dict[int, int]:
    return {int(row): int(n) for table in tables for row, n in zip(table.rows, table.tokens, strict=True)}


SHARDS = st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12), min_size=1, max_size=12)


@given(
    lengths=SHARDS,
    budget=st.integers(8, 120),
    world=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    window=st.integers(1, 6),
    bins=st.integers(1, 8),
    long=st.sampled_from(["cut", "skip"]),
    held_out=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 3),
)
def test_every_row_once_within_the_budget_and_equal_steps(
    lengths: list[list[int]],
    budget: int,
    world: int,
    accumulation: int,
    window: int,
    bins: int,
    long: str,
    held_out: float,
    seed: int,
) -> None:
    tables = tables_of(lengths)
    sampling = Sampling(
        budget,
        seed=seed,
        window_shards=window,
        world_size=world,
        accumulation=accumulation,
        held_out=held_out,
        long=long,  # type: ignore[arg-type]
        open_bins=bins,
    )
    order, length = order_of(tables, sampling), lengths_of(tables)
    batches = batches_of(order)
    used = Counter(row for batch in batches for row in batch)
    out = {int(row) for t in tables for row in t.rows[is_held_out(t.hashes, held_out)]}
    trained = set(length) - out
    too_long = {row for row in trained if length[row] > budget}
    counts = order.counts
    assert all(batches) and max(used.values(), default=1) == 1
    assert order.steps % accumulation == 0
    assert all(sum(min(length[row], budget) for row in batch) <= budget for batch in batches)
    assert set(used) <= trained
    wanted = trained - too_long if long == "skip" else trained
    assert len(wanted) - len(used) == counts.dropped
    assert (counts.skipped, counts.cut) == ((len(too_long), 0) if long == "skip" else (0, len(too_long)))
    assert counts.held_out == len(out)
    assert (counts.rows, counts.batches) == (len(used), len(batches))
    assert counts.tokens == sum(min(length[row], budget) for row in used)
    # Rows are dropped only at the end, and only where they cannot be spread: fewer rows than batches in a step.
    assert counts.dropped < world * accumulation


@given(lengths=SHARDS, window=st.integers(1, 5), multiple=st.integers(1, 6), seed=st.integers(0, 2))
def test_what_is_handed_out_early_is_what_is_handed_out_at_the_end(
    lengths: list[list[int]], window: int, multiple: int, seed: int
) -> None:
    """A store that is still being written gives the batches of the complete one, and no later window changes them."""
    tables = tables_of(lengths)
    sampling = Sampling(80, seed=seed, window_shards=window, world_size=multiple, open_bins=3)
    growing, known = EpochOrder(sampling, 0), []
    for part in windows(len(tables), sampling, 0, in_order=True):
        growing.add([tables[shard] for shard in part])
        known.append(batches_of(growing))
        prints = [growing.fingerprint(step) for step in range(growing.steps + 1)]
    growing.close()
    final = batches_of(growing)
    for early in known:
        assert final[: len(early)] == early
    assert [growing.fingerprint(step) for step in range(len(prints))] == prints


def test_a_batch_is_found_without_what_came_before() -> None:
    tables = some_tables()
    sampling = Sampling(100, seed=3, window_shards=3, world_size=2)
    whole, again = order_of(tables, sampling, 1), order_of(tables, sampling, 1)
    assert whole.steps > 5
    for step in reversed(range(whole.steps)):
        assert [again.rows(step, rank) for rank in (0, 1)] == batches_of(whole)[2 * step : 2 * step + 2]
    with pytest.raises(IndexError):
        whole.rows(whole.steps, 0)
    with pytest.raises(IndexError):
        whole.rows(0, 2)


def test_a_world_of_another_size_takes_the_same_batches() -> None:
    """All but those at the end, which are split to make up whole steps."""
    tables = some_tables(30)
    one, four = (batches_of(order_of(tables, Sampling(100, world_size=world))) for world in (1, 4))
    assert len(one) > 40 and four[: len(one) - 4] == one[: len(one) - 4]
    assert len(four) % 4 == 0


def test_the_order_depends_on_seed_and_epoch() -> None:
    tables = some_tables()
    orders = {
        (seed, epoch): batches_of(order_of(tables, Sampling(100, seed=seed), epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert all(a == b or orders[a] != orders[b] for a in orders for b in orders)
    assert orders[0, 0] == batches_of(order_of(tables, Sampling(100, seed=0), 0))


def test_rows_are_shuffled_within_windows_of_shuffled_shards() -> None:
    tables = some_tables(shards=64, rows=20)
    sampling = Sampling(64, window_shards=8)
    rows = [row for batch in batches_of(order_of(tables, sampling)) for row in batch]
    apart = np.corrcoef(np.arange(len(rows)), rows)[0, 1]
    assert abs(apart) < 0.25
    # Few shards are read at a time: those of a window, and the few whose rows wait in open bins.
    starts = [int(table.rows[0]) for table in tables]
    spans = [len(shards_of(np.array(rows[at : at + 100]), starts)) for at in range(0, len(rows) - 100, 50)]
    assert max(spans) <= 3 * sampling.window_shards
    neighbours = np.mean(np.abs(np.diff(rows)) == 1)
    assert neighbours < 0.05


def test_without_shuffling_rows_come_as_planned() -> None:
    tables = tables_of([[30, 30], [30, 30], [30]])
    order = order_of(tables, Sampling(60, shuffle=False))
    assert batches_of(order) == [[0, 1], [2, 3], [4]]


def test_batches_are_nearly_full() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.9, 0.7, 6000), 8, 2048).astype(int)
    tables = tables_of([part.tolist() for part in np.split(lengths, 150)])
    counts = order_of(tables, Sampling(8192, world_size=2)).counts
    assert counts.tokens / (counts.batches * 8192) > 0.985
    assert counts.tokens == lengths.sum()


def test_no_bin_stays_open_for_long() -> None:
    """A row that fits beside nothing is handed out all the same, and its shard is done."""
    tables = tables_of([[60, 1]] + [[90, 95, 100, 85, 91, 99, 98, 97]] * 12)
    sampling = Sampling(100, shuffle=False, window_shards=1, open_bins=3)
    order = EpochOrder(sampling, 0)
    for table in tables:
        order.add([table])
    given = [row for batch in batches_of(order) for row in batch]
    assert given.index(0) <= sampling.oldest + 3
    assert 0 not in order.needed_from(order.steps)


def test_rows_that_are_still_needed() -> None:
    tables = some_tables()
    sampling = Sampling(100, window_shards=3)
    order = EpochOrder(sampling, 0)
    taken: set[int] = set()
    for window in list(windows(len(tables), sampling, 0))[:3]:
        order.add([tables[shard] for shard in window])
        taken |= {int(row) for shard in window for row in tables[shard].rows}
    for step in range(order.steps + 1):
        before = {row for batch in batches_of(order)[:step] for row in batch}
        assert set(order.needed_from(step).tolist()) == taken - before


def test_held_out_rows_are_chosen_by_their_tokens() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
    few, more = is_held_out(hashes, 0.02), is_held_out(hashes, 0.1)
    assert abs(few.mean() - 0.02) < 0.002 and abs(more.mean() - 0.1) < 0.005
    assert not (few & ~more).any()
    assert not is_held_out(hashes, 0.0).any()
    # Equal rows are on the same side, and so are never trained on and evaluated both.
    tables = [RowTable(np.arange(400), np.full(400, 5, np.int32), np.tile(hashes[:200], 2))]
    sampling = Sampling(50, held_out=0.4)
    evaluated = {row for batch in batches_of(order_of(tables, sampling, evaluation=True)) for row in batch}
    assert {row % 200 for row in evaluated} == {row for row in evaluated if row < 200} and 100 < len(evaluated) < 220


def test_training_and_evaluation_share_no_row_and_lose_none() -> None:
    tables = some_tables(40)
    sampling = Sampling(100, held_out=0.3)
    trained = {row for batch in batches_of(order_of(tables, sampling)) for row in batch}
    evaluated = {row for batch in batches_of(order_of(tables, sampling, evaluation=True)) for row in batch}
    assert trained.isdisjoint(evaluated) and trained | evaluated == set(lengths_of(tables))
    chosen = frozenset(sorted(evaluated)[:5])
    fewer = order_of(tables, sampling, evaluation=True, chosen=chosen)
    assert {row for batch in batches_of(fewer) for row in batch} == chosen


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"budget": 101}, {"window_shards": 2}, {"held_out": 0.1}, {"longest": 50}, {"long": "skip"}],
)
def test_a_fingerprint_tells_another_order(change: dict[str, object]) -> None:
    tables = some_tables()
    base = {"budget": 100, "window_shards": 3}
    mine, other = (order_of(tables, Sampling(**(base | c))) for c in ({}, change))  # type: ignore[arg-type]
    assert mine.fingerprint(3) != other.fingerprint(3)
    assert mine.fingerprint(0) != other.fingerprint(0)


def test_a_fingerprint_tells_other_rows_but_not_those_to_come() -> None:
    tables = some_tables()
    sampling = Sampling(100, window_shards=3, shuffle=False)
    mine = order_of(tables, sampling)
    first, last = list(tables), list(tables)
    first[1] = first[1]._replace(hashes=first[1].hashes + np.uint64(1))
    last[-1] = last[-1]._replace(hashes=last[-1].hashes + np.uint64(1))
    assert order_of(first, sampling).fingerprint(1) != mine.fingerprint(1)
    assert order_of(last, sampling).fingerprint(1) == mine.fingerprint(1)
    assert order_of(last, sampling).fingerprint(mine.steps) != mine.fingerprint(mine.steps)
    failed = list(tables)  # a row that failed is not there
    failed[0] = RowTable(*(column[1:] for column in failed[0]))
    assert order_of(failed, sampling).fingerprint(1) != mine.fingerprint(1)


def test_too_few_rows_for_every_rank_are_dropped_and_counted() -> None:
    order = order_of(tables_of([[5, 5, 5]]), Sampling(100, world_size=4))
    assert (order.steps, order.counts.dropped, order.counts.rows) == (0, 3, 0)
    order = order_of(tables_of([[5, 5, 5, 5]]), Sampling(100, world_size=4))
    assert (order.steps, order.counts.dropped) == (1, 0)
    # Of five batches of one row each, four make a step.
    order = order_of(tables_of([[90] * 5]), Sampling(100, world_size=4))
    assert (order.steps, order.counts.dropped, order.counts.rows) == (1, 1, 4)


def test_shards_are_found_by_their_rows() -> None:
    starts = [0, 5, 9]
    assert [shard_of(row, starts) for row in (0, 4, 5, 8, 9, 100)] == [0, 0, 1, 1, 2, 2]
    assert shards_of(np.array([4, 9, 3]), starts) == {0, 2}


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"world_size": 0}, {"held_out": 1.0}, {"longest": 101}, {"longest": 0}, {"open_bins": 0}]
)
def test_settings_that_make_no_batches_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|is a share|does not fit"):
        Sampling(**({"budget": 100} | wrong))  # type: ignore[arg-type]
