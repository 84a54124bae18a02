"""Exact duplicates: a row's keys are made where it is parsed, and kept, 16 bytes each, where rows are counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from eyas.data.prepare.normalise import letters
from eyas.data.rows import Message, Tool

_KEY_BYTES = 16


def conversation_key(messages: Iterable[Message], tools: Iterable[Tool] | None = None) -> bytes:
    """16 bytes that name a whole conversation: every role and text, thoughts, tool calls and tools."""
    parts: list[str] = []
    for message in messages:
        parts += [message["role"], letters(message.get("content") or "")]
        parts.append(letters(message.get("reasoning_content") or ""))
        parts.append(_json(message.get("tool_calls")))
    return key_of([*parts, _json(tools)])


def prompt_key(messages: Iterable[Message]) -> bytes:
    """16 bytes that name a conversation's user turns."""
    return key_of(letters(message.get("content") or "") for message in messages if message["role"] == "user")


def text_key(text: str) -> bytes:
    """16 bytes that name a row that is one text, or whose user turns are not known one by one."""
    return key_of([letters(text)])


def key_of(parts: Iterable[str]) -> bytes:
    """16 bytes that name a list of texts: lengths come first, so that no two lists run together."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d\n" % len(data))
        digest.update(data)
    return digest.digest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if value else ""


class Seen:
    """The conversations met so far. Rows with an answer and rows without one are counted apart:

    a prompt is a duplicate of an answered row with the same key, for its answer would be learned twice; but an answered
    row is not thrown away because its bare prompt came earlier.
    """

    def __init__(self) -> None:
        self._answered: set[bytes] = set()
        self._asked: set[bytes] = set()

    def is_new(self, key: bytes, *, answered: bool = True) -> bool:
        """Whether `key` was not met before; it is from now on."""
        if key in self._answered or (not answered and key in self._asked):
            return False
        (self._answered if answered else self._asked).add(key)
        return True
