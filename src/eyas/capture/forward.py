"""How the own rows of one forward lie in its span, and what the writers are told of them.

A span holds all rows of aux, then the kept ones of last, then all token ids: each field is one copy where the whole
forward is ours.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import torch

from eyas.capture.arena import Block, aligned
from eyas.capture.assembler import Record
from eyas.capture.contract import CaptureSpec, runs_hash
from eyas.capture.encoding import STORED_DTYPES
from eyas.capture.hostcopy import host_bytes, take_rows
from eyas.capture.writing import Finish, Job, Open, Part

_ID_BYTES: Final = 4


class Share:
    """One request's rows of a forward."""

    __slots__ = ("asked", "kept", "record", "row", "rows", "slices", "start")

    def __init__(self, record: Record, start: int, row: int, rows: int, slices: list[tuple[int, int]]) -> None:
        self.record, self.start, self.row, self.rows, self.slices = record, start, row, rows, slices
        self.kept = sum(b - a for a, b in slices)
        self.asked = ""


class FieldSizes:
    """How a forward's fields lie in its span: all rows of aux, then the kept ones of last, then all token ids."""

    __slots__ = ("aux", "ids", "ids_at", "kept", "last", "last_at", "rows", "total")

    def __init__(self, spec: CaptureSpec, rows: int, kept: int) -> None:
        self.rows, self.kept = rows, kept
        self.aux, self.last = rows * spec.aux_bytes_per_token, kept * spec.last_bytes_per_position
        self.ids = rows * _ID_BYTES
        self.last_at = aligned(self.aux)
        self.ids_at = self.last_at + aligned(self.last)
        self.total = self.ids_at + aligned(self.ids)


def sizes_of(spec: CaptureSpec, shares: Sequence[Share]) -> FieldSizes:
    """Of a forward with these shares."""
    return FieldSizes(spec, sum(share.rows for share in shares), sum(share.kept for share in shares))


def fill(
    out: torch.Tensor,
    spec: CaptureSpec,
    shares: Sequence[Share],
    sizes: FieldSizes,
    aux: torch.Tensor | None,
    last: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> None:
    """Copy the shares' rows into a span's bytes; enqueues on the current stream, never waits.

    Args:
        out: U8, `sizes.total` bytes or more.
        spec: the agreement.
        shares: in the order of their rows.
        sizes: theirs.
        aux, last, ids: [n, A * H], [n, H], [n] of the whole forward.
    """
    if aux is None or last is None or ids is None:
        raise ValueError("shares of a forward that brought nothing")
    stored = STORED_DTYPES[spec.dtype]
    rows = [(share.row, share.row + share.rows) for share in shares]
    kept = [(share.row + start, share.row + stop) for share in shares for start, stop in share.slices]
    aux_out = out[: sizes.aux].view(stored).view(spec.aux_shape(sizes.rows))
    last_out = out[sizes.last_at : sizes.last_at + sizes.last].view(stored).view(spec.last_shape(sizes.kept))
    ids_out = out[sizes.ids_at : sizes.ids_at + sizes.ids].view(torch.int32)
    take_rows(aux_out, aux.view(len(aux), len(spec.layers), spec.hidden_size), rows, spec.dtype)
    take_rows(last_out, last, kept, spec.dtype)
    take_rows(ids_out, ids, rows, None)


def jobs_of(block: Block, spec: CaptureSpec, shares: Sequence[Share], sizes: FieldSizes) -> list[Job]:
    """What is to be done with the shares once they are in the block."""
    base, jobs = block.start, list[Job]()
    aux, last = spec.aux_bytes_per_token, spec.last_bytes_per_position
    row = kept = 0
    for share in shares:
        record = share.record
        if record.fresh:
            runs = f"{runs_hash(record.runs):016x}"
            jobs.append(Open(record.key, record.rid, record.tokens, record.positions, runs))
        jobs.append(
            Part(
                record.key,
                share.start,
                share.start + share.rows,
                block.number,
                (base + row * aux, share.rows * aux),
                (base + sizes.last_at + kept * last, share.kept * last),
                (base + sizes.ids_at + row * _ID_BYTES, share.rows * _ID_BYTES),
            )
        )
        row, kept = row + share.rows, kept + share.kept
        if record.complete:
            jobs.append(Finish(record.key, share.asked))
    return jobs


def prompt_bytes(prompt: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, at a few nanoseconds each. Raises where one has more than 32 bits."""
    if isinstance(prompt, array) and prompt.itemsize == 8 and prompt.typecode in "lq":
        wide = torch.frombuffer(prompt, dtype=torch.int64) if prompt else torch.empty(0, dtype=torch.int64)
        narrow = wide.to(torch.int32)
        if torch.equal(narrow, wide):
            return bytes(host_bytes(narrow))
    return struct.pack(f"<{len(prompt)}i", *prompt)
