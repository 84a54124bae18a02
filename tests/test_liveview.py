from __future__ import annotations

import io

import pytest
from rich.console import Console

from eyas.liveview import LiveView

TEXTS = ("[/dim] 3 [bold]rows[/]", "[red]x", "a\\[b]", "[link=file:///x]y")


class Shown(LiveView):
    """Shows one text."""

    def __init__(self, console: Console, text: str, now: list[float]) -> None:
        super().__init__(console, text, lambda: now[0])
        self._text = text

    def _progress(self) -> tuple[int, int | None]:
        return 1, 2

    def _parts(self) -> list[tuple[str, str]]:
        return [("[b]name", self._text)]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_shown_as_they_are(text: str, terminal: bool) -> None:
    """Brackets in a name or a figure are no markup, on a terminal or in a file; unmatched ones end nothing."""
    out, now = io.StringIO(), [0.0]
    shown = Shown(Console(file=out, force_terminal=terminal, width=120, color_system=None), text, now)
    with shown:
        now[0] = 11.0
        shown.refresh()
        shown.say(text)
    assert out.getvalue().count(text) >= (3 if terminal else 2)  # what is said, and the panel's heading and part
    assert "[b]name" in out.getvalue()
