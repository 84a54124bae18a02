"""What a page is made of, and the words for numbers that several sections use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from eyas.report.charts import Chart


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its heading and one sentence on how to read it. wide: over the page's whole width."""

    title: str
    chart: Chart
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. numbers: columns that are set right; more: rows that were left out, by name or number."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the page cannot show: what, why or how much, and the command that makes it."""

    what: str
    why: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A figure at the top of the page. good: None says nothing of it, else whether it is as it should be."""

    name: str
    value: str
    note: str = ""
    good: bool | None = None


@dataclass(slots=True)
class Section:
    """A part of the page.

    Attributes:
        id, title: its anchor and heading.
        facts: name and text.
        commands: what makes this part again.
        versions: (who, name and version, ...) rows for the table at the end.
        missing: what is not there.
        problems: what is wrong, each a sentence.
        keys: its figures for the top of the page.
    """

    id: str
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    versions: list[tuple[str, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show of it."""
        return not (self.facts or self.figures or self.tables or self.problems)

    def draw(self, title: str, chart: Chart | None, note: str = "", *, wide: bool = False) -> None:
        """Adds a figure, unless there was nothing to draw."""
        if chart is not None:
            self.figures.append(Figure(title, chart, note, wide))


def moment(seconds: float) -> str:
    """`2026-11-30 13:05 UTC`; empty for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return ""


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """`12,345`, or a dash where it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """`12.3%`, or a dash."""
    return "-" if part is None or not whole else f"{part / whole:.1%}"


def interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """`2.01 (1.96 to 2.07)`."""
    if value is None:
        return "-"
    ends = "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{value:.{digits}f}{ends}"


def named(versions: dict[str, str]) -> str:
    """`torch 2.13.0, transformers 5.19.0`."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
