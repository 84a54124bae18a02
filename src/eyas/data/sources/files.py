"""Bytes of a file -> `Raw` rows, in order, in bounded memory; what a worker process can parse is not parsed here.

What a file is, is read from its content; its name decides only whether text that is no JSON is a list of prompts.

    JSON lines      one object a line; lines end at \\n alone: U+2028, U+0085 and their like are text to JSON
    JSON array      compact or pretty-printed; at a `field` of an object too
    plain text      one prompt a line: `.txt`
    Parquet         only the columns that some layout knows

The text kinds may be compressed: gzip, zstd, bzip2, xz.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Final

from eyas.data.names import COMPRESSED, display, printable
from eyas.data.rows import DropReason, Fault, Raw
from eyas.data.sources.columns import COLUMNS
from eyas.data.sources.json_split import BrokenJsonError, NoListError, find_list, split_array
from eyas.data.sources.streams import Stream, compression_of, open_stream
from eyas.data.sources.tables import check_table, table_rows
from eyas.errors import ConfigError

#: The longest line, or element of an array, read into memory.
MAX_LINE_BYTES: Final = 64 << 20

HEAD_BYTES: Final = 1 << 20
_CHUNK: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"


class Kind(StrEnum):
    """What a file is."""

    LINES = "JSON lines"
    ARRAY = "JSON array"
    TEXT = "plain text"
    PARQUET = "Parquet"


# --- rows -------------------------------------------------------------------------------------------------------------


def read_file(path: Path, kind: Kind, source: str, field: str | None = None) -> Iterator[Raw]:
    """The rows of a file of a known kind. A file that turns out to be damaged ends with one Fault that says where.

    Raises:
        ConfigError: the file cannot be opened.
    """
    name = display(path)
    if kind is Kind.PARQUET:
        for number, row, fault in table_rows(path):
            yield Raw(name, number, source, Fault(*fault) if fault else row)
        return
    try:
        with open_stream(path) as stream:
            rows = _array(stream, field) if kind is Kind.ARRAY else _lines(stream)
            for number, offset, payload in rows:
                row = _prompt(payload, offset) if kind is Kind.TEXT and isinstance(payload, bytes) else payload
                yield Raw(name, number, source, row, offset)
    except OSError as error:
        raise ConfigError("cannot read the input file", name, error.strerror or str(error)) from error


def _lines(stream: Stream) -> Iterator[tuple[int, int, bytes | Fault]]:
    r"""(number from 1, byte offset, line with its \n) of each line that is not blank."""
    number, start = 1, 0
    parts, length = list[bytes](), 0  # the line so far
    while chunk := stream.read(_CHUNK):
        begin = 0
        while (end := chunk.find(b"\n", begin) + 1) > 0:
            if parts:
                parts.append(chunk[:end])
                line = b"".join(parts)
                parts = []
            else:
                line = chunk[begin:end]
            length += end - begin
            yield from _line(number, start, line, length)
            number, start, length, begin = number + 1, start + length, 0, end
        if begin < len(chunk):
            length += len(chunk) - begin
            if length <= MAX_LINE_BYTES:
                parts.append(chunk[begin:])
            else:
                parts = [b" "]
    if stream.fault:  # half a line before it is part of the fault
        yield number, start, Fault(DropReason.BAD_FILE, f"byte {start + length}: {_rest_lost(stream.fault)}")
    elif length:
        yield from _line(number, start, b"".join(parts), length)


def _line(number: int, start: int, line: bytes, length: int) -> Iterator[tuple[int, int, bytes | Fault]]:
    if length > MAX_LINE_BYTES + 1:
        yield number, start, Fault(DropReason.LINE_TOO_LONG, f"{length} bytes; the most is {MAX_LINE_BYTES}")
        return
    if number == 1 and line.startswith(_BOM):
        line, start = line[len(_BOM) :], len(_BOM)
    if not line.isspace() and line:
        yield number, start, line


def _array(stream: Stream, field: str | None) -> Iterator[tuple[int, int, bytes | Fault]]:
    number = 0
    try:
        for number, (offset, text) in enumerate(split_array(stream.read, MAX_LINE_BYTES, field), 1):
            too_long = Fault(DropReason.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes")
            yield number, offset, too_long if text is None else text
    except NoListError as error:  # the file was another one when it was looked at
        yield number + 1, 0, Fault(DropReason.BAD_FILE, str(error))
    except BrokenJsonError as error:
        if stream.fault:
            yield (
                number + 1,
                error.offset,
                Fault(DropReason.BAD_FILE, f"byte {error.offset}: {_rest_lost(stream.fault)}"),
            )
        else:
            yield number + 1, error.offset, Fault(DropReason.BAD_JSON, _rest_lost(str(error)))
    else:
        if stream.fault:
            yield number + 1, 0, Fault(DropReason.BAD_FILE, stream.fault)


def _rest_lost(what: str) -> str:
    return f"{what}; the rest of the file cannot be read"


def _prompt(line: bytes, offset: int) -> dict[str, str] | Fault:
    try:
        return {"prompt": line.rstrip(b"\r\n").decode("utf-8")}
    except UnicodeDecodeError as error:
        return Fault(DropReason.BAD_UTF8, f"byte {offset + error.start}: {error.reason}")


# --- kinds ------------------------------------------------------------------------------------------------------------

_FOREIGN: Final = {
    b"PK\x03\x04": "a zip archive (PyTorch's and NumPy's files are such)",
    b"PK\x05\x06": "an empty zip archive",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x89HDF": "an HDF5 file",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"\x93NUMPY": "a NumPy array",
    b"SQLite format 3": "a SQLite database",
    b"Obj\x01": "an Avro file",
    b"PARE": "an encrypted Parquet file",
    b"FEA1": "a Feather file",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed by LZ4",
    b"\x5d\0\0": "compressed by LZMA; xz compresses it as a kind that is read",
    b"LZIP": "compressed by lzip",
    b"\x1f\x9d": "compressed by compress",
    b"\xff\x06\0\0sNaPpY": "compressed by Snappy",
    b"Rar!": "a RAR archive",
    b"\x7fELF": "a program",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself (git lfs pull fetches it)",
}
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff", b"{\x00", b"[\x00", b"\x00{", b"\x00[")
_BLANK_AND_BOM: Final = _BOM + b" \t\r\n"
_KNOWN: Final = "known: JSON lines, a JSON array, Parquet, .txt with one prompt a line; text may be compressed"
_MARKUP: Final = re.compile(rb"<(!doctype|!--|\?xml|html|head|body|svg)\b", re.IGNORECASE)
_CR_BETWEEN_ROWS: Final = re.compile(rb"\}[ \t]*\r[ \t\r]*\{")  # CR is blank to JSON, and two objects are two rows
_LIST_OF_OBJECTS: Final = re.compile(rb'"((?:[^"\\]|\\.){1,64})"\s*:\s*\[\s*\{')


def inspect(path: Path, field: str | None = None) -> Kind:
    """What a file is, read from its first megabyte.

    Raises:
        ConfigError: it is not there, not readable, empty, or of a kind not known.
    """
    name = display(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError("the input is neither a file nor a folder", name)
        with open_stream(path) as stream:
            head, whole = stream.head(HEAD_BYTES)
            compressed, fault = stream.compression, stream.fault
    except OSError as error:
        raise ConfigError("cannot read the input file", name, error.strerror or str(error)) from error
    except ValueError as error:  # a NUL in the name
        raise ConfigError("cannot read the input file", repr(str(path)), str(error)) from error
    if not head:
        failed = f"cannot decompress the input file ({compressed})" if compressed else "cannot read the input file"
        what = failed if fault else "the input file is empty"
        raise ConfigError(what, name, fault)
    if head.startswith(b"PAR1"):
        return _parquet(path, compressed, field)
    if fault and not _is_txt(path) and _unlike_json(head):  # what a damaged file decompresses to
        raise ConfigError(f"the input file is damaged ({compressed})", name, fault)
    if foreign := _foreign(head):
        raise ConfigError(f"unknown kind of input file: {foreign}", name, _KNOWN)
    text = head.removeprefix(_BOM).lstrip()
    if not text:
        raise ConfigError("the input file holds only blank lines", name)
    if field is not None:
        return _with_field(path, field)
    return _text_kind(path, text, whole)


def _with_field(path: Path, field: str) -> Kind:
    try:
        with open_stream(path) as stream:
            find_list(stream.read, MAX_LINE_BYTES, field)
    except NoListError as error:
        raise ConfigError(f"no list of rows at field {field}", display(path), printable(str(error))) from error
    except BrokenJsonError as error:
        raise ConfigError(f"broken JSON before field {field}", display(path), printable(str(error))) from error
    return Kind.ARRAY


def _parquet(path: Path, compressed: str, field: str | None) -> Kind:
    if compressed:
        raise ConfigError("a compressed Parquet file", display(path), f"decompress it first ({compressed})")
    if field is not None:
        raise ConfigError("a Parquet file has no field", display(path), f"leave out field: {field}")
    check_table(path, display(path))
    return Kind.PARQUET


def _foreign(head: bytes) -> str:
    """What else it is; empty for text."""
    if head.startswith(_UTF16):
        return "text in UTF-16 or UTF-32; iconv -f UTF-16 -t UTF-8 makes it readable"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        return "a Python pickle"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if layer := compression_of(head):
        return f"compressed too many times ({layer})"
    if _MARKUP.match(head.lstrip(_BLANK_AND_BOM)):
        return "HTML or XML"
    return next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), "")


def _text_kind(path: Path, text: bytes, whole: bool) -> Kind:
    is_txt = _is_txt(path)
    first, _, rest = text.partition(b"\n")
    more = bool(rest.strip()) or not whole
    if b"\n" not in text.rstrip() and (_CR_BETWEEN_ROWS.search(text) or (is_txt and b"\r" in text.rstrip())):
        hint = r"tr '\r' '\n' < FILE makes it readable"
        raise ConfigError("the lines of the input file end at CR alone", display(path), hint)
    match text[:1]:
        case b"{" if not is_txt or isinstance(_parsed(first), dict):
            return _object_kind(path, text, whole)
        case b"[" if not is_txt or re.match(rb'\[\s*\{\s*"', text):
            return Kind.LINES if more and rest and _is_line(first, rest) else Kind.ARRAY
        case _ if is_txt and b"\0" in text:
            raise ConfigError("unknown kind of input file: binary, with zero bytes", display(path), _KNOWN)
        case _ if is_txt:
            return Kind.TEXT
        case _:
            lines = [line for line in text.split(b"\n") if line.strip()][:1000]
            if any(re.match(rb'\s*\{\s*"', line) or _is_json(line) for line in lines):
                return Kind.LINES  # some lines are bad, the first too
            raise ConfigError("the input file is not JSON", display(path), f"{_guess(first)}; {_KNOWN}")


def _is_line(first: bytes, rest: bytes) -> bool:
    """Whether a line that opens a list is a row among rows, though no row is a list, and not the start of an array:
    the list is closed on it, or an object that has a line of its own follows a line that asks for none."""
    if isinstance(_parsed(first), list):
        return True
    lines = [first, *(line for line in rest.split(b"\n") if line.strip())][:1000]
    return any(
        isinstance(_parsed(line), dict) and not before.rstrip().endswith((b"[", b"{", b",", b":"))
        for before, line in pairwise(lines)
    )


def _unlike_json(head: bytes) -> bool:
    return not head.lstrip(_BLANK_AND_BOM).startswith((b"{", b"["))


def _guess(first: bytes) -> str:
    start = first[:200].strip()
    if start.startswith(b"\0"):
        return "it starts with zero bytes; was it written to the end?"
    if start.startswith((b"---", b"- ")) or re.match(rb"[\w-]+:(\s|$)", start):
        return "YAML?"
    if re.fullmatch(rb"[^,;\t{\[(\x00-\x1f]+([,;\t][^,;\t]*)+", start):
        return "CSV?"
    return f"it starts with {start[:40].decode('utf-8', 'replace')!a}"


def _is_txt(path: Path) -> bool:
    suffix = PurePath(path.stem).suffix if path.suffix.lower() in COMPRESSED else path.suffix
    return suffix.lower() == ".txt"


def _object_kind(path: Path, text: bytes, whole: bool) -> Kind:
    """JSON lines, or one object that is no row: on one line, or over many."""
    first, _, rest = text.partition(b"\n")
    rest = rest.lstrip()
    if not rest and whole:
        found = _lists(_parsed(first))
        if not found:
            return Kind.LINES
    elif _parsed(first) is None and rest[:1] in (b'"', b"}") and rest:  # else a line that is broken, and the next one
        found = _lists(_parsed(text)) if whole else _matches(text)
    else:
        return Kind.LINES
    hint = f"if its rows are in {found[0]}, say so: field: {found[0]}" if found else "one row a line: jq -c . FILE"
    raise ConfigError("the input file is one JSON object, not a list of rows", display(path), printable(hint))


def _lists(value: Any) -> list[str]:
    """Keys of lists of objects, by which an object that is no row itself could be one of rows."""
    if not isinstance(value, dict) or COLUMNS & value.keys():
        return []
    found = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    for key, item in value.items():
        found += [f"{key}.{inner}" for inner in _lists(item)]
    return found


def _matches(text: bytes) -> list[str]:
    found = [match[1].decode("utf-8", "replace") for match in _LIST_OF_OBJECTS.finditer(text[:HEAD_BYTES])]
    return [key for key in found[:1] if key not in COLUMNS]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
