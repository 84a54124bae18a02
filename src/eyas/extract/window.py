"""The bound on what is in flight: rows, tokens and bytes at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Most rows, tokens, and bytes of states in flight in one place."""

    requests: int
    tokens: int
    size: int

    def hold(self, requests: int, tokens: int, size: int) -> bool:
        """Whether so much may be in flight."""
        return requests <= self.requests and tokens <= self.tokens and size <= self.size


class Window:
    """Admits rows while all three sums stay under their limits; a row larger than a limit goes alone.

    Args:
        requests: most rows in flight.
        tokens: most tokens in flight.
        bytes_: most bytes of states in flight.
    """

    def __init__(self, requests: int, tokens: int, bytes_: int) -> None:
        self._limits = Limits(requests, tokens, bytes_)
        self._used = (0, 0, 0)
        self._changed = asyncio.Condition()
        self._closed = False

    @property
    def in_flight(self) -> int:
        return self._used[0]

    async def acquire(self, tokens: int, bytes_: int) -> bool:
        """Wait for room. False once the window is closed: no further row may start."""
        cost = (1, tokens, bytes_)
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._fits(cost))
            if self._closed:
                return False
            self._used = tuple(u + c for u, c in zip(self._used, cost, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
            return True

    async def release(self, tokens: int, bytes_: int) -> None:
        """Give back what `acquire` took."""
        async with self._changed:
            self._used = tuple(u - c for u, c in zip(self._used, (1, tokens, bytes_), strict=True))  # pyright: ignore[reportAttributeAccessIssue]
            self._changed.notify_all()

    async def close(self) -> None:
        """Admit nothing more; waiters return False."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, cost: tuple[int, int, int]) -> bool:
        return self._used[0] == 0 or self._limits.hold(*(u + c for u, c in zip(self._used, cost, strict=True)))
