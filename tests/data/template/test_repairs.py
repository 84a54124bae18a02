from __future__ import annotations

from typing import Any

import pytest
from hostile_chats import hostile_chats

from eyas.data.rows import Message
from eyas.data.template.repairs import (
    GREETING_DROPPED,
    SYSTEM_MERGED,
    TURNS_MERGED,
    forms,
    readable,
    repairs,
    thought_of,
)


def talk(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in turns]


def test_nulls_and_finish_reasons_do_not_reach_a_template() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None, "finish_reason": "stop"}
    assert readable(message, None) == {"role": "assistant", "content": ""}
    plain = {"role": "user", "content": "<think>a</think>"}
    assert readable(plain, "reasoning_content") is plain


@pytest.mark.parametrize(
    ("content", "moved"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        (" <think></think>b", ("", "b")),
        ("x<think>a</think>b", None),
        ("<think>a</think>b</think>c", None),
        ("<think>a<think>b</think>c", None),
        ("<think>a", None),
    ],
)
def test_a_plain_inline_thought_is_moved(content: str, moved: tuple[str, str] | None) -> None:
    message = {"role": "assistant", "content": content}
    found = readable(message, "thinking")
    if moved is None:
        assert found == message
    else:
        assert (found["thinking"], found["content"]) == moved
    assert readable(message, None) is message


def test_thoughts_of_any_name() -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        assert thought_of({"role": "assistant", "content": "b", field: " a "}) == "a"
    assert thought_of({"role": "assistant", "content": "<think> a </think>b"}) == "a"
    assert thought_of({"role": "assistant", "content": None}) == ""


def test_repairs_come_with_the_fewest_changes_first() -> None:
    messages = talk(("system", "s"), ("assistant", "hi"), ("user", "a"), ("user", "b"), ("assistant", "c"))
    found = [notes for _, notes in repairs(messages)]
    assert found == [
        (SYSTEM_MERGED,),
        (TURNS_MERGED,),
        (GREETING_DROPPED,),
        (SYSTEM_MERGED, TURNS_MERGED),
        (SYSTEM_MERGED, GREETING_DROPPED),
        (TURNS_MERGED, GREETING_DROPPED),
        (SYSTEM_MERGED, TURNS_MERGED, GREETING_DROPPED),
    ]
    assert list(repairs(messages))[-1][0] == talk(("user", "s\n\na\n\nb"), ("assistant", "c"))
    assert list(repairs(talk(("user", "a"), ("assistant", "b")))) == []


def test_a_system_message_that_no_user_follows_stays() -> None:
    assert list(repairs(talk(("user", "a"), ("assistant", "b"), ("system", "s")))) == []


def test_merged_turns_keep_their_thoughts_and_calls() -> None:
    first: Message = {"role": "assistant", "content": "a", "reasoning_content": "x"}
    called: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    second: Message = {"role": "assistant", "content": "b", "reasoning_content": "y", "tool_calls": [called]}
    third: Message = {"role": "assistant", "content": "c"}
    ((merged, notes),) = repairs([{"role": "user", "content": "q"}, first, second, third])
    assert notes == (TURNS_MERGED,)
    assert merged[1:] == [
        {"role": "assistant", "content": "a\n\nb", "reasoning_content": "x\n\ny", "tool_calls": [called]},
        third,
    ]


def test_nothing_given_is_changed_in_place() -> None:
    for row in hostile_chats(100, seed=1):
        messages = [readable(message, "reasoning_content") for message in row.messages]
        before = repr(messages)
        for changed in [*forms(messages), *(repaired for repaired, _ in repairs(messages))]:
            assert changed != messages
        assert repr(messages) == before
