"""Streams put together: however they are cut into chunks, and whichever server's habits they have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.regenerate.budget import Usage
from eyas.data.regenerate.openai_faults import Fault, FaultKind
from eyas.data.regenerate.openai_stream import MAX_CHARS, StreamedAnswer


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} | more


def message(*chunks: Any, usage: Usage | None = None) -> dict[str, Any]:
    answer = StreamedAnswer()
    for one in chunks:
        answer.take(one)
    return answer.message(usage)


def utf16_units(text: str) -> list[str]:
    """What a server written in a language of UTF-16 strings may cut apart."""
    data = text.encode("utf-16-le")
    return [data[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(data), 2)]


@given(st.text(min_size=1).filter(str.strip), st.text(), st.data())
def test_any_cut_gives_the_same_message(text: str, reasoning: str, data: st.DataObject) -> None:
    def pieces(whole: str) -> list[str]:
        units = utf16_units(whole)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(units)), max_size=5)))
        return ["".join(units[a:b]) for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True)]

    name = data.draw(st.sampled_from(["reasoning_content", "reasoning"]))
    chunks = [chunk({name: piece}) for piece in pieces(reasoning)] + [
        chunk({"content": piece}) for piece in pieces(text)
    ]
    # As the wire has it: escapes for whatever is no whole character.
    wired = [json.loads(json.dumps(one)) for one in [*chunks, chunk({}, "stop")]]
    expected = {"role": "assistant", "content": text, "finish_reason": "stop"}
    assert message(*wired) == expected | ({"reasoning_content": reasoning} if reasoning else {})


def test_calls_in_pieces_whole_and_without_an_index() -> None:
    def call(**fields: Any) -> dict[str, Any]:
        return chunk({"tool_calls": [fields]})

    in_pieces = [
        call(index=0, id="a", function={"name": "f", "arguments": ""}),
        call(index=1, id="b", function={"name": "g", "arguments": "{"}),
        call(index=0, id=None, function={"arguments": '{"x"'}),
        call(index=0, function={"arguments": ": 1}"}),
        call(index=1, function={"arguments": "}"}),
    ]
    no_index = [
        call(id="a", function={"name": "f", "arguments": '{"x": 1}'}),
        call(id="b", function={"name": "g", "arguments": "{}"}),
    ]
    for chunks in (in_pieces, no_index):
        got = message(*chunks, chunk({}, "stop"))
        assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in got["tool_calls"]] == [
            ("a", "f", '{"x": 1}'),
            ("b", "g", "{}"),
        ]
        assert got["finish_reason"] == "tool_calls"


def test_parts_other_choices_and_an_unstreamed_reply() -> None:
    parts = [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you"}]
    other = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    assert message(chunk({"content": parts}), other, chunk({}, "stop"))["content"] == "Hi, you"
    whole = {"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "eos"}]}
    assert message(whole) == {"role": "assistant", "content": "Hi", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([chunk({"content": "half"})], "cut-stream"),
        ([chunk({"content": " \n"}, "stop")], "empty-answer"),
        ([chunk({"content": ""}, "length")], "empty-answer"),
        ([chunk({"reasoning": " "}, "stop")], "empty-answer"),
        ([chunk({"content": "x"}, "content_filter")], "content-filter"),
        ([chunk({"content": "x"}, "abort")], "malformed-reply"),
        ([chunk({"content": "x"}, "error")], "malformed-reply"),
        ([chunk({"content": "\ud800"}, "stop")], "malformed-reply"),
        ([{"choices": []}], "malformed-reply"),
        ([{"choices": None}], "malformed-reply"),
        ([], "malformed-reply"),
    ],
)
def test_what_is_no_answer(chunks: list[Any], reason: str) -> None:
    usage = Usage(3, 4)
    with pytest.raises(Fault) as fault:
        message(*chunks, usage=usage)
    assert (fault.value.reason, fault.value.kind, fault.value.charged) == (reason, FaultKind.RETRY, True)
    assert fault.value.usage == (None if reason == "cut-stream" else usage)  # what half an answer says is not its cost


@pytest.mark.parametrize(
    "bad",
    [
        [],
        5,
        "text",
        None,
        {"choices": 7},
        {"choices": ["x"]},
        chunk({"content": 5}),
        chunk({"content": [1]}),
        chunk({"tool_calls": [5]}),
    ],
)
def test_what_no_server_should_send_is_a_value_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="not what the API describes"):
        StreamedAnswer().take(bad)


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_finish_is_not_taken_back_by_the_chunks_after_it(nothing: str | None) -> None:
    assert (
        message(chunk({"content": "x"}, nothing), chunk({}, "length"), chunk({}, nothing))["finish_reason"] == "length"
    )


def test_a_call_cut_by_the_limit_fails_its_row_and_costs() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": '{"city": "Be'}}
    with pytest.raises(Fault) as fault:
        message(chunk({"content": "let me see", "tool_calls": [call]}), chunk({}, "length"), usage=Usage(3, 4))
    assert (fault.value.reason, fault.value.kind, fault.value.usage) == ("cut-tool-call", FaultKind.ROW, Usage(3, 4))


def test_errors_within_a_stream() -> None:
    for error, reason, kind in (
        ({"message": "busy", "code": 429}, "rate-limited", FaultKind.RETRY),
        ({"message": "died", "code": 502}, "server-error", FaultKind.RETRY),
        ("died", "server-error", FaultKind.RETRY),
        ({"message": "maximum context length", "code": "400"}, "prompt-too-long", FaultKind.ROW),
    ):
        for where in ({"error": error}, {"choices": [{"index": 0, "error": error}]}):
            with pytest.raises(Fault) as fault:
                StreamedAnswer().take(where)
            assert (fault.value.reason, fault.value.kind, fault.value.charged) == (reason, kind, True)


def test_an_answer_without_end_does_not_fill_memory() -> None:
    answer = StreamedAnswer()
    answer.take(chunk({"content": "x" * MAX_CHARS}))
    with pytest.raises(ValueError, match="does not end"):
        answer.take(chunk({"content": "x"}))


def test_the_last_usage_counts() -> None:
    answer = StreamedAnswer()
    answer.take(chunk({"content": "x"}, usage={"prompt_tokens": 1}))
    answer.take({"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 2}}], "usage": None})
    assert answer.usage == {"prompt_tokens": 2}
