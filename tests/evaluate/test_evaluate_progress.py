"""A long evaluation tells how far it is, in a file or a pipe too."""

from __future__ import annotations

import io

from rich.console import Console

from eyas.evaluate.progress import PromptsView


def test_a_line_every_ten_seconds_with_the_time_that_is_left() -> None:
    now, out = [0.0], io.StringIO()
    with PromptsView(Console(file=out, width=200), clock=lambda: now[0]) as view:
        view.count(4, 80, "url, 1 at a time")  # an earlier session did those
        for done in range(5, 9):
            now[0] += 6
            view.count(done, 80, "url, 1 at a time")
        now[0] += 3600
        view.count(1, 80, "url, 8 at a time")  # another pass: the hour between is not its own
        now[0] += 11
        view.count(12, 80, "url, 8 at a time")
    assert [" ".join(line.split()) for line in out.getvalue().splitlines()] == [
        "7.5% prompts 6/80 left 7m24s at url, 1 at a time",
        "10.0% prompts 8/80 left 7m12s at url, 1 at a time",
        "1.2% prompts 1/80 at url, 8 at a time",
        "15.0% prompts 12/80 left 1m08s at url, 8 at a time",
    ]


def test_nothing_to_do_is_no_error() -> None:
    now, out = [0.0], io.StringIO()
    with PromptsView(Console(file=out), clock=lambda: now[0]) as view:
        view.count(0, 0)
        now[0] += 11
        view.count(0, 0)
    assert out.getvalue().split() == ["0.0%", "prompts", "0/0"]
