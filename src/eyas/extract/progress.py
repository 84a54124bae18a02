"""How far an extraction is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console

from eyas.liveview import LiveView
from eyas.rates import ETA_WINDOW_S, RateMeter, human_bytes, human_time


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


class ExtractView(LiveView):
    """Shows an extraction.

    Args:
        console: where it goes.
        total: what there is to do.
        clock: seconds.
    """

    def __init__(self, console: Console, total: Snapshot, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "extract", clock)
        self._meter, self._outlook = RateMeter(), RateMeter(ETA_WINDOW_S)
        self._now = total

    @property
    def snapshot(self) -> Snapshot:
        return self._now

    def update(self, **changes: int | None) -> None:
        """Set fields of the snapshot and redraw."""
        before = self._now.tokens_done
        self._now = replace(self._now, **changes)
        if self._now.tokens_done > before:
            for meter in (self._meter, self._outlook):
                meter.add(self._clock(), self._now.tokens_done - before)
        self.refresh()

    def resume(self, rows: int, tokens: int) -> None:
        """Count rows that an earlier session did: progress, but not speed."""
        self._now = replace(self._now, rows_done=self._now.rows_done + rows, tokens_done=self._now.tokens_done + tokens)
        self.refresh()

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

    def _progress(self) -> tuple[int, int]:
        return self._now.tokens_done, self._now.tokens
