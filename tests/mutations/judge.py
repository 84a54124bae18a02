"""Injects every mutation of the catalogue, lets every check look, and takes down who saw what under which name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.store.documents import read_sidecar
from eyas.store.reader import StoreReader, StoreRow
from eyas.verify import verify
from mutations.bench import Target0, bench, quiet
from mutations.mutation import Check, Mutation, Verdict

ROW_TOKENS: Final = 40
CONTROLS: Final = (1, 7, 16, 40, 90)  # lengths of rows that nothing touches
_MISMATCH: Final = re.compile(r"row (\d+), (\w+): ")


@dataclass(frozen=True)
class Judged:
    """What came of a stage.

    Attributes:
        verdicts: one a mutation.
        control: names under which anything else was seen in the same runs: must be empty.
    """

    verdicts: list[Verdict]
    control: list[str]


def judge_wire(folder: Path, target: Target0, mutations: Sequence[Mutation], controls: Sequence[Mutation]) -> Judged:
    """Between server and store: one job, each mutation at a row of its own, then every check over what was stored."""
    verdicts = [Verdict(mutation) for mutation in mutations]
    rows: list[range] = []
    for mutation in (*mutations, *controls):
        start = rows[-1].stop if rows else 0
        rows.append(range(start, start + mutation.rows))
    lengths = [ROW_TOKENS] * (rows[-1].stop) + list(CONTROLS)
    with bench(folder, target, lengths, shard_bytes=1 << 20) as made:
        made.extract(control := folder / "control", "extract.attempts=3")
        for mutation, its in zip((*mutations, *controls), rows, strict=True):
            made.server.armed |= dict.fromkeys(its, mutation)
        made.extract(store := folder / "store")
        made.server.armed.clear()
        assert not made.server.errors, made.server.errors
        seen: dict[Check, dict[int, list[str]]] = {Check.EXTRACT: _failed(store)}
        report = verify(
            store,
            corpus=made.corpus,
            against=str(target.path),
            logits=made.server.url,
            sample=0,
            console=quiet(),
        )
        seen[Check.VERIFY] = _by_row((p.row, str(p.kind)) for p in report.problems)
        assert report.comparison is not None
        assert report.audit is not None
        seen[Check.AGAINST] = _by_row(map(mismatch, report.comparison.mismatches))
        seen[Check.LOGITS] = _by_row((p.row, str(p.kind)) for p in report.audit.problems)
        for verdict, its in zip(verdicts, rows, strict=False):
            verdict.seen = {
                check: sorted({n for row in its for n in names.pop(row, [])}) for check, names in seen.items()
            }
        made.extract(store, "extract.attempts=3", retry_failed=True)
        right, again = ({row.row: row for row in StoreReader(root)} for root in (control, store))
        for verdict, its in zip(verdicts, rows, strict=False):
            verdict.right_again = verdict.mutation.seen_by is not Check.EXTRACT or all(
                _same(right.get(row), again.get(row)) for row in its
            )
        left = [f"{check}: row {row}: {n}" for check, names in seen.items() for row, ns in names.items() for n in ns]
    return Judged(verdicts, left)


def _failed(store: Path) -> dict[int, list[str]]:
    """Reason by row, as the finished shards' sidecars record it."""
    info = StoreReader(store).info
    found: dict[int, list[str]] = {}
    for shard in info.plan.shards:
        sidecar = read_sidecar(store / f"{shard.stem}.json")
        assert sidecar is not None
        found |= {row: [reason] for row, reason in sidecar.failed.items()}
    return found


def _by_row(pairs: Iterable[tuple[int | None, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row, name in pairs:
        found.setdefault(-1 if row is None else row, []).append(name)
    return found


def mismatch(text: str) -> tuple[int, str]:
    """The row and state of a mismatch that `verify --against` reports."""
    if (match := _MISMATCH.match(text)) is None:
        row = re.match(r"row (\d+)", text)
        return int(row[1]) if row else -1, "control"
    return int(match[1]), match[2] if match[2] == "last" else f"layer {match[2]}"


def _same(right: StoreRow | None, again: StoreRow | None) -> bool:
    """Whether a row is there, and is what an undisturbed run stores."""
    if right is None or again is None:
        return False
    return all(getattr(right, name).equal(getattr(again, name)) for name in ("tokens", "aux", "last", "last_index"))
