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
from typing import Final

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


def parse_header(data: bytes | memoryview, file_bytes: int) -> Layout:
    """Read a safetensors header back from a file's first bytes.

    Args:
        data: at least the whole header (8 bytes + the length they state).
        file_bytes: the file's size, which the offsets must fill exactly.

    Raises:
        ValueError: truncated, not safetensors, or offsets that overlap, leave holes or leave the file.
    """
    if len(data) < 8:
        raise ValueError("shorter than a safetensors header")
    length = int.from_bytes(data[:8], "little")
    base = 8 + length
    if base > min(len(data), file_bytes):
        raise ValueError("truncated safetensors header")
    try:
        entries = json.loads(bytes(data[8:base]))
        metadata = entries.pop("__metadata__", {})
        infos = {
            name: TensorInfo(e["dtype"], tuple(e["shape"]), base + e["data_offsets"][0], base + e["data_offsets"][1])
            for name, e in entries.items()
        }
        edge = base
        for info in sorted(infos.values(), key=lambda i: (i.start, i.stop)):
            if info.start != edge or info.stop - info.start != math.prod(info.shape) * ITEM_SIZE[info.dtype]:
                raise ValueError("tensor offsets overlap, leave holes or do not fit their shape")
            edge = info.stop
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"damaged safetensors header: {error!r}") from error
    if edge != file_bytes:
        raise ValueError(f"file has {file_bytes} bytes, its header describes {edge}")
    return Layout(bytes(data[:base]), infos, metadata, file_bytes)
