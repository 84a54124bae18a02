"""Rows in a random order that a seed decides, in bounded memory: scattered to files by a hash, each sorted by it.

The order is that of a 128-bit hash of (seed, number of the row): uniform, and the same however many files there are.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

_BITS: Final = 6  # of the hash, that choose one of 64 files
_FILES: Final = 1 << _BITS
_HEADER: Final = struct.Struct("<16sIII")  # hash; tokens; bytes of the id; bytes of the source
#: A file larger than this is scattered again instead of being read into memory.
MEMORY_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PlainRow:
    """A row on its way into a corpus: `tokens` int32 [T], `loss_mask` uint8 [T]."""

    id: str
    source: str
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


class Shuffle:
    """Takes rows in any number, then gives them back in the seed's order.

    Args:
        folder: made on entry and removed on exit, whatever happens.
        seed: decides the order, together with the numbers in which rows were added.
        memory_bytes: largest part of the rows that is sorted in memory.
    """

    def __init__(self, folder: Path, seed: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self._folder, self._seed, self._memory_bytes = folder, seed, memory_bytes
        self._rows = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._scatter = _Scatter(self._folder, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scatter.discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, row: PlainRow) -> None:
        """Takes the next row."""
        key = hashlib.blake2b(b"%d %d" % (self._seed, self._rows), digest_size=16).digest()
        name, source = row.id.encode(), row.source.encode()
        self._rows += 1
        head = _HEADER.pack(key, len(row.tokens), len(name), len(source))
        body = row.tokens.astype("<i4", copy=False).tobytes(), row.loss_mask.astype("u1", copy=False).tobytes()
        self._scatter.add(key, b"".join((head, name, source, *body)))

    def rows(self) -> Iterator[PlainRow]:
        """Every row once, in the seed's order."""
        for path in self._scatter.close():
            yield from self._sorted(path, 1)

    def _sorted(self, path: Path, depth: int) -> Iterator[PlainRow]:
        if path.stat().st_size > self._memory_bytes and (depth + 1) * _BITS <= 128:
            for part in self._scattered(path, depth):
                yield from self._sorted(part, depth + 1)
            return
        data = path.read_bytes()
        path.unlink()
        for _, start in sorted(_offsets(data)):
            yield _row(data, start)

    def _scattered(self, path: Path, depth: int) -> list[Path]:
        scatter = _Scatter(path.with_suffix(".d"), depth)
        with path.open("rb") as file:
            while head := file.read(_HEADER.size):
                key, tokens, name, source = _HEADER.unpack(head)
                scatter.add(key, head + file.read(name + source + 5 * tokens))
        path.unlink()
        return scatter.close()


class _Scatter:
    """64 files in a folder; a record goes to the one that some bits of its key name."""

    def __init__(self, folder: Path, depth: int) -> None:
        folder.mkdir(exist_ok=True)
        self._shift = 128 - _BITS * (depth + 1)
        self._paths = [folder / f"{i:02d}" for i in range(_FILES)]
        self._files: dict[int, BinaryIO] = {}
        self._stack = ExitStack()

    def add(self, key: bytes, record: bytes) -> None:
        number = (int.from_bytes(key, "big") >> self._shift) % _FILES
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = self._stack.enter_context(self._paths[number].open("wb", buffering=1 << 17))
        file.write(record)

    def close(self) -> list[Path]:
        """The files that hold something, ascending by key."""
        self._stack.close()
        return [self._paths[number] for number in sorted(self._files)]

    def discard(self) -> None:
        """Close whatever is open; what could not be written any more does not matter."""
        with suppress(OSError):
            self._stack.close()


def _offsets(data: bytes) -> Iterator[tuple[bytes, int]]:
    start = 0
    while start < len(data):
        key, tokens, name, source = _HEADER.unpack_from(data, start)
        yield key, start
        start += _HEADER.size + name + source + 5 * tokens


def _row(data: bytes, start: int) -> PlainRow:
    _, tokens, name, source = _HEADER.unpack_from(data, start)
    start += _HEADER.size
    label, ids = start + name, start + name + source
    return PlainRow(
        data[start:label].decode(),
        data[label:ids].decode(),
        np.frombuffer(data, "<i4", tokens, ids),
        np.frombuffer(data, np.uint8, tokens, ids + 4 * tokens),
    )
