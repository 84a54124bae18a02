"""Rows of Parquet files, streamed. Only columns that layouts know are read: images are never decoded.

A null is the same as no field, at every depth: tables fill in fields that a row never had.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.data.names import printable
from eyas.data.rows import DropReason
from eyas.data.sources.columns import COLUMNS, EXPECTED, MEDIA, READ
from eyas.errors import ConfigError, first_line

BATCH_ROWS: Final = 256
MEDIA_BATCH_ROWS: Final = 16
_BYTES: Final = 2  # rank of a leaf that could hold pictures
_ERRORS: Final = (OSError, pa.ArrowException, ValueError, MemoryError, OverflowError)

TableRow = tuple[int, dict[str, Any] | None, tuple[DropReason, str] | None]


def check_table(path: Path, name: str) -> None:
    """Whether a Parquet file can be read and has a column that makes a row.

    Raises:
        ConfigError: it is damaged, has no such column, or has one twice.
    """
    try:
        with pq.ParquetFile(path) as table:
            found = table.schema_arrow.names
    except _ERRORS as error:
        raise ConfigError("the Parquet file is damaged", name, printable(first_line(error))) from error
    if not COLUMNS & set(found):
        columns = ", ".join(found) or "none"
        raise ConfigError(
            "unknown columns in the Parquet file", name, f"found {printable(columns)}; expected {EXPECTED}"
        )
    if twice := next((column for column in found if column in {*READ, *MEDIA} and found.count(column) > 1), None):
        raise ConfigError(f"two columns of the Parquet file are called {twice}", name, "rename one of them")


def table_rows(path: Path) -> Iterator[TableRow]:
    """(row number from 1, row, fault) of each row; a damaged file ends with one fault.

    Raises:
        OSError: the file cannot be opened.
    """
    number = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as table:
            for group in range(table.num_row_groups):
                for row in _group_rows(table, group):
                    number += 1
                    yield (number, row, None) if isinstance(row, dict) else (number, None, row)
    except _ERRORS as error:
        what = f"row {number + 1}: {printable(first_line(error))}; the rest of the file cannot be read"
        yield number + 1, None, (DropReason.BAD_FILE, what)


def clean_row(row: dict[str, Any]) -> dict[str, Any]:
    """Without nulls and NaNs inside of its columns; a column that is null stays, to be named where it is missed."""
    return {name: clean(value) for name, value in row.items()}


def clean(value: Any) -> Any:
    """Without nulls and NaNs in objects, at every depth."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if item is not None and item == item}  # noqa: PLR0124
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value


def _group_rows(table: pq.ParquetFile, group: int) -> Iterator[dict[str, Any] | tuple[DropReason, str]]:
    names = [name for name in table.schema_arrow.names if name in READ]
    media = _media_leaves(table.schema)
    size = MEDIA_BATCH_ROWS if any(rank == _BYTES for rank, _ in media.values()) else BATCH_ROWS
    leaves = [leaf for _, leaf in media.values()]
    for batch in table.iter_batches(size, row_groups=[group], columns=names + leaves):
        has_media = {name: _not_null(batch.column(name)) for name in media}
        for i, row in enumerate(_python_rows(batch.select(names))):
            if isinstance(row, dict):
                row.update({name: True for name, seen in has_media.items() if seen[i]})
            yield row


def _media_leaves(schema: pq.ParquetSchema) -> dict[str, tuple[int, str]]:
    """Column of images or sounds -> (rank, path) of the leaf that shows most cheaply whether a row has one.

    Any leaf tells whether the object or list around it is null or empty: the path of an image does for its bytes.
    Statistics would tell it too, but pyarrow ends the process on damaged ones.
    """
    found: dict[str, tuple[int, str]] = {}
    for i in range(len(schema)):
        leaf = schema.column(i)
        name = leaf.path.split(".")[0]
        if name in MEDIA:
            is_text = "String" in str(leaf.logical_type)
            rank = _BYTES if leaf.physical_type == "BYTE_ARRAY" and not is_text else int(is_text)
            found[name] = min(found.get(name, (rank, leaf.path)), (rank, leaf.path))
    return found


def _not_null(column: pa.Array) -> list[bool]:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return pc.fill_null(pc.greater(pc.list_value_length(column), 0), False).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    return column.is_valid().to_pylist()


def _untimed(column: pa.Array) -> pa.Array:
    """Times as text or numbers: Python has no year 100,000 and may not know a time zone; ids at most are times."""
    if not pa.types.is_temporal(column.type):
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        return column.cast(pa.int64())


def _python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | tuple[DropReason, str]]:
    batch = pa.RecordBatch.from_arrays([_untimed(column) for column in batch.columns], names=batch.schema.names)
    try:
        columns = [_values(column) for column in batch.columns]
    except _ERRORS:  # some row; its neighbours are good
        yield from (_python_row(batch.slice(i, 1)) for i in range(len(batch)))
    else:
        names = batch.schema.names
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _python_row(batch: pa.RecordBatch) -> dict[str, Any] | tuple[DropReason, str]:
    try:
        return clean_row(batch.to_pylist(maps_as_pydicts="lossy")[0])  # says which byte is bad
    except UnicodeDecodeError as error:
        return DropReason.BAD_UTF8, f"byte {error.start} of a text: {error.reason}"
    except _ERRORS as error:
        return DropReason.BAD_FILE, printable(first_line(error))


def _values(array: pa.Array) -> list[Any]:
    """Python's values of a column, as `clean` has them; several times as fast as `to_pylist` where objects nest."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())  # pyright: ignore[reportAttributeAccessIssue]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array.to_numpy(zero_copy_only=False).tolist()
    if pa.types.is_struct(kind):
        columns = [_values(column) for column in array.flatten()]  # pyright: ignore[reportAttributeAccessIssue]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows: list[Any] = [
            {name: value for name, value in zip(names, values, strict=True) if value is not None and value == value}  # noqa: PLR0124
            for values in zip(*columns, strict=True)
        ] or [{} for _ in range(len(array))]
        return _with_nulls(rows, array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = array.offsets.to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
        first = ends[0]
        items = _values(array.values.slice(first, ends[-1] - first))  # pyright: ignore[reportAttributeAccessIssue]
        return _with_nulls([items[start - first : end - first] for start, end in pairwise(ends)], array)
    return [clean(value) for value in array.to_pylist(maps_as_pydicts="lossy")]


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
