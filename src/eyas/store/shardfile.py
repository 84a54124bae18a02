"""Reading a shard file's index: everything but the states themselves, checked against its own layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.capture.contract import CaptureSpec
from eyas.capture.strictjson import loads
from eyas.capture.tensorfile import MAX_HEADER_BYTES, Layout, parse_header
from eyas.errors import IntegrityError
from eyas.store.files import pread_all
from eyas.store.format import FORMAT, FORMAT_VERSION, RowStatus, Sidecar, shard_layout
from eyas.store.journal import RowFailed, Session, merged_provenance
from eyas.store.plan import Shard

_MAX_INDEX_BYTES: Final = 1 << 30  # of a shard of terabytes; what a sparse file claims beyond is not read


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A shard without its states.

    Attributes:
        shard, spec, corpus, plan: from the file's metadata.
        layout: where each tensor lies.
        row_offsets, last_offsets: [R + 1] int64, first token and first kept position of each row.
        row_xxh3: [R, 4] uint64, columns as format.FIELDS.
        last_index: [L] int32. tokens: [T] int32. loss_mask: [T] uint8. row_status: [R] uint8.
        index_xxh3: xxh3-64 of every byte of the file outside `aux` and `last`.
    """

    shard: Shard
    spec: CaptureSpec
    corpus: str
    plan: str
    layout: Layout
    row_offsets: npt.NDArray[np.int64]
    last_offsets: npt.NDArray[np.int64]
    row_xxh3: npt.NDArray[np.uint64]
    last_index: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    row_status: npt.NDArray[np.uint8]
    index_xxh3: int

    def span(self, field: str, row: int) -> tuple[int, int]:
        """Byte range in the file of `aux` or `last` of the shard's row `row` (0-based)."""
        return state_span(self.layout, self.spec, field, self.row_offsets if field == "aux" else self.last_offsets, row)


def state_span(
    layout: Layout, spec: CaptureSpec, field: str, offsets: npt.NDArray[np.int64], row: int
) -> tuple[int, int]:
    """Byte range in the file of `aux` or `last` of a row, given that field's offsets."""
    step = spec.aux_bytes_per_token if field == "aux" else spec.last_bytes_per_position
    base = layout.tensors[field].start
    return base + int(offsets[row]) * step, base + int(offsets[row + 1]) * step


def _metadata_shard(metadata: dict[str, str], layout: Layout) -> tuple[Shard, CaptureSpec, Layout]:
    if metadata["format"] != FORMAT or metadata["version"] != str(FORMAT_VERSION):
        raise ValueError(f"format {metadata['format']!r} version {metadata['version']!r}, expected {FORMAT_VERSION}")
    spec = CaptureSpec.from_dict(loads(metadata["spec"], MAX_HEADER_BYTES))
    start, stop = (int(x) for x in metadata["rows"].split(":"))
    shard = Shard(
        int(metadata["shard"]), start, stop, layout.tensors["tokens"].shape[0], layout.tensors["last_index"].shape[0]
    )
    if shard.index < 0 or not 0 <= start < stop:
        raise ValueError(f"shard {shard.index} of rows {start}:{stop}")
    return shard, spec, shard_layout(shard, spec, metadata["corpus"], metadata["plan"])


def read_index(fd: int, where: object) -> ShardIndex:
    """Read and check the index of a shard file.

    Args:
        fd: open for reading.
        where: the path, for messages.

    Raises:
        IntegrityError: not a shard, cut short, or an index that contradicts itself.
        OSError: the disk.
    """
    size = os.fstat(fd).st_size
    try:
        layout, shard, spec = _read_header(fd, size)
    except (ValueError, KeyError, IndexError) as error:
        raise IntegrityError("not a shard of a store", where, str(error)) from error

    head_stop, tail_start = layout.tensors["aux"].start, layout.tensors["last"].stop
    head, tail = pread_all(fd, 0, head_stop), pread_all(fd, tail_start, size)
    digest = xxhash.xxh3_64(head)
    digest.update(tail)

    def view(name: str, dtype: str) -> npt.NDArray[Any]:
        info = layout.tensors[name]
        data, base = (head, 0) if info.start < head_stop else (tail, tail_start)
        count = (info.stop - info.start) // np.dtype(dtype).itemsize
        return np.frombuffer(data, dtype, count, info.start - base).reshape(info.shape)

    row_offsets, last_index = view("row_offsets", "<i8"), view("last_index", "<i4")
    index = ShardIndex(
        shard=shard,
        spec=spec,
        corpus=layout.metadata["corpus"],
        plan=layout.metadata["plan"],
        layout=layout,
        row_offsets=row_offsets,
        last_offsets=np.searchsorted(last_index, row_offsets).astype(np.int64),
        row_xxh3=view("row_xxh3", "<u8"),
        last_index=last_index,
        tokens=view("tokens", "<i4"),
        loss_mask=view("loss_mask", "u1"),
        row_status=view("row_status", "u1"),
        index_xxh3=digest.intdigest(),
    )
    if contradiction := _contradiction(index):
        raise IntegrityError("shard index contradicts itself", where, contradiction)
    return index


def _read_header(fd: int, size: int) -> tuple[Layout, Shard, CaptureSpec]:
    """Raises ValueError, KeyError or IndexError unless it is, byte for byte, the header that this format writes."""
    if size < 8:
        raise ValueError("shorter than a safetensors header")
    length = int.from_bytes(pread_all(fd, 0, 8), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError("no safetensors header")
    layout = parse_header(memoryview(pread_all(fd, 0, 8 + length)), size)
    shard, spec, expected = _metadata_shard(dict(layout.metadata), layout)
    if expected.header != layout.header:
        raise ValueError("header is not the one this format writes")
    if (outside := layout.tensors["aux"].start + size - layout.tensors["last"].stop) > _MAX_INDEX_BYTES:
        raise ValueError(f"an index of {outside} bytes, at most {_MAX_INDEX_BYTES} are read")
    return layout, shard, spec


def _contradiction(index: ShardIndex) -> str:
    """What is wrong between an index's own arrays; nothing is an empty text."""
    rows, last, tokens = index.row_offsets, index.last_index, index.shard.tokens
    ascending = bool(np.all(np.diff(rows) > 0)) and bool(np.all(np.diff(last) > 0))
    if not ascending or rows[0] != 0 or rows[-1] != tokens:
        return "row_offsets or last_index out of order"
    if len(last) and (last[0] < 0 or last[-1] >= tokens):
        return "last_index leaves the shard"
    if np.any(index.row_status > max(RowStatus)):
        return "unknown row_status"
    return ""


UNKNOWN_REASON: Final = "unknown"  # of a failed row whose journal is gone


def sidecar_of(index: ShardIndex, sessions: list[Session]) -> Sidecar:
    """The sidecar of a finished shard file: facts from the file, reasons and provenance from its journal."""
    reasons = {
        row: entry.reason for session in sessions for row, entry in session.rows.items() if isinstance(entry, RowFailed)
    }
    failed = (np.flatnonzero(index.row_status == RowStatus.FAILED) + index.shard.start).tolist()
    return Sidecar(
        name=index.shard.name,
        rows=(index.shard.start, index.shard.stop),
        tokens=index.shard.tokens,
        positions=index.shard.positions,
        bytes=index.layout.file_bytes,
        failed={row: reasons.get(row, UNKNOWN_REASON) for row in failed},
        spec_id=index.spec.spec_id,
        corpus=index.corpus,
        plan=index.plan,
        index_xxh3=index.index_xxh3,
        provenance=merged_provenance(sessions),
    )
