"""How fast work is done: tokens/s over a sliding window, and an ETA by tokens with its spread.

Rows differ in length a hundredfold, so an ETA by rows swings; tokens cost nearly the same each.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
#: The ETA looks further back than the speed: a minute's dip is no forecast of hours.
ETA_WINDOW_S = 1800.0
_BUCKETS = 6
_STEPS, _LONGEST_STEP_S = 600, 0.5  # the finest division of a window
_MIN_SPAN_S = 1.0


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds left: the estimate, and the range it would span if speed stayed within two standard errors."""

    seconds: float
    low: float
    high: float


class RateMeter:
    """Tokens finished over a sliding window of `window_s` seconds; times are seconds on any one clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._step_s = min(window_s / _STEPS, _LONGEST_STEP_S)
        self._done: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, tokens: int) -> None:
        """`tokens` finished at time `at_s`; times must not fall."""
        if len(self._done) > 1 and at_s - self._done[-1][0] < self._step_s:
            at_s, tokens = self._done[-1][0], tokens + self._done.pop()[1]  # thousands of short rows cost no more
        self._done.append((at_s, tokens))
        # One older event stays: it marks where the window's first interval began.
        while len(self._done) > 2 and self._done[1][0] <= at_s - self._window_s:
            self._done.popleft()

    def rate(self, now_s: float) -> float | None:
        """Tokens/s over the window, or None before there is a second to speak of.

        The first event only opens the interval: its tokens were worked on before it, start-up included.
        """
        if not self._done or now_s - self._done[0][0] < _MIN_SPAN_S:
            return None
        return (sum(tokens for _, tokens in self._done) - self._done[0][1]) / (now_s - self._done[0][0])

    def eta(self, now_s: float, tokens_left: int) -> Eta | None:
        """When `tokens_left` will be done; None while no rate is known."""
        rate = self.rate(now_s)
        if not rate:
            return None
        error = self._standard_error(now_s)
        slow, fast = max(rate - 2 * error, rate / 10), rate + 2 * error
        return Eta(tokens_left / rate, tokens_left / fast, tokens_left / slow)

    def _standard_error(self, now_s: float) -> float:
        start = self._done[0][0]
        width = (now_s - start) / _BUCKETS
        sums = [0.0] * _BUCKETS
        for at_s, tokens in list(self._done)[1:]:
            sums[min(int((at_s - start) / width), _BUCKETS - 1)] += tokens
        mean = sum(sums) / _BUCKETS
        return math.sqrt(sum((s - mean) ** 2 for s in sums) / (_BUCKETS - 1) / _BUCKETS) / width


def human_time(seconds: float) -> str:
    """70 -> `1m10s`."""
    total = max(0, round(seconds))
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def human_bytes(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
