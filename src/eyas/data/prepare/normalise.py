"""Text as filters compare it: case, spacing and punctuation apart. Pure."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from itertools import groupby
from typing import Final

#: Scripts written without spaces: each character counts as a word.
_UNSPACED: Final = (
    (0x0E00, 0x0E7F),  # Thai
    (0x0E80, 0x0EFF),  # Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)

_ASCII_REST: Final = re.compile("[^a-z0-9]+")
_ASCII_WORDS: Final = re.compile("[a-z0-9]+")


def letters(text: str) -> str:
    """Letters, their marks and digits alone, after NFKC and case folding.

    A text that has none (an emoji, a row of question marks) is kept as it is: it is not the same as every other one.
    """
    folded = _folded(text)
    rest = _ASCII_REST if folded.isascii() else _patterns()[0]
    return rest.sub("", folded) or folded.strip()


def words(text: str) -> list[str]:
    """Runs of letters, marks and digits, after NFKC and case folding; in scripts without spaces each character."""
    folded = _folded(text)
    return (_ASCII_WORDS if folded.isascii() else _patterns()[1]).findall(folded)


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What is no letter, mark or digit; and a word. Python's `\\w` has no marks, without which Hindi vowels vanish."""
    rest = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] not in "LMN"]
    unspaced = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSPACED)
    return re.compile(f"[{_ranges(rest)}]+"), re.compile(f"[^{_ranges(rest)}{unspaced}]+|[^{_ranges(rest)}]")


def _ranges(codes: list[int]) -> str:
    """A character class's inside for ascending code points."""
    parts: list[str] = []
    for _, run in groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0]):
        block = [code for _, code in run]
        parts.append(f"\\U{block[0]:08x}-\\U{block[-1]:08x}")
    return "".join(parts)
