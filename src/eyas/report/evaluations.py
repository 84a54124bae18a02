"""evaluation-*.json (the format is in `eyas.evaluate`) as rows of one table; a file that is none is told by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from eyas.data.names import shortened
from eyas.errors import first_line
from eyas.logs import as_number, read_list, read_number, read_numbers, read_object, read_text
from eyas.report.documents import read_document

ALL: Final = "all"  # the category of a whole benchmark
LIVE: Final = "live"
_ORDER: Final = {"offline-simulated": 0, "offline-decoded": 1, LIVE: 2}
_NAMES: Final = {"offline-simulated": "simulated", "offline-decoded": "decoded", LIVE: "live"}


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of an evaluation: a category at a concurrency.

    Attributes:
        plan: depth, branches and temperature, for people. sampling: all that the file says of it.
        source: how it was measured, for people: `simulated` on a store, `decoded` in process, `live, vllm`.
        by_position: [depth] conditional shares.
        prompts_digest: rows of different ones do not compare.
    """

    file: str
    mode: str
    engine: str
    source: str
    benchmark: str
    category: str
    plan: str
    sampling: str
    head: str
    head_digest: str
    prompts_digest: str
    length: float | None
    low: float | None
    high: float | None
    by_position: tuple[float | None, ...]
    prompts: float | None
    tokens: float | None
    concurrency: float | None
    tokens_per_s: float | None
    speedup: float | None
    ttft_ms: float | None

    @property
    def drafter(self) -> str:
        """Which one: the beginning of its digest, or its name where none is known."""
        return self.head_digest[:8] or shortened(self.head, 24)


@dataclass(slots=True)
class Evaluations:
    """All of them.

    Attributes:
        rows: with a drafter. plain: of servers without one.
        sampling, notes: what they say of themselves.
        unread: (file, why) of files that are no evaluations.
    """

    rows: list[Measured] = field(default_factory=list)
    plain: list[Measured] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    versions: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    sampling: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)

    def whole(self, mode: str = "") -> list[Measured]:
        """Rows over all categories; of one mode where it is named."""
        return [row for row in self.rows if row.category == ALL and mode in ("", row.mode)]


def read_evaluations(files: tuple[Path, ...]) -> Evaluations:
    """Every file's rows: simulated first, then decoded, then live; in each by benchmark."""
    found = Evaluations()
    for path in files:
        try:
            document = read_document(path)
        except (OSError, ValueError) as error:
            found.unread.append((path.name, first_line(error)))
            continue
        if not isinstance(document, Mapping) or not read_text(document, "mode"):
            found.unread.append((path.name, "it is no evaluation"))
            continue
        _add(found, path.name, document)
    found.rows, found.plain = _told_apart(found.rows), _told_apart(found.plain)
    for rows in (found.rows, found.plain):
        rows.sort(key=_place)
    return found


def _place(row: Measured) -> tuple[Any, ...]:
    """Simulated first, then decoded, then live; a whole benchmark before its categories."""
    order = _ORDER.get(row.mode, len(_ORDER))
    return order, row.source, row.benchmark, row.category != ALL, row.category, row.concurrency or 0.0


def _told_apart(rows: list[Measured]) -> list[Measured]:
    """Where one way of measuring was used with several plans, drafters or lengths of answers, or a benchmark with
    several choices of prompts, that is part of its name: what does not compare is never one line or one bar."""
    for group, told in (
        (lambda row: row.source, lambda row: row.plan),
        (lambda row: row.source, lambda row: f"drafter {row.drafter}"),
        (lambda row: row.source, lambda row: row.sampling or "sampling not known"),
        (lambda row: (row.source, row.benchmark), lambda row: f"prompts {row.prompts_digest[:8] or 'not known'}"),
    ):
        rows = _named_by(rows, group, told)
    return rows


def _named_by(
    rows: list[Measured], group: Callable[[Measured], object], told: Callable[[Measured], str]
) -> list[Measured]:
    """The rows, with what `told` says in the names of a group of which it says several things."""
    said: dict[object, set[str]] = {}
    for row in rows:
        said.setdefault(group(row), set()).add(told(row))
    return [replace(row, source=f"{row.source}, {told(row)}") if len(said[group(row)]) > 1 else row for row in rows]


def _add(found: Evaluations, name: str, document: Mapping[str, Any]) -> None:
    rows = [row for row in read_list(document, "results") if isinstance(row, Mapping)]
    if not rows:
        found.unread.append((name, "it holds no results"))
        return
    mode, engine = read_text(document, "mode"), read_text(document, "engine")
    source = _NAMES.get(mode, mode) + (f", {engine}" if mode == LIVE and engine else "")
    measured = [_measured(row, document, name, source) for row in rows]
    if mode == LIVE and read_number(document, "depth") == 0:
        found.plain += measured
    else:
        found.rows += measured
    notes = [text for text in read_list(document, "notes") if isinstance(text, str)]
    for told, into in (
        ([read_text(document, "command")], found.commands),
        ([read_text(document, "date")], found.dates),
        ([_sampling(document)], found.sampling),
        (notes, found.notes),
    ):
        into += [text for text in told if text and text not in into]
    versions = read_object(document, "versions")
    found.versions.append((f"evaluation, {source}", {key: read_text(versions, key) for key in versions}))


def _measured(row: Mapping[str, Any], document: Mapping[str, Any], name: str, source: str) -> Measured:
    ends = (*read_list(row, "ci95"), None, None)
    return Measured(
        file=name,
        mode=read_text(document, "mode"),
        engine=read_text(document, "engine"),
        source=source,
        benchmark=read_text(document, "benchmark", "unnamed"),
        category=read_text(row, "category", ALL),
        plan=_plan(document),
        sampling=_sampling(document),
        head=read_text(document, "head"),
        head_digest=read_text(document, "head_digest"),
        prompts_digest=read_text(document, "prompts_digest"),
        length=read_number(row, "accept_length"),
        low=as_number(ends[0]),
        high=as_number(ends[1]),
        by_position=read_numbers(row, "accept_by_position"),
        prompts=read_number(row, "prompts"),
        tokens=read_number(row, "tokens"),
        concurrency=read_number(row, "concurrency"),
        tokens_per_s=read_number(row, "tokens_per_s"),
        speedup=read_number(row, "speedup"),
        ttft_ms=read_number(row, "ttft_ms"),
    )


def _sampling(document: Mapping[str, Any]) -> str:
    """`temperature 0.0, seed 0, max_new_tokens 128`."""
    chosen = read_object(document, "sampling")
    return ", ".join(f"{key} {value}" for key, value in chosen.items() if value is not None and value is not False)


def _plan(document: Mapping[str, Any]) -> str:
    """`depth 3`; of a tree `depth 3, top 4 (12 tokens)`; and a temperature."""
    text, topk = f"depth {read_text(document, 'depth', 'unknown')}", read_number(document, "topk")
    if topk is not None and topk != 1:
        text += f", top {topk:.0f} ({read_text(document, 'draft_tokens')} tokens)"
    temperature = read_number(read_object(document, "sampling"), "temperature")
    return f"{text}, temperature {temperature:g}" if temperature else text
