from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.prepare.normalise import letters, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, x_y!", "dontstopxy"),
        ("\uff21\uff22\uff23 \uff11\uff12", "abc12"),
        ("Straße", "strasse"),
        ("की का", "कीका"),  # vowels are marks, and not all the same
        ("你好\uff0c世界", "你好世界"),
        ("???", "???"),
        (" 😀 ", "😀"),
        ("", ""),
    ],
)
def test_letters(text: str, expected: str) -> None:
    assert letters(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, x_y!", ["don", "t", "stop", "x", "y"]),
        ("东京tokyo 2020年", ["东", "京", "tokyo", "2020", "年"]),
        ("สวัส", ["ส", "ว", "ั", "ส"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("की का", ["की", "का"]),
        ("!?", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"])))
def test_words_and_letters_are_the_same_characters(text: str) -> None:
    joined = "".join(words(text))
    assert joined == letters(text) or not joined
    assert all(unicodedata.category(character)[0] in "LMN" for character in joined)


@given(st.lists(st.text("abcXYZ019", min_size=1), max_size=6))
def test_ascii_and_other_texts_are_split_alike(parts: list[str]) -> None:
    text = " ".join(parts)
    assert words(text + " ü") == [*words(text), "ü"]
    assert letters(text + "ü") == (letters(text) if parts else "") + "ü"
