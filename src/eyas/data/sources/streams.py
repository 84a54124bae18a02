"""A file's bytes, decompressed: what the compression is is read from its first bytes, never from its name."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from eyas.data.names import printable

_MAGIC: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ZSTD_SKIPPABLE: Final = b"\x2a\x4d\x18"  # bytes 1 to 3 of a frame that holds no data
_MOST_LAYERS: Final = 3
_RAW_BYTES: Final = 1 << 20
_ZSTD_READ: Final = 1 << 16
_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, ValueError)


class Stream:
    """Bytes to read on. A fault of the file ends them as if they were all, and is told in `fault`.

    Attributes:
        compression: names of the layers, such as `gzip`; empty for a file that is not compressed.
        fault: why the bytes ended too early; empty as long as they did not.
    """

    def __init__(self, raw: Any, compression: str, path: Path) -> None:
        self._raw, self._path, self._given = raw, path, 0
        self._zstd = compression.endswith("zstd")
        self._back = b""
        self.compression, self.fault = compression, ""

    def read(self, size: int) -> bytes:
        """At least one and at most `size` bytes; none at the end."""
        if self._back:
            data, self._back = self._back[:size], self._back[size:]
            return data
        if self.fault:
            return b""
        try:
            data = self._raw.read(min(size, _ZSTD_READ)) if self._zstd else self._raw.read1(size)
        except _ERRORS as error:
            self.fault = printable(" ".join(str(error).split()) or type(error).__name__)
            return self._rescued() if self._zstd else b""
        self._given += len(data)
        return data

    def head(self, size: int) -> tuple[bytes, bool]:
        """The first bytes, which are given again by `read`, and whether they are all there is."""
        parts: list[bytes] = []
        missing = size
        while missing and (data := self.read(missing)):
            parts.append(data)
            missing -= len(data)
        self._back = b"".join(parts) + self._back
        return self._back, missing > 0

    def _rescued(self) -> bytes:
        """What the failed read had decompressed before the fault: pyarrow does not give it, so it is read again."""
        with ExitStack() as stack:
            raw, _ = _open(self._path, stack)
            left, parts = self._given, list[bytes]()
            try:
                while left:
                    left -= len(raw.read(min(left, _ZSTD_READ)))
                while byte := raw.read(1):
                    parts.append(byte)
            except _ERRORS:
                pass
            return b"".join(parts)


@contextmanager
def open_stream(path: Path) -> Iterator[Stream]:
    """The bytes of a file as they were before compression.

    Raises:
        OSError: the file cannot be opened.
    """
    with ExitStack() as stack:
        raw, layers = _open(path, stack)
        yield Stream(raw, ", ".join(layers), path)


def _open(path: Path, stack: ExitStack) -> tuple[Any, list[str]]:
    raw: Any = stack.enter_context(path.open("rb", buffering=_RAW_BYTES))
    layers: list[str] = []
    while len(layers) < _MOST_LAYERS:
        try:
            layer = compression_of(raw.peek(8)[:8])
        except _ERRORS as error:  # of the layer before; asked once more, it would say that all was read
            return _Broken(error), layers
        if not layer:
            break
        layers.append(layer)
        match layer:
            case "gzip":
                raw = stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
            case "bzip2":
                raw = stack.enter_context(bz2.BZ2File(raw))
            case "xz":
                raw = stack.enter_context(lzma.LZMAFile(raw))  # noqa: SIM115 - closed by the stack
            case _:
                raw = stack.enter_context(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"))
                break
    return raw, layers


class _Broken:
    """A layer that gave its error before it gave a byte."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read1(self, size: int) -> bytes:
        raise self._error


def compression_of(head: bytes) -> str:
    """Name of the compression that starts with these bytes; empty for none."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    is_skippable = len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == _ZSTD_SKIPPABLE
    return "zstd" if is_skippable else ""
