"""How far an extraction is: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from eyas.rates import ETA_WINDOW_S, RateMeter, human_bytes, human_time

_PLAIN_EVERY_S = 10.0
_PANEL_EVERY_S = 0.25


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
