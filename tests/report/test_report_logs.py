"""What is made of logs and of evaluations: sessions follow one another, what is foreign is a gap or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import evaluation, write_evaluation

from eyas.report.evaluation_sections import evaluation_section, live_section
from eyas.report.evaluations import read_evaluations
from eyas.report.extraction import read_extraction
from eyas.report.places import Places
from eyas.report.training_section import depths
from run_logs import write_log


def test_events_of_another_shape_are_gaps() -> None:
    assert depths([(None, 0.5), (0.25,), ()]) == [[None, 0.25, None], [0.5, None, None]]


# --- extraction -------------------------------------------------------------------------------------------------------


def start(t: float, **changes: object) -> dict[str, object]:
    return {"t": t, "event": "start", "workers": 1, "engine": "sglang", "provenance": {"sglang": "0.5.23"}, **changes}


def end(t: float, **changes: object) -> dict[str, object]:
    return {
        "t": t,
        "event": "end",
        "rows_done": 9,
        "failed": 1,
        "seconds": 50.0,
        "tokens_per_s": 100.0,
        "stopped": False,
        **changes,
    }


def test_sessions_of_an_extraction_follow_one_another_without_the_night_between(tmp_path: Path) -> None:
    progress = [
        {"t": 1000 + s, "event": "progress", "tokens_done": s, "rate": None if s < 10 else 90.0 + s}
        for s in (5, 10, 15)
    ]
    write_log(tmp_path, "a", [start(1000), *progress, end(1050, stopped=True)])
    later = [{"t": 90_000 + s, "event": "progress", "rate": 200.0} for s in (5, 10)]
    write_log(tmp_path, "b", [start(90_000), *later, end(90_100, seconds=100.0, tokens_per_s=250.0)])
    write_log(tmp_path, "c", [start(99_000), end(99_001, seconds=0.0, tokens_per_s=0.0)])
    found = read_extraction(tmp_path)
    first, second = found.sittings
    assert (first.engine, first.stopped, first.speed) == ("sglang 0.5.23", True, ((10.0, 100.0), (15.0, 105.0)))
    assert (second.worked_before_s, second.seconds) == (50.0, 100.0)
    assert (found.idle, found.tokens_per_s) == (1, (100 * 50 + 250 * 100) / 150)


def test_failures_are_counted_by_reason(tmp_path: Path) -> None:
    retried = [{"t": 2, "event": "row_retried", "row": r, "attempt": 1, "reason": "aborted"} for r in range(3)]
    failed = [
        {"t": 3, "event": "row_failed", "row": 1, "reason": "chunk-gap", "detail": ""},
        {"t": 3, "event": "row_failed"},
    ]
    write_log(tmp_path, "a", [start(1), *retried, *failed])
    found = read_extraction(tmp_path)
    assert (found.retried, found.failed) == ({"aborted": 3}, {"chunk-gap": 1, "unknown": 1})
    assert not found.sittings[0].ended


def test_a_verification_before_the_last_rows_is_stale(tmp_path: Path) -> None:
    write_log(tmp_path, "a", [start(1000), {"t": 1001, "event": "shard_done"}, end(1050)])
    write_log(tmp_path, "verify-1", [{"t": 1020, "event": "verified"}])
    assert read_extraction(tmp_path).stale
    write_log(tmp_path, "verify-2", [{"t": 1060, "event": "verified"}])
    assert not read_extraction(tmp_path).stale


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_evaluations_are_read_in_the_order_of_how_they_were_measured(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "a", evaluation("live", "vllm"))
    write_evaluation(tmp_path, "b", evaluation("offline-decoded", "transformers", topk=4, draft_tokens=12))
    found = read_evaluations(tuple(sorted(tmp_path.glob("*.json"))))
    assert [(row.source, row.category, row.concurrency) for row in found.rows] == [
        ("decoded", "all", 1), ("decoded", "math", 1), ("decoded", "writing", 1),
        ("live, vllm", "all", 1), ("live, vllm", "all", 4), ("live, vllm", "math", 1), ("live, vllm", "writing", 1),
    ]  # fmt: skip
    row = found.rows[0]
    assert (row.length, row.low, row.high, row.by_position, row.plan) == (
        2,
        1.9,
        2.2,
        (0.6, 0.5, 0.4),
        "depth 3, top 4 (12 tokens)",
    )
    assert found.commands == ["eyas evaluate run/draft --live", "eyas evaluate run/draft --offline-decoded"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "it is no evaluation"),
        ('{"results": []}', "it is no evaluation"),
        ('{"mode": "live"}', "it holds no results"),
        ('{"mode": "live", "results": [3]}', "it holds no results"),
    ],
)
def test_a_file_that_is_no_evaluation_is_told_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "evaluation-x.json").write_text(text)
    found = read_evaluations((tmp_path / "evaluation-x.json",))
    ((name, reason),) = found.unread
    assert (name, found.rows) == ("evaluation-x.json", [])
    assert why in reason


def test_an_evaluation_with_values_of_other_kinds_still_gives_rows(tmp_path: Path) -> None:
    rows = [{"category": 3, "accept_length": "two", "ci95": "wide", "accept_by_position": {}, "concurrency": None}]
    write_evaluation(tmp_path, "x", {"mode": "live", "sampling": [], "versions": 3, "depth": None, "results": rows})
    (row,) = read_evaluations((tmp_path / "evaluation-x.json",)).rows
    assert (row.category, row.length, row.low, row.by_position, row.benchmark) == ("3", None, None, (), "unnamed")


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    """The format is `eyas.evaluate`'s; these are its keys."""
    document = evaluation("offline-simulated", "store")
    path = tmp_path / "evaluation-1.json"
    path.write_text(json.dumps(document))
    (row, *_) = read_evaluations((path,)).whole()
    assert (row.benchmark, row.head, row.prompts, row.prompts_digest) == ("mt_bench", "run/draft", 10, "91d2")


def test_plans_of_one_way_are_told_apart_and_servers_without_drafts_are_no_drafters(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "a", evaluation("live", "vllm"))
    write_evaluation(tmp_path, "b", evaluation("live", "vllm", depth=5, sampling={"temperature": 0.7}))
    write_evaluation(tmp_path, "c", evaluation("live", "vllm", depth=0, head="", head_digest=""))
    write_evaluation(tmp_path, "d", evaluation("offline-decoded", "transformers", notes=["one row was too long", 3]))
    found = read_evaluations(tuple(sorted(tmp_path.glob("*.json"))))
    sources = list(dict.fromkeys(row.source for row in found.rows))
    assert sources == ["decoded", "live, vllm, depth 3", "live, vllm, depth 5, temperature 0.7"]
    assert {row.head for row in found.plain} == {""}
    assert found.notes == ["one row was too long"]


DRAFTERS = ({}, {"head_digest": "0123456789ab"})
PROMPTS = ({}, {"prompts_digest": "fedcba9876"})
LENGTHS = ({}, {"sampling": {"temperature": 0.0, "seed": 0, "max_new_tokens": 9}})


@pytest.mark.parametrize(
    "changes", [DRAFTERS, PROMPTS, LENGTHS, ({"head_digest": "", "head": "a"}, {"head_digest": ""})]
)
@pytest.mark.parametrize("depth", [3, 0])
def test_what_does_not_compare_has_names_of_its_own(tmp_path: Path, changes: Any, depth: int) -> None:
    """Two drafters, lengths of answers or choices of prompts, in one server on one benchmark are two lines."""
    for number, change in enumerate(changes):
        write_evaluation(tmp_path, str(number), evaluation("live", "vllm", **{"depth": depth, **change}))
    found = read_evaluations(tuple(sorted(tmp_path.glob("*.json"))))
    lines: dict[str, list[float | None]] = {}
    for row in found.rows or found.plain:
        if row.category == "all":
            lines.setdefault(row.source, []).append(row.concurrency)
    assert list(lines.values()) == [[1, 4], [1, 4]], lines


def test_other_prompts_of_another_benchmark_change_no_name(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "a", evaluation("live", "vllm"))
    write_evaluation(tmp_path, "b", evaluation("live", "vllm", benchmark="gsm8k", prompts_digest="other"))
    found = read_evaluations(tuple(sorted(tmp_path.glob("*.json"))))
    assert {row.source for row in found.rows} == {"live, vllm"}


@pytest.mark.parametrize("concurrencies", [(1, 4), (1,)], ids=["lines", "bars"])
def test_an_evaluation_made_twice_is_drawn_once_and_everywhere_the_later(
    tmp_path: Path, concurrencies: tuple[int, ...]
) -> None:
    for number, speed in enumerate((111.0, 222.0)):
        document = evaluation("live", "vllm")
        rows = [
            {**row, "tokens_per_s": speed, "accept_length": 1 + speed / 1000}
            for row in document["results"] if row["concurrency"] in concurrencies
        ]  # fmt: skip
        write_evaluation(tmp_path, str(number), {**document, "results": rows})
    found = read_evaluations(tuple(sorted(tmp_path.glob("*.json"))))
    live = live_section(Places(tmp_path), found)
    whole = evaluation_section(Places(tmp_path), found)
    speeds = next(figure for figure in live.figures if figure.title == "Output speed").chart.svg
    lengths = next(figure for figure in whole.figures if "by benchmark" in figure.title).chart.svg
    assert "222" in speeds and "111" not in speeds
    assert speeds.count('class="hover"') == (2 if len(concurrencies) > 1 else 0)
    assert "1.22" in lengths and "1.11" not in lengths


@pytest.mark.parametrize(("change", "alike"), [({}, True), *((one, False) for _, one in (DRAFTERS, PROMPTS))])
def test_live_is_held_against_offline_of_the_same_drafter_and_prompts_only(
    tmp_path: Path, change: dict[str, str], alike: bool
) -> None:
    write_evaluation(tmp_path, "a", evaluation("live", "vllm"))
    write_evaluation(tmp_path, "b", evaluation("offline-decoded", "transformers", **change))
    section = live_section(Places(tmp_path), read_evaluations(tuple(sorted(tmp_path.glob("*.json")))))
    (row,) = next(table for table in section.tables if table.title == "Live beside offline").rows
    assert row[-1] == ("+0.0%" if alike else "not comparable")
