"""Between server and client: the record's file, its folder, and the plugin's word."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from eyas.capture.contract import RECORD_METADATA, RequestId
from eyas.capture.tensorfile import layout
from mutations.mutation import Check, Held, Mutation, Parcel, Stage, bytes_of


def _record(name: str, error: str, inject: Callable[[Held], bytes]) -> Mutation:
    return Mutation(name, Stage.RECORD, inject, Check.EXTRACT, error)


def _spool(name: str, error: str, inject: Callable[[Parcel], None], rows: int = 1) -> Mutation:
    return Mutation(name, Stage.SPOOL, inject, Check.EXTRACT, error, rows=rows)


def _reply(name: str, error: str, **changes: Any) -> Mutation:
    return Mutation(name, Stage.REPLY, lambda word: word | changes, Check.EXTRACT, error)


def _cut(held: Held, rows: int) -> dict[str, torch.Tensor]:
    return {"aux": held.aux[:-rows], "last": held.last[:-rows]}


def _doubled(held: Held, rows: int) -> dict[str, torch.Tensor]:
    return {field: torch.cat([t, t[-rows:]]) for field, t in (("aux", held.aux), ("last", held.last))}


def _odd(held: Held, value: float, *, honest: bool) -> bytes:
    aux = held.aux.clone()
    aux[3, 1, 5] = value
    return held.rebuilt(aux=aux, honest=honest)


def _holed(held: Held) -> bytes:
    data = bytearray(held.data)
    start = -(-held.header_bytes // 4096) * 4096
    data[start : start + 4096] = bytes(4096)
    return bytes(data)


def _in_text(held: Held, text: bytes, skip: int = 0, mask: int = 1) -> bytes:
    """A bit of the header flipped, `skip` bytes behind the first occurrence of `text`."""
    at = held.data.index(text) + len(text) + skip
    return held.flipped(at, mask)


def _without_metadata(held: Held) -> bytes:
    plan = layout([("aux", "BF16", tuple(held.aux.shape)), ("last", "BF16", tuple(held.last.shape))], {})
    return plan.header + bytes_of(held.aux) + bytes_of(held.last)


def _with_third(held: Held) -> bytes:
    shapes = [(name, "BF16", tuple(t.shape)) for name, t in (("aux", held.aux), ("last", held.last))]
    plan = layout([*shapes, ("more", "BF16", (1,))], {RECORD_METADATA: held.header.to_json()})
    return plan.header + bytes_of(held.aux) + bytes_of(held.last) + b"\0\0"


def _padded(held: Held) -> bytes:
    """A space that pads the header becomes something else."""
    for chunks in ([[0, held.header.rows]], held.header.chunks, [[0, 9], [9, held.header.rows]]):
        data = held.rebuilt(chunks=chunks)
        end = 8 + int.from_bytes(data[:8], "little")
        if data[end - 1] == ord(" "):
            return data[: end - 1] + b"!" + data[end:]
    raise AssertionError("no header with padding")


def _other_rid(held: Held, **fields: Any) -> bytes:
    rid = RequestId.parse(held.header.rid)
    assert rid is not None
    return held.again(rid=rid._replace(**fields)).data


def _states_of_other(held: Held) -> bytes:
    other = held.again(shift=1)
    return held.rebuilt(aux=other.aux, last=other.last, honest=False)


def _digest_bit(held: Held) -> bytes:
    digest = f"{int(held.header.aux, 16) ^ 1:016x}"
    return held.rebuilt(honest=False).replace(held.header.aux.encode(), digest.encode())


RECORDS = (
    _record("a record of another run", "rid-differs", lambda h: _other_rid(h, run="run99999")),
    _record("a stale record of an earlier session", "rid-differs", lambda h: _other_rid(h, session="ses99999")),
    _record("a replayed record of another attempt", "rid-differs", lambda h: _other_rid(h, attempt=7)),
    _record("a record of another row", "rid-differs", lambda h: _other_rid(h, row=77777)),
    _record("a record of other token ids (another tokenizer)", "tokens-differ", lambda h: h.again(shift=1).data),
    _record("a record of one token less", "tokens-differ", lambda h: h.again(cut=1).data),
    _record("last at other positions of equal count", "positions-differ", lambda h: h.again(move=-1).data),
    _record("last at fewer positions", "positions-differ", lambda h: h.again(drop=1).data),
    _record("a record of other layers", "spec-differs", lambda h: h.again(spec={"layers": (1, 2, 4)}).data),
    _record("a record in another dtype", "spec-differs", lambda h: h.again(spec={"dtype": "f16"}).data),
    _record("a record with last at all positions", "spec-differs", lambda h: h.again(spec={"last": "all"}).data),
    _record("another model's record of equal shapes", "spec-differs", lambda h: h.again(spec={"model": "e" * 32}).data),
    _record("states of another row under this header", "checksum-differs", _states_of_other),
    _record("rows shifted by one", "checksum-differs", lambda h: h.rebuilt(aux=h.aux.roll(1, 0), honest=False)),
    _record("last shifted by one", "checksum-differs", lambda h: h.rebuilt(last=h.last.roll(1, 0), honest=False)),
    _record("layers permuted", "checksum-differs", lambda h: h.rebuilt(aux=h.aux.flip(1), honest=False)),
    _record("the last chunk's rows are missing", "shape-differs", lambda h: h.rebuilt(**_cut(h, 8))),
    _record("the last chunk's rows come twice", "shape-differs", lambda h: h.rebuilt(**_doubled(h, 8))),
    _record("rows counted without the last chunk", "rows-differ", lambda h: h.rebuilt(rows=32, **_cut(h, 8))),
    _record("the last chunk is not in the list", "chunks-gap", lambda h: h.rebuilt(chunks=h.header.chunks[:-1])),
    _record(
        "a chunk is twice in the list",
        "chunks-gap",
        lambda h: h.rebuilt(chunks=[*h.header.chunks, h.header.chunks[-1]]),
    ),
    _record("chunks out of order in the list", "chunks-gap", lambda h: h.rebuilt(chunks=h.header.chunks[::-1])),
    _record("chunks overlap in the list", "chunks-gap", lambda h: h.rebuilt(chunks=[[0, 16], [12, h.header.rows]])),
    _record("shape transposed", "shape-differs", lambda h: h.rebuilt(aux=h.aux.transpose(0, 1).contiguous())),
    _record(
        "shape relabelled over the same bytes",
        "shape-differs",
        lambda h: h.rebuilt(last=h.last.reshape(-1, len(h.last))),
    ),
    _record("dtype relabelled", "shape-differs", lambda h: h.rebuilt(dtype="F16")),
    _record("aux and last exchanged", "shape-differs", lambda h: h.rebuilt(aux=h.last, last=h.aux)),
    _record("a third tensor", "shape-differs", _with_third),
    _record("NaN, digests as they were", "checksum-differs", lambda h: _odd(h, float("nan"), honest=False)),
    _record("NaN, digests made to fit", "not-finite", lambda h: _odd(h, float("nan"), honest=True)),
    _record("Inf, digests made to fit", "not-finite", lambda h: _odd(h, float("inf"), honest=True)),
    _record("a page of zeros (a hole)", "checksum-differs", _holed),
    _record("bit flipped in the header's length", "record-damaged", lambda h: h.flipped(0, 2)),
    _record("bit flipped in the header's JSON", "record-damaged", lambda h: h.flipped(8)),
    _record("bit flipped in the header's padding", "record-damaged", _padded),
    _record("bit flipped in the request id", "rid-differs", lambda h: _in_text(h, rb"\"rid\":\"", 30)),
    _record("bit flipped in the spec", "spec-differs", lambda h: _in_text(h, rb"\"spec_id\":\"")),
    _record("bit flipped in the token hash", "tokens-differ", lambda h: _in_text(h, rb"\"tokens\":\"")),
    _record("bit flipped in the positions' hash", "positions-differ", lambda h: _in_text(h, rb"\"runs\":\"")),
    _record("bit flipped in aux's digest", "checksum-differs", _digest_bit),
    _record("bit flipped in aux", "checksum-differs", lambda h: h.flipped(h.header_bytes + 1001)),
    _record("bit flipped in last", "checksum-differs", lambda h: h.flipped(len(h.data) - 1)),
    _record("cut in the header", "record-damaged", lambda h: h.data[:100]),
    _record("cut in a tensor", "record-damaged", lambda h: h.data[:-1000]),
    _record("grown by a byte", "record-damaged", lambda h: h.data + b"\0"),
    _record("grown beyond all bounds", "record-damaged", lambda h: h.data + bytes(2 << 20)),
    _record("empty", "record-damaged", lambda h: b""),
    _record("bytes that are no record", "record-damaged", lambda h: bytes(range(256)) * 8),
    _record("no record header in it", "record-damaged", _without_metadata),
)


# --- the folder -------------------------------------------------------------------------------------------------------


def _names_swapped(parcel: Parcel) -> None:
    one, other = parcel.held
    parcel.put(parcel.path(0), other.data)
    parcel.put(parcel.path(1), one.data)


def _names_and_rids_swapped(parcel: Parcel) -> None:
    for index, held in enumerate(reversed(parcel.held)):
        parcel.put(parcel.path(index), held.rebuilt(rid=parcel.held[index].header.rid))


def _elsewhere(parcel: Parcel) -> None:
    target = parcel.spool.parent / f"elsewhere-{parcel.held[0].header.rid}"
    target.write_bytes(parcel.held[0].data)
    parcel.path().symlink_to(target)


def _note(text: str) -> Callable[[Parcel], None]:
    return lambda parcel: parcel.put(parcel.path().with_suffix(".failed"), text.encode())


SPOOL = (
    _spool("two records of equal length exchange their names", "rid-differs", _names_swapped, rows=2),
    _spool("they exchange names and request ids", "tokens-differ", _names_and_rids_swapped, rows=2),
    _spool("a link instead of a file", "record-unreadable", _elsewhere),
    _spool("a pipe instead of a file", "record-unreadable", lambda parcel: os.mkfifo(parcel.path())),
    _spool("a folder instead of a file", "record-unreadable", lambda parcel: parcel.path().mkdir()),
    _spool("no file at all", "record-late", lambda parcel: None),
    _spool("half a failure note", "record-damaged", _note('{"reason": "retr')),
    _spool("a failure of a name nobody agreed on", "unknown-refusal", _note('{"reason": "magic", "detail": ""}')),
)

REPLIES = (
    _reply("the plugin's word is about other tokens", "tokens-differ", tokens="0" * 32),
    _reply("the plugin's word is of another spec", "spec-differs", spec_id="0" * 32),
    _reply("the plugin's word counts other rows", "rows-differ", rows=3),
    _reply("neither accepted nor refused", "bad-reply", status="perhaps"),
    _reply("a word with unknown fields", "bad-reply", more=1),
)


def unchanged(held: Held) -> bytes:
    """The control: taken apart and put together again."""
    data = held.rebuilt()
    assert data == held.data
    return replace(held, data=data).data
