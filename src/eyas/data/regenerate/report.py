"""What became of a regeneration: the report, its file, and how far it is while it runs."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eyas.data.regenerate.budget import Totals, dollars
from eyas.data.sources import Input

EXAMPLES: Final = 3  # rows named for each reason
PLAIN_EVERY_S: Final = 10.0
LIVE_EVERY_S: Final = 0.5


@dataclass(slots=True)
class RegenerateReport:
    """What became of the rows. Of a complete run, `read == answered + reused + failed.total() + skipped.total()`.

    Attributes:
        model: who answered.
        read: rows read; the inputs hold more where the run was stopped.
        answered, reused: rows finished in this session, and in earlier ones.
        failed: reason -> rows without an answer, of earlier sessions too.
        skipped: reason -> rows that cannot be asked.
        examples: reason -> the first few such rows, as `file:line: detail`.
        turns, prompt_tokens, completion_tokens: answered in this session.
        tries: reason -> tries of this session that failed; most were asked again.
        totals: what replies were charged, over all sessions.
        others: rows of the output that these inputs do not hold.
        seconds: of this session.
        complete: every row of the inputs is finished, failed or skipped, and the output in their order.
        over_budget: the run ended because the next request could have passed the limit.
    """

    model: str = ""
    read: int = 0
    answered: int = 0
    reused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tries: Counter[str] = field(default_factory=Counter)
    totals: Totals = field(default_factory=Totals)
    others: int = 0
    seconds: float = 0.0
    complete: bool = False
    over_budget: bool = False

    @property
    def finished(self) -> int:
        """Rows of the inputs that need nothing more."""
        return self.answered + self.reused + self.failed.total() + self.skipped.total()

    def skip(self, reason: str, where: str) -> None:
        """Counts a row that cannot be asked."""
        self.skipped[reason] += 1
        self._example(reason, where)

    def fail(self, reason: str, where: str) -> None:
        """Counts a row without an answer."""
        self.failed[reason] += 1
        self._example(reason, where)

    def _example(self, reason: str, text: str) -> None:
        if len(examples := self.examples[reason]) < EXAMPLES:
            examples.append(text)

    def money(self) -> str:
        """The sum so far, in a few words; empty where nothing costs."""
        totals = self.totals
        if not totals.cost and not totals.unknown:
            return ""
        text = dollars(totals.cost)
        if totals.unknown:
            text += f", and up to {dollars(totals.unknown)} for {totals.unknown_tries:,} tries of unknown cost"
        return text

    def lines(self) -> list[str]:
        """The report for a person, one fact a line."""
        speed = self.completion_tokens / self.seconds if self.seconds else 0.0
        text = [
            f"read {self.read:,} rows: {self.answered:,} answered, {self.reused:,} answered before, "
            f"{self.failed.total():,} failed, {self.skipped.total():,} skipped",
            f"{self.turns:,} turns, {self.prompt_tokens:,} tokens in, {self.completion_tokens:,} out"
            f" in {self.seconds:.1f} s ({speed:,.0f} tokens/s)",
        ]
        if money := self.money():
            text.append(f"spent {money}")
        if self.tries:
            text.append("tries that failed: " + ", ".join(f"{n:,} {reason}" for reason, n in self.tries.most_common()))
        for what, reasons in (("failed", self.failed), ("skipped", self.skipped)):
            for reason, count in reasons.most_common():
                text.append(f"{what} {count:,}: {reason}")
                text += [f"  {example}" for example in self.examples[reason]]
        if self.others:
            text.append(f"{self.others:,} rows of other inputs are kept at the end")
        return text

    def write(self, path: Path) -> None:
        """Puts the report beside the output as JSON.

        Raises:
            OSError: the disk refuses.
        """
        totals = self.totals
        document: dict[str, Any] = {
            "model": self.model,
            "complete": self.complete,
            "over_budget": self.over_budget,
            "read": self.read,
            "answered": self.answered,
            "reused": self.reused,
            "failed": self.failed.total(),
            "failed_by_reason": dict(self.failed),
            "skipped": self.skipped.total(),
            "skipped_by_reason": dict(self.skipped),
            "others": self.others,
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "failed_tries": dict(self.tries),
            "seconds": round(self.seconds, 3),
            "all_sessions": {
                "prompt_tokens": totals.prompt_tokens,
                "completion_tokens": totals.completion_tokens,
                "cost": str(totals.cost),
                "cost_unknown": str(totals.unknown),
                "tries_of_unknown_cost": totals.unknown_tries,
            },
        }
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def count_rows(inputs: Sequence[Input], stop: list[bool]) -> int | None:
    """How many rows the inputs hold, for the forecast; None when that is not known cheaply, or `stop` was filled."""
    if any(one.kind is None for one in inputs):  # a data set, which may have to be downloaded for it
        return None
    total = 0
    for one in inputs:
        for _ in one.rows_raw():
            total += 1
            if stop:
                return None
    return total


class RunView:
    """Shows how far a run is: a live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, report: RegenerateReport) -> None:
        self._console, self._report = console, report
        self.total: int | None = None  # rows of the inputs, once they are counted
        self._began = self._said = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._notes: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._task = self._live.add_task("regenerate")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own; the same not again within half a minute."""
        now = time.monotonic()
        if now - self._notes.get(text, now - 31) > 30:
            self._console.print(f"regenerate: {text}", highlight=False, markup=False, soft_wrap=True)
        self._notes[text] = now

    def tick(self) -> None:
        """Show the state, when it is time to."""
        now = time.monotonic()
        if self._live:
            self._live.update(self._task, description=self._line(now))
        elif now - self._said >= PLAIN_EVERY_S:
            self._said = now
            self._console.print(self._line(now), highlight=False, markup=False, soft_wrap=True)

    def _line(self, now: float) -> str:
        report, elapsed = self._report, max(now - self._began, 1e-9)
        rows = f"{report.finished:,}" + (f"/{self.total:,}" if self.total else "")
        parts = [f"regenerate: {rows} rows", f"{report.completion_tokens / elapsed:,.0f} tokens/s"]
        if self.total and report.answered:
            left = max(0, self.total - report.finished) * elapsed / report.answered
            parts.append(f"{_duration(left)} left")
        if failed := report.failed.total():
            parts.append(f"{failed:,} failed")
        if again := report.tries.total():
            parts.append(f"{again:,} tries failed")
        if money := report.money():
            parts.append(money)
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    """70 -> `1m10s`."""
    total = round(seconds)
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
