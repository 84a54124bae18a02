"""How far a training run is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from rich.console import Console

from eyas.acceptance import accept_length
from eyas.liveview import LiveView
from eyas.rates import ETA_WINDOW_S, RateMeter, human_time
from eyas.train.metrics import EvalFacts, StepFacts

_SMOOTHED: Final = 50  # steps over which loss and accuracy are averaged


class TrainView(LiveView):
    """Shows a training run.

    Args:
        console: where it goes.
        total: optimiser steps of the run, or None where a store that grows leaves it open.
        done: steps of earlier sessions: progress, but not speed.
        clock: seconds.
    """

    def __init__(
        self, console: Console, total: int | None, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, "train", clock)
        self._total, self._step = total, done
        self._speed, self._outlook = RateMeter(), RateMeter(ETA_WINDOW_S)
        self._recent: deque[StepFacts] = deque(maxlen=_SMOOTHED)
        self._evaluated: EvalFacts | None = None

    def step(self, facts: StepFacts) -> None:
        """One more optimiser step."""
        now = self._clock()
        self._step = facts.step
        self._recent.append(facts)
        self._speed.add(now, facts.tokens)
        self._outlook.add(now, 1)
        self.refresh()

    def evaluation(self, facts: EvalFacts) -> None:
        """A line of its own, and a part of the panel from now on."""
        self._evaluated = facts
        found = facts.acceptance
        positions = " ".join(f"{share:.2f}" for share in found.by_position)
        self.say(
            f"step {facts.step:,}: acceptance length {found.length:.3f} ({found.low:.3f} to {found.high:.3f}) on "
            f"{facts.rows:,} rows, by position {positions}, loss {facts.loss:.4f}"
        )

    def rate(self) -> float | None:
        """Positions a second over the last minute."""
        return self._speed.rate(self._clock())

    def _parts(self) -> list[tuple[str, str]]:
        rate = self.rate()
        parts = [
            ("step", f"{self._step:,}" + (f"/{self._total:,}" if self._total else "")),
            ("speed", f"{rate:,.0f} tokens/s" if rate else "-"),
            ("left", self._left()),
        ]
        if self._recent:
            count = len(self._recent)
            accuracy = self._accuracy()
            seconds = sum(facts.seconds for facts in self._recent)
            waited = sum(facts.wait_s for facts in self._recent) / seconds if seconds else 0.0
            parts += [
                ("loss", f"{sum(facts.loss for facts in self._recent) / count:.4f}"),
                ("right", " ".join(f"{share:.2f}" for share in accuracy)),
                ("lr", f"{self._recent[-1].lr:.2e}"),
                ("norm", f"{self._recent[-1].norm:.2f}"),
                ("data wait", f"{waited:.0%}"),
            ]
        if self._evaluated:
            found = self._evaluated.acceptance
            parts.append(("accepted", f"{found.length:.3f} at step {self._evaluated.step:,}"))
        elif self._recent:
            # Shares of all rows, not only of chains that were right so far: below what chains reach.
            parts.append(("accepted", f"about {accept_length(self._accuracy()):.2f}"))
        return parts

    def _accuracy(self) -> list[float]:
        depth = len(self._recent[-1].rows_K)
        rows = [sum(facts.rows_K[k] for facts in self._recent) for k in range(depth)]
        right = [sum(facts.right_K[k] for facts in self._recent) for k in range(depth)]
        return [r / n if n else 0.0 for r, n in zip(right, rows, strict=True)]

    def _left(self) -> str:
        if self._total is None:
            return "as long as the store grows"
        eta = self._outlook.eta(self._clock(), self._total - self._step)
        return f"{human_time(eta.seconds)} ({human_time(eta.low)} to {human_time(eta.high)})" if eta else "-"

    def _progress(self) -> tuple[int, int | None]:
        return self._step, self._total
