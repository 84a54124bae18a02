"""What becomes of the workers' reports, and when a person and the log hear of it."""

from __future__ import annotations

import math
import time

from eyas.events import EventLog
from eyas.extract.engine import EngineInfo
from eyas.extract.progress import ExtractView, Snapshot
from eyas.extract.summary import Summary
from eyas.extract.worker import Report
from eyas.signals import StopSignals

_PROGRESS_EVENT_S = 5.0
_SAY_AGAIN_S = 30.0


def snapshot(summary: Summary, info: EngineInfo) -> Snapshot:
    """What a run's view begins with."""
    return Snapshot(
        rows=summary.rows,
        rows_done=summary.rows_done,
        tokens=summary.tokens,
        tokens_done=summary.tokens_done,
        failed=summary.failed,
        spool_quota=info.spool_bytes and info.spool_bytes * info.servers,
    )


class Desk:
    """Where the workers' reports become summary, view and log."""

    def __init__(
        self, summary: Summary, view: ExtractView, log: EventLog, signals: StopSignals, drain_s: float
    ) -> None:
        self._summary, self._view, self._log = summary, view, log
        self._signals, self._drain_s = signals, drain_s
        self._said: dict[str, float] = {}
        self._began_s: float | None = None
        self._next_event_s = time.monotonic() + _PROGRESS_EVENT_S

    @property
    def seconds(self) -> float:
        """Since the first shard was leased."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def news(self, report: Report) -> None:
        """Take one report in."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        summary = self._summary
        rows, tokens = summary.rows_done, summary.tokens_done
        summary.add(report)
        if report.note:
            self.say(report.note)
        if report.failure:
            row, reason, detail = report.failure
            self._log.emit("row_failed", row=row, reason=reason, detail=detail)
        if report.retried:
            row, attempt, reason, detail = report.retried
            self._log.emit("row_retried", row=row, attempt=attempt, reason=reason, detail=detail)
        if report.done:
            self._log.emit("shard_done", shard=report.shard)
        if report.leased:
            self._view.resume(summary.rows_done - rows, summary.tokens_done - tokens)
        self._view.update(
            rows_done=summary.rows_done,
            tokens_done=summary.tokens_done,
            failed=summary.failed,
            retries=summary.retries,
            waits=summary.waits,
        )
        if time.monotonic() >= self._next_event_s:
            self._next_event_s = time.monotonic() + _PROGRESS_EVENT_S
            self._log.emit(
                "progress", rows_done=summary.rows_done, tokens_done=summary.tokens_done, rate=self._view.rate()
            )

    def say(self, text: str) -> None:
        """A line for the user and the log; not again within half a minute, however many rows meet the same."""
        now = time.monotonic()
        if now - self._said.get(text, -math.inf) > _SAY_AGAIN_S:
            self._view.say(text)
            self._log.emit("note", text=text)
        self._said[text] = now

    def tick(self, spool_bytes: int | None) -> None:
        """Redraw, with the spool's bytes in use."""
        if self._signals.stopped:
            self.say(f"stopping: rows in flight have up to {self._drain_s:.0f} s; Ctrl-C again does not wait")
        if spool_bytes is not None:
            self._view.update(spool_bytes=spool_bytes)
        else:
            self._view.refresh()
