"""Messages as files have them -> messages as chat templates take them.

    {"role", "content"}  OpenAI      {"from", "value"}  ShareGPT      a list of text parts is joined, thoughts apart

Roles are folded (case, spaces) and mapped by ROLES and by those the user adds; any other role is a fault of the row.
Messages keep their order and number. Null fields are the same as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from eyas.data.rows import DropReason, Message, Tool

#: Role as written, folded -> role given to the chat template.
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
#: An assistant's message whose text is the JSON of the tools it calls.
CALL_ROLES: Final = ("function_call", "tool_call")

_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_NO_CALLS: Final = ("[]", "null")  # as their JSON text
_TEXT_PARTS: Final = ("text", "input_text", "output_text", None)
_THOUGHT_PARTS: Final = ("thinking", "reasoning")


class BadRowError(Exception):
    """Within the parsers of rows only: unwinds them, and becomes a Dropped."""

    def __init__(self, reason: DropReason, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def to_messages(turns: Any, roles: Mapping[str, str] = {}, where: str = "the conversation") -> list[Message]:
    """A list of messages, or the list as its JSON text, or columns of one length as some tables keep lists.

    Raises:
        BadRowError: it is none of these, or a message is bad.
    """
    if isinstance(turns, str):
        turns = _from_text(turns, where)
    if isinstance(turns, dict):
        turns = _transposed(turns, where)
    if not isinstance(turns, list) or not turns:
        raise BadRowError(DropReason.BAD_MESSAGES, f"{where} is {kind_of(turns)}, not a list of messages")
    return [_message(turn, i, roles) for i, turn in enumerate(turns)]


def checked_text(text: Any, where: str) -> str:
    """`text`, which some tokenizer can encode.

    Raises:
        BadRowError: it is no text, or holds half a surrogate pair.
    """
    if not isinstance(text, str):
        raise BadRowError(DropReason.BAD_MESSAGES, f"{where} is {kind_of(text)}, not a text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRowError(DropReason.BAD_TEXT, f"{where} has half a surrogate pair at {error.start}") from error
    return text


def kind_of(value: Any) -> str:
    """How JSON names the value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return f"of the type {type(value).__name__}"


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


# --- one message ------------------------------------------------------------------------------------------------------


def _message(turn: Any, i: int, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise BadRowError(DropReason.BAD_MESSAGES, f"message {i} is {kind_of(turn)}, not an object")
    if len(turn) == 2 and not roles:  # most messages
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and isinstance(content, str) and role in ROLES:
            return {"role": ROLES[role], "content": checked_text(content, f"message {i}.content")}
    return _full_message(without_nulls(turn), i, roles)


def _full_message(turn: dict[str, Any], i: int, roles: Mapping[str, str]) -> Message:
    where = f"message {i}"
    role = _role(turn.get("role", turn.get("from")), where, roles)
    content = turn.get("content", turn.get("value"))
    calls: Any = next(
        (turn[key] for key in ("tool_calls", "function_call") if turn.get(key) and turn[key] not in _NO_CALLS), None
    )
    if role in CALL_ROLES:
        if not content:
            _bad_tools(f"{where} calls no tool")
        role, content, calls = "assistant", "", content
    if calls and role != "assistant":
        raise BadRowError(DropReason.BAD_TOOLS, f"{where} is of the {role}, but calls tools")
    message: Message = {"role": role}
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), "")
    thoughts = [_content(reasoning, f"{where}.reasoning_content")[0]] if reasoning else []
    if role == "tool":
        content = _tool_result(content, f"{where}.content")
    elif not content and (calls or thoughts):
        content = ""
    elif content is None:
        raise BadRowError(DropReason.BAD_MESSAGES, f"{where} has no content")
    message["content"], more = _content(content, f"{where}.content")
    if thoughts := [thought for thought in (*thoughts, *more) if thought]:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for key in ("tool_call_id", "name", "finish_reason"):
        if isinstance(value := turn.get(key), str):
            message[key] = checked_text(value, f"{where}.{key}")
    return message


def _role(role: Any, where: str, roles: Mapping[str, str]) -> str:
    folded = role.strip().lower() if isinstance(role, str) else ""
    for name, known in roles.items():
        if name.strip().lower() == folded:
            return known
    if folded in CALL_ROLES:
        return folded
    if folded not in ROLES:
        what = "no role" if role is None else f"the role {short(role)}"
        raise BadRowError(DropReason.UNKNOWN_ROLE, f"{where} has {what}")
    return ROLES[folded]


def _content(content: Any, where: str) -> tuple[str, list[str]]:
    """A text, or the texts of a list of parts joined, and its thoughts; never the `repr` of anything else."""
    if not isinstance(content, list):
        return checked_text(content, where), []
    if not content:
        raise BadRowError(DropReason.NOT_TEXT, f"{where} is []")
    texts, thoughts = list[str](), list[str]()
    for part in content:
        into, text = _part(part)
        if text is None:
            name = part.get("type", "?") if isinstance(part, dict) else kind_of(part)
            raise BadRowError(DropReason.NOT_TEXT, f"{where} has a part that is not text: {short(name)}")
        (thoughts if into == "thought" else texts).append(text)
    return checked_text("".join(texts), where), [checked_text("".join(thoughts), where)]


def _part(part: Any) -> tuple[str, str | None]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        return "", None
    name = part.get("type")
    if name in _TEXT_PARTS:
        return "text", part["text"] if isinstance(part.get("text"), str) else None
    if name in _THOUGHT_PARTS:
        found = (part.get(key) for key in (name, "text") if isinstance(part.get(key), str))
        return "thought", next(found, None)
    return "", None


def _transposed(columns: dict[str, Any], where: str) -> Any:
    """{"role": [...], "content": [...]} -> [{"role", "content"}, ...]"""
    lists = [value for value in columns.values() if isinstance(value, list)]
    if not lists or len(lists) < len(columns) or len({len(items) for items in lists}) > 1:
        raise BadRowError(DropReason.BAD_MESSAGES, f"{where} is an object, not a list of messages")
    return [dict(zip(columns, items, strict=True)) for items in zip(*lists, strict=True)]


def _from_text(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(DropReason.BAD_MESSAGES, f"{where} is a text, not a list of messages") from error


# --- tools ------------------------------------------------------------------------------------------------------------


def to_tools(value: Any) -> list[Tool] | None:
    """What the target may call: a list (or its JSON text) of tools as OpenAI's API has them, or of bare functions.

    Raises:
        BadRowError: it is no such list.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _json_or(value, "the tools are a text that is no JSON")
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise BadRowError(DropReason.BAD_TOOLS, f"the tools are {kind_of(value)}, not a list")
    return [_tool(item, f"tool {i}") for i, item in enumerate(value)]


def _tool(tool: Any, where: str) -> Tool:
    if isinstance(tool, str):
        tool = _json_or(tool, f"{where} is a text that is no JSON")
    if not isinstance(tool, dict):
        _bad_tools(f"{where} is {kind_of(tool)}, not an object")
    if tool.get("type") not in ("function", None) and "function" not in tool and "parameters" not in tool:
        _bad_tools(f"{where} is of the type {short(tool.get('type'))}, not a function")
    function = tool.get("function")
    if function is None:  # a bare function
        function = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        _bad_tools(f"{where} has no name")
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        parameters = _json_or(parameters, f"{where}.parameters is a text that is no JSON")
        function = {**function, "parameters": parameters}
    if not isinstance(parameters, dict | None):
        _bad_tools(f"{where}.parameters is {kind_of(parameters)}, not an object")
    _encodable(function, where)
    return {"type": "function", "function": without_nulls(function)}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _json_or(calls, f"{where} is a text that is no JSON")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        _bad_tools(f"{where} is {kind_of(calls)}, not a list of calls")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = _json_or(call, f"{where} is a text that is no JSON")
    if not isinstance(call, dict):
        _bad_tools(f"{where} is {kind_of(call)}, not an object")
    function = call.get("function") or call
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        _bad_tools(f"{where} has no function name")
    arguments = _arguments(function.get("arguments"), where)
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if (call_id := call.get("id")) is not None:
        made = {"id": call_id if isinstance(call_id, str) else json.dumps(call_id), **made}
    _encodable(made, where)
    return made


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """As servers give them to the template: JSON text is parsed; a text that is no JSON stays one."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, dict):
        _bad_tools(f"{where}.arguments is {kind_of(arguments)}, not an object")
    return arguments


def _tool_result(content: Any, where: str) -> Any:
    """A tool's answer: texts and parts as anywhere; other JSON as its text; nothing is an empty answer."""
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and any(isinstance(part, dict) and "type" in part for part in content):
        return content
    _encodable(content, where)
    return json.dumps(content, ensure_ascii=False, default=str)


def _json_or(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        _bad_tools(fault)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip())


def _encodable(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(DropReason.BAD_TEXT, f"{where} has half a surrogate pair") from error
    except (RecursionError, ValueError, TypeError) as error:
        raise BadRowError(DropReason.BAD_TOOLS, f"{where}: {error}") from error


def _bad_tools(detail: str) -> NoReturn:
    raise BadRowError(DropReason.BAD_TOOLS, detail)


def short(value: Any, most: int = 60) -> str:
    """A value as it is quoted in a message."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
