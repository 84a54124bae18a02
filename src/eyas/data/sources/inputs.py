"""Inputs as the user names them -> rows, one at a time: a good one, or a `Dropped` that says what and where.

    open_sources(sources) -> [Input, ...]        Input.rows_raw() -> Raw, ...        parse(raw) -> Row

A source is a file, a folder (the files in it whose suffix is known, below it too, sorted), a glob (sorted), or a
Hugging Face data set: `hf:NAME`, `hf:NAME:SPLIT`, or a folder that `save_to_disk` wrote.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Final

from eyas.config import SourceConfig
from eyas.data.names import COMPRESSED, SUFFIXES, display, stem
from eyas.data.outfolder import DROPPED_FILE, FILES, SUMMARY_FILE
from eyas.data.rows import Fault, Raw, Row
from eyas.data.sources.files import Kind, inspect, read_file
from eyas.data.sources.layouts import parse
from eyas.errors import ConfigError

__all__ = ["Input", "Raw", "open_sources", "parse", "read_chats", "read_rows"]

HUB: Final = "hf:"
_SAVED: Final = ("state.json", "dataset_dict.json")  # in a folder written by save_to_disk
_NOT_DATA: Final = ("readme", "license", "licence", "notice", "requirements", "dataset_infos", "dataset_info")


@dataclass(frozen=True, slots=True)
class Input:
    """One file or data set to read, picklable.

    Attributes:
        source: its label in the statistics.
        path: the file, or the data set's name.
        weight: how often its rows are seen; for the reader of the rows to apply.
        max_rows: at most so many rows are read, bad ones included; applied here.
        kind: what the file is; None for a data set.
        field: where in a JSON object its list of rows is.
        split, subset: of a data set.
    """

    source: str
    path: str
    weight: float = 1.0
    max_rows: int | None = None
    kind: Kind | None = None
    field: str | None = None
    split: str = ""
    subset: str | None = None

    def rows_raw(self) -> Iterator[Raw]:
        """Each row as it was read, in order.

        Raises:
            ConfigError: it cannot be opened any more.
        """
        rows = self._dataset() if self.kind is None else read_file(Path(self.path), self.kind, self.source, self.field)
        yield from islice(rows, self.max_rows)

    def _dataset(self) -> Iterator[Raw]:
        name = display(HUB + self.path + (f":{self.split}" if self.split else ""))
        for number, row, fault in _hub().dataset_rows(self.path, self.split, self.subset):
            yield Raw(name, number, self.source, Fault(*fault) if fault else row)


def open_sources(sources: Sequence[SourceConfig | Path | str]) -> list[Input]:
    """The files that `sources` name, in order, each one checked before any work.

    Raises:
        ConfigError: nothing is there, it cannot be read, or it is of a kind not known.
    """
    inputs: list[Input] = []
    for source in sources:
        config = source if isinstance(source, SourceConfig) else SourceConfig(path=str(source))
        if config.path.startswith(HUB):
            inputs.append(_open_dataset(config, config.path.removeprefix(HUB)))
            continue
        for path in _expand(config.path):
            if path.is_dir():
                inputs.append(_open_dataset(config, str(path)))
                continue
            kind = inspect(path, config.field)
            label = config.name or stem(display(path))
            inputs.append(Input(label, str(path), config.weight, config.max_rows, kind, config.field))
    return inputs


def read_rows(inputs: Iterable[Input], roles: Mapping[str, str] = {}) -> Iterator[Row]:
    """Every row of `inputs`, in order; memory is bounded by the longest row.

    Raises:
        ConfigError: an input cannot be opened any more.
    """
    for one in inputs:
        for raw in one.rows_raw():
            yield parse(raw, roles)


def read_chats(path: Path) -> Iterator[Row]:
    """Every row of one file, in order.

    Raises:
        ConfigError: the file is missing, cannot be read, or is of a kind not known.
    """
    yield from read_rows(open_sources([path]))


# --- paths ------------------------------------------------------------------------------------------------------------


def _expand(given: str) -> list[Path]:
    """Files, and folders that are data sets of their own."""
    if not given:  # else it would be the folder at hand
        raise ConfigError("an input without a name", "''", "is a variable of the shell empty?")
    try:
        path = Path(given).expanduser()
        there = path.exists()
    except (RuntimeError, ValueError, OSError) as error:  # no such user; a NUL; a name that is too long
        raise ConfigError("cannot read the input file", ascii(given)[1:-1][:200], str(error)) from error
    if there or not glob.has_magic(given):
        return _folder(path) if path.is_dir() else [path]
    found = sorted(set(glob.glob(str(path), recursive=True)))  # noqa: PTH207 - absolute patterns too
    files = [Path(name) for name in found if not Path(name).is_dir()]
    folders = [] if "**" in given else [Path(name) for name in found if Path(name).is_dir()]
    files = sorted({*files, *(file for folder in folders for file in _folder(folder))})
    if not files:
        hint = "a bracket that is part of a name is written [[]" if "[" in given else ""
        raise ConfigError("no file matches", display(given), hint)
    return files


def _folder(folder: Path) -> list[Path]:
    if any((folder / name).is_file() for name in _SAVED):
        return [folder]
    found: list[Path] = []

    def fail(error: OSError) -> None:
        raise ConfigError("cannot read the folder", display(error.filename), error.strerror or str(error)) from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        ours = FILES if {SUMMARY_FILE, DROPPED_FILE}.issubset(files) else ()  # what `prepare` wrote is no input
        found += [Path(parent, name) for name in files if _is_data(name) and name not in ours]
    if not found:
        raise ConfigError("no data in the folder", display(folder), f"known suffixes: {', '.join(SUFFIXES)}")
    return sorted(found)


def _is_data(name: str) -> bool:
    path = Path(name)
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower() in SUFFIXES and not name.startswith(".") and inner.stem.lower() not in _NOT_DATA


# --- data sets --------------------------------------------------------------------------------------------------------


def _open_dataset(config: SourceConfig, name: str) -> Input:
    if config.field is not None:
        raise ConfigError("a data set has no field", display(name), f"leave out field: {config.field}")
    split = None
    if not Path(name).expanduser().exists():
        name, _, split = name.partition(":")
    if not name:
        raise ConfigError("no name of a data set", config.path, "write hf:NAME or hf:NAME:SPLIT")
    found = _hub().check_dataset(name, split or None, config.subset)
    label = config.name or stem(Path(name).name)
    return Input(label, name, config.weight, config.max_rows, None, None, found, config.subset)


def _hub() -> ModuleType:
    """The adapter to `datasets`, which is large and optional."""
    try:
        return importlib.import_module("eyas.data.sources.hub")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ConfigError("the package datasets is missing", "", "pip install 'eyas[hf]'") from error
