"""What `eyas verify` found, for a person and for the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eyas.errors import IntegrityError
from eyas.store.check import Problem, ProblemKind
from eyas.verify.against import LAST, Comparison


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        store: its folder.
        rows, failed: good rows, and rows recorded as failed.
        problems: what is wrong with the bytes.
        comparison: against the model, where asked for.
        corpus: what identity was compared with, where asked for.
        notes: what was not checked.
    """

    store: Path
    rows: int
    failed: int
    problems: tuple[Problem, ...]
    comparison: Comparison | None = None
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
                text = f"error median {right.median:.1e} worst {right.worst:.1e}, cosine at least {right.cosine:.5f}"
                text += f"; nearest control {min(near):.1e}" if near else "; no control could be told apart"
                lines.append(("  last" if name == LAST else f"  layer {name}", text))
            if alike := done.alike.total():
                total = alike + done.told_apart.total()
                lines.append(
                    ("controls", f"{alike:,} of {total:,} are too close to say in this dtype (very short rows)")
                )
            lines += [("mismatch", text) for text in done.mismatches[:5]]
        return lines + [("not checked", note) for note in self.notes]

    def check(self) -> None:
        """Raises IntegrityError when anything is wrong."""
        mismatches = self.comparison.mismatches if self.comparison else []
        if found := len(self.problems) + len(mismatches):
            first = str(self.problems[0]) if self.problems else mismatches[0]
            unfinished = {ProblemKind.UNFINISHED, ProblemKind.MISSING, ProblemKind.MANIFEST}
            if not mismatches and {problem.kind for problem in self.problems} <= unfinished:
                hint = "the same extract command resumes"
                raise IntegrityError(f"the store is not finished: {first}", self.store, hint)
            raise IntegrityError(
                f"{found} problems, the first: {first}", self.store, "remove the shards named and run extract again"
            )
