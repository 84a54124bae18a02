"""question.jsonl: what is read, and what is refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.evaluate.questions import Question, benchmark_of, digest_of, read_questions


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_questions_are_read_in_their_order(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Ä?", "And?"], "reference": ["x"]},
        "",
        {"turns": ["One\u2028two?"]},
    ]
    path = write(tmp_path / "mt_bench" / "question.jsonl", *rows)
    found = read_questions(path)
    assert found == [Question("81", "writing", ("Ä?", "And?")), Question("3", "none", ("One\u2028two?",))]
    assert read_questions(path, 1) == found[:1]
    assert benchmark_of(path) == "mt_bench"
    assert benchmark_of(tmp_path / "mine.jsonl") == "mine"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("{", "not JSON"),
        ("[1]", "an object"),
        ({"question_id": 1}, "`turns`"),
        ({"turns": []}, "`turns`"),
        ({"turns": ["a", 2]}, "`turns`"),
        ({"turns": ["a", " "]}, "`turns`"),
        ({"turns": "a"}, "`turns`"),
    ],
)
def test_a_line_that_is_no_question_is_named(line: object, hint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"turns": ["a"]}, line)
    with pytest.raises(ConfigError, match=hint) as caught:
        read_questions(path)
    assert caught.value.where == f"{path}:2"


def test_no_file_and_no_questions_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no questions"):
        read_questions(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_questions(tmp_path / "bytes.jsonl")


def test_the_digest_is_of_what_is_asked_and_of_its_order() -> None:
    one, two = Question("1", "a", ("x", "y")), Question("2", "b", ("z",))
    assert digest_of([one, two]) == digest_of([Question("7", "c", ("x", "y")), two])
    assert digest_of([one, two]) != digest_of([two, one])
    assert digest_of([one]) != digest_of([Question("1", "a", ("x y",))])


def test_the_shared_benchmarks_are_read(shared_data: Path) -> None:
    found = {path.parent.name: read_questions(path) for path in (shared_data / "eval").glob("*/question.jsonl")}
    assert len(found["mt_bench"]) == 80
    assert all(len(question.turns) == 2 for question in found["mt_bench"])
    assert {len(question.turns) for question in found["gsm8k"]} == {1}
