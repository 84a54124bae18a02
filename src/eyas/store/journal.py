"""The journal of an open shard: one line per finished row, each with its own checksum. Pure.

    <xxh3-64 of the JSON, 16 hex> <compact JSON>\n

    {"session": {"plan", "spec_id", "corpus", "provenance"}}            who writes the rows that follow, and of what
    {"row": 7, "aux": "<xxh3>", "last": "<xxh3>"}                       row 7's states are in the file
    {"row": 8, "failed": "retracted", "detail": "..."}                  row 8 will not come

A later line about a row replaces the earlier one. Whatever follows the first damaged line is not trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from eyas.capture.strictjson import loads, shown

Provenance = dict[str, str]
MAX_LINE_BYTES: Final = 1 << 20  # a session's provenance; a row's line has a hundred bytes
_DIGEST: Final = re.compile("[0-9a-f]{16}")
#: What `row_line` writes of a stored row. A journal may have a line for each of a hundred thousand rows: those are read
#: without a JSON parser, which takes four times as long. Whatever else says the same is left to the parser.
_ROW_OK: Final = re.compile(rb'\{"aux":"([0-9a-f]{16})","last":"([0-9a-f]{16})","row":(0|[1-9][0-9]{0,17})\}')


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
        plan, spec_id, corpus: what the rows are of; a plan knows their lengths only, the corpus's digest their tokens.
        provenance: the engines; several only where a finished shard was reopened.
        rows: by corpus row number.
    """

    plan: str
    spec_id: str
    corpus: str
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
    return _sealed(json.dumps(payload, separators=(",", ":"), sort_keys=True).encode())


def _sealed(text: bytes) -> bytes:
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def session_line(session: Session) -> bytes:
    """The line that opens a session."""
    head = {
        "plan": session.plan,
        "spec_id": session.spec_id,
        "corpus": session.corpus,
        "provenance": session.provenance,
    }
    return _line({"session": head})


def row_line(entry: RowOk | RowFailed) -> bytes:
    """The line of one finished row."""
    match entry:
        case RowOk(row, aux, last):
            return _sealed(b'{"aux":"%016x","last":"%016x","row":%d}' % (aux, last, row))
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
            if end - offset > MAX_LINE_BYTES:
                raise ValueError(f"{end - offset} bytes long")
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
            return Journal(sessions, offset, f"damaged line at byte {offset}: {error}"[:300])
        offset = end + 1
    return Journal(sessions, offset)


def _parse(line: bytes) -> Session | RowOk | RowFailed:
    checksum, _, text = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(text).encode():
        raise ValueError("checksum differs")
    if found := _ROW_OK.fullmatch(text):
        aux, last, number = found.groups()
        return RowOk(int(number), int(aux, 16), int(last, 16))
    data = loads(text, MAX_LINE_BYTES)
    if "session" in data:
        head = data["session"]
        plan, spec_id, corpus = (text_field(head[key]) for key in ("plan", "spec_id", "corpus"))
        return Session(plan, spec_id, corpus, provenance_field(head["provenance"]))
    row = int_field(data["row"])
    if "failed" in data:
        return RowFailed(row, text_field(data["failed"]), text_field(data["detail"]))
    return RowOk(row, digest_field(data["aux"]), digest_field(data["last"]))


# --- fields of documents, believed only if they are what we write -----------------------------------------------------


def int_field(value: object) -> int:
    """An integer from 0 on. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"not a count: {shown(value)}")
    return value


def text_field(value: object) -> str:
    """A text. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {shown(value)}")  # noqa: TRY004  the one error of all parsers
    return value


def digest_field(value: object) -> int:
    """An xxh3-64 as 16 hex digits. Raises ValueError."""
    if not _DIGEST.fullmatch(text_field(value)):
        raise ValueError(f"not 16 hex digits: {shown(value)}")
    return int(text_field(value), 16)


def provenance_field(value: object) -> list[Provenance]:
    """A list of objects of texts. Raises ValueError."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"not a list of engines: {shown(value)}")
    return [{key: text_field(text) for key, text in one.items()} for one in value]


def merged_provenance(sessions: Sequence[Session]) -> list[Provenance]:
    """The distinct engines behind the rows, in an order that does not depend on who came first."""
    distinct = {json.dumps(p, sort_keys=True): p for session in sessions if session.rows for p in session.provenance}
    return [distinct[key] for key in sorted(distinct)]
