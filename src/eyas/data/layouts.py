"""One parsed JSON value -> `Chat`, `Sampled` or `Dropped`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from eyas.data.files import Fault, Raw
from eyas.data.rows import Chat, Dropped, DropReason, Message, Row, Sampled

#: Role as written, folded -> role given to the chat template.
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}

_TOOL_ROLES: Final = ("tool", "function", "ipython", "observation", "function_call")
_MEDIA_COLUMNS: Final = ("image", "images", "audio", "audios", "video", "videos")


class _BadRowError(Exception):
    """Inside this module only: unwinds a row's parser; becomes a Dropped."""

    def __init__(self, reason: DropReason, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def parse(raw: Raw, roles: Mapping[str, str] = {}) -> Row:
    """The row that `raw` holds, or why it cannot be used.

    Args:
        raw: as `Input.rows_raw` gave it.
        roles: further role names, as `prepare.roles` has them.
    """
    try:
        return _row(_value(raw), raw, roles)
    except _BadRowError as bad:
        return Dropped(bad.reason, raw.file, raw.line, bad.detail, raw.source)


def _value(raw: Raw) -> dict[str, Any]:
    row = raw.payload
    if isinstance(row, bytes):
        row = _json(row, raw.offset)
    if isinstance(row, Fault):
        raise _BadRowError(row.reason, row.detail)
    if not isinstance(row, dict):
        raise _BadRowError(DropReason.NOT_AN_OBJECT, f"the line holds {_kind(row)}, not an object")
    return _without_nulls(row)


def _json(line: bytes, offset: int) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRowError(DropReason.BAD_UTF8, f"byte {offset + error.start} of the file: {error.reason}") from error
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else "; the file ends in the middle of a line"
        raise _BadRowError(DropReason.BAD_JSON, f"column {error.colno}: {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise _BadRowError(DropReason.BAD_JSON, str(error)) from error


def _row(row: dict[str, Any], raw: Raw, roles: Mapping[str, str]) -> Chat | Sampled:
    file, line, source = raw.file, raw.line, raw.source
    row_id = _id(row.get("id"), f"{PurePath(file).stem}:{line}")
    match row:
        case {"prompt_ids": prompt, "answer_ids": answer}:
            made_with = row.get("tokenizer_hash", "")
            ids = _ids(prompt, "prompt_ids"), _ids(answer, "answer_ids")
            return Sampled(row_id, *ids, str(made_with), file, line, source)
        case {"conversations": turns} | {"messages": turns}:
            if found := [column for column in _MEDIA_COLUMNS if row.get(column)]:
                raise _BadRowError(DropReason.NOT_TEXT, f"column {found[0]}")
            if row.get("tools"):
                raise _BadRowError(DropReason.TOOLS, "column tools")
            return Chat(row_id, _messages(turns, roles), file, line, source=source)
        case _:
            found = ", ".join(sorted(map(str, row))) or "none"
            raise _BadRowError(DropReason.UNKNOWN_COLUMNS, f"found {found}; expected conversations or messages")


def _messages(turns: Any, roles: Mapping[str, str]) -> list[Message]:
    if isinstance(turns, str):  # some tables keep the list as its JSON text
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise _BadRowError(DropReason.BAD_MESSAGES, "the conversation is a text, not a list") from error
    if not isinstance(turns, list) or not turns:
        raise _BadRowError(DropReason.BAD_MESSAGES, f"the conversation is {_kind(turns)}, not a list of messages")
    return [_message(turn, f"message {i}", roles) for i, turn in enumerate(turns)]


def _message(turn: Any, where: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise _BadRowError(DropReason.BAD_MESSAGES, f"{where} is {_kind(turn)}, not an object")
    turn = _without_nulls(turn)
    if turn.get("tool_calls") or turn.get("function_call"):
        raise _BadRowError(DropReason.TOOLS, f"{where} calls tools")
    match turn:
        case {"role": role, "content": content} | {"from": role, "value": content}:
            pass
        case {"role": _} | {"from": _}:
            raise _BadRowError(DropReason.BAD_MESSAGES, f"{where} has no content")
        case _:
            raise _BadRowError(DropReason.UNKNOWN_ROLE, f"{where} has no role")
    message = {"role": _role(role, where, roles), "content": _text(content, f"{where}.content")}
    if reasoning := turn.get("reasoning_content"):
        message["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    return message


def _role(role: Any, where: str, roles: Mapping[str, str]) -> str:
    folded = role.strip().lower() if isinstance(role, str) else ""
    if folded in roles:
        return roles[folded]
    if folded in _TOOL_ROLES:
        raise _BadRowError(DropReason.TOOLS, f"{where} has the role {folded}")
    if folded not in ROLES:
        raise _BadRowError(DropReason.UNKNOWN_ROLE, f"{where} has the role {role!r}")
    return ROLES[folded]


def _text(content: Any, where: str) -> str:
    """A text, or the texts of a list of text parts joined; never the `repr` of anything else."""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        texts = [text for text in parts if isinstance(text, str)]
        if not parts or len(texts) < len(parts):
            raise _BadRowError(
                DropReason.NOT_TEXT, f"{where} has parts that are not text" if parts else f"{where} is []"
            )
        content = "".join(texts)
    if not isinstance(content, str):
        raise _BadRowError(DropReason.BAD_MESSAGES, f"{where} is {_kind(content)}, not a text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRowError(DropReason.BAD_TEXT, f"{where} has half a surrogate pair at {error.start}") from error
    return content


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _BadRowError(DropReason.BAD_TOKENS, f"{where} is not a list of integers")
    return value


def _id(value: Any, missing: str) -> str:
    if value is None:
        return missing
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _kind(value: Any) -> str:
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
        case _:
            return "an object"
