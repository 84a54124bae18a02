"""What capture costs the server's forward thread, measured there."""

from __future__ import annotations

from typing import Final

_KEPT: Final = 1000
_EVERY: Final = 64  # forwards between two looks: sorting a thousand numbers costs some of what it measures


class ForwardCost:
    """Percentiles over the last thousand forwards.

    Attributes:
        p50_us, p99_us: microseconds; 0 before the first forward, at most 64 forwards old.
    """

    def __init__(self) -> None:
        self.p50_us = 0.0
        self.p99_us = 0.0
        self._last: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """One more forward."""
        if len(self._last) < _KEPT:
            self._last.append(seconds)
        else:
            self._last[self._count % _KEPT] = seconds
        self._count += 1
        if self._count < 16 or self._count % _EVERY == 0:
            ordered = sorted(self._last)
            self.p50_us, self.p99_us = (
                round(1e6 * ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.99)
            )
