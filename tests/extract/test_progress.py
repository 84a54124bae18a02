from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from eyas.extract.progress import ETA_WINDOW_S, ExtractView, RateMeter, Snapshot, human_bytes, human_time


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_that_of_the_window_not_of_the_run() -> None:
    meter = RateMeter(window_s=60)
    for second in range(600):
        meter.add(second, 100 if second < 300 else 1000)
    assert meter.rate(599) == pytest.approx(1000, rel=0.02)


def test_thousands_of_short_rows_a_second_cost_the_meter_no_more() -> None:
    meter = RateMeter(window_s=60)
    for row in range(200_000):
        meter.add(row / 2000, 7)
    assert meter.rate(100) == pytest.approx(14_000, rel=0.01)
    assert len(meter._done) <= 602


def test_start_up_does_not_count() -> None:
    """A server that compiles for 75 s before its first reply is no slower for it."""
    meter = RateMeter()
    for second in range(75, 105):
        meter.add(second, 1000)
    assert meter.rate(104) == pytest.approx(1000, rel=0.01)


def test_no_rate_before_there_is_one() -> None:
    meter = RateMeter()
    assert meter.rate(0) is None
    assert meter.eta(0, 100) is None
    meter.add(5, 100)
    assert meter.rate(5.5) is None


def test_a_stalled_run_slows_down_in_the_figures() -> None:
    meter = RateMeter()
    for second in range(30):
        meter.add(second, 1000)
    assert meter.rate(60) < 600
    assert meter.rate(3000) < 10


def test_the_spread_holds_the_truth_for_unequal_rows() -> None:
    rng = random.Random(7)
    hits = 0
    for _ in range(50):
        meter, now, left = RateMeter(), 0.0, 1_000_000
        while now < 60:
            tokens = int(rng.lognormvariate(5.5, 1.2)) + 1
            now += tokens / 2000 * rng.uniform(0.8, 1.25)
            meter.add(now, tokens)
            left -= tokens
        eta = meter.eta(now, left)
        assert eta is not None
        truth = left / 2000 * 1.012  # the mean of the uniform factor above, weighted by time
        assert eta.low < eta.seconds < eta.high
        hits += eta.low * 0.95 <= truth <= eta.high * 1.05
    assert hits >= 40


def test_plain_lines_when_not_a_terminal() -> None:
    text, clock = io.StringIO(), Clock()
    view = ExtractView(Console(file=text, width=200), Snapshot(rows=10, rows_done=0, tokens=1000, tokens_done=0), clock)
    with view:
        for step in range(1, 25):
            clock.now = float(step)
            view.update(rows_done=step // 3, tokens_done=step * 40, failed=1, spool_bytes=1 << 20)
    lines = text.getvalue().splitlines()
    assert len(lines) == 2  # every ten seconds
    words = lines[0].split("left")[0].split()
    assert words == ["40.0%", "rows", "3/10", "tokens", "400/1,000", "speed", "40", "tokens/s"]
    assert re.search(r"left 15s \(\d+s to \d+s\)  failed 1  spool 1.0 MiB$", lines[0])


def test_the_panel_is_drawn_four_times_a_second_however_many_rows_come() -> None:
    drawn: list[float] = []
    clock = Clock()

    class Counting(ExtractView):
        def _panel(self):
            drawn.append(clock.now)
            return super()._panel()

    view = Counting(Console(file=io.StringIO(), force_terminal=True), Snapshot(10_000, 0, 10_000, 0), clock)
    with view:
        for row in range(1, 1001):
            clock.now = row / 500
            view.update(rows_done=row, tokens_done=row)
    assert len(drawn) in (8, 9)


def test_resumed_rows_are_progress_but_not_speed() -> None:
    clock = Clock()
    view = ExtractView(Console(file=io.StringIO()), Snapshot(10, 0, 1000, 0), clock)
    view.resume(5, 500)
    clock.now = 2.0
    assert (view.snapshot.rows_done, view.snapshot.tokens_done, view.rate()) == (5, 500, None)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (70, "1m10s"), (3700, "1h01m"), (-3, "0s")])
def test_human_time(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (4.6e12, "4.18 TiB")])
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_a_recorded_run_is_foretold_within_a_fifth_after_its_first_minute() -> None:
    """1,661 real chats of 20 to 2,048 tokens, SmolLM2 by transformers on two CPU cores: when each row was stored.

    (Multi-turn, assistant and self-instruct chats in corpus order, so lengths change along the run; the machine did
    other work meanwhile.)
    """
    trace = json.loads((Path(__file__).parent / "eta_trace.json").read_text())
    end, left = trace[-1][0], sum(tokens for _, tokens in trace)
    meter, checked = RateMeter(ETA_WINDOW_S), 0
    for at_s, tokens in trace:
        meter.add(at_s, tokens)
        left -= tokens
        truth = end - at_s
        if at_s < 60 or truth < 10:
            continue
        eta = meter.eta(at_s, left)
        assert eta is not None
        assert abs(eta.seconds - truth) <= 0.2 * truth, f"at {at_s} s: {eta.seconds:.0f} s foretold, {truth:.0f} s true"
        checked += 1
    assert checked > 1000
