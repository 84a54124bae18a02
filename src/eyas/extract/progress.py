"""How far a run is: tokens/s over a sliding window, and an ETA by tokens with its spread.

Rows differ in length a hundredfold, so an ETA by rows swings; tokens cost nearly the same each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

WINDOW_S = 60.0
#: The ETA looks further back than the speed: a minute's dip is no forecast of hours.
ETA_WINDOW_S = 1800.0
_BUCKETS = 6
_STEPS, _LONGEST_STEP_S = 600, 0.5  # the finest division of a window
_PLAIN_EVERY_S = 10.0
_PANEL_EVERY_S = 0.25
_MIN_SPAN_S = 1.0


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds left: the estimate, and the range it would span if speed stayed within two standard errors."""

    seconds: float
    low: float
    high: float


class RateMeter:
    """Tokens finished over a sliding window of `window_s` seconds; times are seconds on any one clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._step_s = min(window_s / _STEPS, _LONGEST_STEP_S)
        self._done: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, tokens: int) -> None:
        """`tokens` finished at time `at_s`; times must not fall."""
        if len(self._done) > 1 and at_s - self._done[-1][0] < self._step_s:
            at_s, tokens = self._done[-1][0], tokens + self._done.pop()[1]  # thousands of short rows cost no more
        self._done.append((at_s, tokens))
        # One older event stays: it marks where the window's first interval began.
        while len(self._done) > 2 and self._done[1][0] <= at_s - self._window_s:
            self._done.popleft()

    def rate(self, now_s: float) -> float | None:
        """Tokens/s over the window, or None before there is a second to speak of.

        The first event only opens the interval: its tokens were worked on before it, start-up included.
        """
        if not self._done or now_s - self._done[0][0] < _MIN_SPAN_S:
            return None
        return (sum(tokens for _, tokens in self._done) - self._done[0][1]) / (now_s - self._done[0][0])

    def eta(self, now_s: float, tokens_left: int) -> Eta | None:
        """When `tokens_left` will be done; None while no rate is known."""
        rate = self.rate(now_s)
        if not rate:
            return None
        error = self._standard_error(now_s)
        slow, fast = max(rate - 2 * error, rate / 10), rate + 2 * error
        return Eta(tokens_left / rate, tokens_left / fast, tokens_left / slow)

    def _standard_error(self, now_s: float) -> float:
        start = self._done[0][0]
        width = (now_s - start) / _BUCKETS
        sums = [0.0] * _BUCKETS
        for at_s, tokens in list(self._done)[1:]:
            sums[min(int((at_s - start) / width), _BUCKETS - 1)] += tokens
        mean = sum(sums) / _BUCKETS
        return math.sqrt(sum((s - mean) ** 2 for s in sums) / (_BUCKETS - 1) / _BUCKETS) / width


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run, in rows, tokens and bytes. `done` counts this session's and earlier ones' good rows."""

    rows: int
    rows_done: int
    tokens: int
    tokens_done: int
    failed: int = 0
    retries: int = 0
    waits: int = 0
    spool_bytes: int | None = None
    spool_quota: int | None = None


def human_time(seconds: float) -> str:
    """70 -> `1m10s`."""
    total = max(0, round(seconds))
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def human_bytes(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


class RunView:
    """Shows a run: a live panel on a terminal, a plain line every ten seconds elsewhere.

    Use as a context manager, and feed it from one thread.
    """

    def __init__(self, console: Console, total: Snapshot, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._meter, self._outlook = RateMeter(), RateMeter(ETA_WINDOW_S)
        self._now = total
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        self._every_s = _PANEL_EVERY_S if self._live else _PLAIN_EVERY_S
        self._next_s = clock() + (0.0 if self._live else self._every_s)

    @property
    def snapshot(self) -> Snapshot:
        return self._now

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, **changes: int | None) -> None:
        """Set fields of the snapshot and redraw."""
        before = self._now.tokens_done
        self._now = replace(self._now, **changes)
        if self._now.tokens_done > before:
            for meter in (self._meter, self._outlook):
                meter.add(self._clock(), self._now.tokens_done - before)
        self.refresh()

    def say(self, text: str) -> None:
        """A line of its own, above the panel."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def resume(self, rows: int, tokens: int) -> None:
        """Count rows that an earlier session did: progress, but not speed."""
        self._now = replace(self._now, rows_done=self._now.rows_done + rows, tokens_done=self._now.tokens_done + tokens)
        self.refresh()

    def refresh(self) -> None:
        """Redraw when it is time to; call now and then even without news."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self._every_s
        if self._live:
            self._live.update(self._panel())
        else:
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def rate(self) -> float | None:
        """Tokens/s over the window."""
        return self._meter.rate(self._clock())

    def _parts(self) -> list[tuple[str, str]]:
        now = self._now
        rate, eta = self.rate(), self._outlook.eta(self._clock(), now.tokens - now.tokens_done)
        parts = [
            ("rows", f"{now.rows_done:,}/{now.rows:,}"),
            ("tokens", f"{now.tokens_done:,}/{now.tokens:,}"),
            ("speed", f"{rate:,.0f} tokens/s" if rate else "-"),
            ("left", f"{human_time(eta.seconds)} ({human_time(eta.low)} to {human_time(eta.high)})" if eta else "-"),
            ("failed", f"{now.failed:,}"),
        ]
        if now.retries or now.waits:
            parts.append(("retries", f"{now.retries:,}" + (f", {now.waits:,} waits" if now.waits else "")))
        if now.spool_bytes is not None:
            quota = f"/{human_bytes(now.spool_quota)}" if now.spool_quota else ""
            parts.append(("spool", human_bytes(now.spool_bytes) + quota))
        return parts

    def _line(self) -> str:
        share = self._now.tokens_done / max(1, self._now.tokens)
        return f"{share:6.1%}  " + "  ".join(f"{name} {text}" for name, text in self._parts())

    def _panel(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("extract", ProgressBar(total=max(1, self._now.tokens), completed=self._now.tokens_done, width=50))
        for name, text in self._parts():
            grid.add_row(name, text)
        return grid
