"""The same rows in every container that is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def lines(rows: Rows, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def array(rows: Rows, indent: int | None = None) -> bytes:
    return json.dumps(rows, indent=indent, ensure_ascii=False).encode()


def halves(compress: Callable[[bytes], bytes], data: bytes) -> bytes:
    """Two members (or frames), one after the other."""
    return compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


def parquet(rows: Rows, path: Path, **options: Any) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))  # a row that lacks one gets a null
    pq.write_table(pa.table({key: [row.get(key) for row in rows] for key in columns}), path, **options)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}

TEXTS: dict[str, Callable[[Rows], bytes]] = {
    "lines": lines,
    "crlf": lambda rows: lines(rows, "\r\n"),
    "bom": lambda rows: b"\xef\xbb\xbf" + lines(rows),
    "blank lines": lambda rows: b"\n \n" + lines(rows, "\n\n \t\r\n"),
    "no last newline": lambda rows: lines(rows).rstrip(b"\n"),
    "compact array": array,
    "pretty array": lambda rows: array(rows, 1),
    "array with BOM and CRLF": lambda rows: b"\xef\xbb\xbf\r\n" + array(rows, 2).replace(b"\n", b"\r\n") + b"\r\n",
}
