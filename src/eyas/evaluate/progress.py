"""How far an evaluation is."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from eyas.liveview import LiveView
from eyas.rates import human_time


class PromptsView(LiveView):
    """Prompts that are done, pass after pass: see LiveView."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "evaluate", clock)
        self._name, self._done, self._total = "", 0, 0
        self._first, self._began_s = 0, clock()

    def count(self, done: int, total: int, name: str = "") -> None:
        """`done` prompts of `total`; another name is another pass, whose time is its own."""
        if name != self._name or done < self._done or not self._total:
            self._name, self._first, self._began_s = name, done, self._clock()
        self._done, self._total = done, total
        self.refresh()

    def _progress(self) -> tuple[int, int | None]:
        return self._done, self._total

    def _parts(self) -> list[tuple[str, str]]:
        parts = [("prompts", f"{self._done:,}/{self._total:,}")]
        if (new := self._done - self._first) > 0:
            left_s = (self._clock() - self._began_s) / new * (self._total - self._done)
            parts.append(("left", human_time(left_s)))
        return [*parts, ("at", self._name)] if self._name else parts
