"""How a run ended, or how far it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from eyas.extract.forecast import Forecast
from eyas.extract.worker import Report
from eyas.rates import human_bytes


@dataclass(slots=True)
class Summary:
    """How a run ended.

    Attributes:
        rows, tokens: in the corpus.
        rows_done, tokens_done: stored and verified, earlier sessions included.
        failed: rows recorded as failed, with `reasons` counted by name.
        seconds, tokens_per_s: of this session, from its first shard (the first request follows at once) to the end;
            speed counts only this session's rows.
        bytes: of the complete shards.
        forecast: what was planned.
        consumed: numbers of shards that were trained on and removed; their rows count as stored.
    """

    rows: int
    tokens: int
    forecast: Forecast
    rows_done: int = 0
    tokens_done: int = 0
    rows_now: int = 0
    tokens_now: int = 0
    failed: int = 0
    retries: int = 0
    waits: int = 0
    seconds: float = 0.0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_failures: list[str] = field(default_factory=list)
    consumed: set[int] = field(default_factory=set)
    stopped: bool = False
    _shards: dict[int, tuple[int, int, int]] = field(default_factory=dict, repr=False)  # rows, tokens, failed

    @property
    def tokens_per_s(self) -> float:
        """This session's speed, end to end."""
        return self.tokens_now / self.seconds if self.seconds else 0.0

    @property
    def complete(self) -> bool:
        """Every row is stored or recorded as failed."""
        return self.rows_done + self.failed >= self.rows

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        lines = [
            ("rows", f"{self.rows_done:,} of {self.rows:,} stored, {self.failed:,} failed"),
            ("tokens", f"{self.tokens_done:,}"),
            ("store", human_bytes(self.bytes)),
            (
                "speed",
                f"{self.tokens_per_s:,.0f} tokens/s over {self.seconds:.1f} s"
                if self.rows_now
                else "nothing left to do",
            ),
        ]
        if self.consumed:
            what = (
                f"{len(self.consumed):,} shards were trained on and removed; to redo them remove their .consumed files"
            )
            lines.append(("consumed", what))
        return lines + [("failed", f"{count} x {reason}") for reason, count in self.reasons.most_common()]

    def add(self, report: Report) -> None:
        """Fold one worker's news in."""
        if report.leased:
            self.hold(report.shard, report.rows, report.tokens, report.failed)
            return
        rows, tokens, failed = self._shards.get(report.shard, (0, 0, 0))
        self.hold(report.shard, rows + report.rows, tokens + report.tokens, failed + report.failed)
        self.rows_now += report.rows
        self.tokens_now += report.tokens
        self.retries += report.retries
        self.waits += report.waits
        if report.failure:
            row, reason, detail = report.failure
            self.reasons[reason] += 1
            if len(self.first_failures) < 5:
                self.first_failures.append(f"row {row}: {reason}" + (f" ({detail})" if detail else ""))

    def hold(self, shard: int, rows: int, tokens: int, failed: int) -> None:
        """Replace what was known of a shard. (It may be leased again in a run, and by other processes meanwhile.)"""
        before = self._shards.get(shard, (0, 0, 0))
        self._shards[shard] = (rows, tokens, failed)
        self.rows_done += rows - before[0]
        self.tokens_done += tokens - before[1]
        self.failed += failed - before[2]
