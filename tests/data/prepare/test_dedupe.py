from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.prepare.dedupe import Seen, conversation_key, key_of, prompt_key, text_key
from eyas.data.rows import Message


def talk(*texts: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_case_spacing_and_punctuation_do_not_count() -> None:
    assert conversation_key(talk("Hello,  World!", "Hi.")) == conversation_key(talk("hello world", "HI"))
    assert prompt_key(talk("Hello,  World!", "one")) == prompt_key(talk("hello\nworld?", "two"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (talk("a", "b"), talk("ab")),
        (talk("a", "b"), talk("b", "a")),
        (talk("a", "b"), [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]),
        (talk("a", "b"), [*talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}]),
        (talk("a", "b"), [*talk("a"), {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}]),
    ],
)
def test_other_conversations_have_other_keys(one: list[Message], other: list[Message]) -> None:
    assert conversation_key(one) != conversation_key(other)


def test_tools_belong_to_the_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert conversation_key(talk("a", "b"), tools) != conversation_key(talk("a", "b"))


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_no_two_lists_of_texts_run_together(one: list[str], other: list[str]) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)


def test_a_text_of_signs_alone_is_itself() -> None:
    assert len({text_key(text) for text in ("???", "!!!", "😀", "😃", "")}) == 5


def test_the_first_is_kept() -> None:
    seen = Seen()
    assert [seen.is_new(key) for key in (b"a", b"b", b"a", b"b")] == [True, True, False, False]


def test_a_bare_prompt_does_not_displace_its_answer() -> None:
    seen = Seen()
    assert seen.is_new(b"a", answered=False)
    assert not seen.is_new(b"a", answered=False)
    assert seen.is_new(b"a"), "the answered row is kept though its prompt came first"
    assert not seen.is_new(b"a", answered=False), "and the prompt of an answered row is not asked again"
