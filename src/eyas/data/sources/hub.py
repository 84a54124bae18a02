"""Rows of Hugging Face data sets, streamed; needs the extra `hf`.

A folder that `save_to_disk` wrote is opened as it is; anything else goes through `load_dataset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import datasets

from eyas.data.names import printable
from eyas.data.rows import DropReason
from eyas.data.sources.columns import COLUMNS, EXPECTED, MEDIA, READ
from eyas.data.sources.tables import TableRow, clean_row
from eyas.errors import ConfigError, first_line

#: Files by which a folder is known to be written by save_to_disk.
SAVED: Final = ("state.json", "dataset_dict.json")
_Data = datasets.Dataset | datasets.IterableDataset


def check_dataset(name: str, split: str | None, subset: str | None) -> str:
    """The split that is read: the one asked for, the only one, or `train`.

    Raises:
        ConfigError: there is no such data set, subset or split, or no column that makes a row.
    """
    opened = _open(name, split, subset)
    if isinstance(opened, dict):
        if split is None:
            split = next(iter(opened)) if len(opened) == 1 else "train"
        if split not in opened:
            raise ConfigError(f"no split {split} in the data set", name, f"known: {', '.join(map(str, opened))}")
        data: Any = opened[split]
    else:
        if split is not None and str(opened.split) != split:
            raise ConfigError(f"no split {split} in the data set", name, "it is a single one; leave the split out")
        data, split = opened, ""
    found = data.column_names
    if found is not None and not COLUMNS & set(found):
        columns = ", ".join(found) or "none"
        raise ConfigError("unknown columns in the data set", name, f"found {printable(columns)}; expected {EXPECTED}")
    return split


def dataset_rows(name: str, split: str, subset: str | None) -> Iterator[TableRow]:
    """(row number from 1, row, fault) of each row; a data set that cannot be read on ends with one fault."""
    number = 0
    try:
        opened = _open(name, split or None, subset)
        for row in _readable(opened[split] if isinstance(opened, dict) else opened):
            number += 1
            yield number, clean_row(cast(dict[str, Any], row)), None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a builder script, a codec or the network raises
        what = f"row {number + 1}: {printable(first_line(error))}; the rest of the data set cannot be read"
        yield number + 1, None, (DropReason.BAD_FILE, what)


def _open(name: str, split: str | None, subset: str | None) -> Any:
    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and any((folder / file).is_file() for file in SAVED):
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, streaming=True)
    except Exception as error:
        raise ConfigError(
            "cannot open the data set", name if split is None else f"{name}:{split}", printable(first_line(error))
        ) from error


def _readable(data: _Data) -> _Data:
    """Only the columns that layouts know; images and sounds as they are stored, never decoded."""
    names = data.column_names
    if names is None:  # known only once rows are read
        return data
    data = data.select_columns([column for column in names if column in READ or column in MEDIA])
    for column, feature in (data.features or {}).items():
        if column in MEDIA and hasattr(feature, "decode"):
            data = data.cast_column(column, type(feature)(decode=False))
    return data
