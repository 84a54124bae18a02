"""Cuts a JSON array into the texts of its elements, without parsing them: from a stream, in bounded memory.

    [{"a": 1}, {"b": [2]}]      ->  {"a": 1}   {"b": [2]}
    {"data": {"rows": [...]}}   ->  the elements of the list at the field `data.rows`

An element that is no JSON costs no other one, and elements can be parsed in other processes. A parser of events could
do neither, and those at hand end at the first NaN and give half a surrogate pair as a question mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Final

CHUNK_BYTES: Final = 1 << 20

_BLANK: Final = re.compile(rb"[ \t\r\n]*+")
_SCALAR: Final = re.compile(rb"[^ \t\r\n,\]}\[{\"]*+")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
#: All up to the next bracket outside of strings, or up to the quote of a string that does not end here.
_TO_BRACKET: Final = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+', re.DOTALL)
_CLOSER: Final = {0x5B: 0x5D, 0x7B: 0x7D}  # [ and {
_QUOTE: Final = 0x22
_END: Final = -1


class BrokenJsonError(Exception):
    """The text cannot be cut any further: `offset` in bytes, and why."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"byte {offset}: {why}")
        self.offset, self.why = offset, why


class NoListError(Exception):
    """There is no list where one should be; the message says what was found."""


def split_array(
    read: Callable[[int], bytes], limit: int, field: str | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """(byte offset, JSON text) of each element of an array, in order; None for a text of more than `limit` bytes.

    Args:
        read: gives at most so many bytes, none at the end.
        field: keys joined by dots, where the array is inside of objects; else the text is the array.

    Raises:
        NoListError: there is no list at `field`.
        BrokenJsonError: brackets that do not match, an end in the middle; the elements before it were given.
    """
    window = _Window(read, limit)
    _enter(window, field)
    yield from _elements(window)
    if field is None:
        if window.peek() != _END:
            raise BrokenJsonError(window.offset, "more text after the end of the list")
    else:
        while read(CHUNK_BYTES):  # a checksum at the end of the file is looked at only there
            pass


def find_list(read: Callable[[int], bytes], limit: int, field: str) -> None:
    """Reads up to the list at `field`.

    Raises:
        NoListError, BrokenJsonError: as split_array.
    """
    _enter(_Window(read, limit), field)


def _elements(window: _Window) -> Iterator[tuple[int, bytes | None]]:
    if window.peek() == ord("]"):
        window.pos += 1
        return
    while True:
        window.peek()
        offset = window.offset
        yield offset, window.value()
        match window.peek():
            case 0x2C:  # comma
                window.pos += 1
            case 0x5D:
                window.pos += 1
                return
            case byte:
                raise BrokenJsonError(window.offset, _cut_or(byte, "expected a comma or the end of the list"))


def _enter(window: _Window, field: str | None) -> None:
    """Moves behind the bracket that opens the array."""
    if window.peek() == 0xEF:  # byte order mark
        window.pos = min(window.pos + 3, len(window.buf))
    done: list[str] = []
    for key in () if field is None else field.split("."):
        if window.peek() != ord("{"):
            raise NoListError(f"{'.'.join(done) or 'the file'} is not an object")
        window.pos += 1
        found: list[str] = []
        while (name := _key(window)) != key:
            if name is None:
                raise NoListError(f"no key {key}; found {', '.join(found) or 'none'}")
            found.append(name)
            window.value()
            if window.peek() == ord(","):
                window.pos += 1
        done.append(key)
    if window.peek() != ord("["):
        raise NoListError(f"{'.'.join(done) or 'the file'} is not a list")
    window.pos += 1


def _key(window: _Window) -> str | None:
    """The next key of an object, its colon passed; None at the end of the object."""
    if (byte := window.peek()) == ord("}"):
        return None
    if byte != _QUOTE:
        raise BrokenJsonError(window.offset, _cut_or(byte, "expected a key"))
    offset, text = window.offset, window.value()
    try:
        name = json.loads((text or b"").decode("utf-8"))
    except ValueError as error:
        raise BrokenJsonError(offset, f"a key that is no text: {error}") from error
    if (byte := window.peek()) != ord(":"):
        raise BrokenJsonError(window.offset, _cut_or(byte, "expected a colon"))
    window.pos += 1
    window.peek()
    return name


def _cut_or(byte: int, expected: str) -> str:
    return "the text ends here" if byte == _END else expected


class _Window:
    """The part of a stream that is in memory, and a place in it."""

    def __init__(self, read: Callable[[int], bytes], limit: int) -> None:
        self._read, self._limit = read, limit
        self.buf, self.pos, self._base = b"", 0, 0

    @property
    def offset(self) -> int:
        return self._base + self.pos

    def peek(self) -> int:
        """The next byte that is not blank, which the place moves to; _END at the end."""
        while True:
            self.pos = _BLANK.match(self.buf, self.pos).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self.pos < len(self.buf):
                return self.buf[self.pos]
            if not self._fill(self.pos):
                return _END

    def value(self) -> bytes | None:
        """The text of the value that starts here, passed; None where it is longer than the limit."""
        byte = self.buf[self.pos] if self.pos < len(self.buf) else _END
        if byte in _CLOSER:
            return self._nested()
        pattern = _STRING if byte == _QUOTE else _SCALAR
        while True:
            found = pattern.match(self.buf, self.pos)
            if found is not None and (byte == _QUOTE or found.end() < len(self.buf)):
                break
            if len(self.buf) - self.pos > self._limit:
                raise BrokenJsonError(self.offset, f"a value of more than {self._limit} bytes")
            if not self._fill(self.pos):
                raise BrokenJsonError(self.offset, "the text ends in the middle of a value")
        if found.end() == self.pos:
            raise BrokenJsonError(self.offset, "expected a value")
        self.pos = found.end()
        return found[0]

    def _nested(self) -> bytes | None:
        start, closers, began = self.pos, bytearray(), self.offset
        whole = True
        while True:
            at = _TO_BRACKET.match(self.buf, self.pos).end()  # pyright: ignore[reportOptionalMemberAccess]
            self.pos = at
            if at == len(self.buf) or self.buf[at] == _QUOTE:
                if self.offset - began > self._limit:
                    whole = False
                if len(self.buf) - at > self._limit:
                    raise BrokenJsonError(self.offset, f"a text of more than {self._limit} bytes")
                shift = start if whole else at
                if not self._fill(shift):
                    raise BrokenJsonError(
                        self.offset, f"the text ends in the middle of the value that starts at {began}"
                    )
                start -= shift
                continue
            byte = self.buf[at]
            self.pos += 1
            if byte in _CLOSER:
                closers.append(_CLOSER[byte])
            elif closers.pop() != byte:
                raise BrokenJsonError(self.offset - 1, "a bracket that closes another kind of bracket")
            if not closers:
                return self.buf[start : self.pos] if whole and self.pos - start <= self._limit else None

    def _fill(self, keep: int) -> bool:
        """Reads on, forgetting what is before `keep`; whether there was more.

        It reads as much as it holds already, so that what is searched again stays in proportion.
        """
        data = self._read(max(CHUNK_BYTES, len(self.buf) - keep))
        if data:
            self.buf = self.buf[keep:] + data
            self.pos -= keep
            self._base += keep
        return bool(data)
