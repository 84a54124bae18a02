"""evaluation-*.json (the format is in `eyas.evaluate`) as rows of one table; a file that is none is told by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from eyas.errors import first_line
from eyas.report.logs import as_number, read_document, read_list, read_number, read_numbers, read_object, read_text

ALL: Final = "all"  # the category of a whole benchmark
LIVE: Final = "live"
_ORDER: Final = {"offline-simulated": 0, "offline-decoded": 1, LIVE: 2}
_NAMES: Final = {"offline-simulated": "simulated", "offline-decoded": "decoded", LIVE: "live"}


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of an evaluation: a category at a concurrency.

    Attributes:
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
    depth: str
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


@dataclass(slots=True)
class Evaluations:
    """All of them. unread: (file, why) of files that are no evaluations."""

    rows: list[Measured] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    versions: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    sampling: list[tuple[str, str]] = field(default_factory=list)
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
    found.rows.sort(
        key=lambda row: (
            _ORDER.get(row.mode, 3),
            row.engine,
            row.benchmark,
            row.category != ALL,
            row.category,
            row.concurrency or 0,
        )
    )
    return found


def _add(found: Evaluations, name: str, document: Mapping[str, Any]) -> None:
    rows = [row for row in read_list(document, "results") if isinstance(row, Mapping)]
    if not rows:
        found.unread.append((name, "it holds no results"))
        return
    mode, engine = read_text(document, "mode"), read_text(document, "engine")
    source = _NAMES.get(mode, mode) + (f", {engine}" if mode == LIVE and engine else "")
    for row in rows:
        found.rows.append(_measured(row, document, name, source))
    for text, into in (("command", found.commands), ("date", found.dates)):
        if (said := read_text(document, text)) and said not in into:
            into.append(said)
    sampling = ", ".join(f"{key} {value}" for key, value in read_object(document, "sampling").items())
    found.sampling.append((name, sampling))
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
        depth=_depth(document),
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


def _depth(document: Mapping[str, Any]) -> str:
    """`3`, or for a tree `3, top 4 (12 tokens)`."""
    depth, topk = read_text(document, "depth"), read_number(document, "topk")
    if topk is None or topk == 1:
        return depth
    return f"{depth}, top {topk:.0f} ({read_text(document, 'draft_tokens')} tokens)"
