"""Rows that share text with an evaluation set: 13 words in a row, or a whole user turn that is shorter than that.

Words are those of `normalise.words`. Each is 64 bits (xxh3), and 13 in a row are 64 bits again (a sum of odd
multiples), so a row is compared with evaluation sets of any size by one search in a sorted array.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.data.prepare.normalise import words
from eyas.data.rows import Chat, Dropped, Message, Preformatted, Row, Sampled
from eyas.data.sources import Input, Raw, open_sources, parse
from eyas.errors import ConfigError

GRAM_WORDS: Final = 13
_REFERENCES: Final = ("reference", "references", "answer", "answers", "canonical_solution")

Hashes = npt.NDArray[np.uint64]

_MULTIPLES: Final = np.array([xxhash.xxh3_64_intdigest(b"%d" % i) | 1 for i in range(GRAM_WORDS)], dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationIndex:
    """Evaluation sets as rows are compared with them; picklable.

    Attributes:
        grams: uint64 [G], ascending: every 13 words in a row of any user turn or reference.
        gram_origins: int32 [G], index into `origins` of the first row that has them.
        turns: user turns of fewer words, as one hash -> index into `origins`.
        origins: `file:line` of each evaluation row.
        unread: rows of the evaluation sets that could not be read.
    """

    grams: Hashes
    gram_origins: npt.NDArray[np.int32]
    turns: dict[int, int]
    origins: list[str]
    unread: int = 0

    @classmethod
    def read(cls, sets: Sequence[str]) -> Self:
        """The evaluation sets in files, folders or globs of any layout that `prepare` reads.

        Raises:
            ConfigError: one of them cannot be read, or holds no text.
        """
        origins: list[str] = []
        grams: list[Hashes] = []
        owners: list[int] = []
        turns: dict[int, int] = {}
        unread = 0
        for one in open_sources(sets):
            before = len(origins)
            for row, references in _rows(one):
                if isinstance(row, Dropped | Sampled):
                    unread += 1
                    continue
                number = len(origins)
                origins.append(f"{row.file}:{row.line}")
                for text in [*_texts(row), *references]:
                    if len(found := _grams(text)):
                        grams.append(found)
                        owners.append(number)
                for text in _user_turns(row):
                    if (turn := _short_turn(text)) is not None:
                        turns.setdefault(turn, number)
            if len(origins) == before:
                raise ConfigError("no text in the evaluation set", one.path, "rows of turns, messages or prompts")
        return cls(*_index(grams, owners), turns, origins, unread)

    def find(self, messages: Iterable[Message]) -> str | None:
        """The first evaluation row, as `file:line`, that a conversation meets."""
        for message in messages:
            for text in _message_texts(message):
                if (met := self.find_text(text)) is not None:
                    return met
            turn = _short_turn(message["content"]) if message["role"] == "user" and self.turns else None
            if turn is not None and turn in self.turns:
                return self.origins[self.turns[turn]]
        return None

    def find_text(self, text: str) -> str | None:
        """The first evaluation row, as `file:line`, that a text shares 13 words in a row with."""
        hashes = _grams(text)
        if not len(hashes) or not len(self.grams):
            return None
        at = np.minimum(np.searchsorted(self.grams, hashes), len(self.grams) - 1)
        met = np.flatnonzero(self.grams[at] == hashes)
        return self.origins[int(self.gram_origins[at[met[0]]])] if len(met) else None


def _index(grams: list[Hashes], owners: list[int]) -> tuple[Hashes, npt.NDArray[np.int32]]:
    if not grams:
        return np.empty(0, np.uint64), np.empty(0, np.int32)
    every = np.concatenate(grams)
    owner = np.repeat(np.array(owners, dtype=np.int32), [len(found) for found in grams])
    unique, first = np.unique(every, return_index=True)  # of equal ones the first
    return unique, owner[first]


def _grams(text: str) -> Hashes:
    """uint64 [words - 12]."""
    hashes = np.fromiter(map(_word_hash, words(text)), dtype=np.uint64)
    if len(hashes) < GRAM_WORDS:
        return hashes[:0]
    windows = np.lib.stride_tricks.sliding_window_view(hashes, GRAM_WORDS)
    return (windows * _MULTIPLES).sum(axis=1, dtype=np.uint64)  # wraps, as hashes do


def _short_turn(text: str) -> int | None:
    """A whole turn of fewer than 13 words as 64 bits; None for a longer or a wordless one."""
    found = words(text)
    return _word_hash(" ".join(found)) if 0 < len(found) < GRAM_WORDS else None


@lru_cache(maxsize=1 << 17)
def _word_hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))


# --- the texts of rows ------------------------------------------------------------------------------------------------


def _rows(one: Input) -> Iterator[tuple[Row, list[str]]]:
    for raw in one.rows_raw():
        yield parse(raw), _references(raw)


def _references(raw: Raw) -> list[str]:
    """Answers beside the turns, which no layout of conversations has a place for."""
    row = raw.payload
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return []
    if not isinstance(row, dict):
        return []
    found = [row.get(name) for name in _REFERENCES]
    texts = [text for value in found for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _texts(row: Chat | Preformatted) -> Iterator[str]:
    """What an evaluation row asks, and answers it comes with; system prompts are shared by many sets."""
    if isinstance(row, Preformatted):
        yield row.text
        return
    for message in row.messages:
        if message["role"] != "system":
            yield from _message_texts(message)


def _user_turns(row: Chat | Preformatted) -> list[str]:
    messages = row.messages if isinstance(row, Chat) else []
    return [message["content"] for message in messages if message["role"] == "user"]


def _message_texts(message: Message) -> Iterator[str]:
    for key in ("content", "reasoning_content"):
        if text := message.get(key):
            yield text
