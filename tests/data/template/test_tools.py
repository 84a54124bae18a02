from __future__ import annotations

from typing import Any

import pytest

from eyas.data.rows import DropReason, Message, Tool
from eyas.data.template.tools import calls_fault, results_fault, tools_fault


def tool(name: str) -> Tool:
    return {"type": "function", "function": {"name": name}}


def call(arguments: Any, name: str = "look") -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def test_each_tool_must_be_named() -> None:
    assert tools_fault([tool("look"), tool("find")], "tools: look, find") is None
    assert tools_fault(None, "") is None
    reason, detail = tools_fault([tool("look"), tool("find")], "tools: look") or ("", "")
    assert (reason, "'find'" in detail) == (DropReason.TOOLS, True)
    assert tools_fault([tool("")], "anything") is not None


def test_a_name_that_the_words_hold_is_no_tool_and_no_call() -> None:
    asked = "you are helpful\nlook for it"
    assert tools_fault([tool("look")], asked, asked) is not None
    assert tools_fault([tool("look")], "look: ...\n" + asked, asked) is None
    for said in ({"content": " I look. "}, {"content": "", "reasoning_content": "I look."}):
        message = {**call({}), **said}
        assert calls_fault(message, "I look.<end>", "I look.<end>") is not None
        assert calls_fault(message, "I look.<call>look<end>", "I look.<call>look<end>") is None
        assert calls_fault(message, "<call>look<end>", "<call>look<end>") is None


@pytest.mark.parametrize("text", ['a\n"é"', r"a\n\"é\"", r"a\n\"\u00e9\""])
def test_a_result_may_be_there_as_it_is_or_as_json(text: str) -> None:
    assert results_fault([{"role": "tool", "content": ' a\n"é" '}], f"<{text}>") is None


def test_lost_results_are_found() -> None:
    assert results_fault([{"role": "tool", "content": "found"}], "nothing") is not None
    assert results_fault([{"role": "tool", "content": " "}, {"role": "user", "content": "x"}], "nothing") is None


@pytest.mark.parametrize(
    ("arguments", "text", "reason"),
    [
        ({"a": 1}, 'look {"a": 1}', None),
        ({"a": 1}, "look <a>1</a>", None),
        ({"a": 1}, "look {'a': 1}", DropReason.TOOLS),
        ({"a": 1}, "nothing", DropReason.TOOLS),
        ({}, "look {}", None),
        ('{"a" 1', 'look {"a" 1', None),
        ('{"a" 1', r'look "{\"a\" 1"', DropReason.BAD_TOOLS),
    ],
)
def test_calls(arguments: Any, text: str, reason: DropReason | None) -> None:
    fault = calls_fault(call(arguments), text, text)
    assert (fault and fault[0]) == reason
