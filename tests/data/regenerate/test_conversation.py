"""What is asked of a chat: tables of shapes, and rules that hold for every chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.regenerate.conversation import Script, as_sent, key_of, output_row, script_of
from eyas.data.rows import Chat, Message

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def chat(shape: str, **more: Any) -> Chat:
    """`s u a c t`: system, user, assistant, an assistant that calls a tool, its result."""
    makers: dict[str, Message] = {
        "s": {"role": "system", "content": "S"},
        "u": {"role": "user", "content": "U"},
        "a": {"role": "assistant", "content": "old"},
        "c": {"role": "assistant", "content": "", "tool_calls": [CALL]},
        "t": {"role": "tool", "content": "T", "tool_call_id": "c1"},
    }
    return Chat("id", [dict(makers[letter]) for letter in shape], "f.jsonl", 1, **more)


def shape_of(script: Script) -> str:
    """The steps in the letters of `chat`, `A` for an answer."""
    letters = {"system": "s", "user": "u", "assistant": "c", "tool": "t"}
    return "".join("A" if step is None else letters[step["role"]] for step in script.steps)


@pytest.mark.parametrize(
    ("given_", "asked"),
    [
        ("ua", "uA"),
        ("sua", "suA"),
        ("uaua", "uAuA"),
        ("uau", "uAuA"),
        ("u", "uA"),
        ("uu", "uAuA"),  # a list of prompts
        ("suuu", "suAuAuA"),
        ("uua", "uuA"),  # two user turns in a chat stay as they are
        ("aus", "usA"),  # whatever follows it, a user turn is answered
        ("uaa", "uA"),  # one turn in two parts
        ("aua", "uA"),  # nothing asked for the greeting
        ("saua", "suA"),
        ("ucta", "uctA"),
        ("uct", "uctA"),
        ("uctaua", "uctAuA"),
        ("ucctta", "uccttA"),
        ("uacta", "uctctA".replace("ctct", "cct")),  # what was said before calling belongs to the call
        ("uactua", "ucctuA"),
    ],
)
def test_turns_asked(given_: str, asked: str) -> None:
    script = script_of(chat(given_))
    assert isinstance(script, Script)
    assert shape_of(script) == asked


@pytest.mark.parametrize(("given_", "reason"), [("s", "no-prompt"), ("a", "no-prompt"), ("uc", "nothing-to-answer")])
def test_nothing_to_ask(given_: str, reason: str) -> None:
    assert script_of(chat(given_)) == reason


def test_a_blank_prompt_is_not_asked() -> None:
    blank = Chat("i", [{"role": "user", "content": " \n"}], "f", 1)
    assert script_of(blank) == "empty-prompt"


def test_the_system_prompt_of_the_settings_is_for_chats_without_one() -> None:
    for shape, first in (("ua", "mine"), ("sua", "S")):
        script = script_of(chat(shape), "mine")
        assert isinstance(script, Script)
        context = script.context([])
        assert context is not None
        assert context[0] == {"role": "system", "content": first}


def test_a_cut_answer_and_a_call_end_the_chat() -> None:
    script = script_of(chat("uaua"))
    assert isinstance(script, Script)
    cut = {"role": "assistant", "content": "x", "finish_reason": "length"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL], "finish_reason": "tool_calls"}
    for end in (cut, call):
        assert script.context([end]) is None
        assert script.conversation([end])[1:] == [end]


def test_the_key_is_of_the_prompts_and_tools_alone() -> None:
    def digest(row: Chat) -> bytes:
        script = script_of(row)
        assert isinstance(script, Script)
        return script.digest

    base = digest(chat("uaua"))
    other = Chat(
        "other", [m | {"content": "new"} if m["role"] == "assistant" else m for m in chat("uaua").messages], "g", 9
    )
    assert digest(other) == base
    assert digest(chat("uaua", tools=[{"type": "function"}])) != base
    assert digest(chat("uau")) == base  # the same is asked
    assert digest(chat("ua")) != base
    assert len({base, key_of(base, 1), key_of(base, 2)}) == 3
    assert key_of(base, 0) == base


def test_calls_are_sent_as_the_api_wants_them() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "q", "finish_reason": "stop"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"ü": 1}}}, CALL]},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second", "tool_call_id": "c1"},
    ]
    user, called, first, second = as_sent(messages)
    assert user == {"role": "user", "content": "q"}
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == ['{"ü": 1}', '{"x": 1}']
    assert [call["id"] for call in called["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert second["tool_call_id"] == "c1"


def test_the_row_is_what_prepare_reads() -> None:
    row = chat("ua", tools=[{"type": "function", "function": {"name": "f"}}])
    script = script_of(row)
    assert isinstance(script, Script)
    answer = {"role": "assistant", "content": "new", "finish_reason": "length"}
    assert output_row(row, script, [answer], b"\x01" * 16, "m", {"prompt_tokens": 1}) == {
        "id": "id", "conversations": [{"role": "user", "content": "U"}, answer], "tools": row.tools, "model": "m",
        "finish_reason": "length", "usage": {"prompt_tokens": 1}, "key": "01" * 16,
    }  # fmt: skip


@given(st.text("suact", min_size=1, max_size=12))
def test_any_chat_is_asked_in_order_and_keeps_its_prompts(shape: str) -> None:
    row = chat(shape)
    script = script_of(row)
    if isinstance(script, str):
        assert "u" not in shape or "c" in shape
        return
    answers: list[Message] = []
    while (context := script.context(answers)) is not None:
        assert context[-1]["role"] != "assistant" or "c" in shape
        assert context[: len(script.conversation(answers))] == context
        assert [m for m in context if m["content"].startswith("new")] == answers
        answers.append({"role": "assistant", "content": f"new {len(answers)}"})
        assert len(answers) <= script.turns
    whole = script.conversation(answers)
    assert len(answers) == script.turns
    assert [m["content"] for m in whole if m["role"] in "system user tool"] == [
        m["content"] for m in row.messages if m["role"] in "system user tool"
    ]
    if "c" not in shape:
        assert "old" not in json.dumps(whole)
