"""Which answers of a chat are asked for, what the server is told for each, and the row that comes of it. Pure.

    script_of(chat, system) -> Script     steps: a message that is kept, or ANSWER, a turn of the target's own
    Script.context(answers)               what the server is sent for the next answer; None when there is no next one
    Script.conversation(answers)          the messages of the finished row

Every answer is asked after the answer before it. Rules, where a chat is not simply user, assistant, user, ...:

    no assistant turn at all (a list of prompts)   each user turn is answered
    the last turn is the user's or a tool's        it is answered too
    a turn that called tools                       kept as it is, its results belong to it
    several assistant turns in a row               one turn
    assistant turns before any user turn           left out: there is nothing they answer
    an answer cut by the token limit, or one that  the chat ends there
    calls tools (nobody is there to run them)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from eyas.data.rows import Chat, Message, Tool

ANSWER: Final = None  # a step that the target fills
KEY_BYTES: Final = 16
_SENT: Final = ("role", "content", "reasoning_content", "tool_call_id", "name")  # and tool_calls, as the API wants them


@dataclass(frozen=True, slots=True)
class Script:
    """The steps of one chat.

    Attributes:
        digest: KEY_BYTES bytes that name the prompts and tools, whatever file, id or line they have.
        steps: messages that are kept, and ANSWER for each turn that is the target's.
        system: of the settings, for a chat that has none.
        tools: what the target may call.
    """

    digest: bytes
    steps: tuple[Message | None, ...]
    system: str | None = None
    tools: list[Tool] | None = None

    @property
    def turns(self) -> int:
        """How many answers are asked for at most."""
        return self.steps.count(ANSWER)

    def context(self, answers: Sequence[Message]) -> list[Message] | None:
        """The messages before the next answer; None when the chat is at its end."""
        messages, ended = self._walk(answers)
        return None if ended else messages

    def conversation(self, answers: Sequence[Message]) -> list[Message]:
        """The messages of the row, as far as `answers` go."""
        return self._walk(answers)[0]

    def _walk(self, answers: Sequence[Message]) -> tuple[list[Message], bool]:
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        given = iter(answers)
        for step in self.steps:
            if step is not None:
                messages.append(step)
            elif (answer := next(given, None)) is None:
                return messages, False
            else:
                messages.append(answer)
                if ends_chat(answer):
                    break
        return messages, True


def ends_chat(answer: Message) -> bool:
    """Whether nothing can follow: the answer was cut, or waits for tools that nobody runs."""
    return answer.get("finish_reason") == "length" or bool(answer.get("tool_calls"))


def script_of(chat: Chat, system: str | None = None) -> Script | str:
    """The steps of a chat, or by name why there is nothing to ask: `no-prompt`, `empty-prompt`, `nothing-to-answer`."""
    prompts = [message["content"] for message in chat.messages if message["role"] == "user"]
    if not prompts:
        return "no-prompt"
    if not any(text.strip() for text in prompts):
        return "empty-prompt"
    steps = tuple(_steps(chat.messages))
    if ANSWER not in steps:
        return "nothing-to-answer"
    if any(message["role"] == "system" for message in chat.messages):
        system = None
    return Script(_digest(steps, chat.tools), steps, system, chat.tools or None)


def _steps(messages: Sequence[Message]) -> Iterator[Message | None]:
    every = not any(message["role"] == "assistant" for message in messages)
    asked = False  # a user turn has been seen
    open_ = False  # something waits for an answer
    for is_assistant, run in groupby(messages, lambda message: message["role"] == "assistant"):
        turn = list(run)
        if is_assistant:
            if any(message.get("tool_calls") for message in turn):
                yield from turn
            elif asked:
                yield ANSWER
            open_ = False
            continue
        for message in turn:
            yield message
            asked |= message["role"] == "user"
            open_ |= message["role"] in ("user", "tool")
            if every and message["role"] == "user":
                yield ANSWER
                open_ = False
    if open_ and asked:
        yield ANSWER


def _digest(steps: Sequence[Message | None], tools: Sequence[Tool] | None) -> bytes:
    text = json.dumps([steps, tools or None], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def key_of(digest: bytes, occurrence: int) -> bytes:
    """The name of the `occurrence`-th row (from 0) that asks the same."""
    if not occurrence:
        return digest
    return hashlib.blake2b(b"%b %d" % (digest, occurrence), digest_size=KEY_BYTES).digest()


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the API takes them: arguments of calls as text, and an id for every call and its result."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without a result yet
    for at, message in enumerate(messages):
        out = {name: message[name] for name in _SENT if message.get(name) is not None}
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [_call(call, f"call_{at}_{i}") for i, call in enumerate(calls)]
            waiting = [call["id"] for call in out["tool_calls"]]
        if message["role"] == "tool":
            if "tool_call_id" not in out:
                out["tool_call_id"] = waiting[0] if waiting else f"call_{at}"
            waiting = [name for name in waiting if name != out["tool_call_id"]]
        sent.append(out)
    return sent


def _call(call: Mapping[str, Any], new_id: str) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call.get("id") or new_id, "type": "function", "function": named}


def output_row(
    chat: Chat, script: Script, answers: Sequence[Message], key: bytes, model: str, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """The row that is stored, which `eyas prepare` reads; each answer carries its own `finish_reason`."""
    row: dict[str, Any] = {"id": chat.id, "conversations": script.conversation(answers)}
    if script.tools:
        row["tools"] = script.tools
    finish_reason = answers[-1].get("finish_reason", "stop")
    return row | {"model": model, "finish_reason": finish_reason, "usage": dict(usage), "key": key.hex()}
