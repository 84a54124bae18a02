from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise

import pytest
from report_runs import HOSTILE

from eyas.report.charts import Bars, Chart, Line, bar_chart, column_chart, line_chart
from eyas.report.svg import HEIGHT, WIDTH, Axis, tag

X, Y = Axis("step"), Axis("loss")


def parsed(chart: Chart | None) -> ET.Element:
    assert chart is not None
    return ET.fromstring(str(chart.svg))


def lengths(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def titles(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter("title")]


def test_a_line_goes_where_its_numbers_are() -> None:
    root = parsed(line_chart("Loss", [Line("loss", [0, 5, 10], [4.0, 2.0, 0.0])], X, Axis("loss", zero=True)))
    (path,) = [element.get("d", "") for element in root.iter("path")]
    (x0, y0), (x1, y1), (x2, y2) = lengths(path)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert y0 < y1 < y2  # large numbers are above
    assert 0 < x0 < x2 < WIDTH
    assert 0 < y0 < y2 < HEIGHT
    assert "loss: 2 at step 5" in titles(root)


def test_the_axis_begins_at_zero_only_where_it_should() -> None:
    def bottom(y: Axis) -> float:
        root = parsed(line_chart("Loss", [Line("loss", [0, 1], [90.0, 100.0])], X, y))
        return max(y for path in root.iter("path") for _, y in lengths(path.get("d", "")))

    assert bottom(Axis("loss")) > bottom(Axis("loss", zero=True)) + 100


def test_equal_factors_lie_equally_far_apart() -> None:
    chart = line_chart("Speed", [Line("sglang", [1, 4, 16], [1.0, 2.0, 3.0])], Axis("at a time", log=True), Y)
    (path,) = [element.get("d", "") for element in parsed(chart).iter("path")]
    (x0, _), (x1, _), (x2, _) = lengths(path)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert {"1", "4", "16"} <= {element.text for element in parsed(chart).iter("text")}


def test_gaps_and_what_is_no_number_break_the_line() -> None:
    y = [1.0, None, 3.0, float("nan"), 5.0, float("inf"), 7.0, 8.0]
    root = parsed(line_chart("Loss", [Line("loss", [float(i) for i in range(8)], y)], X, Y))
    (path,) = [element.get("d", "") for element in root.iter("path")]
    assert (path.count("M"), path.count("L")) == (4, 1)


def test_a_band_lies_around_its_line() -> None:
    line = Line("length", [0, 1, 2], [2.0, 2.5, 3.0], [1.5, None, 2.5], [2.5, 3.0, 3.5])
    root = parsed(line_chart("Length", [line], X, Y))
    (band,) = root.iter("polygon")
    points = [tuple(map(float, point.split(","))) for point in band.get("points", "").split()]
    assert len(points) == 4  # the point without a lower end has no band
    assert "length: 2 (1.500 to 2.500) at step 0" in titles(root)


def test_sessions_are_marked_where_they_began() -> None:
    marks = [(5.0, "session of today"), (0.0, "at the edge"), (99.0, "beyond")]
    root = parsed(line_chart("Loss", [Line("loss", [0, 10], [1.0, 2.0])], X, Y, marks=marks))
    found = [line for line in root.iter("line") if line.get("class") == "mark"]
    assert [title.text for line in found for title in line.iter("title")] == ["session of today"]


def test_bars_are_as_long_as_their_values_and_have_their_intervals() -> None:
    bars = [Bars("offline", [2.0, 4.0], [1.9, None], [2.2, None]), Bars("live", [None, 2.0])]
    chart = bar_chart("Length", ["mt_bench", "gsm8k"], bars, Axis("tokens", zero=True))
    root = parsed(chart)
    widths = [float(rect.get("width", 0)) for rect in root.iter("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2)
    assert widths[2] == pytest.approx(widths[0], rel=1e-2)
    assert [path.get("class") for path in root.iter("path")] == ["error"]
    assert "mt_bench, offline: 2 (1.900 to 2.200)" in titles(root)
    assert chart is not None and [name for _, name in chart.legend] == ["offline", "live"]


def test_columns_are_as_high_as_their_values() -> None:
    root = parsed(column_chart("Rows", [("16", 1.0), ("32", 3.0)], Axis("tokens"), Axis("rows", zero=True)))
    first, second = (float(rect.get("height", 0)) for rect in root.iter("rect"))
    assert second == pytest.approx(3 * first, rel=1e-2)
    assert "tokens 32: 3 rows" in titles(root)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: line_chart("Loss", [], X, Y),
        lambda: line_chart("Loss", [Line("loss", [], [])], X, Y),
        lambda: line_chart("Loss", [Line("loss", [0, 1], [None, float("nan")])], X, Y),
        lambda: line_chart("Speed", [Line("a", [0.0, -1.0], [1.0, 2.0])], Axis("at a time", log=True), Y),
        lambda: bar_chart("Length", [], [], Y),
        lambda: bar_chart("Length", ["a"], [Bars("b", [None])], Y),
        lambda: column_chart("Rows", [], X, Y),
        lambda: column_chart("Rows", [("1", 0.0)], X, Y),
    ],
)
def test_nothing_to_draw_is_no_plot(draw: Callable[[], Chart | None]) -> None:
    assert draw() is None


@pytest.mark.parametrize("y", [[5.0], [5.0, 5.0], [0.0, 0.0], [-1e-12, 1e-12], [1e29, -1e29], [-3.0, -3.0]])
@pytest.mark.parametrize("zero", [False, True])
def test_whatever_the_numbers_the_plot_stays_in_its_frame(y: list[float], zero: bool) -> None:
    line = Line("loss", [float(i) for i in range(len(y))], list(y))
    root = parsed(line_chart("Loss", [line], X, Axis("loss", zero=zero)))
    for path in root.iter("path"):
        assert all(0 <= x <= WIDTH and 0 <= at <= HEIGHT for x, at in lengths(path.get("d", "")))


def test_a_hundred_thousand_points_make_a_small_plot() -> None:
    y: list[float | None] = [float(i % 977) for i in range(100_000)]
    chart = line_chart("Loss", [Line("loss", [float(i) for i in range(100_000)], y)], X, Y)
    assert chart is not None and len(chart.svg) < 60_000


def test_labels_that_have_no_room_are_left_out() -> None:
    columns = [(f"{i * 1_000_000:,}", 1.0) for i in range(40)]
    root = parsed(column_chart("Rows", columns, X, Y))
    shown = [element for element in root.iter("text") if element.get("class") == "tick middle"]
    halves = [(float(element.get("x", 0)), 4 * len(element.text or "")) for element in shown]
    assert 2 <= len(shown) < 12
    assert all(b - right > a + left for (a, left), (b, right) in pairwise(halves))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leaves_its_place(name: str) -> None:
    """Parsed again, every element is one of ours, and the text is the name that was given."""
    ours = {"svg", "title", "g", "line", "text", "path", "circle", "rect", "polygon"}
    charts = [
        line_chart(name, [Line(name, [0, 1], [1.0, 2.0])], Axis(name), Axis(name), marks=[(0.5, name)]),
        bar_chart(name, [name], [Bars(name, [1.0], [0.5], [1.5])], Axis(name)),
        column_chart(name, [(name, 1.0)], Axis(name), Axis(name)),
    ]
    for chart in charts:
        root = parsed(chart)
        assert {element.tag for element in root.iter()} <= ours
        assert {key for element in root.iter() for key in element.attrib}.isdisjoint({"onerror", "href", "src"})
        assert any(text.startswith(name[:4].replace("\u202e", "\\u202e")[:4]) for text in titles(root))


def test_the_same_numbers_give_the_same_bytes() -> None:
    def drawn() -> str:
        chart = line_chart("Loss", [Line("a", [0, 1], [1.0, 2.0]), Line("b", [0, 1], [3.0, 4.0])], X, Y)
        return str(chart)

    assert drawn() == drawn()


def test_attributes_and_text_are_escaped() -> None:
    assert tag("text", '<&">', class_='"x"', text_anchor="<") == (
        '<text class="&#34;x&#34;" text-anchor="&lt;">&lt;&amp;&#34;&gt;</text>'
    )


def test_half_a_character_can_be_written() -> None:
    assert tag("text", "half \ud800") == "<text>half \\ud800</text>"
