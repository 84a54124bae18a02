"""What a block of code costs in lines and bytes: a count is the same on a busy machine, seconds are not."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import eyas

OURS = str(Path(eyas.__file__).parent)


class Cost:
    """Lines of this package that ran while it was entered, in any thread; bytes that went through system calls."""

    def __enter__(self) -> Cost:
        self._lines, self._bytes = itertools.count(), io_bytes()
        self._before = sys.gettrace()
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        threading.settrace(self._before)  # pyright: ignore[reportArgumentType]
        self.lines, self.bytes = next(self._lines), io_bytes() - self._bytes

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        next(self._lines)  # atomic, unlike an addition
        return self._line


def io_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


_opened: list[list[str]] = []  # where names go at the moment


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(arguments[0], str | Path):
        _opened[-1].append(Path(arguments[0]).name)


sys.addaudithook(_hook)  # it stays as long as the process


@contextmanager
def opened() -> Iterator[list[str]]:
    """Names of all files that are opened, by whichever thread."""
    _opened.append([])
    try:
        yield _opened[-1]
    finally:
        _opened.pop()


def linear(counts: list[int]) -> bool:
    """Whether going from 2n to 4n costs twice what going from n to 2n does; quadratic growth costs four times that.

    What is the same for any number of rows falls out; a few thousand are what timers and threads may make of it.
    """
    return counts[2] - counts[1] <= 1.1 * 2 * (counts[1] - counts[0]) + 4096
