"""What a check found: passed, refused, or not proven, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from eyas.errors import IntegrityError


class Verdict(StrEnum):
    """Of one part of a check. `UNPROVEN`: what was at hand could not decide it."""

    PASSED = "passed"
    REFUSED = "refused"
    UNPROVEN = "not proven"


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of a check.

    Attributes:
        name: what was looked at.
        verdict: the outcome.
        text: why, one clause.
        hint: what to do.
    """

    name: str
    verdict: Verdict
    text: str
    hint: str = ""

    def line(self) -> tuple[str, str]:
        """For a table."""
        hint = f" ({self.hint})" if self.hint and self.verdict != Verdict.PASSED else ""
        return self.name, f"{self.verdict:<10}  {self.text}{hint}"


@dataclass(slots=True)
class CheckReport:
    """What `check_draft` found.

    Attributes:
        folder: as named.
        findings: in the order they were looked at. After names, shapes or settings that are refused nothing else is.
    """

    folder: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def refused(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == Verdict.REFUSED]

    @property
    def unproven(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == Verdict.UNPROVEN]

    def passed(self, name: str, text: str) -> None:
        """Note what is as it should be."""
        self.findings.append(Finding(name, Verdict.PASSED, text))

    def refuse(self, name: str, text: str, hint: str = "") -> None:
        """Note what is wrong."""
        self.findings.append(Finding(name, Verdict.REFUSED, text, hint))

    def leave_open(self, name: str, text: str, hint: str = "") -> None:
        """Note what could not be told."""
        self.findings.append(Finding(name, Verdict.UNPROVEN, text, hint))

    def lines(self) -> list[tuple[str, str]]:
        """The table, name and text, with the verdict at its end."""
        found = [finding.line() for finding in self.findings]
        if self.refused:
            return [*found, ("verdict", f"refused: {len(self.refused)} of {len(found)}")]
        left = ", ".join(finding.name for finding in self.unproven)
        return [*found, ("verdict", f"passed; not proven: {left}" if left else "passed")]

    def check(self) -> None:
        """Raises IntegrityError where anything was refused."""
        if self.refused:
            first = self.refused[0]
            raise IntegrityError(f"the draft is refused: {first.name}: {first.text}", self.folder, first.hint)
