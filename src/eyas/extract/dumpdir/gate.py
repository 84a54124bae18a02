"""Several rows in flight, but never two of one length: among our own, a token count then is an identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    length: int
    alone: bool
    admitted: asyncio.Future[None]


class LengthGate:
    """Admits rows whose lengths all differ; a row that must be alone waits for all others, and later ones for it."""

    def __init__(self) -> None:
        self._lengths: set[int] = set()
        self._alone = False
        self._waiting: list[_Waiter] = []

    @property
    def lengths(self) -> frozenset[int]:
        """Of the rows in flight."""
        return frozenset(self._lengths)

    @asynccontextmanager
    async def hold(self, length: int, *, alone: bool = False) -> AsyncIterator[None]:
        """Be in flight with a row of `length` tokens."""
        waiter = _Waiter(length, alone, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._admit()
        try:
            await waiter.admitted
            yield
        finally:
            if waiter in self._waiting:  # cancelled before its turn
                self._waiting.remove(waiter)
            else:
                self._lengths.discard(length)
                self._alone = False
            self._admit()

    def _admit(self) -> None:
        """Let in whoever may go, oldest first; nobody overtakes one that waits to be alone."""
        for waiter in list(self._waiting):
            if self._alone or (waiter.alone and self._lengths):
                return
            if waiter.length in self._lengths:
                continue
            self._waiting.remove(waiter)
            self._lengths.add(waiter.length)
            self._alone = waiter.alone
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)
