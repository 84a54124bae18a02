"""What plots are made of: elements, axes, and where numbers lie in the picture. Pure: numbers in, markup out.

Colours come from the page (classes `c0` to `c6`), so that one plot is right in light, in dark and on paper; lines
differ by dashes (`d0` to `d6`), too. Whatever is text goes through `markupsafe`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from eyas.data.names import visible
from eyas.report.scales import labels, short, ticks

WIDTH: Final = 480
HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 80, 18, 14, 50
COLOURS: Final = 7  # of the palette; beyond it they begin again


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis reads.

    Attributes:
        label: what it is, with its unit.
        zero: it begins at zero, or ends there.
        whole: only whole numbers are marked, and the outermost keep off the edges.
        at_most: it does not go beyond this where no value does.
        log: equal factors lie equally far apart, and the values themselves are marked; all must be above zero.
    """

    label: str
    zero: bool = False
    whole: bool = False
    at_most: float | None = None
    log: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Where numbers lie in the picture.

    Attributes:
        span_x, span_y: the least and the largest number of each axis.
        left, right, bottom: edges of the plot in the picture, whose height is `height`.
        log: of x.
    """

    span_x: tuple[float, float]
    span_y: tuple[float, float]
    left: float = LEFT
    right: float = WIDTH - RIGHT
    height: float = HEIGHT
    log: bool = False

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    def x(self, value: float) -> float:
        low, high = self.span_x
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.span_y
        return self.bottom - (value - low) / (high - low) * (self.bottom - TOP)


def tag(name: str, *inside: str | Markup, **attributes: object) -> Markup:
    """An element; `_` in an attribute's name is `-`, a trailing one is left out. Text and values are escaped."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(coordinate(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{Markup('').join(map(_text, inside))}</{name}>")  # every part of it is escaped


def picture(title: str, height: float, body: Sequence[Markup]) -> Markup:
    """The whole plot; `title` is for those who do not see it."""
    name = visible(title)
    box = f"0 0 {WIDTH} {coordinate(height)}"
    return tag("svg", tag("title", name), *body, viewBox=box, role="img", aria_label=name, class_="chart")


def x_axis(frame: Frame, of: Axis, marks: Sequence[tuple[float, str]]) -> Markup:
    """Ticks (place in the picture, label), as many as there is room for, and the axis's label."""
    parts = [tag("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis")]
    free = -math.inf
    for place, label in marks:
        half = 4.3 * len(label)  # half of the label at its widest
        if place - half < free:
            continue
        free = place + half + 3
        parts.append(tag("line", x1=place, x2=place, y1=frame.bottom, y2=frame.bottom + 4, class_="axis"))
        parts.append(tag("text", label, x=place, y=frame.bottom + 17, class_="tick middle"))
    parts.append(tag("text", of.label, x=frame.middle, y=frame.height - 8, class_="label middle"))
    return tag("g", *parts)


def y_axis(frame: Frame, of: Axis) -> Markup:
    """Grid lines with their labels, and the axis's label, upright."""
    parts: list[Markup] = []
    for value, label in marked(frame.span_y, of):
        place = frame.y(value)
        parts.append(tag("line", x1=frame.left, x2=frame.right, y1=place, y2=place, class_="grid"))
        parts.append(tag("text", label, x=frame.left - 7, y=place + 4, class_="tick end"))
    turned = f"translate(13 {coordinate((TOP + frame.bottom) / 2)}) rotate(-90)"
    return tag("g", *parts, tag("text", of.label, transform=turned, class_="label middle"))


def marked(span: tuple[float, float], of: Axis, values: Sequence[float] = ()) -> list[tuple[float, str]]:
    """(value, label) of an axis's ticks; of a logarithmic one the values that are there."""
    if of.log:
        return [(value, exact(value)) for value in sorted(set(values))]
    at = ticks(*span, whole=of.whole)
    return list(zip(at, labels(at), strict=True))


def look(colour: int) -> str:
    """The classes of a series: its colour and its dashes."""
    return f"c{colour % COLOURS} d{colour % COLOURS}"


def exact(value: float) -> str:
    """A place on an axis as people read it: steps and counts in full."""
    return f"{value:,.0f}" if float(value).is_integer() else short(value)


def coordinate(value: object) -> str:
    """To a tenth: nobody sees more, and the page stays small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _text(inside: str | Markup) -> Markup:
    return inside if isinstance(inside, Markup) else escape(visible(inside))
