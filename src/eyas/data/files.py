"""Bytes of a file -> `Raw` rows, in order, in bounded memory; what a worker process can parse is not parsed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from eyas.data.rows import DropReason
from eyas.errors import ConfigError

#: The longest line read into memory.
MAX_LINE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row that could not be read."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """One row as it was read: small and picklable, parsed in another process.

    Attributes:
        payload: bytes are the JSON text of the row; a Fault says why there is none; all else is the row itself.
        offset: of the JSON text in the (decompressed) file, in bytes.
    """

    file: str
    line: int
    source: str
    payload: Any
    offset: int = 0


def read_lines(path: Path, source: str) -> Iterator[Raw]:
    """The rows of a file of JSON lines.

    Raises:
        ConfigError: the file cannot be read.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            for number, offset, line in _lines(file):
                payload = Fault(DropReason.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes") if line is None else line
                yield Raw(name, number, source, payload, offset)
    except OSError as error:
        raise ConfigError("cannot read the input file", path, error.strerror or str(error)) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    r"""(line number from 1, byte offset, line) of each line that is not blank; None for one that is too long.

    Lines end at \n alone: U+2028, U+0085 and their like are text to JSON.
    """
    number = offset = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        start, offset = offset, offset + len(line)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                offset += len(rest)
            offset += len(rest)
            yield number, start, None
            continue
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            line, start = line[3:], 3
        if line.strip():
            yield number, start, line
