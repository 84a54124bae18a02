"""Plots: lines with bands, bars with error bars, columns.

Every point has its values in a `<title>`, which browsers show on hover and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from eyas.data.names import shortened, visible
from eyas.report.scales import axis, short, thin
from eyas.report.svg import (
    BOTTOM,
    HEIGHT,
    TOP,
    Axis,
    Frame,
    coordinate,
    exact,
    look,
    marked,
    picture,
    tag,
    x_axis,
    y_axis,
)

_HOVERED: Final = 120  # points of a line that tell their values
_DOTTED: Final = 30  # lines of so few points show them
_BAR, _BAR_GAP, _LABEL, _GROUP_GAP = 13, 3, 18, 10
_BARS_LEFT, _BARS_RIGHT = 22, 414  # values stand at the right of their bars
_LONGEST: Final = 44  # characters of a bar's label
Ends = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        name: in the legend.
        x, y: its points; None in y is a gap.
        low, high: the ends of an interval at each point, where it has one.
    """

    name: str
    x: Sequence[float]
    y: Ends
    low: Ends = ()
    high: Ends = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One colour of bars.

    Attributes:
        name: in the legend.
        values: one for each group; None draws nothing.
        low, high: the ends of the error bars.
    """

    name: str
    values: Ends
    low: Ends = ()
    high: Ends = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot and what its colours mean.

    Attributes:
        svg: the plot.
        legend: (class, name) of each series; empty where there is only one.
        lines: whether they are lines, which differ by dashes too.
    """

    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    lines: bool = False


def line_chart(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, *, marks: Sequence[tuple[float, str]] = ()
) -> Chart | None:
    """Lines over a number; None where there is nothing to draw.

    Args:
        title: what the plot shows, for those who do not see it.
        lines: with at least one finite point among them.
        x, y: the axes.
        marks: (x, text) of upright lines: where a session began.
    """
    drawn = [(number, _drawable(line, x)) for number, line in enumerate(lines)]
    drawn = [(number, line) for number, line in drawn if any(value is not None for value in line.y)]
    if not drawn:
        return None
    values = [v for _, line in drawn for v in (*line.y, *line.low, *line.high) if v is not None]
    places = [v for _, line in drawn for v, at in zip(line.x, line.y, strict=True) if at is not None]
    frame = Frame(_span(places, x), axis(values, zero=y.zero, at_most=y.at_most), log=x.log)
    ticks = [(frame.x(value), label) for value, label in marked(frame.span_x, x, places)]
    body = [y_axis(frame, y), x_axis(frame, x, ticks)]
    low, high = frame.span_x
    for at, text in marks:
        if low < at < high:
            place = frame.x(at)
            body.append(tag("line", tag("title", text), x1=place, x2=place, y1=TOP, y2=frame.bottom, class_="mark"))
    body += [_line(frame, line, look(number), x) for number, line in drawn]
    legend = tuple((look(number), line.name) for number, line in drawn)
    return Chart(picture(title, HEIGHT, body), legend if len(lines) > 1 else (), lines=True)


def bar_chart(
    title: str, groups: Sequence[str], bars: Sequence[Bars], value: Axis, text: Callable[[float], str] = short
) -> Chart | None:
    """Horizontal bars in groups, each group's label above its bars; None where there is nothing to draw.

    Args:
        title: what the plot shows.
        groups: their labels.
        bars: one entry a colour, each with a value for every group.
        value: the axis of the values; bars begin at zero.
        text: how a value is written at its bar.
    """
    ends = [v for one in bars for v in (*one.values, *one.high) if _known(v) is not None]
    if not ends:
        return None
    shown = [[_known(v) is not None for v in one.values] for one in bars]
    rows = [sum(column) for column in zip(*shown, strict=True)]
    height = TOP + sum(_LABEL + n * (_BAR + _BAR_GAP) + _GROUP_GAP for n in rows) + BOTTOM
    most = max(axis([v for v in ends if v is not None], zero=True, at_most=value.at_most)[1], 1e-12)
    frame = Frame((0.0, most), (0.0, 1.0), _BARS_LEFT, _BARS_RIGHT, height)
    ticks = [(frame.x(at), label) for at, label in marked(frame.span_x, value)]
    body = [tag("line", x1=at, x2=at, y1=TOP, y2=frame.bottom, class_="grid") for at, _ in ticks]
    body.append(x_axis(frame, value, ticks))
    top = TOP
    for group, name in enumerate(groups):
        known = visible(name)
        label = shortened(known, _LONGEST)
        body.append(tag("text", tag("title", known), label, x=_BARS_LEFT, y=top + 12, class_="group"))
        top += _LABEL
        for number, one in enumerate(bars):
            if shown[number][group]:
                body.append(_bar(frame, one, group, top, look(number), known, text))
                top += _BAR + _BAR_GAP
        top += _GROUP_GAP
    legend = tuple((look(number), one.name) for number, one in enumerate(bars) if any(shown[number]))
    return Chart(picture(title, height, body), legend if len(bars) > 1 else ())


def column_chart(title: str, columns: Sequence[tuple[str, float]], x: Axis, y: Axis) -> Chart | None:
    """Columns side by side, such as a histogram: (label, value) each; None where there is nothing to draw."""
    if not any(value for _, value in columns):
        return None
    span = axis([value for _, value in columns], zero=True, at_most=y.at_most)
    frame = Frame((0.0, float(len(columns))), span)
    ticks = [(frame.x(number + 0.5), label) for number, (label, _) in enumerate(columns)]
    body = [y_axis(frame, y), x_axis(frame, x, ticks)]
    width = 0.8 * (frame.x(1) - frame.x(0))
    for (place, label), (_, value) in zip(ticks, columns, strict=True):
        told = tag("title", f"{x.label} {label}: {exact(value)} {y.label}")
        top = frame.y(value)
        body.append(
            tag("rect", told, x=place - width / 2, y=top, width=width, height=frame.bottom - top, class_="fill c0")
        )
    return Chart(picture(title, HEIGHT, body))


# --- parts ------------------------------------------------------------------------------------------------------------


def _span(places: Sequence[float], x: Axis) -> tuple[float, float]:
    """The least and the largest of the x axis, never the same."""
    low, high = min(places), max(places)
    if x.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if x.log:
        return low / 1.15, high * 1.15
    if x.whole:
        return low - 0.25, high + 0.25
    return (low, high) if high - low > 1e-9 * abs(high) else (low - 0.5, high + 0.5)


def _line(frame: Frame, line: Line, looks: str, x: Axis) -> Markup:
    """A line with its band, its dots and what they tell."""
    kept = thin(line.y)
    points = [(i, value) for i in kept if (value := line.y[i]) is not None]
    path, before = [], -1
    for position, i in enumerate(kept):
        if (value := line.y[i]) is not None:
            pen = "L" if position and before == position - 1 else "M"
            path.append(f"{pen}{coordinate(frame.x(line.x[i]))} {coordinate(frame.y(value))}")
            before = position
    parts = [_band(frame, line, kept, looks), tag("path", d="".join(path), class_=f"line {looks}")]
    for i, value in points[:: max(1, math.ceil(len(points) / _HOVERED))]:
        text = f"{line.name}: {short(value)}{_interval(line, i)} at {x.label} {exact(line.x[i])}"
        place = {"cx": frame.x(line.x[i]), "cy": frame.y(value)}
        if len(points) <= _DOTTED:
            parts.append(tag("circle", **place, r=2.6, class_=f"fill {looks}"))
        parts.append(tag("circle", tag("title", text), **place, r=7, class_="hover"))
    return tag("g", *parts)


def _band(frame: Frame, line: Line, kept: Sequence[int], looks: str) -> Markup:
    ends = [
        (frame.x(line.x[i]), frame.y(low), frame.y(high))
        for i in kept
        if (low := _at(line.low, i)) is not None and (high := _at(line.high, i)) is not None
    ]
    if len(ends) < 2:
        return Markup("")
    there = [f"{coordinate(x)},{coordinate(high)}" for x, _, high in ends]
    back = [f"{coordinate(x)},{coordinate(low)}" for x, low, _ in reversed(ends)]
    return tag("polygon", points=" ".join(there + back), class_=f"band {looks}")


def _bar(
    frame: Frame, one: Bars, group: int, top: float, looks: str, name: str, text: Callable[[float], str]
) -> Markup:
    """A bar with its error bar, its value behind both."""
    value = one.values[group] or 0.0
    label, end = text(value), frame.x(max(value, 0.0))
    told = tag("title", f"{name}, {one.name}: {label}{_interval(one, group)}")
    width = max(end - frame.left, 0.5)
    parts = [tag("rect", told, x=frame.left, y=top, width=width, height=_BAR, class_=f"fill {looks}")]
    low, high = _at(one.low, group), _at(one.high, group)
    if low is not None and high is not None:
        left, right, y = frame.x(max(low, 0.0)), frame.x(max(high, 0.0)), coordinate(top + _BAR / 2)
        whiskers = "".join(f"M{coordinate(x)} {coordinate(top + _BAR / 2 - 3)}v6" for x in (left, right))
        parts.append(tag("path", d=f"M{coordinate(left)} {y}H{coordinate(right)}{whiskers}", class_="error"))
        end = max(end, right)
    parts.append(tag("text", label, x=end + 6, y=top + 11, class_="tick"))
    return tag("g", *parts)


def _interval(one: Line | Bars, index: int) -> str:
    low, high = _at(one.low, index), _at(one.high, index)
    return "" if low is None or high is None else f" ({short(low)} to {short(high)})"


def _at(values: Ends, index: int) -> float | None:
    return _known(values[index]) if index < len(values) else None


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _drawable(line: Line, x: Axis) -> Line:
    """The line with gaps where its values are no numbers, or lie where the axis has no place."""
    right = [math.isfinite(at) and (at > 0 or not x.log) for at in line.x]
    y = [_known(value) if placed else None for value, placed in zip(line.y, right, strict=True)]
    low, high = ([_at(ends, i) for i in range(len(ends))] for ends in (line.low, line.high))
    return Line(line.name, line.x, y, low, high)
