from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.rows import Chat, Dropped, DropReason, Fault, Preformatted, Raw, Sampled
from eyas.data.sources.columns import READ
from eyas.data.sources.layouts import parse

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
TURNS = [USER, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(row: object, **roles: str) -> Any:
    """The row, which is the same whether it comes as JSON or as a value."""
    found = parse(Raw("d/rows.jsonl.gz", 7, "rows", row), roles)
    if not isinstance(row, bytes):
        text = json.dumps(row, default=str).encode()
        same = parse(Raw("d/rows.jsonl.gz", 7, "rows", text), roles)
        assert same == found or "\\ud" in text.decode()
    assert (found.file, found.line, found.source) == ("d/rows.jsonl.gz", 7, "rows")
    return found


def messages(row: object) -> list[dict[str, Any]]:
    found = read(row)
    assert isinstance(found, Chat), found
    return found.messages


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": TURNS}, TURNS),
        ({"conversation": TURNS}, TURNS),
        ({"messages": TURNS}, TURNS),
        ({"messages": json.dumps(TURNS)}, TURNS),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, TURNS),
        ({"prompt": "Hi", "response": "Hello."}, TURNS),
        ({"prompt": "Hi", "completion": "Hello."}, TURNS),
        ({"prompt": [USER], "completion": [ANSWER]}, TURNS),
        ({"prompt": [SYSTEM, USER], "completion": "Hello."}, [SYSTEM, *TURNS]),
        ({"prompt": "Hi", "response": ANSWER}, TURNS),
        ({"question": "Hi", "answer": "Hello."}, TURNS),
        ({"query": "Hi", "response": "Hello."}, TURNS),
        ({"input": "Hi", "output": "Hello."}, TURNS),
        ({"instruction": "Hi", "input": "", "output": "Hello."}, TURNS),
        ({"instruction": "Hi", "output": "Hello."}, TURNS),
        (
            {"instruction": "H", "input": "i", "output": "O"},
            [{**USER, "content": "H\n\ni"}, {**ANSWER, "content": "O"}],
        ),
        (
            {"instruction": "H", "context": "i", "response": "O"},
            [{**USER, "content": "H\n\ni"}, {**ANSWER, "content": "O"}],
        ),
        ({"instruction": "Hi", "history": [["Hi", "Hello."]], "output": "Hello."}, TURNS + TURNS),
        ({"instruction": "Hi", "history": [], "system": "Be brief.", "output": "Hello."}, [SYSTEM, *TURNS]),
        ({"turns": ["Hi", "Hi"]}, [USER, USER]),
        ({"turns": TURNS}, TURNS),
        ({"prompt": "Hi"}, [USER]),
        ({"prompt": "Hi", "response": None}, [USER]),
        ({"instruction": "Hi"}, [USER]),
        ({"prompt": "Hi", "response": ""}, [USER, {**ANSWER, "content": ""}]),
        ({"messages": TURNS, "system": "Be brief."}, [SYSTEM, *TURNS]),
        ({"messages": TURNS, "system_prompt": "Be brief."}, [SYSTEM, *TURNS]),
        ({"messages": [SYSTEM, *TURNS], "system": "another"}, [SYSTEM, *TURNS]),
        ({"messages": TURNS, "system": ""}, TURNS),
        ({"messages": TURNS, "tools": [], "image": None, "images": []}, TURNS),
    ],
)
def test_layouts(row: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert messages({"id": "a", **row}) == expected


def test_precedence() -> None:
    """Each layout of the table wins over all that come after it."""
    order = [
        {"prompt_ids": [1], "answer_ids": [2]},
        {"conversations": [USER]},
        {"conversation": [ANSWER]},
        {"messages": [SYSTEM]},
        {"turns": ["turn"]},
        {"prompt": "p"},
        {"instruction": "in"},
        {"question": "q"},
        {"query": "y"},
        {"input": "x"},
        {"text": "t"},
    ]
    for i in range(len(order)):
        together = {key: value for row in reversed(order[i:]) for key, value in row.items()}
        alone, found = read(order[i]), read(together)
        if isinstance(alone, Chat) and "instruction" in order[i]:
            assert found.messages == [{"role": "user", "content": "in\n\nx"}]
        else:
            assert found == alone
        if i + 1 < len(order):
            later = {key: value for key, value in together.items() if key not in order[i]}
            assert read({**later, **dict.fromkeys(order[i])}) == read(later)  # a null column is none


def test_text_is_preformatted() -> None:
    found = read({"id": 1, "text": "<|im_start|>user\nHi"})
    assert found == Preformatted("1", "<|im_start|>user\nHi", "d/rows.jsonl.gz", 7, "rows")


def test_sampled_ids() -> None:
    row = {"id": 7, "prompt_ids": [1, 2], "answer_ids": [3], "tokenizer_hash": "ab", "conversations": TURNS}
    assert read(row) == Sampled("7", [1, 2], [3], "ab", "d/rows.jsonl.gz", 7, "rows")
    for bad in ([3, True], "1 2", [1.0], [[1]], {"a": 1}, 3):
        assert read({**row, "answer_ids": bad}).reason is DropReason.BAD_TOKENS
        assert read({**row, "prompt_ids": bad}).reason is DropReason.BAD_TOKENS
    assert isinstance(read({**row, "answer_ids": None}), Chat)


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_go_with_the_chat(column: str) -> None:
    for tools in ([TOOL], json.dumps([TOOL]), [TOOL["function"]]):
        assert read({"messages": TURNS, column: tools}).tools == [TOOL]
        assert read({"prompt": "Hi", column: tools}).tools == [TOOL]
    for none in (None, [], "", "[]"):
        assert read({"messages": TURNS, column: none}).tools is None
    assert read({"messages": TURNS, column: "f(x)"}).reason is DropReason.BAD_TOOLS


def test_finish_reason_of_a_row_is_that_of_its_last_answer() -> None:
    assert messages({"prompt": "Hi", "response": "Hello.", "finish_reason": "length"})[-1]["finish_reason"] == "length"
    assert messages({"messages": TURNS, "finish_reason": "length"}) == [USER, {**ANSWER, "finish_reason": "length"}]
    own = [USER, {**ANSWER, "finish_reason": "stop"}]
    assert messages({"messages": own, "finish_reason": "length"}) == own
    assert messages({"messages": [USER], "finish_reason": "length"}) == [USER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"\xff", DropReason.BAD_UTF8),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', DropReason.BAD_UTF8),  # half a pair as bytes
        (b'{"messages": "\xf0\x9f"}', DropReason.BAD_UTF8),
        (b"{", DropReason.BAD_JSON),
        (b"\0\0", DropReason.BAD_JSON),
        (b"[" * 100_000, DropReason.BAD_JSON),
        (b'{"a":' * 100_000, DropReason.BAD_JSON),
        (b"9" * 5000, DropReason.BAD_JSON),
        (b'{"id": ' + b"9" * 5000 + b"}", DropReason.BAD_JSON),
        (b"{'messages': []}", DropReason.BAD_JSON),
        (b'{"messages": []},', DropReason.BAD_JSON),
        (b"7", DropReason.NOT_AN_OBJECT),
        (b'"text"', DropReason.NOT_AN_OBJECT),
        (b"null", DropReason.NOT_AN_OBJECT),
        (TURNS, DropReason.NOT_AN_OBJECT),
        ({}, DropReason.UNKNOWN_COLUMNS),
        ({"data": "x"}, DropReason.UNKNOWN_COLUMNS),
        ({"response": "x"}, DropReason.UNKNOWN_COLUMNS),
        ({"prompt_ids": [1]}, DropReason.UNKNOWN_COLUMNS),
        ({"conversations": None}, DropReason.UNKNOWN_COLUMNS),
        ({"conversations": []}, DropReason.BAD_MESSAGES),
        ({"turns": []}, DropReason.BAD_MESSAGES),
        ({"turns": ["Hi", 7]}, DropReason.BAD_MESSAGES),
        ({"prompt": 7}, DropReason.BAD_MESSAGES),
        ({"prompt": []}, DropReason.BAD_MESSAGES),
        ({"prompt": "Hi", "response": 7}, DropReason.BAD_MESSAGES),
        ({"instruction": "Hi", "input": 7}, DropReason.BAD_MESSAGES),
        ({"instruction": "Hi", "history": ["Hi"]}, DropReason.BAD_MESSAGES),
        ({"instruction": "Hi", "history": [["Hi", None]]}, DropReason.BAD_MESSAGES),
        ({"messages": TURNS, "system": 7}, DropReason.BAD_MESSAGES),
        ({"text": ["x"]}, DropReason.BAD_MESSAGES),
        ({"text": "\ud800"}, DropReason.BAD_TEXT),
        ({"prompt": "\ud800"}, DropReason.BAD_TEXT),
        ({"turns": ["\udfff"]}, DropReason.BAD_TEXT),
        ({"messages": TURNS, "system": "\ud800"}, DropReason.BAD_TEXT),
        ({"messages": [{"role": "x", "content": "y"}]}, DropReason.UNKNOWN_ROLE),
        *[({"messages": TURNS, column: "a.png"}, DropReason.NOT_TEXT) for column in ("image", "audio", "video")],
        ({"prompt": "Hi", "images": [{"bytes": "x"}]}, DropReason.NOT_TEXT),
    ],
)
def test_bad_rows_are_dropped_by_name(row: object, reason: DropReason) -> None:
    found = read(row)
    assert isinstance(found, Dropped)
    assert found.reason is reason
    assert found.detail
    assert found.detail.isprintable()
    assert len(found.detail) < 500


def test_details_say_what_to_do() -> None:
    assert "found data; expected conversations, " in read({"data": "x"}).detail
    assert "conversations (null)" in read({"id": 2, "conversations": None}).detail
    assert "field: rows" in read({"version": 1, "rows": [{"messages": TURNS}]}).detail
    assert "NUL" in read(b"\0").detail
    assert "byte 103:" in parse(Raw("f", 1, "s", b'{"\xff', 101)).detail  # pyright: ignore[reportAttributeAccessIssue]
    cut = read(b'{"id": "k3", "conversations": [{"role": ')
    assert "ends in the middle" in cut.detail


def test_a_fault_of_the_reader_becomes_a_dropped_row() -> None:
    found = parse(Raw("f", 3, "s", Fault(DropReason.BAD_FILE, "a\x1b[2Jb\n")))
    assert found == Dropped(DropReason.BAD_FILE, "f", 3, "a\\x1b[2Jb\\n", "s")


def test_what_json_does_not_know_is_no_value() -> None:
    row = b'{"id": NaN, "score": Infinity, "tools": NaN, "system": NaN, "prompt": "Hi", "response": -Infinity}'
    assert read(row) == Chat("rows:7", [USER], "d/rows.jsonl.gz", 7, source="rows")


def test_the_last_of_two_keys_counts() -> None:
    assert read(b'{"prompt": "no", "prompt": "Hi"}').messages == [USER]


def test_a_byte_order_mark_inside_of_joined_files_is_not_text() -> None:
    assert read(b'\xef\xbb\xbf{"prompt": "Hi"}\r\n').messages == [USER]


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [
        ("a", "a"),
        (1, "1"),
        (3.5, "3.5"),
        (["x"], '["x"]'),
        ({"a": None}, '{"a": null}'),
        (None, "rows:7"),
        (True, "true"),
        (0, "0"),
        ("", ""),
        ("../../etc/passwd", "../../etc/passwd"),
        ("a/b\\c:\0\n", "a/b\\c:\0\n"),
        ("x" * 100_000, "x" * 100_000),
        ("\ud800", "?"),
        (["\ud800é"], '["?é"]'),
        (10**40, str(10**40)),
    ],
)
def test_ids_become_texts_and_nothing_else(given_id: object, expected: str) -> None:
    assert read({"id": given_id, "messages": TURNS}).id == expected
    assert read({"question_id": given_id, "text": "x"}).id == expected


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02 00:00:00+00:00"),
        (Decimal("1.50"), "1.50"),
        (b"ab", "ab"),
        (b"\xff\x00", "ff00"),
    ],
)
def test_ids_of_tables(given_id: object, expected: str) -> None:
    found = parse(Raw("f.parquet", 1, "f", {"id": given_id, "messages": TURNS}))
    assert isinstance(found, Chat)
    assert found.id == expected


def test_id_wins_over_question_id() -> None:
    assert read({"id": 1, "question_id": 2, "prompt": "Hi"}).id == "1"
    assert read({"id": None, "question_id": 2, "prompt": "Hi"}).id == "2"


# --- anything ---------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4) | st.just(TURNS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(READ)), VALUES, max_size=5))
def test_whatever_the_columns_hold_a_row_is_kept_or_dropped_by_name(row: dict[str, Any]) -> None:
    for payload in (row, json.dumps(row).encode()):
        found = parse(Raw("f", 1, "s", payload))
        if isinstance(found, Dropped):
            assert found.detail
            assert found.detail.isprintable()
        else:
            found.id.encode("utf-8")


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u d8', max_size=40).map(str.encode))
def test_no_bytes_raise(data: bytes) -> None:
    assert parse(Raw("f", 1, "s", data)).line == 1
