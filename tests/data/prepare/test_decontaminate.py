from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.prepare.decontaminate import GRAM_WORDS, EvaluationIndex
from eyas.data.prepare.normalise import words
from eyas.data.rows import Message
from eyas.errors import ConfigError

LONG = "Write a persuasive email to convince your introverted friend, who dislikes public speaking, to volunteer here"


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]


def index_of(tmp_path: Path, *turns: str) -> EvaluationIndex:
    return EvaluationIndex.read([str(jsonl(tmp_path / "eval.jsonl", {"question_id": 81, "turns": list(turns)}))])


def test_thirteen_words_in_a_row_are_found_wherever_they_are(tmp_path: Path) -> None:
    index = index_of(tmp_path, LONG)
    part = " ".join(words(LONG)[2:15])
    for text in (LONG, part.upper(), f"Hello. {part}? Bye.", part.replace(" ", "\n\n- ")):
        assert index.find(user(text)) == f"{tmp_path / 'eval.jsonl'}:1"
        assert index.find_text(text) == f"{tmp_path / 'eval.jsonl'}:1"
    assert index.find(user(" ".join(words(LONG)[2:14]))) is None
    assert index.find(user(" ".join(reversed(words(LONG))))) is None


def test_answers_and_thoughts_are_compared_too(tmp_path: Path) -> None:
    index = index_of(tmp_path, LONG)
    assert index.find([*user("Hi")[:1], {"role": "assistant", "content": LONG}])
    assert index.find([*user("Hi")[:1], {"role": "assistant", "content": "x", "reasoning_content": LONG}])


def test_a_short_turn_counts_where_it_is_a_whole_user_turn(tmp_path: Path) -> None:
    index = index_of(tmp_path, "Who wrote Hamlet?", LONG)
    assert index.find(user("who wrote HAMLET"))
    assert index.find(user("Tell me who wrote Hamlet?")) is None
    assert index.find([*user("Hi")[:1], {"role": "assistant", "content": "Who wrote Hamlet?"}]) is None


def test_references_of_an_evaluation_row_count(tmp_path: Path) -> None:
    row = {"question_id": 1, "turns": ["Hi there"], "reference": [LONG, "42"]}
    index = EvaluationIndex.read([str(jsonl(tmp_path / "eval.jsonl", row))])
    assert index.find(user(LONG))
    assert index.find(user("42")) is None


def test_characters_are_words_where_nobody_writes_spaces(tmp_path: Path) -> None:
    index = index_of(tmp_path, "请写一封有说服力的电子邮件给你的朋友")
    assert index.find(user("你好\uff0c请写一封有说服力的电子邮件。"))
    assert index.find(user("请写一封有说服力")) is None


def test_the_first_evaluation_row_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "eval.jsonl", *({"messages": [{"role": "user", "content": LONG}]} for _ in range(3)))
    assert EvaluationIndex.read([str(path)]).find(user(LONG)) == f"{path}:1"


WORDS = st.lists(st.sampled_from(["a", "b"]), max_size=24).map(" ".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.lists(WORDS.filter(bool), min_size=1, max_size=3), WORDS)
def test_it_agrees_with_a_slow_comparison_of_words(tmp_path: Path, turns: list[str], text: str) -> None:
    index = pickle.loads(pickle.dumps(index_of(tmp_path, *turns)))
    grams = {tuple(turn.split()[i : i + 13]) for turn in turns for i in range(len(turn.split()) - 12)}
    mine = text.split()
    expected = any(tuple(mine[i : i + 13]) in grams for i in range(len(mine) - 12))
    expected |= 0 < len(mine) < GRAM_WORDS and text in turns
    assert (index.find(user(text)[:1]) is not None) == expected


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "eval.jsonl", {"turns": [LONG]}, {"strange": 1}, {"turns": 3})
    assert EvaluationIndex.read([str(path)]).unread == 2


@pytest.mark.parametrize("content", ["", '{"strange": 1}\n'])
def test_an_evaluation_set_without_text_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"eval\.jsonl"):
        EvaluationIndex.read([str(path)])


def test_every_shared_evaluation_set_meets_itself(shared_data: Path) -> None:
    for path in sorted(shared_data.glob("eval/*/question.jsonl")):
        index = EvaluationIndex.read([str(path)])
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line:
                for turn in json.loads(line)["turns"]:
                    assert not words(turn) or index.find(user(turn)), (path, turn)
