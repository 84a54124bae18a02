"""How far `prepare` is: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from eyas.data.prepare.report import PrepareReport
from eyas.data.sources import Input, Raw

PLAIN_EVERY_S: Final = 10.0
_PLAIN_SUFFIXES: Final = (".jsonl", ".ndjson", ".txt")


class Progress:
    """Counts bytes read where the files' sizes are known."""

    def __init__(self, console: Console, report: PrepareReport, inputs: Sequence[Input]) -> None:
        self.console, self._report = console, report
        self._paths = [Path(one.path) for one in inputs]
        self._sizes = [path.stat().st_size if path.is_file() else 0 for path in self._paths]
        self._total = sum(self._sizes) if all(path.is_file() for path in self._paths) else None
        self._done = 0
        self._first: tuple[float, int] | None = None
        self._began = self.said_s = time.monotonic()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        shown = columns if self._total else (columns[0], columns[1], columns[4])
        self._live = Bar(*shown, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._task = self._live.add_task("prepare", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def advance(self, number: int, raw: Raw) -> None:
        """`raw`, of input `number`, is the last row that was counted."""
        here = 0
        if isinstance(raw.payload, bytes) and self._paths[number].suffix.lower() in _PLAIN_SUFFIXES:
            here = min(raw.offset + len(raw.payload), self._sizes[number])
        self._done = sum(self._sizes[:number]) + here
        if self._first is None:  # what it takes to get there is no measure of the rest
            self._first = time.monotonic(), self._done
        self.say()

    def say(self, doing: str = "") -> None:
        """Shows the counts, and what is being done."""
        now, report = time.monotonic(), self._report
        spent = max(now - self._began, 1e-9)
        line = f"{report.read:,} rows, {report.kept:,} kept, {report.tokens / spent / 1000:,.0f}k tokens/s"
        if self._live:
            self._live.update(self._task, description=doing or line, completed=self._done)
        elif now - self.said_s >= PLAIN_EVERY_S:
            self.said_s = now
            part = f"{self._done / self._total:.0%}, " if self._total and not doing else ""
            self.print(f"prepare: {part}{line}{f'; {doing}' if doing else self._left(now)}")

    def _left(self, now: float) -> str:
        if not self._total or self._first is None or self._done <= self._first[1]:
            return ""
        seconds = (self._total - self._done) * (now - self._first[0]) / (self._done - self._first[1])
        return f", about {seconds:,.0f} s left" if seconds >= 1 else ""

    def print(self, what: RenderableType) -> None:
        """A line that stays."""
        self.console.print(what, highlight=False, markup=False, width=min(self.console.width, 100))
