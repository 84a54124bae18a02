"""Conversations as a template will take them: other forms of the same messages, and repairs where it raises. Pure.

What a template allows is never changed. Where it raises, or leaves a call out, the same messages are tried in other
forms (arguments as text, no content beside a call); then these repairs, the fewest that help, in this order, and noted:

1. a system message is merged into the user turn after it,
2. turns of one role in a row are merged, a blank line between them,
3. a greeting before the first user turn is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

from eyas.data.rows import Message

SYSTEM_MERGED: Final = "system-merged-into-user"
TURNS_MERGED: Final = "consecutive-turns-merged"
GREETING_DROPPED: Final = "greeting-dropped"

#: One thought at the start of a content, and nothing else that looks like one.
_THOUGHT: Final = re.compile(r"\s*<think>((?:(?!</?think>).)*)</think>((?:(?!</?think>).)*)", re.DOTALL)


def readable(message: Message, reasoning_field: str | None) -> Message:
    """A message with the fields a template reads: no nulls, and the thought where it looks for it."""
    content = message.get("content")
    thinks = reasoning_field is not None and message["role"] == "assistant" and "<think>" in (content or "")
    if content is not None and len(message) == 2 and not thinks:
        return message
    kept = {key: value for key, value in message.items() if value is not None and key != "finish_reason"}
    kept.setdefault("content", "")
    if reasoning_field is None or message["role"] != "assistant":
        return kept
    thought = kept.pop("reasoning_content", None)
    if thinks and not (thought or "").strip() and (inline := _THOUGHT.fullmatch(kept["content"])):
        thought, kept["content"] = inline[1].strip("\n"), inline[2].lstrip("\n")
    if thought is not None:
        kept[reasoning_field] = thought
    return kept


def thought_of(message: Message) -> str:
    """What an assistant thought before its answer, in a field of its own or at the start of the content."""
    field = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), "")
    if field:
        return str(field).strip()
    content = message.get("content") or ""
    inline = _THOUGHT.fullmatch(content) if "<think>" in content else None
    return inline[1].strip() if inline else ""


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The same messages in the other forms that some templates want, the likeliest first."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    as_text = any(not isinstance(_function(call).get("arguments"), str) for call in calls)
    unsaid = any(message.get("tool_calls") and not message["content"].strip() for message in messages)
    if as_text:
        yield [_with_text_arguments(message) for message in messages]
    if unsaid:
        yield [_without_blank_content(message) for message in messages]
    if as_text and unsaid:
        yield [_without_blank_content(_with_text_arguments(message)) for message in messages]


def repairs(messages: list[Message]) -> Iterator[tuple[list[Message], tuple[str, ...]]]:
    """Repaired conversations, the fewest changes first, and the notes that name them."""
    for count in range(1, len(_REPAIRS) + 1):
        for chosen in combinations(_REPAIRS, count):
            repaired = messages
            for note in chosen:
                changed = _REPAIRS[note](repaired)
                if changed == repaired:
                    break  # nothing to repair: the smaller choice was tried
                repaired = changed
            else:
                yield repaired, chosen


def _merge_system(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            merged.append({**message, "content": "\n\n".join([*filter(str.strip, waiting), message["content"]])})
            waiting = []
        else:
            merged.append(message)
    return merged if not waiting else messages


def _merge_turns(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] != "tool" and not last.get("tool_calls"):
            both = {**last, **message}
            for field in ("content", "reasoning_content", "reasoning", "thinking"):
                texts = [one[field] for one in (last, message) if one.get(field)]
                if texts:
                    both[field] = "\n\n".join(texts)
            merged[-1] = both
        else:
            merged.append(message)
    return merged


def _drop_greeting(messages: list[Message]) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return [message for message in messages[:first] if message["role"] != "assistant"] + messages[first:]


_REPAIRS: Final[Mapping[str, Callable[[list[Message]], list[Message]]]] = {
    SYSTEM_MERGED: _merge_system,
    TURNS_MERGED: _merge_turns,
    GREETING_DROPPED: _drop_greeting,
}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function") or call


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(_function(call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _without_blank_content(message: Message) -> Message:
    blank = message.get("tool_calls") and not message["content"].strip()
    return {**message, "content": None} if blank else message
