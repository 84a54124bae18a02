"""A dump's files into tensors: no code in them runs, nothing larger than agreed or half written is taken."""

from __future__ import annotations

import os
import pickle
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from eyas.errors import first_line
from eyas.extract.dumpdir.folder import FileId, Fresh, place_of
from eyas.extract.dumpdir.layout import (
    TORCH_SUFFIXES,
    Layout,
    MarkedEarly,
    Misfit,
    Place,
    Unfinished,
    count_of,
    parse_text,
)

MAX_FILE_BYTES: Final = 16 << 30  # 390,000 tokens of three layers of hidden size 7168 in bf16
_TEXT_BYTES: Final = 1 << 20
_PICKLE_BYTES: Final = 16 << 20
_MOST_ENTRIES: Final = 65_536
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# In a folder that others write to, a link must not lead elsewhere nor a pipe make us wait.
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Dump:
    """States of one dump as the server wrote them.

    Attributes:
        aux: [T, A, H].
        last: [T, H], before or after the final norm.
    """

    aux: torch.Tensor
    last: torch.Tensor


class DumpReader:
    """Reads the new files of one dump folder, each once, and vouches that they did not change meanwhile.

    Args:
        folder: where the dumps are.
        fresh: what is new; other files in the folder are not touched.
        layout: what is where.
        max_bytes: most bytes of one file.
    """

    def __init__(self, folder: Path, fresh: Fresh, layout: Layout, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = folder / fresh.name
        self._fresh, self._layout, self._max_bytes = fresh, layout, max_bytes
        self._contents: dict[str, Any] = {}

    def count(self) -> int:
        """The dump's token count.

        Raises:
            Unfinished: not there yet.
            Misfit: not where the settings say, or no count.
        """
        return count_of(self._values(self._layout.count))

    def dump(self, tokens: int) -> Dump:
        """All states of a dump of `tokens` tokens.

        Raises:
            Unfinished: rows are missing, or a file is being written.
            Misfit: another shape, more rows, or a file that is too large.
        """
        layout = self._layout
        if layout.aux.by_layer:
            layers = [self._values(layout.aux.of_layer(layer)) for layer in layout.layers]
            columns = [layout.last_of(values, tokens) for values in layers]
            if len({column.dtype for column in columns}) > 1:
                raise Misfit("layers of different dtypes")
            aux = torch.stack(columns, dim=1)
        else:
            aux = layout.aux_of(self._values(layout.aux), tokens)
        last = layout.last_of(self._values(layout.last), tokens)
        self._check_marker()
        self._check_unchanged()
        return Dump(aux, last)

    def _values(self, place: Place) -> list[Any]:
        return [place.value(self._content(name, place)) for name in place.files(self._fresh.files)]

    def _content(self, name: str, place: Place) -> Any:
        if name not in self._contents:
            with _opened(self._path, self._fresh, name) as file:
                self._contents[name] = (
                    _torch_content(file, name, self._max_bytes) if place.is_torch else _text(file, place)
                )
        return self._contents[name]

    def _check_marker(self) -> None:
        marked_ns = self._fresh.files[self._layout.done].modified_ns
        for name in self._contents:
            if name.endswith(TORCH_SUFFIXES) and self._fresh.files[name].modified_ns > marked_ns:
                raise MarkedEarly(f"{name} was written after {self._layout.done}")

    def _check_unchanged(self) -> None:
        """A server that starts its count anew may write over a dump that is just being read."""
        for name in (*self._contents, self._layout.done):
            with _opened(self._path, self._fresh, name):
                pass


@contextmanager
def _opened(path: Path, fresh: Fresh, name: str) -> Iterator[IO[bytes]]:
    """The very file that was seen.

    Raises:
        Unfinished: it, or the folder, is not the one that was seen, or cannot be read.
    """
    try:
        folder = os.open(path, _FOLDER_FLAGS)
        try:
            same_place = place_of(os.fstat(folder)) == fresh.place
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise Unfinished(f"{name}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not (same_place and stat.S_ISREG(info.st_mode) and FileId.of(info) == fresh.files[name]):
            raise Unfinished(f"{name} changed while it was read")
        yield file


def _text(file: IO[bytes], place: Place) -> Any:
    data = file.read(_TEXT_BYTES + 1)
    if len(data) > _TEXT_BYTES:
        raise Misfit(f"{place.file} is larger than {_TEXT_BYTES} bytes")
    try:
        return parse_text(data.decode(), bool(place.key))
    except UnicodeDecodeError as error:
        raise Unfinished(f"{place.file} is no text") from error


def _torch_content(file: IO[bytes], name: str, max_bytes: int) -> Any:
    _check_archive(file, name, max_bytes)
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Misfit(f"{name} holds more than tensors: {first_line(error)[:200]}") from error
    except Exception as error:  # a damaged archive raises whatever it likes
        raise Unfinished(f"{name} cannot be read: {first_line(error)[:200]}") from error


def _check_archive(file: IO[bytes], name: str, max_bytes: int) -> None:
    """Bound what reading will cost before torch believes any number in the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
        # Either it is still being written, or in the format that torch used before 1.6, which cannot be bounded.
        raise Unfinished(f"{name} is no complete archive of torch") from error
    if len(entries) > _MOST_ENTRIES or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise Misfit(f"{name} is no archive as torch.save writes it")
    sizes: Mapping[str, int] = {entry.filename: entry.file_size for entry in entries}
    if sum(sizes.values()) > max_bytes:
        raise Misfit(f"{name} has {sum(sizes.values()):,} bytes, at most {max_bytes:,} are read")
    if any(size > _PICKLE_BYTES for entry, size in sizes.items() if entry.endswith(".pkl")):
        raise Misfit(f"{name} holds more than tensors")
