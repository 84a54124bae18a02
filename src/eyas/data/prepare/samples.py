"""Rows as a person sees them: the text that the target sees, the trained tokens marked."""

from __future__ import annotations

import itertools
from pathlib import PurePath
from typing import Final

import numpy as np
from rich.console import Console
from rich.text import Text

from eyas.data.names import shortened, visible
from eyas.data.prepare.encode import Kept
from eyas.data.template import Encoded, Template

#: A stretch of more tokens is shortened in its middle.
LONG_TOKENS: Final = 160
_HEAD, _TAIL = 100, 40
#: A conversation of more stretches is shortened in its middle.
LONG_TURNS: Final = 16


def render_sample(template: Template, kept: Kept, rows: list[Encoded], console: Console) -> Text:
    """A row's text as the target sees it: trained tokens in colour, or between ⟦ and ⟧ where there is none."""
    colour = console.is_terminal and not console.no_color
    text = Text()
    for row in rows:
        trained = int(np.count_nonzero(row.loss_mask))
        width, counts = min(console.width, 100), f"  {len(row.tokens):,} tokens, {trained:,} trained "
        place = f"── {kept.id}  {kept.file}:{kept.line}"
        if len(place) + len(counts) > width:
            place = f"── {kept.id}  …/{PurePath(kept.file).name}:{kept.line}"
        head = shortened(visible(place), max(width - len(counts), 20)) + counts
        text.append(head.ljust(width, "─") + "\n", "bold" if colour else "")
        stretches = _stretches(row)
        for number, (start, stop) in enumerate(stretches):
            if len(stretches) > LONG_TURNS and LONG_TURNS - 4 <= number < len(stretches) - 4:
                if number == LONG_TURNS - 4:
                    text.append(f"\n… {len(stretches) - LONG_TURNS:,} stretches of turns …\n", "dim" if colour else "")
                continue
            part = _shortened(template, row.tokens[start:stop].tolist())
            if row.loss_mask[start]:
                text.append(part if colour else f"⟦{part}⟧", "bold green" if colour else "")
            else:
                text.append(part)
        text.append("" if text.plain.endswith("\n") else "\n")
    return text


def _stretches(row: Encoded) -> list[tuple[int, int]]:
    """[start, stop) of tokens that are all trained, or all not."""
    edges = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.tokens)]
    return list(itertools.pairwise(edges))


def _shortened(template: Template, tokens: list[int]) -> str:
    if len(tokens) <= LONG_TOKENS:
        return visible(template.decode(tokens))
    # A cut may go through a character that is several tokens.
    head, tail = template.decode(tokens[:_HEAD]).rstrip("\ufffd"), template.decode(tokens[-_TAIL:]).lstrip("\ufffd")
    return f"{visible(head)} … {len(tokens) - _HEAD - _TAIL:,} tokens … {visible(tail)}"
