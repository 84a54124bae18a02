"""Where a field's bytes come from on their way into a shard: piece by piece, so that none is touched twice.

What is in memory already gives pieces of itself, without a copy (`source_of`); what still lies elsewhere, a record file
say, is read into a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """The bytes of one field of one row, to be read once and in order."""

    @property
    def nbytes(self) -> int:
        """How many there are."""
        ...

    def pieces(self, size: int) -> Iterator[memoryview]:
        """All bytes in order, `size` at a time and at last the rest.

        A piece is valid until the thread asks for the next one, of any source: it may lie in a buffer they share.
        Whoever reads it sees the same bytes each time, whatever becomes of where they came from.
        """
        ...


def flat(data: Any) -> memoryview:
    """The bytes of any C-contiguous buffer, without a copy.

    Raises:
        TypeError: not a buffer, or not contiguous.
    """
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return view.cast("B")


class _Held:
    """A source whose bytes are in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def pieces(self, size: int) -> Iterator[memoryview]:
        for start in range(0, len(self._data), size):
            yield self._data[start : start + size]


def source_of(data: Any) -> Source:
    """A source as it is; any C-contiguous buffer as one. Raises TypeError for anything else."""
    return data if isinstance(data, Source) else _Held(flat(data))
