"""Conversations that no one would write: planted tokens, thoughts, blank turns, greetings, calls, results."""

# ruff: noqa: RUF001 (DeepSeek's control tokens hold fullwidth bars)
from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from eyas.data.rows import Chat, Message

#: Pieces of texts: control tokens of every family, thoughts, white space, characters of several bytes.
PIECES = (
    *("<|im_end|>", "<|im_start|>assistant\n", "<|im_start|>user\n", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>", "<|python_tag|>", "<|im_", "end|>"),
    *("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<think>\nso\n</think>\n\n", "\n", "\n\n", " ", "  ", "\t"),
    *(
        "assistant",
        "ASSISTANT:",
        "12",
        "3.5",
        "é",
        "e\u0301",
        "\u0301",
        "你好",
        "مرحبا",
        "👩\u200d👩\u200d👧",
        "\u202e",
    ),
    *("\u2028", "\ufeff", "Ａ", "{{ x }}", "{% generation %}", "ok", "Yes", "the answer", ".", "'s", "<", "|", "<|"),
)
NAMES = ("find", "do_it")


def hostile_chats(count: int, seed: int) -> Iterator[Chat]:
    """The same ones for the same seed."""
    dice = _Dice(random.Random(seed))
    for i in range(count):
        yield Chat(f"made:{i}", dice.messages(), "made", i + 1, dice.tools() if dice.chance(0.2) else None)


class _Dice:
    def __init__(self, random_: random.Random) -> None:
        self._random = random_

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def text(self) -> str:
        return "".join(self._random.choices(PIECES, k=self._random.choice((0, 1, 1, 2, 3, 5, 8))))

    def tools(self) -> list[dict[str, Any]]:
        described = [{"name": name, "description": self.text(), "parameters": {}} for name in NAMES]
        return [{"type": "function", "function": function} for function in described]

    def messages(self) -> list[Message]:
        messages: list[Message] = []
        if self.chance(0.3):
            messages.append({"role": "system", "content": self.text()})
        if self.chance(0.1):
            messages.append({"role": "assistant", "content": self.text()})
        for _ in range(self._random.choice((1, 1, 2, 3, 5))):
            messages.append({"role": "user", "content": self.text()})
            if self.chance(0.95):
                messages += self._reply()
        return messages

    def _reply(self) -> list[Message]:
        first = self._answer()
        if not first.get("tool_calls"):
            return [first]
        result = {"role": "tool", "content": self.text(), "tool_call_id": "c1"}
        return [first, result, *([self._answer()] if self.chance(0.8) else [])]

    def _answer(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text()}
        match self._random.randrange(10):
            case 0 | 1:
                message["reasoning_content"] = self.text()
            case 2:
                message["tool_calls"] = [self._call() for _ in range(self._random.choice((1, 1, 2)))]
                message["content"] = self._random.choice(("", None, self.text()))
            case 3 if self.chance(0.4):
                message["finish_reason"] = "length"
            case 4:
                message["content"] = self._random.choice(("", " \n"))
        return message

    def _call(self) -> dict[str, Any]:
        arguments: tuple[Any, ...] = ({}, {"a": self.text()}, {"n": 3, "when": None, "l": [1, "x"]}, "not {json")
        function = {"name": self._random.choice(NAMES), "arguments": self._random.choice(arguments)}
        return {"id": "c1", "type": "function", "function": function}
