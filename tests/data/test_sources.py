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
    assert f"byte {path.stat().st_size - 3}:" in last.detail


@pytest.mark.parametrize("name", ["missing.jsonl", "folder.jsonl", "table.parquet", "noname"])
def test_unreadable_inputs_name_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=name):
        list(read_chats(tmp_path / name))


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
        [*(f"17_column_names:{line}" for line in range(1, 7)), "1", "17_column_names:8", "17_column_names:9"],
        {10: "unknown-columns"},
    ),
    "21_one_row": (["only"], {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(shared_data: Path, name: str) -> None:
    rows = list(read_chats(shared_data / "hostile" / f"{name}.jsonl"))
    kept, dropped = HOSTILE[name]
    assert {row.line: str(row.reason) for row in rows if isinstance(row, Dropped)} == dropped
    if name != "21_one_row":
        assert [row.id for row in rows if not isinstance(row, Dropped)] == kept
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
        assert f"byte {data.index(bad)}:" in row.detail
    *_, torn = read_chats(folder / "15_cut_last_line.jsonl")
    assert "ends in the middle" in str(torn)
    *_, unknown = read_chats(folder / "17_column_names.jsonl")
    assert "found data; expected conversations, " in str(unknown)


def test_sharegpt_and_messages_hold_the_same_chats(shared_data: Path) -> None:
    openai, sharegpt = (
        list(read_chats(shared_data / "formats" / name)) for name in ("openai_messages.jsonl", "sharegpt.jsonl")
    )
    assert len(openai) == 60
    assert [getattr(row, "messages", None) for row in openai] == [getattr(row, "messages", ()) for row in sharegpt]
