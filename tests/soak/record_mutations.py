"""Ways in which a record can be wrong that identity, checksums or finiteness see. Bytes in, bytes out.

A mutation gets the record's parts and what the relay has seen before, and returns the new file, or None where it
cannot be made of this record. States that are wrong but finite, under the right header and with hashes made anew, are
not among them: only a recomputation (`eyas verify --against`, `--logits`) can see those.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import numpy as np

from eyas.capture.contract import RECORD_METADATA, RecordHeader, RequestId, field_hash
from eyas.capture.tensorfile import layout, parse_header


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A record taken apart: header, and its float32 tensors aux [T, A, H] and last [L, H]."""

    data: bytes
    header: RecordHeader
    aux: np.ndarray
    last: np.ndarray

    @classmethod
    def parse(cls, data: bytes) -> RecordFile:
        """Raises ValueError or KeyError for anything but a float32 record."""
        plan = parse_header(data, len(data))
        header = RecordHeader.from_json(plan.metadata[RECORD_METADATA])
        aux, last = (
            np.frombuffer(data, "<f4", offset=info.start, count=(info.stop - info.start) // 4).reshape(info.shape)
            if info.stop > info.start
            else np.zeros(info.shape, "<f4")
            for info in (plan.tensors["aux"], plan.tensors["last"])
        )
        return cls(data, header, aux, last)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the relay has seen before.

    Attributes:
        same_size: a record of another row, but of this one's size.
        same_row: an earlier record of this very row: of another session, or an earlier attempt.
        any_record: some record of an earlier session.
    """

    same_size: bytes | None = None
    same_row: bytes | None = None
    any_record: bytes | None = None


Mutation = Callable[[RecordFile, Earlier, Random], bytes | None]


def assemble(
    header: RecordHeader | Mapping[str, Any],
    aux: np.ndarray,
    last: np.ndarray,
    *,
    rehash: bool = False,
    names: Sequence[str] = ("aux", "last"),
    dtype: str = "F32",
) -> bytes:
    """A record file of these parts; `rehash` makes the header's checksums those of the parts."""
    aux, last = np.ascontiguousarray(aux), np.ascontiguousarray(last)
    if rehash:
        assert isinstance(header, RecordHeader)
        hashes = (f"{field_hash(part.tobytes()):016x}" for part in (aux, last))
        header = replace(header, **dict(zip(("aux", "last"), hashes, strict=True)))
    text = header.to_json() if isinstance(header, RecordHeader) else json.dumps(header)
    tensors = [(name, dtype, part.shape) for name, part in zip(names, (aux, last), strict=True)]
    return layout(tensors, {RECORD_METADATA: text}).header + aux.tobytes() + last.tobytes()


def _claim(**change: Callable[[RecordHeader, Random], Any]) -> Mutation:
    """A header that claims something else; the states stay as they are."""

    def mutate(record: RecordFile, _: Earlier, random: Random) -> bytes | None:
        changed = {name: value(record.header, random) for name, value in change.items()}
        if all(getattr(record.header, name) == value for name, value in changed.items()):
            return None
        return assemble(replace(record.header, **changed), record.aux, record.last)

    return mutate


def _rid(**change: Callable[[RequestId, Random], Any]) -> Mutation:
    def other(header: RecordHeader, random: Random) -> str:
        rid = RequestId.parse(header.rid)
        assert rid is not None
        return str(rid._replace(**{name: value(rid, random) for name, value in change.items()}))

    return _claim(rid=other)


def _states(change: Callable[[np.ndarray, np.ndarray, Random], bool], *, rehash: bool = False) -> Mutation:
    """States changed in place under the right header; None where `change` says that nothing changed."""

    def mutate(record: RecordFile, _: Earlier, random: Random) -> bytes | None:
        aux, last = record.aux.copy(), record.last.copy()
        if not change(aux, last, random):
            return None
        if aux.tobytes() == record.aux.tobytes() and last.tobytes() == record.last.tobytes():
            return None
        return assemble(record.header, aux, last, rehash=rehash)

    return mutate


def _shift(aux: np.ndarray, last: np.ndarray, _: Random) -> bool:
    aux[:] = np.roll(aux, 1, axis=0)
    last[:] = np.roll(last, 1, axis=0)
    return True


def _swap_neighbours(aux: np.ndarray, _: np.ndarray, random: Random) -> bool:
    if len(aux) < 2:
        return False
    at = random.randrange(len(aux) - 1)
    aux[[at, at + 1]] = aux[[at + 1, at]]
    return True


def _permute_layers(aux: np.ndarray, _: np.ndarray, random: Random) -> bool:
    aux[:] = aux[:, random.choice([[1, 0, 2], [2, 1, 0], [1, 2, 0]])] if aux.shape[1] == 3 else aux[:, ::-1]
    return True


def _neighbouring_row(aux: np.ndarray, _: np.ndarray, random: Random) -> bool:
    if len(aux) < 2:
        return False
    at = random.randrange(1, len(aux))
    aux[at] = aux[at - 1]
    return True


def _missing_chunk(aux: np.ndarray, _: np.ndarray, random: Random) -> bool:
    aux[random.randrange(len(aux)) :] = 0
    return True


def _flip(which: int) -> Callable[[np.ndarray, np.ndarray, Random], bool]:
    def change(aux: np.ndarray, last: np.ndarray, random: Random) -> bool:
        part = (aux, last)[which]
        if not part.size:
            return False
        raw = part.reshape(-1).view(np.uint8)
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        return True

    return change


def _put(which: int, value: float) -> Callable[[np.ndarray, np.ndarray, Random], bool]:
    def change(aux: np.ndarray, last: np.ndarray, random: Random) -> bool:
        part = (aux, last)[which]
        if not part.size:
            return False
        part.reshape(-1)[random.randrange(part.size)] = value
        return True

    return change


def _header_bytes(record: RecordFile, _: Earlier, random: Random) -> bytes:
    """A flipped bit within the file's JSON, our claims included, that changes what it says."""
    stop = 8 + int.from_bytes(record.data[:8], "little")
    text = record.data[8:stop].rstrip(b" ")
    while True:
        data = bytearray(record.data)
        data[8 + random.randrange(len(text))] ^= 1 << random.randrange(7)
        try:
            if _said(RecordFile.parse(bytes(data)).header) == _said(record.header):
                continue  # a hexadecimal digit in another case
        except (ValueError, KeyError, TypeError):
            pass
        return bytes(data)


def _said(header: RecordHeader) -> RecordHeader:
    """A header with its checksums as numbers, which is how they are compared."""
    return replace(header, aux=f"{int(header.aux, 16):016x}", last=f"{int(header.last, 16):016x}")


def _fields(change: Callable[[dict[str, Any]], object]) -> Mutation:
    def mutate(record: RecordFile, _: Earlier, __: Random) -> bytes:
        header = json.loads(record.header.to_json())
        change(header)
        return assemble(header, record.aux, record.last)

    return mutate


def _cut_rows(record: RecordFile, _: Earlier, __: Random) -> bytes | None:
    """The last row is missing from the tensor, and the checksum is that of what is there."""
    return assemble(record.header, record.aux[:-1], record.last, rehash=True) if len(record.aux) > 1 else None


def _double_chunk(record: RecordFile, _: Earlier, __: Random) -> bytes:
    start, stop = record.header.chunks[-1]
    return assemble(record.header, np.concatenate([record.aux, record.aux[start:stop]]), record.last, rehash=True)


def _hex(_: object, random: Random) -> str:
    return f"{random.getrandbits(64):016x}"


_CLAIMS: Final[dict[str, Mutation]] = {
    "rid-of-another-row": _rid(row=lambda rid, random: (rid.row + random.randint(1, 9)) % 10**8),
    "rid-of-another-attempt": _rid(attempt=lambda rid, _: (rid.attempt + 1) % 100),
    "rid-of-another-session": _rid(session=lambda _, random: f"{random.getrandbits(32):08x}"),
    "rid-of-another-run": _rid(run=lambda _, random: f"{random.getrandbits(32):08x}"),
    "tokens-of-another-prompt": _claim(tokens=lambda _, random: f"{random.getrandbits(128):032x}"),
    "more-rows-claimed": _claim(rows=lambda header, _: header.rows + 1),
    "positions-of-another-mask": _claim(runs=_hex),
    "more-positions-claimed": _claim(positions=lambda header, _: header.positions + 1),
    "another-spec": _claim(spec_id=lambda _, random: f"{random.getrandbits(128):032x}"),
    "gap-between-chunks": _claim(chunks=lambda header, _: [[0, 0], *header.chunks[1:], [header.rows, header.rows + 1]]),
    "chunk-claimed-twice": _claim(chunks=lambda header, _: [*header.chunks, header.chunks[-1]]),
    "another-checksum": _claim(aux=_hex),
}
_STATES: Final[dict[str, Mutation]] = {
    "rows-shifted": _states(_shift),
    "rows-swapped": _states(_swap_neighbours),
    "row-repeated": _states(_neighbouring_row),
    "layers-permuted": _states(_permute_layers),
    "chunk-missing": _states(_missing_chunk),
    "bit-flip-in-aux": _states(_flip(0)),
    "bit-flip-in-last": _states(_flip(1)),
    "nan-in-aux": _states(_put(0, float("nan")), rehash=True),
    "nan-in-last": _states(_put(1, float("nan")), rehash=True),
    "infinity-in-aux": _states(_put(0, float("-inf")), rehash=True),
    "infinity-in-last": _states(_put(1, float("inf")), rehash=True),
}
_FILES: Final[dict[str, Mutation]] = {
    "truncated": lambda record, _, random: record.data[: random.randrange(1, len(record.data))],
    "truncated-header": lambda record, _, random: record.data[: random.randrange(1, 64)],
    "empty-file": lambda *_: b"",
    "trailing-bytes": lambda record, _, random: record.data + random.randbytes(random.randrange(1, 64)),
    "bit-flip-in-header": _header_bytes,
    "header-length-huge": lambda record, *_: struct.pack("<Q", 1 << 62) + record.data[8:],
    "claim-missing": _fields(lambda header: header.pop("runs")),
    "claim-unknown": _fields(lambda header: header.update(comment="x")),
    "claim-ill-typed": _fields(lambda header: header.update(chunks=7, aux=None)),
    "row-cut-off": _cut_rows,
    "chunk-doubled": _double_chunk,
    "another-dtype": lambda record, *_: assemble(record.header, record.aux, record.last, dtype="I32"),
    "tensor-renamed": lambda record, *_: assemble(record.header, record.aux, record.last, names=("aux", "final")),
    "no-record-at-all": lambda *_: b'{"reason": "ok"}',
}
_OTHERS: Final[dict[str, Mutation]] = {
    "record-of-equal-size": lambda _, earlier, __: earlier.same_size,
    "record-of-an-earlier-attempt": lambda _, earlier, __: earlier.same_row,
    "record-of-an-earlier-session": lambda _, earlier, __: earlier.any_record,
}

#: By name. The relay knows three more: two records swapped for each other, a link, and a false failure note.
MUTATIONS: Final[Mapping[str, Mutation]] = _CLAIMS | _STATES | _FILES | _OTHERS
