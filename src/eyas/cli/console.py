"""The two streams that commands write to, and how lines of a result are printed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def plain(text: str) -> str:
    """A text of a file or a path, which may hold markup, or bytes that are no characters."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def say_lines(lines: Sequence[Text]) -> None:
    """Styled lines, each unwrapped."""
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def say_table(lines: list[tuple[str, str]]) -> None:
    """Names in a column, and what there is to say about each."""
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        out.print(f"{name:<{width}}  {plain(text)}", highlight=False, soft_wrap=True)


def say_figures(table: Table) -> None:
    """A table as wide as its cells are, whatever the terminal or the file is: rich would cut figures."""
    width = max(out.width, out.measure(table, options=out.options.update(max_width=10_000)).maximum)
    segments = out.render(table, out.options.update(width=width, max_width=width))
    out.print(Segments(segments), crop=False, soft_wrap=True, end="")
