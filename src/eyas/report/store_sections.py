"""The sections on the store: what it holds, how fast it was filled, and what `eyas verify` found."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from eyas.data.names import shortened
from eyas.disk import is_there
from eyas.errors import EyasError
from eyas.logs import read_list, read_number, read_object, read_text
from eyas.rates import human_bytes, human_time
from eyas.report.charts import Bars, Chart, Line, bar_chart, line_chart
from eyas.report.extraction import Extraction, Sitting
from eyas.report.places import Places
from eyas.report.sections import Key, Missing, Section, Table, moment, named, number
from eyas.report.svg import Axis
from eyas.store.documents import describe_store, read_complete, read_store_info
from eyas.store.files import ShardPaths
from eyas.store.format import Sidecar, StoreInfo

_NOTES: Final = 6
_SITTINGS: Final = 20
_REASONS: Final = 16
_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def store_section(places: Places) -> Section:
    """Shards, bytes, agreement, layers, failed rows."""
    section = Section("store", "Store")
    if places.store is None:
        command = f"eyas extract {places.quoted('corpus')} store --server http://localhost:30000"
        section.missing.append(places.missing("store", command))
        return section
    try:
        info = read_store_info(places.store)
        section.facts += [
            ("target's fingerprint" if name == "model" else name, text) for name, text in describe_store(places.store)
        ]
        _shards(section, places, info)
    except EyasError as error:
        section.problems.append(f"The store is not in order: {error}.")
        return section
    section.commands.append(f"eyas extract {places.quoted('corpus')} {places.quoted('store')}")
    return section


def _shards(section: Section, places: Places, info: StoreInfo) -> None:
    assert places.store is not None
    paths = [ShardPaths(places.store, shard.stem) for shard in info.plan.shards]
    done = [sidecar for path in paths if (sidecar := read_complete(path)) is not None]
    size = sum(sidecar.bytes for sidecar in done)
    section.keys.append(Key("store", human_bytes(size), f"{len(done):,} of {len(paths):,} shards"))
    failed = Counter(reason for sidecar in done for reason in sidecar.failed.values())
    if failed:
        section.problems.append(f"{failed.total():,} rows are recorded as failed; training leaves them out.")
        rows = [(shortened(reason, 100), f"{count:,}") for reason, count in failed.most_common(_REASONS)]
        section.tables.append(Table("Failed rows", ("reason", "rows"), rows, frozenset({1})))
    if left := len(paths) - len(done) - sum(is_there(path.consumed) for path in paths):
        command = f"eyas extract {places.quoted('corpus')} {places.quoted('store')}"
        section.missing.append(Missing(f"{left:,} of {len(paths):,} shards", "extraction is not finished", command))
    section.draw("Bytes by what they hold", _bytes(info, done, size))
    provenance = sorted({tuple(sorted(one.items())) for sidecar in done for one in sidecar.provenance})
    section.versions += [("extraction", _provenance(dict(one))) for one in provenance]
    if len(dtypes := {dict(one).get("dtype", "") for one in provenance}) > 1:
        section.problems.append(f"Rows were computed in different dtypes: {', '.join(sorted(dtypes))}.")


def _bytes(info: StoreInfo, done: Sequence[Sidecar], size: int) -> Chart | None:
    spec = info.spec
    aux = sum(sidecar.tokens for sidecar in done) * spec.aux_bytes_per_token
    last = sum(sidecar.positions for sidecar in done) * spec.last_bytes_per_position
    layers = f"outputs of layers {', '.join(map(str, spec.layers))}"
    parts = {layers: aux, "states after the final norm": last, "tokens, masks, hashes": max(0, size - aux - last)}
    unit, one = next((name, one) for name, one in _UNITS if max(1, *parts.values()) >= one)
    bars = [Bars("bytes", [value / one if size else None for value in parts.values()])]
    title = "Bytes by what they hold"
    return bar_chart(title, list(parts), bars, Axis(unit, zero=True), lambda value: human_bytes(value * one))


def _provenance(one: Mapping[str, str]) -> str:
    first = [key for key in ("engine", "sglang", "transformers", "torch", "dtype") if one.get(key)]
    rest = [key for key in sorted(one) if key not in first and one[key]]
    return ", ".join(f"{key} {one[key]}" for key in [*first, *rest])


# --- extraction -------------------------------------------------------------------------------------------------------


def extraction_section(places: Places, found: Extraction | None) -> Section:
    """Throughput over the time worked, sessions, failures by reason."""
    section = Section("extraction", "Extraction")
    if found is None:
        return section  # it is the store that is missing
    if not found.sittings:
        why = f"{places.store}/events tells of no session that did anything"
        section.missing.append(Missing("the extraction's log", why))
        return section
    rate, worked = found.tokens_per_s, sum(sitting.seconds for sitting in found.sittings)
    idle = f"; {found.idle:,} more found all done" if found.idle else ""
    section.facts += [
        ("engine", ", ".join(dict.fromkeys(sitting.engine for sitting in found.sittings))),
        ("sessions", f"{len(found.sittings):,}, {human_time(worked)} of work{idle}"),
        ("speed", f"{number(rate)} tokens/s over all sessions"),
    ]
    if rate:
        section.keys.append(Key("extraction", f"{rate:,.0f}", f"tokens/s over {human_time(worked)}"))
    begun = ", an upright line where a session began" if len(found.sittings) > 1 else ""
    section.draw("Throughput", _speed(found, worked), f"Mean of the last minute, as the run showed it{begun}.")
    if found.retried or found.failed:
        section.draw("Failures by reason", _failures(found))
    else:
        section.facts.append(("failures", "none, nothing was tried again"))
    section.facts += [("note", shortened(text, 300)) for text in list(dict.fromkeys(found.notes))[:_NOTES]]
    section.tables.append(_sittings(found.sittings))
    if not found.sittings[-1].ended:
        section.problems.append("The last session's log has no end: it was killed, or it is still at work.")
    return section


def _speed(found: Extraction, worked: float) -> Chart | None:
    unit, size = ("hours", 3600.0) if worked > 3 * 3600 else ("minutes", 60.0) if worked > 180 else ("seconds", 1.0)
    xs: list[float] = []
    ys: list[float | None] = []
    for sitting in found.sittings:
        xs.append(sitting.worked_before_s / size)
        ys.append(None)  # sessions are not joined
        xs += [(sitting.worked_before_s + at) / size for at, _ in sitting.speed]
        ys += [rate for _, rate in sitting.speed]
    marks = [(one.worked_before_s / size, f"session of {moment(one.began)}") for one in found.sittings[1:]]
    title = "Tokens a second over the time worked"
    x, y = Axis(f"{unit} of work", zero=True), Axis("tokens/s", zero=True)
    return line_chart(title, [Line("tokens/s", xs, ys)], x, y, marks=marks)


def _failures(found: Extraction) -> Chart | None:
    reasons = sorted(
        found.retried.keys() | found.failed.keys(), key=lambda one: (-found.retried[one] - found.failed[one], one)
    )[:_REASONS]
    bars = [
        Bars("tried again", [float(n) if (n := found.retried[reason]) else None for reason in reasons]),
        Bars("given up", [float(n) if (n := found.failed[reason]) else None for reason in reasons]),
    ]
    title = "Attempts that were tried again and rows that were given up, by reason"
    return bar_chart(title, reasons, bars, Axis("rows", zero=True, whole=True), lambda value: f"{value:,.0f}")


def _sittings(all_of: Sequence[Sitting]) -> Table:
    rows = [
        (
            moment(one.began),
            one.engine,
            number(one.workers),
            human_time(one.seconds),
            number(one.tokens_per_s),
            number(one.rows_done),
            number(one.failed),
            "stopped" if one.stopped else "finished" if one.ended else "no end",
        )
        for one in all_of[-_SITTINGS:]
    ]
    left = len(all_of) - len(rows)
    head = ("began", "engine", "workers", "worked", "tokens/s", "rows done", "failed", "how it ended")
    return Table("Sessions", head, rows, frozenset({2, 3, 4, 5, 6}), f"and {left:,} earlier ones" if left else "")


# --- verification -----------------------------------------------------------------------------------------------------


def verification_section(places: Places, found: Extraction | None) -> Section:
    """What `eyas verify` found when it last looked."""
    section = Section("verification", "Verification")
    if found is None:
        return section
    command = f"eyas verify {places.quoted('store')} --corpus {places.quoted('corpus')} --against MODEL"
    event = found.verified
    if event is None:
        section.missing.append(Missing("a verification of the store", "its log tells of none", command))
        return section
    section.facts.append(("verified", moment(float(event["t"]))))
    section.facts += [
        (str(pair[0]).strip(), str(pair[1]))
        for pair in read_list(event, "lines")
        if isinstance(pair, list) and len(pair) == 2
    ]
    wrong = (read_number(event, "problems") or 0) + (read_number(event, "mismatches") or 0)
    compared = (read_number(event, "recomputed") or 0) + (read_number(event, "audited") or 0)
    if wrong:
        section.problems.append(f"The verification found {wrong:,.0f} problems.")
    if found.stale:
        section.problems.append("Rows were written after this verification.")
    if not compared:
        why = "only bytes and identity were verified"
        section.missing.append(Missing("a comparison of the states with the model", why, command))
    good = not wrong and not found.stale
    note = f"{compared:,.0f} rows compared with the model" if compared else "bytes and identity only"
    section.keys.append(Key("verification", f"{wrong:,.0f} problems" if wrong else "passed", note, good))
    section.commands.append(_verify_command(places.store or Path(), event))
    versions = read_object(event, "versions")
    section.versions.append(("verification", named({name: read_text(versions, name) for name in versions})))
    return section


def _verify_command(store: Path, event: Mapping[str, object]) -> str:
    words = ["eyas", "verify", str(store)]
    for flag in ("corpus", "against", "logits"):
        if value := read_text(event, flag):
            words += [f"--{flag}", value]
    return shlex.join(words)
