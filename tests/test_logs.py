"""Logs as they are read: in the order of time; torn and foreign lines, and files that are no logs, passed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eyas.logs import as_number, read_list, read_number, read_numbers, read_object, read_sessions, read_text
from run_logs import write_log


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    lines = [b"", b"null", b"[1]", b"{", b'{"event": "x"}', b'{"t": "now"}', b'{"t": NaN}', b"\xff\xfe", b'{"t": true}']
    write_log(
        tmp_path,
        "a",
        [{"t": 5, "event": "start"}],
        tail=b"\n".join([*lines, b'{"t": 6, "event": "end"}', b'{"t": 7, "ev']),
    )
    (session,) = read_sessions(tmp_path)
    assert [event["event"] for event in session.events] == ["start", "end"]


def test_sessions_come_in_the_order_of_time_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    write_log(tmp_path, "b", [{"t": 1, "event": "start"}])
    write_log(tmp_path, "a", [{"t": 2, "event": "start"}])
    os.mkfifo(tmp_path / "events" / "pipe.jsonl")
    (tmp_path / "events" / "folder.jsonl").mkdir()
    (tmp_path / "events" / "gone.jsonl").symlink_to("nowhere")
    assert [session.name for session in read_sessions(tmp_path)] == ["b", "a"]
    assert read_sessions(tmp_path / "no such folder") == []


@pytest.mark.parametrize("value", [None, True, "1", [], float("nan"), float("inf"), 1e99, -1e31])
def test_only_numbers_that_can_be_drawn_are_numbers(value: object) -> None:
    assert as_number(value) is None


def test_values_are_of_the_kind_asked_for() -> None:
    event = {"n": 1, "x": [1, None, "a", 2.5], "o": {"a": 1}, "s": "text", "b": True}
    assert (read_number(event, "n"), read_number(event, "s"), read_number(None, "n")) == (1.0, None, None)
    assert (read_numbers(event, "x"), read_numbers(event, "o")) == ((1.0, None, None, 2.5), ())
    assert (read_object(event, "o"), read_object(event, "x"), read_object([], "o")) == ({"a": 1}, {}, {})
    assert (read_list(event, "x"), read_list(event, "s"), read_list(7, "x")) == ([1, None, "a", 2.5], [], [])
    assert [read_text(event, key, "-") for key in ("s", "n", "b", "o", "none")] == ["text", "1", "-", "-", "-"]
