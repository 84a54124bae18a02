"""One row as it was read -> `Chat`, `Preformatted` or `Sampled`, or a `Dropped` that says what is wrong with it.

The columns of a row decide; where several layouts fit, the first of this table wins:

    prompt_ids, answer_ids                      token ids as a target sampled them -> Sampled
    conversations, conversation, messages       a list of messages (or its JSON text), see `messages` -> Chat
    turns                                       a list of user turns (EAGLE, MT-bench), or of messages
    prompt, instruction, question, query, input      the first of them that is there: a text, or a list of messages;
        response, completion, output, answer         and its answer, likewise; without one, the row is a prompt only.
                                                     `instruction` is joined with `input` (or `context`) by a blank
                                                     line; `history` holds [question, answer] pairs that go before it
    text                                        a conversation in the target's own chat format -> Preformatted

Beside a chat: `id` or `question_id`; `system` (or `system_prompt`) goes first if the chat has no system message;
`tools` (or `functions`); `finish_reason` belongs to the last answer. A null column is the same as none, and so are NaN
and Infinity, which are not JSON. A key given twice: the last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from eyas.data.names import printable, stem
from eyas.data.rows import Chat, Dropped, DropReason, Fault, Message, Preformatted, Raw, Row, Sampled
from eyas.data.sources.columns import ANSWERS, CHATS, EXPECTED, IDS, MEDIA, PROMPTS, SYSTEMS, TEXT, TOOLS, TURNS
from eyas.data.sources.messages import BadRowError, checked_text, kind_of, to_messages, to_tools

_BOM: Final = b"\xef\xbb\xbf"
_DECODER: Final = json.JSONDecoder(parse_constant=lambda _: None)


def parse(raw: Raw, roles: Mapping[str, str] = {}) -> Row:
    """The row that `raw` holds, or why it cannot be used.

    Args:
        raw: as `Input.rows_raw` gave it.
        roles: further role names, as `prepare.roles` has them.
    """
    try:
        return _row(_fields(raw), raw, roles)
    except BadRowError as bad:
        return Dropped(bad.reason, raw.file, raw.line, printable(bad.detail), raw.source)
    except RecursionError:
        return Dropped(DropReason.BAD_JSON, raw.file, raw.line, "nested too deeply", raw.source)


# --- values -----------------------------------------------------------------------------------------------------------


def _fields(raw: Raw) -> dict[str, Any]:
    row = raw.payload
    if isinstance(row, bytes):
        row = _json(row, raw.offset)
    elif isinstance(row, Fault):
        raise BadRowError(row.reason, row.detail)
    if not isinstance(row, dict):
        raise BadRowError(DropReason.NOT_AN_OBJECT, f"the row is {kind_of(row)}, not an object")
    return row


def _json(text: bytes, offset: int) -> Any:
    if text[:3] == _BOM:  # files that were joined
        text = text[3:]
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRowError(DropReason.BAD_UTF8, f"byte {offset + error.start}: {error.reason}") from error
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        cut = "; it holds NUL bytes" if b"\0" in text else "; the row ends in the middle" if at_end else ""
        raise BadRowError(DropReason.BAD_JSON, f"column {error.pos + 1}: {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise BadRowError(DropReason.BAD_JSON, str(error)) from error


def _id(row: Mapping[str, Any], raw: Raw) -> str:
    value = next((row[key] for key in IDS if row.get(key) is not None), None)
    if value is None:
        return f"{stem(raw.file)}:{raw.line}"
    match value:
        case str():
            text = value
        case bytes():
            text = value.decode("utf-8") if _is_utf8(value) else value.hex()
        case _:
            text = json.dumps(value, ensure_ascii=False, default=str).removeprefix('"').removesuffix('"')
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- layouts ----------------------------------------------------------------------------------------------------------


def _row(row: dict[str, Any], raw: Raw, roles: Mapping[str, str]) -> Chat | Preformatted | Sampled:
    if row.get("prompt_ids") is not None and row.get("answer_ids") is not None:
        ids = _ids(row["prompt_ids"], "prompt_ids"), _ids(row["answer_ids"], "answer_ids")
        made_with = str(row.get("tokenizer_hash") or "")
        return Sampled(_id(row, raw), *ids, made_with, raw.file, raw.line, raw.source)
    for column in MEDIA:
        if row.get(column):
            raise BadRowError(DropReason.NOT_TEXT, f"column {column}")
    messages = _messages(row, roles)
    if messages is None:
        if (text := row.get(TEXT)) is None:
            raise _unknown(row)
        return Preformatted(_id(row, raw), checked_text(text, TEXT), raw.file, raw.line, raw.source)
    _add_system(row, messages)
    if isinstance(reason := row.get("finish_reason"), str) and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("finish_reason", checked_text(reason, "finish_reason"))
    tools = next((found for key in TOOLS if row.get(key) is not None and (found := to_tools(row[key]))), None)
    return Chat(_id(row, raw), messages, raw.file, raw.line, tools, raw.source)


def _messages(row: dict[str, Any], roles: Mapping[str, str]) -> list[Message] | None:
    for column in CHATS:
        if (turns := row.get(column)) is not None:
            return to_messages(turns, roles, column)
    if (turns := row.get(TURNS)) is not None:
        return _turns(turns, roles)
    for column in PROMPTS:
        if (prompt := row.get(column)) is not None:
            return _pair(row, column, prompt, roles)
    return None


def _turns(turns: Any, roles: Mapping[str, str]) -> list[Message]:
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [{"role": "user", "content": checked_text(turn, f"turn {i}")} for i, turn in enumerate(turns)]
    return to_messages(turns, roles, TURNS)


def _pair(row: dict[str, Any], column: str, prompt: Any, roles: Mapping[str, str]) -> list[Message]:
    messages = _side(prompt, "user", column, roles)
    if column == "instruction":
        more = next((row[key] for key in ("input", "context") if row.get(key)), None)
        if more is not None:
            joined = f"{messages[-1]['content']}\n\n{checked_text(more, 'input')}"
            messages[-1] = {**messages[-1], "content": joined}
    if (history := row.get("history")) is not None:
        messages = _history(history) + messages
    for answer in ANSWERS:
        if (given := row.get(answer)) is not None:
            return messages + _side(given, "assistant", answer, roles)
    return messages


def _side(value: Any, role: str, column: str, roles: Mapping[str, str]) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": checked_text(value, column)}]
    return to_messages([value] if isinstance(value, dict) and "role" in value else value, roles, column)


def _history(pairs: Any) -> list[Message]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRowError(
            DropReason.BAD_MESSAGES, f"history is {kind_of(pairs)}, not a list of [question, answer] pairs"
        )
    return [
        {"role": role, "content": checked_text(text, f"history[{i}]")}
        for i, pair in enumerate(pairs)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _add_system(row: dict[str, Any], messages: list[Message]) -> None:
    system = next((row[key] for key in SYSTEMS if row.get(key)), None)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": checked_text(system, "system")})


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BadRowError(DropReason.BAD_TOKENS, f"{where} is not a list of integers")
    return value


def _unknown(row: dict[str, Any]) -> BadRowError:
    found = ", ".join(f"{key} (null)" if value is None else str(key) for key, value in row.items()) or "none"
    rows = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    hint = f"; if the rows are in {rows[0]}, say so: field: {rows[0]}" if len(rows) == 1 else ""
    return BadRowError(DropReason.UNKNOWN_COLUMNS, f"found {found[:160]}; expected {EXPECTED}{hint}")
