"""Whether a template rendered tools, calls and results: judged by its text, for no template says what it can. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.data.rows import DropReason, Message, Tool
from eyas.data.template.repairs import thought_of


def tools_fault(tools: Sequence[Tool] | None, prompt: str, bare: str = "") -> tuple[DropReason, str] | None:
    """The first tool that the prompt does not name oftener than the same prompt without tools, `bare`, does."""
    for tool in tools or ():
        name = _function(tool).get("name", "")
        if not name or prompt.count(name) <= bare.count(name):
            return DropReason.TOOLS, f"the template does not render the tool {name!r}"
    return None


def results_fault(messages: Sequence[Message], text: str) -> tuple[DropReason, str] | None:
    """The first tool result that the text does not hold, as it is or as JSON."""
    for message in messages:
        if message["role"] == "tool" and not _holds(text, (message.get("content") or "").strip()):
            return DropReason.TOOLS, f"the template does not render the result {message['content'].strip()[:40]!r}"
    return None


def calls_fault(message: Message, emission: str, turn: str) -> tuple[DropReason, str] | None:
    """The first call of a message that is not in what its turn emits, or is in its rendering as it must not be.

    Arguments that are objects become JSON, tags or whatever the template likes, but never a Python literal. Arguments
    that are text, because they are not JSON, must be there as they are: quoted once more they would be another call.
    """
    for call in message.get("tool_calls") or ():
        function = _function(call)
        name, arguments = function.get("name", ""), function.get("arguments")
        if not name or name not in _besides_words(emission, message, name):
            return DropReason.TOOLS, f"the template does not render the call of {name!r}"
        if isinstance(arguments, str):
            if arguments.strip() not in turn:
                return DropReason.BAD_TOOLS, f"the arguments of {name!r} are not rendered as they are: {arguments[:40]}"
        elif arguments and (literal := repr(arguments)) in turn and literal != _json(arguments):
            return DropReason.TOOLS, f"the template renders the arguments of {name!r} as a Python literal"
    return None


def _besides_words(emission: str, message: Message, name: str) -> str:
    """What a turn emits besides its words, where those hold the name too."""
    for words in ((message.get("content") or "").strip(), thought_of(message)):
        if name in words:
            emission = emission.replace(words, "", 1)
    return emission


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return value.get("function") or value


def _holds(text: str, part: str) -> bool:
    return not part or part in text or _json(part)[1:-1] in text or json.dumps(part)[1:-1] in text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
