"""The safetensors layout as pure functions: header bytes and offsets, no I/O.

Records and shards are plain safetensors files whose size is known before their data is, so that rows can be written
at their own offsets. Layout (huggingface/safetensors): u64 little-endian header length, JSON header, tensor bytes
back to back. We pad the header with spaces to 8 bytes and order tensors by falling item size, so every view is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from eyas.capture.strictjson import loads

MAX_HEADER_BYTES: Final = 1 << 20  # ours are a few kilobytes; what a file claims beyond is not read
_MAX_FILE_BYTES: Final = 2**63 - 1
ITEM_SIZE: Final = {"I64": 8, "U64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in a file: dtype (safetensors name), shape, absolute byte range [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Header bytes (length prefix included), where each tensor lies, and the file's full size in bytes."""

    header: bytes
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    file_bytes: int


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Lay out `(name, dtype, shape)` tensors. Deterministic: same arguments, same bytes.

    Raises:
        ValueError: for an unknown dtype or a repeated name.
    """
    if len({name for name, _, _ in tensors}) != len(tensors):
        raise ValueError("tensor names repeat")
    if unknown := {dtype for _, dtype, _ in tensors} - set(ITEM_SIZE):
        raise ValueError(f"unknown dtype {sorted(unknown)}")
    ordered = sorted(tensors, key=lambda t: -ITEM_SIZE[t[1]])  # stable: equal sizes keep the caller's order
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    spans: list[tuple[str, str, tuple[int, ...], int, int]] = []
    offset = 0
    for name, dtype, shape in ordered:
        size = math.prod(shape) * ITEM_SIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        spans.append((name, dtype, shape, offset, offset + size))
        offset += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    infos = {name: TensorInfo(dtype, shape, base + start, base + stop) for name, dtype, shape, start, stop in spans}
    return Layout(header, infos, dict(metadata), base + offset)


def padded(header: bytes, size: int) -> bytes:
    """A header of `layout`, made `size` bytes long by spaces: its tensors then begin there.

    Raises:
        ValueError: it is longer, or `size` is no multiple of 8.
    """
    if len(header) > size or size % 8:
        raise ValueError(f"a header of {len(header)} bytes cannot take {size}")
    return (size - 8).to_bytes(8, "little") + header[8:].ljust(size - 8)


def parse_header(data: bytes | memoryview, file_bytes: int) -> Layout:
    """Read a safetensors header back from a file's first bytes.

    Args:
        data: at least the whole header (8 bytes + the length they state).
        file_bytes: the file's size, which the offsets must fill exactly.

    Raises:
        ValueError: truncated, longer than MAX_HEADER_BYTES, not safetensors, or offsets that overlap, leave holes or
            leave the file.
    """
    if len(data) < 8:
        raise ValueError("shorter than a safetensors header")
    length = int.from_bytes(data[:8], "little")
    base = 8 + length
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    if base > min(len(data), file_bytes):
        raise ValueError("truncated safetensors header")
    entries = loads(bytes(data[8:base]), MAX_HEADER_BYTES)
    if not isinstance(entries, dict):
        raise ValueError("damaged safetensors header: not an object")  # noqa: TRY004  the one error of all parsers
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("damaged safetensors header: metadata must be texts")
    infos = {name: _tensor_info(entry, base) for name, entry in entries.items()}
    edge = base
    for info in sorted(infos.values(), key=lambda i: (i.start, i.stop)):
        if info.start != edge:
            raise ValueError("tensor offsets overlap or leave holes")
        edge = info.stop
    if edge != file_bytes:
        raise ValueError(f"file has {file_bytes} bytes, its header describes {edge}")
    return Layout(bytes(data[:base]), infos, metadata, file_bytes)


def _tensor_info(entry: Any, base: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("damaged safetensors header: a tensor has dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ValueError("damaged safetensors header: unknown dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("damaged safetensors header: shapes and offsets are integers from 0 on")
    size = _size_of(shape, ITEM_SIZE[dtype])
    if offsets[1] - offsets[0] != size:
        raise ValueError("damaged safetensors header: offsets do not fit the shape")
    return TensorInfo(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _size_of(shape: Sequence[int], item_size: int) -> int:
    """Bytes of a tensor. Stops where no file can hold it: the product of a thousand dimensions is a huge number."""
    if 0 in shape:
        return 0
    size = item_size
    for dimension in shape:
        size *= dimension
        if size > _MAX_FILE_BYTES:
            raise ValueError("damaged safetensors header: a shape larger than any file")
    return size
