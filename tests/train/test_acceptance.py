"""Acceptance lengths: the formula, against chains that are walked one by one, and what the interval means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.acceptance import accept_length, acceptance, counter_counts, cycle_counts, histogram_counts, interval


def counts_of(chains: list[tuple[int, int]], steps: int) -> tuple[list[int], list[int]]:
    """(reached, right) from chains given as (steps that were right, steps that could be tried)."""
    reached, right = [0] * steps, [0] * steps
    for good, tried in chains:
        for k in range(min(tried, good + 1)):
            reached[k] += 1
            right[k] += k < good
    return reached, right


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_length_is_one_and_the_sum_of_products(shares: list[float]) -> None:
    expected, product = 1.0, 1.0
    for share in shares:
        product *= share
        expected += product
    assert accept_length(shares) == pytest.approx(expected)
    assert 1 <= accept_length(shares) <= len(shares) + 1


def test_one_rate_everywhere_is_the_geometric_series() -> None:
    rate, steps = 0.8, 7
    assert accept_length([rate] * steps) == pytest.approx((1 - rate ** (steps + 1)) / (1 - rate))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_without_censoring_it_is_the_mean_of_what_the_chains_yield(good: list[int]) -> None:
    reached, right = counts_of([(g, 5) for g in good], 5)
    assert acceptance(reached, right).length == pytest.approx(1 + np.mean(good))


def test_chains_cut_by_the_end_of_an_answer_do_not_pull_the_length_down() -> None:
    rng = np.random.default_rng(0)
    rates = np.array([0.9, 0.8, 0.7, 0.6])
    good = np.array([next((k for k in range(4) if rng.random() > rates[k]), 4) for _ in range(40_000)])
    tried = rng.integers(1, 5, len(good))  # where the answer ended
    found = acceptance(*counts_of([(min(g, t), t) for g, t in zip(good, tried, strict=True)], 4))
    assert found.length == pytest.approx(accept_length(rates), abs=0.02)
    assert np.allclose(found.by_position, rates, atol=0.02)
    naive = 1 + np.minimum(good, tried).mean()
    assert naive < accept_length(rates) - 0.5, "the mean over cut chains is far off"


def test_nothing_right_and_everything_right_and_nothing_there() -> None:
    assert acceptance([10, 0, 0], [0, 0, 0]).length == 1
    full = acceptance([10, 10, 10], [10, 10, 10])
    assert (full.length, full.low, full.high, full.rows) == (4, 4, 4, 10)
    none = acceptance([0, 0], [0, 0])
    assert (none.length, none.by_position, none.rows) == (1, (0, 0), 0)


def test_the_analytic_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(1)
    rates, rows, rounds = [0.95, 0.9, 0.85, 0.9, 0.7], 400, 600
    inside = 0
    for _ in range(rounds):
        reached, right, left = [], [], rows
        for rate in rates:
            reached.append(left)
            left = int(rng.binomial(left, rate))
            right.append(left)
        low, high = interval(reached, right)
        inside += low <= accept_length(rates) <= high
    assert 0.92 < inside / rounds < 0.98


def test_clusters_that_differ_widen_the_interval() -> None:
    """Half the answers are easy and half are hard: rows of one answer say the same thing many times."""
    rng = np.random.default_rng(2)
    clusters = [0.95 if c % 2 else 0.35 for c in range(40)]
    right = np.array([[rng.binomial(100, rate)] for rate in clusters])
    reached = np.full_like(right, 100)
    by_cluster, as_rows = acceptance(reached, right), acceptance(reached.sum(0), right.sum(0))
    assert by_cluster.length == as_rows.length
    assert by_cluster.high - by_cluster.low > 3 * (as_rows.high - as_rows.low)
    assert acceptance(reached, right) == by_cluster, "the bootstrap is seeded"


@pytest.mark.parametrize(("reached", "right"), [([3, 2], [3]), ([3], [4]), ([3], [-1])])
def test_counts_that_cannot_be_are_refused(reached: list[int], right: list[int]) -> None:
    with pytest.raises(ValueError, match="counts"):
        acceptance(reached, right)


# --- where counts come from -------------------------------------------------------------------------------------------

CYCLES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=30).map(
    lambda pairs: [(min(accepted, possible), possible) for accepted, possible in pairs]
)


@given(CYCLES)
def test_cycles_are_counted_step_by_step(cycles: list[tuple[int, int]]) -> None:
    reached, right = cycle_counts(cycles, 4)
    assert (reached.tolist(), right.tolist()) == counts_of([(a, min(p, 4)) for a, p in cycles], 4)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_cycles_counters_and_histograms_of_whole_cycles_are_one_thing(accepted: list[int]) -> None:
    cycles = cycle_counts([(a, 4) for a in accepted], 4)
    counters = counter_counts(len(accepted), [sum(a > k for a in accepted) for k in range(4)])
    histogram = histogram_counts([accepted.count(n) for n in range(max(accepted) + 1)], 4)
    for found in (counters, histogram):
        assert [part.tolist() for part in found] == [part.tolist() for part in cycles]
    assert acceptance(*counters).length == pytest.approx(1 + np.mean(accepted))


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 4))
def test_counters_differ_by_what_lies_behind_the_ends_of_answers(answers: list[list[int]], room: int) -> None:
    """Answers that their last cycle meets the end of: its server counts all that it accepted, we what there was."""
    known = [(n, 4) for answer in answers for n in answer[:-1]] + [(min(one[-1], room), room) for one in answers]
    counted = [n for answer in answers for n in answer]
    ours = acceptance(*cycle_counts(known, 4)).length
    theirs = acceptance(*counter_counts(len(counted), [sum(n > k for n in counted) for k in range(4)])).length
    assert theirs == pytest.approx(1 + np.mean(counted))
    assert abs(ours - theirs) < 4 / (len(counted) / len(answers))


def test_counters_err_up_and_down() -> None:
    down, up = [(3, 3), (1, 1), (3, 3)], [(0, 3), (1, 1), (0, 3)]
    assert acceptance(*cycle_counts(down, 3)).length == 4
    assert acceptance(*counter_counts(3, [3, 2, 2])).length == pytest.approx(1 + 7 / 3)
    assert acceptance(*cycle_counts(up, 3)).length == pytest.approx(1 + 1 / 3)
    assert acceptance(*counter_counts(3, [1, 1, 1])).length == pytest.approx(2)


def test_a_shallower_chain_is_the_beginning_of_a_deeper_one() -> None:
    found = acceptance([100, 50, 25], [50, 25, 5])
    assert (found.at_depth(1), found.at_depth(3)) == (1.5, found.length)
    assert found.at_depth(2) == acceptance([100, 50], [50, 25]).length


def test_cycles_and_counters_that_cannot_be_are_refused() -> None:
    for call in (
        lambda: cycle_counts([(3, 2)], 4),
        lambda: cycle_counts([(5, 9)], 4),
        lambda: cycle_counts([(-1, 2)], 4),
        lambda: counter_counts(3, [4, 0]),
        lambda: counter_counts(3, [1, 2]),
        lambda: histogram_counts([1, 2, 3], 1),
        lambda: histogram_counts([1, -1], 1),
    ):
        with pytest.raises(ValueError, match=r"accepted"):
            call()
