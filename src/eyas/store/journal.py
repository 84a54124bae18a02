"""The journal of an open shard: one line per finished row, each with its own checksum. Pure.

    <xxh3-64 of the JSON, 16 hex> <compact JSON>\n

    {"session": {"plan": ..., "spec_id": ..., "provenance": [...]}}     who writes the rows that follow
    {"row": 7, "aux": "<xxh3>", "last": "<xxh3>"}                       row 7's states are in the file
    {"row": 8, "failed": "retracted", "detail": "..."}                  row 8 will not come

A later line about a row replaces the earlier one. Whatever follows the first damaged line is not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

Provenance = dict[str, str]


@dataclass(frozen=True, slots=True)
class RowOk:
    """The row's states are in place; xxh3-64 of their bytes."""

    row: int
    aux: int
    last: int


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The row has no states: `reason` is a short closed-set name, `detail` is for a person."""

    row: int
    reason: str
    detail: str = ""


@dataclass(slots=True)
class Session:
    """Rows written by one engine under one plan.

    Attributes:
        provenance: the engines; several only where a finished shard was reopened.
        rows: by corpus row number.
    """

    plan: str
    spec_id: str
    provenance: list[Provenance]
    rows: dict[int, RowOk | RowFailed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal's bytes can be trusted for.

    Attributes:
        sessions: in order; every row is in the last session that spoke of it.
        trusted_bytes: length of the undamaged beginning.
        damage: why reading stopped before the end; empty for a whole journal or a mere torn last line.
    """

    sessions: list[Session]
    trusted_bytes: int
    damage: str = ""


def _line(payload: dict[str, Any]) -> bytes:
    text = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def session_line(session: Session) -> bytes:
    """The line that opens a session."""
    head = {"plan": session.plan, "spec_id": session.spec_id, "provenance": session.provenance}
    return _line({"session": head})


def row_line(entry: RowOk | RowFailed) -> bytes:
    """The line of one finished row."""
    match entry:
        case RowOk(row, aux, last):
            return _line({"row": row, "aux": f"{aux:016x}", "last": f"{last:016x}"})
        case RowFailed(row, reason, detail):
            return _line({"row": row, "failed": reason, "detail": detail})


def encode_journal(sessions: Iterable[Session]) -> bytes:
    """A whole journal."""
    return b"".join(
        session_line(session) + b"".join(row_line(entry) for entry in session.rows.values()) for session in sessions
    )


def decode_journal(data: bytes) -> Journal:
    """Read a journal back, as far as it can be trusted. Never raises."""
    sessions: list[Session] = []
    owner: dict[int, Session] = {}
    offset = 0
    while (end := data.find(b"\n", offset)) >= 0:
        try:
            entry = _parse(data[offset:end])
            if isinstance(entry, Session):
                sessions.append(entry)
            elif not sessions:
                raise ValueError("a row before any session")
            else:
                if (before := owner.get(entry.row)) is not None:
                    del before.rows[entry.row]
                sessions[-1].rows[entry.row] = entry
                owner[entry.row] = sessions[-1]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Journal(sessions, offset, f"damaged line at byte {offset}: {error}")
        offset = end + 1
    return Journal(sessions, offset)


def _parse(line: bytes) -> Session | RowOk | RowFailed:
    checksum, _, text = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(text).encode():
        raise ValueError("checksum differs")
    data = json.loads(text)
    if "session" in data:
        head = data["session"]
        return Session(str(head["plan"]), str(head["spec_id"]), [dict(p) for p in head["provenance"]])
    if "failed" in data:
        return RowFailed(int(data["row"]), str(data["failed"]), str(data["detail"]))
    return RowOk(int(data["row"]), int(data["aux"], 16), int(data["last"], 16))


def merged_provenance(sessions: Sequence[Session]) -> list[Provenance]:
    """The distinct engines behind the rows, in an order that does not depend on who came first."""
    distinct = {json.dumps(p, sort_keys=True): p for session in sessions if session.rows for p in session.provenance}
    return [distinct[key] for key in sorted(distinct)]
