"""What `eyas verify` found, for a person and for the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from eyas.errors import IntegrityError
from eyas.store.check import Problem, ProblemKind
from eyas.verify.against import LAST, Comparison
from eyas.verify.audit import Audit

_SHOWN_ROWS: Final = 16


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        store: its folder.
        rows, failed: good rows, and rows recorded as failed.
        problems: what is wrong with the bytes.
        comparison: against the model, where asked for.
        audit: against a server's log-probabilities, where asked for.
        corpus: what identity was compared with, where asked for.
        notes: what was not checked.
    """

    store: Path
    rows: int
    failed: int
    problems: tuple[Problem, ...]
    comparison: Comparison | None = None
    audit: Audit | None = None
    corpus: Path | None = None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        lines = [("rows", f"{self.rows:,} good, {self.failed:,} recorded as failed")]
        kinds = Counter(problem.kind for problem in self.problems)
        lines.append(
            ("bytes", ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common()) or "all as they should be")
        )
        if self.corpus:
            lines.append(("identity", f"compared with {self.corpus}"))
        lines += [("problem", str(problem)) for problem in self.problems[:5]]
        if self.comparison:
            done = self.comparison
            lines.append(("against", f"{done.rows} rows recomputed, {len(done.mismatches)} mismatches"))
            for name, right in done.worst.items():
                near = [d.median for key, d in done.nearest.items() if key.endswith(f" as {name}")]
                text = f"error {right.median:.1e}, worst {right.worst:.1e}, cosine {right.cosine:.5f}"
                text += f"; nearest control {min(near):.1e}" if near else "; no control could be told apart"
                lines.append(("  last" if name == LAST else f"  layer {name}", text))
            if alike := done.alike.total():
                total = alike + done.told_apart.total()
                lines.append(
                    ("controls", f"{alike:,} of {total:,} are too close to say in this dtype (very short rows)")
                )
            lines += [("mismatch", text) for text in done.mismatches[:5]]
        notes = list(self.notes)
        if self.audit:
            lines += _audit_lines(self.audit)
            notes += self.audit.notes
        return lines + [("not checked", note) for note in notes]

    def check(self) -> None:
        """Raises IntegrityError when anything is wrong."""
        mismatches = list(self.comparison.mismatches) if self.comparison else []
        mismatches += [str(problem) for problem in self.audit.problems] if self.audit else []
        if found := len(self.problems) + len(mismatches):
            first = str(self.problems[0]) if self.problems else mismatches[0]
            unfinished = {ProblemKind.UNFINISHED, ProblemKind.MISSING, ProblemKind.MANIFEST}
            if not mismatches and {problem.kind for problem in self.problems} <= unfinished:
                hint = "the same extract command resumes"
                raise IntegrityError(f"the store is not finished: {first}", self.store, hint)
            hint = "remove the shards named and run extract again"
            if self.audit and len(self.audit.problems) == len(self.audit.rows) > 1:
                hint = "no row fits: does the server run the very model that the store was captured from?"
            raise IntegrityError(f"{found} problems, the first: {first}", self.store, hint)


def _audit_lines(done: Audit) -> list[tuple[str, str]]:
    rows = ", ".join(map(str, done.rows[:_SHOWN_ROWS])) or "none"
    rows += f" and {len(done.rows) - _SHOWN_ROWS} more" if len(done.rows) > _SHOWN_ROWS else ""
    lines = [
        ("logits", f"{len(done.rows)} rows compared with {done.server}, {len(done.problems)} problems"),
        ("  rows", rows),
    ]
    if done.rows:
        text = f"{done.positions:,} positions, error median at most {done.median:.1e}, worst {done.worst:.1e} nats"
        lines.append(("  log p", f"{text} ({done.dtype})"))
    if done.nearest:
        name = min(done.nearest, key=lambda control: done.nearest[control])
        lines.append(("  controls", f"the nearest is {done.nearest[name]:.1e} nats away ({name})"))
    if alike := done.alike.total():
        lines.append(("  controls", f"{alike:,} of {alike + done.told_apart.total():,} are too close to say"))
    if done.unjudged:
        lines.append(("  unjudged", f"{len(done.unjudged)} rows with too little in them to be told from any other"))
    lines += [("  refused", f"row {row}, {why}") for row, why in list(done.refused.items())[:3]]
    return lines + [("problem", str(problem)) for problem in done.problems[:5]]
