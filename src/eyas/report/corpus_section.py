"""The section on the corpus: rows, lengths, sources, what preparing dropped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from eyas.data.names import shortened, visible
from eyas.data.outfolder import SUMMARY_FILE
from eyas.data.statistics import CorpusStatistics, statistics
from eyas.errors import EyasError
from eyas.logs import read_number, read_object, read_text
from eyas.report.charts import column_chart
from eyas.report.documents import read_document
from eyas.report.places import Places
from eyas.report.sections import Key, Section, Table, number, share
from eyas.report.svg import Axis

_SOURCES: Final = 20
_ALL: Final = 0.9999  # of the trained tokens: larger vocabularies would only repeat it


def corpus_section(places: Places) -> Section:
    """The section; empty with a note where there is no corpus."""
    section = Section("corpus", "Corpus")
    if places.corpus is None:
        section.missing.append(places.missing("corpus", "eyas prepare chats.jsonl --target MODEL --out corpus"))
        return section
    try:
        found = statistics([places.corpus])
    except EyasError as error:
        section.problems.append(f"The corpus cannot be read: {error}.")
        return section
    section.keys.append(Key("corpus", f"{found.rows:,} rows", f"{found.tokens:,} tokens"))
    section.facts += [
        ("rows", f"{found.rows:,}"),
        ("tokens", f"{found.tokens:,}, {share(found.trained_tokens, found.tokens)} trained"),
        ("tokens in a row", ", ".join(f"{name} {value:,g}" for name, value in found.lengths.items())),
        ("distinct tokens", f"{found.distinct_tokens:,} of the target's {found.vocab_size:,} are trained"),
        ("target", found.target),
        ("tokenizer", found.tokenizer_hash or "not known"),
        ("template", found.template_hash or "not known"),
        ("digest", found.digests[0]),
    ]
    _draw(section, found)
    section.tables.append(_sources(found))
    _account(section, places.corpus.with_name(SUMMARY_FILE), found.digests[0])
    folder = str(places.corpus.parent)
    section.commands.append(shlex.join(["eyas", "prepare", "CHATS", "--target", found.target, "--out", folder]))
    return section


def _draw(section: Section, found: CorpusStatistics) -> None:
    section.draw(
        "Row lengths",
        column_chart(
            "Rows by their length in tokens",
            [(_size(least), float(rows)) for least, _, rows in found.histogram],
            Axis("tokens in a row, at least"),
            Axis("rows", zero=True),
        ),
    )
    enough = next((i for i, (_, reached) in enumerate(found.coverage) if reached >= _ALL), len(found.coverage))
    section.draw(
        "Draft vocabulary",
        column_chart(
            "Share of the trained tokens that the most frequent tokens make up",
            [(_size(size), 100 * reached) for size, reached in found.coverage[: enough + 1]],
            Axis("most frequent tokens"),
            Axis("% of trained tokens", zero=True, at_most=100.0),
        ),
        "How much of what is trained a drafter can draft at all, if it knows only the most frequent tokens.",
    )


def _size(value: int) -> str:
    return f"{value // 1024}Ki" if value >= 8192 and value % 1024 == 0 else f"{value:,}"


def _sources(found: CorpusStatistics) -> Table:
    ordered = sorted(found.by_source.items(), key=lambda item: (-item[1].tokens, item[0]))
    rows = [
        (
            shortened(visible(label) or "(no label)", 60),
            f"{each.rows:,}",
            f"{each.tokens:,}",
            share(each.tokens, found.tokens),
            share(each.trained_tokens, each.tokens),
        )
        for label, each in ordered[:_SOURCES]
    ]
    left = len(ordered) - _SOURCES
    note = f"and {left:,} more sources: eyas corpus stats --json names them" if left > 0 else ""
    return Table("Sources", ("source", "rows", "tokens", "share", "trained"), rows, frozenset({1, 2, 3, 4}), note)


def _account(section: Section, path: Path, digest: str) -> None:
    """What preparing dropped and changed, where its summary is of this very corpus."""
    try:
        summary = read_document(path)
    except (OSError, ValueError):
        return
    if read_text(summary, "digest") != digest:
        section.problems.append(f"{path.name} beside the corpus is another corpus's account and is not shown.")
        return
    read, dropped = read_number(summary, "read"), read_number(summary, "dropped")
    section.facts.append(("prepared", f"{number(read)} rows read, {number(dropped)} dropped"))
    if filters := read_object(summary, "filters"):
        section.facts.append(("filters", ", ".join(filters)))
    for title, key in (("Dropped rows", "dropped_by_reason"), ("Changed rows", "changed")):
        counts = read_object(summary, key)
        rows = [(name, read_text(counts, name), share(read_number(counts, name), read)) for name in counts]
        if rows:
            section.tables.append(Table(title, ("why", "rows", "share of read"), rows, frozenset({1, 2})))
