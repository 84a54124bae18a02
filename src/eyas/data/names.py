"""How files, faults and texts are shown to people."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

COMPRESSED: Final = (".gz", ".zst", ".zstd", ".bz2", ".xz")
#: Suffixes of files that are read when a folder is named.
SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
_MOST_CHARACTERS: Final = 400


def display(path: PurePath | str) -> str:
    """A path as text that any terminal and any file can take."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def stem(path: PurePath | str) -> str:
    """A file's name without the suffixes that say what it is."""
    name = PurePath(path)
    while name.suffix.lower() in (*COMPRESSED, *SUFFIXES):
        name = PurePath(name.stem)
    return name.name


def printable(text: str) -> str:
    """A message that may quote a file: one line, not too long, nothing that drives a terminal."""
    text = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else text[: width - 1] + "…"


def visible(text: str) -> str:
    """Control and direction characters escaped: a text must not drive the terminal it is shown on."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
