"""What a training run has seen: rows, tokens, the loss and the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from layout import Layout

_SAMPLES = 20  # of the loss


@dataclass
class RunRecord:
    """Filled by a trainer as it steps.

    Attributes:
        layout: whose rows are trained on.
        total_steps: that the run takes.
        began: time.perf_counter() when the data was laid out and imports were done.
        step_ends: the clock after each step, as the host sees it; it does not wait for the GPU.
        tokens, trained: of the rows seen so far, each time they are seen, without padding.
        loss: (step from 1, loss) where the trainer reports one.
    """

    layout: Layout
    total_steps: int
    began: float = 0.0
    step_ends: list[float] = field(default_factory=list)
    tokens: int = 0
    trained: int = 0
    loss: list[tuple[int, float]] = field(default_factory=list)

    @property
    def every(self) -> int:
        """Steps between two losses, so that there are about twenty."""
        return max(1, self.total_steps // _SAMPLES)

    def saw(self, rows: Iterable[int]) -> None:
        """A step's rows, by their number in the layout."""
        for row in rows:
            self.tokens += self.layout.tokens[row]
            self.trained += self.layout.trained[row]

    def stepped(self) -> None:
        """A step has ended."""
        self.step_ends.append(time.perf_counter())

    def as_dict(self) -> dict[str, Any]:
        """For result.json; the run ends with this call.

        `compile_s` is by how much the first step, reading its batch included, took longer than the middle one of the
        others; `setup_s` is what came before the first step's end beside it.
        """
        seconds = time.perf_counter() - self.began
        found: dict[str, Any] = {
            "steps": len(self.step_ends),
            "train_tokens": self.tokens,
            "trained_tokens": self.trained,
            "gpu_seconds": round(seconds, 2),
            "loss": [[step, round(loss, 5)] for step, loss in self.loss],
        }
        gaps = [after - before for before, after in zip(self.step_ends, self.step_ends[1:], strict=False)]
        if gaps:
            middle = statistics.median(gaps)
            found |= {
                "step_s": round(middle, 4),
                "first_step_at_s": round(self.step_ends[0] - self.began, 2),
                "slow_steps_s": round(sum(gap - middle for gap in gaps if gap > 3 * middle), 2),
            }
        return found
