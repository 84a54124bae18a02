"""The sections on what the drafter is worth: acceptance however it was measured, and speed in real servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from eyas.data.names import shortened
from eyas.report.charts import Bars, Chart, Line, bar_chart, line_chart
from eyas.report.evaluations import ALL, LIVE, Evaluations, Measured
from eyas.report.places import Places
from eyas.report.sections import Key, Missing, Section, Table, interval, named, number, share
from eyas.report.svg import Axis

_ROWS: Final = 80
_POSITION: Final = Axis("position in the draft", whole=True)


def evaluation_section(places: Places, found: Evaluations) -> Section:
    """Acceptance length by benchmark and category, and acceptance by position."""
    section = Section("evaluation", "Evaluation")
    section.problems += [f"{name} is not shown: {why}." for name, why in found.unread]
    section.commands += found.commands
    section.versions += [(who, named(versions)) for who, versions in found.versions]
    whole = _single(found.whole())
    if not any(row.mode != LIVE for row in whole):
        head = places.quoted("exported" if places.exported else "train")
        command = f"eyas evaluate {head} --questions question.jsonl --target TARGET"
        section.missing.append(Missing("an offline evaluation", "", command))
    if not whole:
        return section
    _facts(section, found)
    _figures(section, found, whole)
    section.tables.append(_acceptance([row for row in found.rows if row.mode != LIVE or row in whole]))
    decoded = [row for row in whole if row.mode == "offline-decoded"] or [row for row in whole if row.mode != LIVE]
    if decoded:
        best = max(decoded, key=lambda row: row.prompts or 0.0)
        note = f"tokens a cycle; {best.benchmark}, {best.plan}"
        section.keys.append(Key(f"acceptance, {best.source.split(',')[0]}", number(best.length, 2), note))
    return section


def _facts(section: Section, found: Evaluations) -> None:
    heads = {row.head_digest or row.head for row in found.rows}
    if len(heads) > 1:
        section.problems.append(f"These evaluations are of {len(heads):,} different drafters; the table says which.")
    section.facts += [
        ("drafter", ", ".join(dict.fromkeys(row.head for row in found.rows))),
        ("measured", ", ".join(dict.fromkeys(date[:10] for date in found.dates)) or "not known"),
        *(("sampling", text) for text in found.sampling),
        *(("note", text) for text in found.notes),
    ]


def _figures(section: Section, found: Evaluations, whole: Sequence[Measured]) -> None:
    benchmarks = list(dict.fromkeys(row.benchmark for row in whole))
    sources = list(dict.fromkeys(row.source for row in whole))  # of one colour in every plot
    by = {(row.benchmark, row.source): row for row in whole}
    note = "Tokens a cycle, the target's own included. Whiskers: 95 % intervals, by bootstrap over prompts."
    section.draw("Acceptance length by benchmark", _lengths("benchmark", benchmarks, sources, by), note)
    for benchmark in benchmarks:
        shares = [by[benchmark, source].by_position if (benchmark, source) in by else () for source in sources]
        lines = [
            Line(source, [k + 1.0 for k in range(len(of))], of) for source, of in zip(sources, shares, strict=True)
        ]
        title = f"Acceptance by position, {shortened(benchmark, 30)}"
        chart = line_chart(title, lines, _POSITION, Axis("share", zero=True, at_most=1.0))
        note = "Of the drafts that reached a position, the share accepted there."
        same = " Offline and live should lie on each other." if sum(map(bool, shares)) > 1 else ""
        section.draw(title, chart, note + same)
        rows = [row for row in _single(found.rows) if row.benchmark == benchmark and row.category != ALL]
        categories = sorted({row.category for row in rows})
        if len(categories) < 2:
            continue  # it would only say the same again
        of_category = {(row.category, row.source): row for row in rows}
        chart = _lengths("category", categories, sources, of_category)
        section.draw(f"Acceptance length by category, {shortened(benchmark, 30)}", chart)


def _lengths(
    what: str, groups: Sequence[str], sources: Sequence[str], by: Mapping[tuple[str, str], Measured]
) -> Chart | None:
    """Bars with error bars: a group each, a colour for every way it was measured."""
    bars = []
    for source in sources:
        rows = [by.get((group, source)) for group in groups]
        bars.append(
            Bars(
                source,
                [row and row.length for row in rows],
                [row and row.low for row in rows],
                [row and row.high for row in rows],
            )
        )
    title = f"Acceptance length by {what}, with 95 % intervals"
    return bar_chart(title, groups, bars, Axis("tokens a cycle", zero=True), lambda value: f"{value:.2f}")


def _single(rows: Sequence[Measured]) -> list[Measured]:
    """One row a source, benchmark and category: at the fewest requests at a time; of files, the last by name."""
    found: dict[tuple[str, str, str], Measured] = {}
    for row in rows:
        key = (row.source, row.benchmark, row.category)
        if key not in found or (row.concurrency or 0.0) <= (found[key].concurrency or 0.0):
            found[key] = row
    return list(found.values())


def _acceptance(rows: Sequence[Measured]) -> Table:
    most = max(len(row.by_position) for row in rows)
    body = [
        (
            row.benchmark,
            row.category,
            row.source,
            row.plan,
            number(row.prompts),
            interval(row.length, row.low, row.high),
            *(share(row.by_position[k]) if k < len(row.by_position) else "-" for k in range(most)),
            row.drafter,
        )
        for row in rows[:_ROWS]
    ]
    positions = [f"position {k + 1}" for k in range(most)]
    head = ("benchmark", "category", "measured", "drafts", "prompts", "tokens a cycle (95 %)", *positions, "drafter")
    note = f"and {len(rows) - len(body):,} more rows in the files" if len(rows) > len(body) else ""
    return Table("Acceptance", head, body, frozenset(range(4, 6 + most)), note)


# --- live -------------------------------------------------------------------------------------------------------------


def live_section(places: Places, found: Evaluations) -> Section:
    """Speed with and without drafts in real servers, and live acceptance beside offline."""
    section = Section("live", "Live serving")
    rows = found.whole(LIVE)
    if not rows:
        server = "--server http://localhost:30000 --baseline-server http://localhost:30001"
        command = f"eyas evaluate {places.quoted('exported')} --questions question.jsonl --target TARGET {server}"
        section.missing.append(Missing("a live measurement", "no server was asked", command))
        return section
    for title, key, label, note in (
        (
            "Speed-up",
            "speedup",
            "times as fast",
            "Output tokens/s over those of the same engine without drafts.",
        ),
        ("Output speed", "tokens_per_s", "tokens/s", "All requests together."),
        ("Time to first token", "ttft_ms", "ms", ""),
    ):
        section.draw(title, _by_concurrency(title, key, label, rows, found.plain), note)
    section.tables.append(_speeds(rows, found.plain))
    if beside := _beside(_single(rows), [row for row in found.whole() if row.mode != LIVE]):
        head = (
            "benchmark",
            "live",
            "offline",
            "prompts",
            "live, tokens a cycle",
            "offline, tokens a cycle",
            "difference",
        )
        note = "Compared is what was asked with the same prompts and drafts, of the same drafter."
        section.tables.append(Table("Live beside offline", head, beside, frozenset({4, 5, 6}), note))
    quick = max(rows, key=lambda row: row.speedup or 0.0)
    if quick.speedup:
        note = f"{quick.engine}, {number(quick.concurrency)} at a time"
        section.keys.append(Key("live speed-up", f"{quick.speedup:.2f} times", note))
    else:
        section.missing.append(Missing("a live speed-up", "the server was measured with drafts only"))
    return section


def _by_concurrency(
    title: str, key: str, label: str, rows: Sequence[Measured], plain: Sequence[Measured]
) -> Chart | None:
    """Lines where several concurrencies were measured, else bars."""
    measured: dict[str, dict[float, Measured]] = {}  # what was measured again: of files, the last by name
    for row in [*rows, *plain]:
        if getattr(row, key) is not None and row.concurrency and row.category == ALL:
            name = f"{row.source.removeprefix('live, ')}, {row.benchmark}{'' if row in rows else ', without drafts'}"
            measured.setdefault(name, {})[row.concurrency] = row
    of = {name: list(some.values()) for name, some in measured.items()}
    if len({row.concurrency for some in of.values() for row in some}) > 1:
        lines = [
            Line(name, [row.concurrency or 0.0 for row in some], [getattr(row, key) for row in some])
            for name, some in of.items()
        ]
        x = Axis("requests at a time", log=True)
        return line_chart(f"{title} by requests at a time", lines, x, Axis(label, zero=True))
    bars = [Bars(label, [getattr(some[0], key) for some in of.values()])]
    return bar_chart(title, list(of), bars, Axis(label, zero=True))


def _speeds(rows: Sequence[Measured], plain: Sequence[Measured]) -> Table:
    without = {
        (one.engine, one.benchmark, one.prompts_digest, one.concurrency): one for one in plain if one.category == ALL
    }
    body = []
    for row in rows:
        beside = without.get((row.engine, row.benchmark, row.prompts_digest, row.concurrency))
        body.append(
            (
                row.source.removeprefix("live, "),
                row.benchmark,
                number(row.concurrency),
                number(row.tokens_per_s, 1),
                number(beside and beside.tokens_per_s, 1),
                number(row.speedup, 2),
                number(row.ttft_ms, 1),
                interval(row.length, row.low, row.high),
            )
        )
    head = (
        "server", "benchmark", "at a time", "tokens/s", "without drafts", "speed-up", "first token, ms",
        "tokens a cycle (95 %)",
    )  # fmt: skip
    return Table("Speed", head, body, frozenset(range(2, 8)))


def _asked(row: Measured) -> tuple[object, ...]:
    """What a server was asked, and how."""
    return row.engine, row.benchmark, row.prompts_digest, row.concurrency


def _beside(live: Sequence[Measured], offline: Sequence[Measured]) -> list[tuple[str, ...]]:
    rows = []
    for one in live:
        for other in offline:
            if other.benchmark != one.benchmark or one.length is None or not other.length:
                continue
            same = bool(one.prompts_digest) and one.prompts_digest == other.prompts_digest
            alike = same and (one.plan, one.drafter) == (other.plan, other.drafter)
            difference = f"{one.length / other.length - 1:+.1%}" if alike else "not comparable"
            prompts = "the same" if same else "others"
            lengths = (number(one.length, 3), number(other.length, 3))
            rows.append((one.benchmark, one.source.removeprefix("live, "), other.source, prompts, *lengths, difference))
    return rows
