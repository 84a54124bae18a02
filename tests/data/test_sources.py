from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data import files
from eyas.data.rows import Chat, Dropped, DropReason, Sampled
from eyas.data.sources import read_chats
from eyas.errors import ConfigError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def read(folder: Path, *rows: object) -> list[Chat | Sampled | Dropped]:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return list(read_chats(path))


def reason_of(folder: Path, row: object) -> DropReason:
    (dropped,) = read(folder, row)
    assert isinstance(dropped, Dropped)
    assert dropped.line == 1
    assert dropped.file.endswith("rows.jsonl")
    return dropped.reason


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": TURNS},
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"conversations": [{"role": "User ", "content": "Hi"}, {"role": "MODEL", "content": "Hello."}]},
        {
            "conversations": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                TURNS[1],
            ]
        },
        {"conversations": json.dumps(TURNS)},
        {"conversations": None, "messages": TURNS},
        {"conversations": TURNS, "messages": [{"role": "user", "content": "the other column"}]},
        {"conversations": [{**turn, "tool_calls": None, "reasoning_content": ""} for turn in TURNS], "tools": []},
    ],
)
def test_layouts_read_alike(tmp_path: Path, row: dict[str, object]) -> None:
    (chat,) = read(tmp_path, {"id": "a", **row})
    assert chat == Chat("a", TURNS, str(tmp_path / "rows.jsonl"), 1, source="rows")


def test_roles(tmp_path: Path) -> None:
    names = ["system", "developer", "user", "human", "assistant", "gpt", "model"]
    (chat,) = read(tmp_path, {"messages": [{"role": name, "content": "x"} for name in names]})
    assert isinstance(chat, Chat)
    expected = ["system", "system", "user", "user", "assistant", "assistant", "assistant"]
    assert [message["role"] for message in chat.messages] == expected


def test_reasoning_reaches_the_template(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "Hm."}]})
    assert isinstance(chat, Chat)
    assert chat.messages[1] == {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}


def test_sampled_ids(tmp_path: Path) -> None:
    row = {"id": 7, "prompt_ids": [1, 2], "answer_ids": [3], "tokenizer_hash": "ab", "conversations": TURNS}
    assert read(tmp_path, row) == [Sampled("7", [1, 2], [3], "ab", str(tmp_path / "rows.jsonl"), 1, source="rows")]
    assert reason_of(tmp_path, {**row, "answer_ids": [3, True]}) is DropReason.BAD_TOKENS
    assert reason_of(tmp_path, {**row, "prompt_ids": "1 2"}) is DropReason.BAD_TOKENS


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"\xff\n", DropReason.BAD_UTF8),
        (b"{\n", DropReason.BAD_JSON),
        (b"[" * 100_000 + b"\n", DropReason.BAD_JSON),
        (b"9" * 5000 + b"\n", DropReason.BAD_JSON),
        (b"\0\0\n", DropReason.BAD_JSON),
        (b"7\n", DropReason.NOT_AN_OBJECT),
        (TURNS, DropReason.NOT_AN_OBJECT),
        ({"text": "x"}, DropReason.UNKNOWN_COLUMNS),
        ({"conversations": None}, DropReason.UNKNOWN_COLUMNS),
        ({"conversations": []}, DropReason.BAD_MESSAGES),
        ({"conversations": "not JSON"}, DropReason.BAD_MESSAGES),
        ({"conversations": {"role": "user", "content": "x"}}, DropReason.BAD_MESSAGES),
        ({"conversations": [["user", "x"]]}, DropReason.BAD_MESSAGES),
        ({"conversations": [{"role": "user", "content": 42}]}, DropReason.BAD_MESSAGES),
        ({"conversations": [{"role": "user", "content": None}]}, DropReason.BAD_MESSAGES),
        ({"conversations": [{"content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"conversations": [{"role": "my_model_v2", "content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"conversations": [{"role": 3, "content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"conversations": [{"role": "user", "content": "\ud800"}]}, DropReason.BAD_TEXT),
        ({"conversations": [{"role": "user", "content": []}]}, DropReason.NOT_TEXT),
        ({"conversations": [{"role": "user", "content": [{"type": "image_url"}]}]}, DropReason.NOT_TEXT),
        ({"conversations": TURNS, "image": "a.png"}, DropReason.NOT_TEXT),
        ({"conversations": TURNS, "tools": [{"name": "f"}]}, DropReason.TOOLS),
        ({"conversations": [{"role": "tool", "content": "x"}]}, DropReason.TOOLS),
        ({"conversations": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, DropReason.TOOLS),
    ],
)
def test_bad_rows_are_dropped_by_name_and_cost_no_other_row(tmp_path: Path, row: object, reason: DropReason) -> None:
    assert reason_of(tmp_path, row) is reason
    good = {"id": "good", "messages": TURNS}
    first, _, last = read(tmp_path, good, row, good)
    assert isinstance(first, Chat)
    assert isinstance(last, Chat)
    assert (first.line, last.line) == (1, 3)


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [("a", "a"), (1, "1"), (3.5, "3.5"), (["x"], '["x"]'), (None, "rows:1"), (True, "true"), ("\ud800", "?")],
)
def test_ids_become_texts(tmp_path: Path, given_id: object, expected: str) -> None:
    (chat,) = read(tmp_path, {"id": given_id, "messages": TURNS})
    assert isinstance(chat, Chat)
    assert chat.id == expected


def test_rows_of_one_id_are_all_kept(tmp_path: Path) -> None:
    chats = read(tmp_path, *[{"id": "same", "messages": TURNS}] * 3)
    assert [(chat.id, chat.line) for chat in chats if isinstance(chat, Chat)] == [("same", 1), ("same", 2), ("same", 3)]


def test_a_line_beyond_the_limit_is_skipped_whole(tmp_path: Path) -> None:
    good = json.dumps({"messages": TURNS}).encode() + b"\n"
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(good)
        for _ in range(3):
            file.write(b" " * (files.MAX_LINE_BYTES // 2))
        file.write(b"\n" + good + b'"\xff"\n')
    kinds = [(row.line, row.reason if isinstance(row, Dropped) else None) for row in read_chats(path)]
    assert kinds == [(1, None), (2, DropReason.LINE_TOO_LONG), (3, None), (4, DropReason.BAD_UTF8)]
    *_, last = read_chats(path)
    assert isinstance(last, Dropped)
    assert f"byte {path.stat().st_size - 3} of the file" in last.detail


@pytest.mark.parametrize("name", ["missing.jsonl", "folder.jsonl", "table.parquet", "noname"])
def test_unreadable_inputs_name_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=name):
        list(read_chats(tmp_path / name))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.binary(max_size=400)
    | st.lists(
        st.sampled_from(
            [b'{"id":1,', b'"messages":[', b"{}", b"]}", b"\n", b"\r\n", b"\xef\xbb\xbf", b'"\xf0\x9f"', b"null"]
        )
    ).map(b"".join)
)
def test_no_bytes_raise_and_every_line_that_is_not_blank_is_one_row(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [row.line for row in read_chats(path)] == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_texts_come_back_unchanged(tmp_path: Path, texts: list[str], end: str, bom: bool) -> None:
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in texts]
    path = tmp_path / "rows.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + "".join(row + end for row in rows).encode())
    chats = list(read_chats(path))
    assert [chat.messages[0]["content"] for chat in chats if isinstance(chat, Chat)] == texts


#: file of the hostile collection -> ids kept by the reader, reasons of the rest with their lines
HOSTILE = {
    "01_empty_assistant": (["e1", "e2", "e3", "e4", "ok"], {5: "bad-messages"}),
    "03_consecutive_roles": (["c1", "c2", "c3", "c4", "ok"], {}),
    "05_unknown_role": (["r2", "r3", "r5", "ok"], {1: "unknown-role", 4: "unknown-role"}),
    "07_mixed_types": (
        ["1", "two", "07_mixed_types:4", "07_mixed_types:6"],
        {3: "bad-messages", 5: "bad-messages", 7: "bad-messages"},
    ),
    "09_image_parts": (["i3", "ok"], {1: "not-text", 2: "not-text", 4: "not-text", 5: "not-text"}),
    "11_invalid_utf8": (["b0", "b1", "b2"], {2: "bad-utf8", 4: "bad-utf8", 5: "bad-json"}),
    "13_bom_crlf": (["b0", "b1", "b2", "b3"], {}),
    "15_cut_last_line": (["k1", "k2"], {3: "bad-json"}),
    "17_column_names": (
        ["17_column_names:1", "17_column_names:9"],
        dict.fromkeys([2, 3, 4, 5, 6, 7, 8, 10], "unknown-columns"),
    ),
    "21_one_row": (["only"], {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(shared_data: Path, name: str) -> None:
    rows = list(read_chats(shared_data / "hostile" / f"{name}.jsonl"))
    kept, dropped = HOSTILE[name]
    assert {row.line: str(row.reason) for row in rows if isinstance(row, Dropped)} == dropped
    if name != "21_one_row":
        assert [row.id for row in rows if isinstance(row, Chat)] == kept
    assert len(rows) == len(kept) + len(dropped)
    assert not any("\r" in message["content"] for row in rows if isinstance(row, Chat) for message in row.messages)


def test_hostile_line_separators(shared_data: Path) -> None:
    rows = list(read_chats(shared_data / "hostile" / "19_line_separators.jsonl"))
    texts = [message["content"] for row in rows if isinstance(row, Chat) for message in row.messages]
    assert len(rows) == 2
    assert any("\u2028" in text for text in texts)


def test_hostile_details_say_what_and_where(shared_data: Path) -> None:
    folder = shared_data / "hostile"
    data = (folder / "11_invalid_utf8.jsonl").read_bytes()
    bad_rows = [row for row in read_chats(folder / "11_invalid_utf8.jsonl") if isinstance(row, Dropped)]
    for row, bad in zip(bad_rows, (b"\xe9", b'\xf0\x9f\x98"'), strict=False):
        assert f"byte {data.index(bad)} of the file" in row.detail
    *_, torn = read_chats(folder / "15_cut_last_line.jsonl")
    assert "ends in the middle of a line" in str(torn)
    *_, unknown = read_chats(folder / "17_column_names.jsonl")
    assert "found data; expected conversations or messages" in str(unknown)


def test_sharegpt_and_messages_hold_the_same_chats(shared_data: Path) -> None:
    openai, sharegpt = (
        list(read_chats(shared_data / "formats" / name)) for name in ("openai_messages.jsonl", "sharegpt.jsonl")
    )
    assert len(openai) == 60
    assert [getattr(row, "messages", None) for row in openai] == [getattr(row, "messages", ()) for row in sharegpt]
