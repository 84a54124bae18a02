"""Inputs as the user names them -> rows, one at a time: a good one, or a `Dropped` that says what and where.

    open_sources(sources) -> [Input, ...]        Input.rows_raw() -> Raw, ...        parse(raw) -> Row
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eyas.config import SourceConfig
from eyas.data.files import Raw, read_lines
from eyas.data.layouts import parse
from eyas.data.rows import Row
from eyas.errors import ConfigError

__all__ = ["Input", "Raw", "open_sources", "parse", "read_chats", "read_rows"]


@dataclass(frozen=True, slots=True)
class Input:
    """One file to read, picklable.

    Attributes:
        source: its label in the statistics.
        weight: how often its rows are seen; for the reader of the rows to apply.
        max_rows: at most so many rows are read, bad ones included; applied here.
    """

    source: str
    path: str
    weight: float = 1.0
    max_rows: int | None = None

    def rows_raw(self) -> Iterator[Raw]:
        """Each row as it was read, in order."""
        yield from islice(read_lines(Path(self.path), self.source), self.max_rows)


def open_sources(sources: Sequence[SourceConfig | Path | str]) -> list[Input]:
    """The files that `sources` name, in order, each one checked before any work.

    Raises:
        ConfigError: nothing is there, it cannot be read, or it is of a kind not known.
    """
    inputs: list[Input] = []
    for source in sources:
        config = source if isinstance(source, SourceConfig) else SourceConfig(path=str(source))
        for path in _expand(config.path):
            _check(path)
            inputs.append(Input(config.name or path.stem, str(path), config.weight, config.max_rows))
    return inputs


def read_rows(inputs: Iterable[Input], roles: Mapping[str, str] = {}) -> Iterator[Row]:
    """Every row of `inputs`, in order; memory is bounded by the longest row."""
    for one in inputs:
        for raw in one.rows_raw():
            yield parse(raw, roles)


def read_chats(path: Path) -> Iterator[Row]:
    """Every row of one file, in order.

    Raises:
        ConfigError: the file is missing, cannot be read, or is of a kind not known.
    """
    yield from read_rows(open_sources([path]))


def _expand(path: str) -> list[Path]:
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - absolute patterns too
    if not found:
        raise ConfigError("no file matches", path)
    return [Path(name) for name in found]


def _check(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError("cannot read the input file", path, error.strerror or str(error)) from error
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        raise ConfigError("unknown kind of input file", path, f"expected .jsonl, got {path.suffix or 'no suffix'}")
