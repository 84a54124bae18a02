"""The report and the progress of a regeneration, as a person reads them."""

from __future__ import annotations

import io
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

from rich.console import Console

from eyas.data.regenerate import report as regenerate_report
from eyas.data.regenerate.budget import Totals
from eyas.data.regenerate.report import RegenerateReport, RunView, count_rows
from eyas.data.sources import open_sources


def a_report() -> RegenerateReport:
    report = RegenerateReport(
        model="m", read=10, answered=5, reused=2, turns=9, prompt_tokens=1200, completion_tokens=3400
    )
    report.totals = Totals(2000, 5000, Decimal("1.23456"), Decimal("0.05"), 2)
    report.tries = Counter({"rate-limited": 7, "timeout": 1})
    for line in range(2):
        report.fail("timeout", f"in.jsonl:{line}: no answer")
    report.skip("sampled", "in.jsonl:9: holds no messages")
    report.seconds = 10.0
    return report


def test_lines() -> None:
    assert a_report().lines() == [
        "read 10 rows: 5 answered, 2 answered before, 2 failed, 1 skipped",
        "9 turns, 1,200 tokens in, 3,400 out in 10.0 s (340 tokens/s)",
        "spent $1.2346, and up to $0.0500 for 2 tries of unknown cost",
        "tries that failed: 7 rate-limited, 1 timeout",
        "failed 2: timeout",
        "  in.jsonl:0: no answer",
        "  in.jsonl:1: no answer",
        "skipped 1: sampled",
        "  in.jsonl:9: holds no messages",
    ]
    assert a_report().finished == a_report().read


def test_nothing_is_said_of_money_where_nothing_costs() -> None:
    assert not any("spent" in line for line in RegenerateReport().lines())


def test_the_file_has_exact_sums(tmp_path: Path) -> None:
    a_report().write(tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["all_sessions"]["cost"] == "1.23456"
    assert document["failed_by_reason"] == {"timeout": 2}
    assert document["read"] == document["answered"] + document["reused"] + document["failed"] + document["skipped"]


def test_a_plain_line_now_and_then() -> None:
    text = io.StringIO()
    with RunView(Console(file=text, width=300), a_report()) as view:
        view.total = 100
        view.tick()
        assert not text.getvalue()
        view._said -= regenerate_report.PLAIN_EVERY_S  # the clock of a patient person
        view.tick()
        view.say("http://x is away")
        view.say("http://x is away")
    line, note = text.getvalue().splitlines()
    assert line.startswith("regenerate: 10/100 rows, ")
    assert line.endswith("2 failed, 8 tries failed, $1.2346, and up to $0.0500 for 2 tries of unknown cost")
    assert "left" in line
    assert note == "regenerate: http://x is away"


def test_rows_are_counted_unless_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"conversations": []}\n' * 7)
    inputs = open_sources([tmp_path / "in.jsonl"])
    assert count_rows(inputs, []) == 7
    assert count_rows(inputs, [True]) is None
