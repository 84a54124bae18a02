"""How far a run is: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_EVERY_S: Final = 10.0
_PANEL_EVERY_S: Final = 0.25


class LiveView(ABC):
    """Shows a run: a panel that is redrawn on a terminal, a line every ten seconds elsewhere.

    Use as a context manager, and feed it from one thread. What is shown is for subclasses to say.

    Args:
        console: where it goes.
        verb: what the panel is headed with.
        clock: seconds.
    """

    def __init__(self, console: Console, verb: str, clock: Callable[[], float]) -> None:
        self._console, self._verb, self._clock = console, verb, clock
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        self._every_s = _PANEL_EVERY_S if self._live else _PLAIN_EVERY_S
        self._next_s = clock() + (0.0 if self._live else self._every_s)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the panel."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Redraw when it is time to; call now and then even without news."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self._every_s
        if self._live:
            self._live.update(self._panel())
        else:
            self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)

    @abstractmethod
    def _progress(self) -> tuple[int, int | None]:
        """How much is done, and of how much; None where that is open."""

    @abstractmethod
    def _parts(self) -> list[tuple[str, str]]:
        """Names and texts of what there is to show."""

    def _line(self) -> str:
        done, total = self._progress()
        share = "" if total is None else f"{done / max(1, total):6.1%}  "
        return share + "  ".join(f"{name} {text}" for name, text in self._parts())

    def _panel(self) -> Table:
        done, total = self._progress()
        grid = Table.grid(padding=(0, 1))
        bar_total = None if total is None else max(1, total)
        grid.add_row(Text(self._verb), ProgressBar(total=bar_total, completed=done, width=50, pulse=total is None))
        for name, text in self._parts():
            grid.add_row(Text(name), Text(text))
        return grid
