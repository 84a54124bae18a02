from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.report.scales import axis, labels, short, thin, ticks

numbers = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_few_round_and_inside(low: float, span: float, count: int) -> None:
    high = low + span
    if high - low < 1e-6 * abs(low):
        return
    found = ticks(low, high, count)
    assert 0 < len(found) <= 2 * count + 1
    slack = 1e-6 * (high - low)
    assert all(low - slack <= mark <= high + slack for mark in found)
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in pairwise(found)}
    assert steps <= {1.0}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0.12, 0.43, [0.2, 0.3, 0.4]),
        (0, 1e5, [0, 2e4, 4e4, 6e4, 8e4, 1e5]),
        (-3, 4, [-2, 0, 2, 4]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_whole_ticks() -> None:
    assert ticks(0.75, 3.25, whole=True) == [1, 2, 3]


@given(st.lists(numbers, min_size=1), st.booleans())
def test_an_axis_holds_its_values_and_is_never_empty(values: list[float], zero: bool) -> None:
    low, high = axis(values, zero=zero)
    assert low <= min(values) <= max(values) <= high
    assert low < high
    if zero:
        assert low <= 0 <= high


def test_an_axis_of_shares_ends_at_one() -> None:
    assert axis([0.2, 1.0], zero=True, at_most=1.0) == (0.0, 1.0)
    assert axis([0.2, 1.5], zero=True, at_most=1.0)[1] > 1.5


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        ([0, 25, 50], ["0", "25", "50"]),
        ([0, 20000, 40000], ["0", "20k", "40k"]),
        ([0, 500_000, 1_000_000, 1_500_000], ["0", "0.5M", "1.0M", "1.5M"]),
        ([0, 2.5e-4, 5e-4, 1e-3], ["0", "2.5e-4", "5e-4", "1e-3"]),
        ([1000, 2000], ["1,000", "2,000"]),
        ([], []),
    ],
)
def test_labels_are_all_alike(marks: list[float], expected: list[str]) -> None:
    assert labels(marks) == expected


@given(numbers)
def test_short_numbers_are_right_to_three_digits(value: float) -> None:
    text = short(value)
    assert len(text) <= 11
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    read = float(text.rstrip("kMGT").replace(",", "")) * units.get(text[-1], 1.0)
    assert math.isclose(read, value, rel_tol=6e-3, abs_tol=1e-300)


# --- fewer points -----------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300), st.integers(8, 60))
def test_a_thinned_line_keeps_its_ends_its_peaks_and_its_order(y: list[float | None], most: int) -> None:
    kept = thin(y, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 5 * (most // 4 + 1))
    known = [i for i, value in enumerate(y) if value is not None]
    if known:
        assert {known[0], known[-1]} <= set(kept)
        values = [y[i] for i in known]
        assert min(values) in [y[i] for i in kept]  # type: ignore[type-var]
        assert max(values) in [y[i] for i in kept]  # type: ignore[type-var]


def test_one_bad_step_among_a_hundred_thousand_is_seen() -> None:
    y: list[float | None] = [math.sin(i / 1000) for i in range(100_000)]
    y[54_321] = 99.0
    kept = thin(y)
    assert 54_321 in kept
    assert len(kept) <= 500


def test_a_gap_stays_a_gap() -> None:
    y: list[float | None] = [1.0] * 5000
    y[2500] = None
    assert 2500 in thin(y)
