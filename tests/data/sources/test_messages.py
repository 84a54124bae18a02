from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.rows import DropReason
from eyas.data.sources.messages import CALL_ROLES, ROLES, BadRowError, to_messages, to_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def one(message: Any, **roles: str) -> dict[str, Any]:
    (found,) = to_messages([message], roles)
    return found


def reason(make: Any, *arguments: Any) -> DropReason:
    with pytest.raises(BadRowError) as error:
        make(*arguments)
    assert error.value.detail
    return error.value.reason


# --- roles ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(sorted(ROLES)), min_size=1), st.sampled_from([str.upper, str.title, "  {}\t".format, str])
)
def test_roles_are_folded_and_keep_their_order(names: list[str], change: Any) -> None:
    found = to_messages([{"role": change(name), "content": "x"} for name in names])
    assert [message["role"] for message in found] == [ROLES[name] for name in names]


@given(
    st.text()
    | st.integers()
    | st.lists(st.text(), max_size=2)
    | st.none()
    | st.booleans()
    | st.dictionaries(st.text(), st.text())
)
def test_any_other_role_is_a_fault_of_the_row(role: object) -> None:
    if isinstance(role, str) and role.strip().lower() in (*ROLES, *CALL_ROLES):
        return
    assert reason(to_messages, [USER, {"role": role, "content": "x"}]) is DropReason.UNKNOWN_ROLE
    assert reason(to_messages, [{"from": role, "value": "x"}, USER]) is DropReason.UNKNOWN_ROLE


def test_roles_that_the_user_adds_are_folded_too_and_win() -> None:
    assert one({"role": "My_Model ", "content": "x"}, my_model="assistant")["role"] == "assistant"
    assert one({"role": "observation", "content": "x"}, Observation="user")["role"] == "user"
    assert one({"role": "function_call", "content": "x"}, function_call="assistant") == {
        "role": "assistant",
        "content": "x",
    }


# --- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        ("", ""),
        (["H", "i"], "Hi"),
        ([{"type": "text", "text": "H"}, {"type": "text", "text": "i", "image_url": None}], "Hi"),
        ([{"text": "Hi"}], "Hi"),
        ([{"type": "input_text", "text": "H"}, {"type": "output_text", "text": "i"}], "Hi"),
        ("a\u2028b\u0085c\0", "a\u2028b\u0085c\0"),
    ],
)
def test_texts_and_their_parts(content: object, text: str) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": text}
    assert one({"from": "human", "value": content}) == {"role": "user", "content": text}


MEDIA_PARTS = [
    {"type": name, name: {"url": "x"}, "text": extra}
    for name in ("image_url", "image", "input_audio", "audio", "video", "file", "input_image", "refusal", "tool_use")
    for extra in ("a caption", None)
]


@pytest.mark.parametrize("part", [*MEDIA_PARTS, {"type": "text"}, {"type": "text", "text": 7}, {}, 7, ["x"], None])
@pytest.mark.parametrize("around", [[], [{"type": "text", "text": "see"}]])
def test_parts_that_are_not_text_drop_the_row(part: object, around: list[object]) -> None:
    assert reason(to_messages, [{"role": "user", "content": [*around, part]}]) is DropReason.NOT_TEXT


@pytest.mark.parametrize("content", [42, 1.5, True, {"text": "Hi"}, None])
def test_content_that_is_neither_text_nor_parts_is_never_written_out(content: object) -> None:
    assert reason(to_messages, [{"role": "user", "content": content}]) is DropReason.BAD_MESSAGES
    assert reason(to_messages, [{"from": "gpt", "value": content}]) is DropReason.BAD_MESSAGES


def test_an_empty_list_is_not_text() -> None:
    assert reason(to_messages, [{"role": "user", "content": []}]) is DropReason.NOT_TEXT


@given(st.text(st.characters()), st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3))
def test_half_a_surrogate_pair_anywhere_drops_the_row(text: str, half: str) -> None:
    bad = text + half
    for message in (
        {"role": "user", "content": bad},
        {"role": "assistant", "content": [{"type": "text", "text": bad}]},
        {"role": "assistant", "content": "x", "reasoning": bad},
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"x": [bad]}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": bad}]},
        {"role": "tool", "content": {"x": bad}},
        {"role": "tool", "content": "x", "tool_call_id": bad},
    ):
        assert reason(to_messages, [message]) is DropReason.BAD_TEXT
    assert reason(to_tools, [{"name": "f", "description": bad}]) is DropReason.BAD_TEXT


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_other_text_comes_back_unchanged(text: str) -> None:
    assert one({"role": "user", "content": text}) == {"role": "user", "content": text}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_under_one_name(key: str) -> None:
    expected = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert one({"role": "assistant", "content": "Yes.", key: "Hm."}) == expected
    assert one({"from": "gpt", "value": "Yes.", key: "Hm."}) == expected
    for empty in ("", None):
        assert one({"role": "assistant", "content": "Yes.", key: empty}) == {"role": "assistant", "content": "Yes."}
    assert one({"role": "assistant", "content": None, key: "Hm."}) == {**expected, "content": ""}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "thinking", "text": "Hm."},
        {"type": "reasoning", "text": "Hm."},
        {"type": "reasoning", "reasoning": "Hm."},
    ],
)
def test_thoughts_given_as_parts(part: dict[str, str]) -> None:
    found = one({"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]})
    assert found == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_think_tags_are_left_to_the_template() -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    assert one({"role": "assistant", "content": text}) == {"role": "assistant", "content": text}


def test_finish_reason_is_passed_on() -> None:
    found = one({"role": "assistant", "content": "cut he", "finish_reason": "length"})
    assert found["finish_reason"] == "length"


# --- the list ---------------------------------------------------------------------------------------------------------


def test_a_list_as_json_text_or_as_columns() -> None:
    rows = [USER, {"role": "assistant", "content": "Yo"}]
    assert to_messages(json.dumps(rows)) == rows
    assert to_messages({"from": ["human", "gpt"], "value": ["Hi", "Yo"]}) == rows


@pytest.mark.parametrize(
    "turns",
    [
        [],
        "",
        "Hi",
        "[",
        "7",
        "[]",
        7,
        None,
        {},
        USER,
        [["user", "Hi"]],
        ["Hi"],
        [None],
        [USER, 7],
        {"a": [], "b": []},
        "[" * 5000,
    ],
)
def test_what_is_no_list_of_messages(turns: object) -> None:
    assert reason(to_messages, turns) is DropReason.BAD_MESSAGES


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", [], "Let me see."])
@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"name": "f", "arguments": {"x": 1}}],
        json.dumps([CALL]),
        CALL,
        [json.dumps(CALL)],
    ],
)
def test_tool_calls_in_their_forms(content: object, calls: object) -> None:
    found = one({"role": "assistant", "content": content, "tool_calls": calls})
    assert found == {"role": "assistant", "content": content or "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ('{"x": [1, null]}', {"x": [1, None]}),
        ({"x": None}, {"x": None}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ("not JSON", "not JSON"),
        ("[1]", "[1]"),
        ('{"x": ', '{"x": '),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_are_parsed_as_servers_do(given: object, made: object) -> None:
    found = one({"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": given}}]})
    assert found["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": made}}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "Tool_Call", "value": '[{"name": "f", "arguments": "{\\"x\\": 1}"}]'},
        {"role": "function_call", "content": {"name": "f", "arguments": {"x": 1}}},
    ],
)
def test_older_forms_of_calls(message: dict[str, Any]) -> None:
    assert one(message) == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "calls",
    [
        "call f",
        [7],
        [{}],
        [{"function": {}}],
        [{"function": "f"}],
        [{"name": ""}],
        [{"name": 3}],
        [[CALL]],
        {"x": 1},
        7,
        True,
    ]
    + [[{"name": "f", "arguments": arguments}] for arguments in (7, [1], True)],
)
def test_malformed_calls(calls: object) -> None:
    assert reason(to_messages, [{"role": "assistant", "content": "x", "tool_calls": calls}]) is DropReason.BAD_TOOLS
    assert reason(to_messages, [{"from": "function_call", "value": calls}]) is DropReason.BAD_TOOLS


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
@pytest.mark.parametrize("content", [None, "", [], {}, "[]", "null", "call it"])
def test_a_call_that_holds_none_is_no_blank_answer(role: str, content: object) -> None:
    with pytest.raises(BadRowError) as error:
        to_messages([{"role": "user", "content": "Hi"}, {"role": role, "content": content}])
    assert error.value.reason is DropReason.BAD_TOOLS


def test_only_assistants_call_tools() -> None:
    assert reason(to_messages, [{**USER, "tool_calls": [CALL]}]) is DropReason.BAD_TOOLS
    for none in (None, [], "", "[]", "null"):
        assert one({**USER, "tool_calls": none}) == USER


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("sunny", "sunny"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}], "sunny"),
        ({"sky": "blå"}, '{"sky": "blå"}'),
        ([{"a": 1}], '[{"a": 1}]'),
        (7, "7"),
        (True, "true"),
    ],
)
@pytest.mark.parametrize("role", ["tool", "function", "ipython", "observation"])
def test_tool_results(role: str, content: object, text: str) -> None:
    found = one({"role": role, "content": content, "tool_call_id": "c1", "name": "f"})
    assert found == {"role": "tool", "content": text, "tool_call_id": "c1", "name": "f"}


def test_pictures_that_tools_give_are_not_text() -> None:
    image = {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert reason(to_messages, [image]) is DropReason.NOT_TEXT


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [TOOL["function"]],
        [{"type": "function", **TOOL["function"]}],  # pyright: ignore[reportGeneralTypeIssues]
        [json.dumps(TOOL)],
        [{"type": "function", "function": {**TOOL["function"], "parameters": '{"type": "object"}'}}],  # pyright: ignore[reportGeneralTypeIssues]
    ],
)
def test_tools_in_their_forms(tools: object) -> None:
    assert to_tools(tools) == [TOOL]


@pytest.mark.parametrize("none", [None, [], "", " ", "[]", "null"])
def test_no_tools(none: object) -> None:
    assert to_tools(none) is None


@pytest.mark.parametrize(
    "tools",
    [
        *[
            "f(x)",
            7,
            {"name": "f"},
            ["f"],
            [7],
            [{}],
            [{"type": "web_search"}],
            [{"type": "function", "function": None}],
        ],
        *[[{"function": "f"}], [{"name": "f", "parameters": 7}], [{"name": "f", "parameters": "x"}], [{"name": " "}]],
    ],
)
def test_malformed_tools(tools: object) -> None:
    assert reason(to_tools, tools) is DropReason.BAD_TOOLS


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "function_call",
    "reasoning",
    "thinking",
    "name",
    "tool_call_id",
]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(KEYS), ANY | st.sampled_from([*ROLES, *CALL_ROLES, [CALL], '{"name": "f"}'])),
        max_size=3,
    )
)
def test_whatever_a_message_holds_it_is_texts_or_a_fault(turns: list[dict[str, Any]]) -> None:
    try:
        found = to_messages(turns)
    except BadRowError as bad:
        assert bad.detail
        return
    assert len(found) == len(turns)
    for message in found:
        assert message["role"] in ROLES.values()
        json.dumps(message, ensure_ascii=False).encode("utf-8")
        assert isinstance(message["content"], str)
        assert isinstance(message.get("reasoning_content", ""), str)
