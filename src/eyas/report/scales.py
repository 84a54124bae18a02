"""Axes as numbers: round ticks, short labels, and fewer points where there are more than can be seen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

#: Points of one line that are drawn; a screen shows no more.
MOST_POINTS: Final = 400
_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_LEAST: Final = 1e-30  # smaller ones are zero to a picture
_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them; steps of 1, 2, 2.5 or 5 times a power of ten.

    Args:
        low, high: the axis, low < high.
        count: how many are wanted.
        whole: only whole numbers.
    """
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in _ROUND if power * factor >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def axis(values: Sequence[float], *, zero: bool = False, at_most: float | None = None) -> tuple[float, float]:
    """The least and the largest of an axis for `values`: a little room on both sides, never empty.

    Args:
        values: finite, at least one.
        zero: the axis begins at zero, or ends there where all are below it.
        at_most: it does not go beyond this where no value does.
    """
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    span = high - low
    if span <= max(1e-9 * max(abs(low), abs(high)), _LEAST):  # all the same
        span = abs(high) if abs(high) > _LEAST else 1.0
        low, high = (low, high + 0.1 * span) if zero else (low - 0.1 * span, high + 0.1 * span)
        span = high - low
    top = high + 0.06 * span if high > 0 or not zero else high
    if at_most is not None and high <= at_most:
        top = min(top, at_most)
    bottom = low if zero and low == 0 else low - 0.06 * span
    return bottom, top


def labels(marks: Sequence[float]) -> list[str]:
    """Ticks as text, all alike: `0`, `50k`, `100k`; `0.5`, `1.0`; `2.5e-4`."""
    if not marks:
        return []
    most = max(abs(mark) for mark in marks)
    step = min((b - a for a, b in pairwise(marks)), default=most) or 1.0
    if 0 < most < 0.01:
        return [_power(mark) if mark else "0" for mark in marks]
    unit, letter = _unit(most) if most >= 1e4 else (1.0, "")
    return ["0" if letter and not mark else _decimals(mark / unit, step / unit) + letter for mark in marks]


def short(value: float) -> str:
    """A number for people, three or four digits of it: `12,345` -> `12.3k`, `0.98765` -> `0.988`."""
    size = abs(value)
    if size >= 1e4:
        unit, letter = _unit(size)
        return f"{value / unit:.3g}{letter}" if size / unit < 1000 else f"{value:.3g}"
    if size >= 100 or (size >= 1 and float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:.3f}" if 1 <= size < 10 else f"{value:.3g}"


def _unit(size: float) -> tuple[float, str]:
    return next((unit, letter) for unit, letter in _UNITS if size >= unit)


def _power(value: float) -> str:
    """`2.5e-4`; ticks are round, so two digits are all they have."""
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _decimals(value: float, step: float) -> str:
    digits = next((n for n in range(7) if abs(step * 10**n - round(step * 10**n)) < 1e-6 * 10**n), 6)
    return f"{value:,.{digits}f}"


def thin(y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw of a line that has too many: each stretch's first, least, largest and last.

    Peaks stay where they are; a mean would hide the one step that went wrong. (The idea is M4's: Jugel and others,
    VLDB 2014.)

    Args:
        y: the values in their order; None is a gap, and gaps count as no extreme.
        most: about how many may stay; no fewer than 8.
    """
    count = len(y)
    if count <= most:
        return list(range(count))
    stretches = max(2, most // 4)
    kept: set[int] = set()
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        inside = [i for i in range(start, stop) if y[i] is not None]
        if inside:
            kept |= {
                inside[0],
                inside[-1],
                min(inside, key=lambda i: y[i] or 0.0),
                max(inside, key=lambda i: y[i] or 0.0),
            }
        if len(inside) < stop - start:
            kept.add(next(i for i in range(start, stop) if y[i] is None))  # the gap is still seen
    return sorted(kept)
