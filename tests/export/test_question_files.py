"""Questions that a drafter is tried on: which lines are read, and which line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.export.documents import read_questions


def written(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text(end.join(lines), encoding="utf-8", newline="")
    return path


def question(text: str) -> str:
    return f'{{"question_id": 1, "turns": ["{text}"]}}'


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bad", ["{", "null", '{"turns": []}', '{"turns": [3]}', '{"turns": "x"', "[]"])
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path, bad: str, end: str) -> None:
    path = written(tmp_path / "q.jsonl", question("a"), "", "  ", question("b\u2028c\x85d"), bad, end=end)
    with pytest.raises(ConfigError, match=r"q\.jsonl:5"):
        read_questions(path, 10)


def test_the_first_so_many_are_read_and_nothing_after_them(tmp_path: Path) -> None:
    path = written(tmp_path / "q.jsonl", "", question("a"), "", question("b\u2028c"), "no question")
    assert read_questions(path, 2) == ["a", "b\u2028c"]
    assert read_questions(path, 1) == ["a"]
    with pytest.raises(ConfigError, match="not a question"):
        read_questions(path, 3)


def test_a_file_without_questions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no questions"):
        read_questions(written(tmp_path / "q.jsonl", "", " "), 3)
    with pytest.raises(ConfigError, match="cannot read"):
        read_questions(tmp_path / "none.jsonl", 3)
