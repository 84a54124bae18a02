"""What one session leaves for the next: rows, turns, failures, and every dollar."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate.answers import Answers, Failure, Turn, paths_of
from eyas.data.regenerate.budget import ZERO, Usage
from eyas.data.rows import Chat
from eyas.errors import ConfigError, IntegrityError

SETTINGS = {"model": "m", "temperature": 0.5, "system": None, "extra_body": {"top_k": 3}}
CHAT = Chat("id", [{"role": "user", "content": "q"}], "in.jsonl", 3)


def key(number: int) -> bytes:
    return bytes([number]) * 16


def turn(text: str, cost: str | None = "0.1") -> Turn:
    usage = None if cost is None else Usage(10, 5, Decimal(cost))
    return Turn({"role": "assistant", "content": text, "finish_reason": "stop"}, usage)


def row(number: int) -> dict[str, Any]:
    return {"id": str(number), "conversations": [], "key": key(number).hex()}


def opened(out: Path) -> Answers:
    answers = Answers(out)
    answers.check_settings(SETTINGS)
    return answers


def test_turns_rows_and_failures_come_back(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        answers.answered(key(1), turn("a"), "", Decimal("0.1"))
        answers.answered(key(1), turn("b"), "", Decimal("0.1"))
        answers.answered(key(2), turn("c"), "", Decimal("0.1"))
        answers.finished(key(1), row(1))
        answers.fail(key(3), CHAT, Failure("timeout", "slow", 1, 6))
    with opened(out) as answers:
        assert (key(1) in answers, key(2) in answers, len(answers)) == (True, False, 1)
        assert answers.turns(key(2)) == [turn("c")]
        assert answers.turns(key(1)) == []
        assert answers.failed[key(3)] == {
            "key": key(3).hex(), "id": "id", "file": "in.jsonl", "line": 3, "reason": "timeout", "detail": "slow",
            "turn": 1, "attempts": 6,
        }  # fmt: skip
        assert (answers.totals.cost, answers.totals.prompt_tokens) == (Decimal("0.3"), 30)


def test_every_dollar_is_remembered_also_of_requests_a_kill_left_open(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        settled, empty, hung, open_, free = (answers.asked(Decimal(n)) for n in (1, 2, 3, 4, 0))
        assert free == ""
        answers.answered(key(1), turn("a"), settled, Decimal("0.1"))
        answers.charged(empty, Usage(7, 7, Decimal("0.2")), Decimal("0.2"))
        answers.charged(hung, None, Decimal(3))
        assert open_
    for session in range(3):  # known once, however often it is opened
        with opened(out) as answers:
            totals = answers.totals
            assert (totals.cost, totals.unknown, totals.unknown_tries) == (Decimal("0.3"), Decimal(7), 2)
            assert totals.prompt_tokens == 17
            if session == 1:
                answers.arrange(b"")  # a journal made short says the same


def test_an_answer_without_usage_counts_as_its_reservation(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        name = answers.asked(Decimal(2))
        answers.answered(key(1), turn("a", None), name, Decimal(2))
    with opened(out) as answers:
        assert (answers.totals.cost, answers.totals.unknown) == (ZERO, Decimal(2))
        assert answers.turns(key(1)) == [turn("a", None)]


def test_arranging_orders_rows_and_failures_and_shortens_the_journal(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        for number in (3, 1, 9, 2):
            answers.answered(key(number), turn("x" * 1000), "", Decimal("0.1"))
            answers.finished(key(number), row(number))
        answers.answered(key(5), turn("half"), "", Decimal("0.1"))
        for number in (6, 5, 6):
            answers.fail(key(number), CHAT, Failure("timeout", "", 1, number))
    with opened(out) as answers:
        assert answers.arrange(b"".join(map(key, (1, 2, 3, 4, 5, 6)))) == 1
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["1", "2", "3", "9"]
    failed = paths_of(out)[2].read_text().splitlines()
    assert [json.loads(line)["attempts"] for line in failed] == [5, 6]
    assert paths_of(out)[1].stat().st_size < 1000
    with opened(out) as answers:
        assert answers.turns(key(5)) == [turn("half")]
        assert answers.totals.cost == Decimal("0.5")
        answers.finished(key(5), row(5))
        answers.arrange(b"")
    with opened(out) as answers:
        assert list(answers.failed) == [key(6)]


def test_a_half_row_is_cut_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        answers.finished(key(1), row(1))
    good = out.read_bytes()
    out.write_bytes(good + b'{"id": "2", "conver')
    with opened(out) as answers:
        assert len(answers) == 1
        answers.finished(key(2), row(2))
    assert len(out.read_bytes().splitlines()) == 2
    out.write_bytes(b'{"id": "mine"}\n' + good)
    with pytest.raises(IntegrityError, match="line 1 is damaged"):
        opened(out)


@pytest.mark.parametrize(
    ("name", "value"), [("model", "n"), ("temperature", None), ("system", "x"), ("extra_body", {})]
)
def test_another_setting_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with opened(tmp_path / "out.jsonl") as answers:
        answers.answered(key(1), turn("a"), "", ZERO)
    with Answers(tmp_path / "out.jsonl") as answers, pytest.raises(ConfigError, match=name):
        answers.check_settings(SETTINGS | {name: value})


def test_settings_that_gave_no_answer_may_change(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        answers.charged(answers.asked(Decimal(1)), None, Decimal(1))
        answers.totals.add(None, Decimal(1))
    with Answers(out) as answers:
        answers.check_settings(SETTINGS | {"model": "n"})
        answers.answered(key(1), turn("a"), "", Decimal("0.1"))
    with Answers(out) as answers:
        assert (answers.settings["model"], answers.totals.unknown) == ("n", 1)
        with pytest.raises(ConfigError, match="model"):
            answers.check_settings(SETTINGS)


def test_a_session_without_any_result_leaves_no_file(tmp_path: Path) -> None:
    for settings in (None, SETTINGS):
        with Answers(tmp_path / "out.jsonl") as answers:
            if settings:
                answers.check_settings(settings)
        assert not list(tmp_path.iterdir())
    with opened(tmp_path / "out.jsonl") as answers:
        answers.fail(key(1), CHAT, Failure("timeout", "slow", 1, 6))
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.journal", "out.failed.jsonl"}


def test_rows_without_their_journal_are_not_ours_to_go_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as answers:
        answers.finished(key(1), row(1))
    for damage in (b"", b"torn"):
        paths_of(out)[1].write_bytes(damage)
        with pytest.raises(ConfigError):
            Answers(out)
    out.unlink()
    paths_of(out)[2].write_text(json.dumps({"key": key(3).hex(), "reason": "old"}) + "\n")
    paths_of(out)[1].unlink(missing_ok=True)
    with opened(out) as answers:  # begun anew: failures of the answers that were removed are gone too
        assert not answers.failed
