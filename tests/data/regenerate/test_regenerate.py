"""Regeneration against a local server that fails in a fixed pattern; every row ends answered, or failed by name."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from decimal import Decimal
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from openai_server import KEY, MODEL, Act, OpenAIServer, echo, running
from rich.console import Console
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import RegenerateConfig
from eyas.data.regenerate import RegenerateReport, regenerate
from eyas.data.rows import Chat
from eyas.data.sources import read_chats
from eyas.errors import ConfigError, EngineError, EyasError, Interrupted, StoreError

PRICES = {"price_prompt": 1.0, "price_completion": 2.0}
QUICK: dict[str, Any] = {"retry_wait_s": 0.01, "timeout_s": 0.7, "attempts": 3, "drain_s": 5, "in_flight": 16}


def settings(**changes: Any) -> RegenerateConfig:
    return RegenerateConfig(**(QUICK | changes))


ACTS: dict[str, Act] = {
    "ok": Act(),
    "429s": Act("status", status=429, headers=(("Retry-After", "1"),)),
    "empty": Act(text="  \n"),
    "length": Act(finish="length"),
    "filter": Act(finish="content_filter"),
    "think": Act(reasoning="let me see", reasoning_name="reasoning"),
    "call": Act(text="", calls=(("lookup", '{"city": "Bern"}'),), finish="tool_calls"),
    "long": Act("status", status=400, body={"error": {"message": "This model's maximum context length is 8"}}),
    "cutclean": Act("cut", status=206),
    "cost": Act(cost="0.0123"),
} | {kind: Act(kind) for kind in ("plain", "hang", "cut", "reset", "malformed", "error-chunk", "no-done", "no-usage")}


def scripted(body: dict[str, Any], before: int) -> Act:
    """Prompts say what is done with them, try by try: `q7|429,cut,ok`; the last word goes on for ever."""
    words = (body["messages"][-1]["content"].partition("|")[2] or "ok").split(",")
    word = words[min(before, len(words) - 1)]
    if word == "503d":
        return Act("status", status=503, headers=(("Retry-After", formatdate(time.time() + 2, usegmt=True)),))
    return ACTS[word] if word in ACTS else Act("status", status=int(word))


def prompts(path: Path, *texts: str) -> Path:
    rows = [{"id": f"r{i}", "conversations": [{"role": "user", "content": text}]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def go(server: OpenAIServer, source: Path, out: Path, cfg: RegenerateConfig, **more: Any) -> RegenerateReport:
    return regenerate([source], out, servers=[server.url], cfg=cfg, console=Console(quiet=True), **more)


ANSWERED = [
    *("ok", "429,ok", "408,409,ok", "429s,ok", "503d,ok", "500,503,ok", "hang,ok", "cut,ok", "cutclean,ok", "reset,ok"),
    *("empty,ok", "malformed,ok", "filter,ok", "error-chunk,ok", "plain", "think", "call", "length", "cost"),
    *("empty,cost", "cut,empty,ok", "no-usage", "425,ok"),
]
FAILED = {
    "500": "server-error",
    "429": "rate-limited",
    "503": "server-error",
    "hang": "timeout",
    "cut": "cut-stream",
    "cutclean": "cut-stream",
    "reset": "connection-lost",
    "empty": "empty-answer",
    "malformed": "malformed-reply",
    "filter": "content-filter",
    "long": "prompt-too-long",
    "418": "bad-request",
}


def tries(word: str) -> int:
    """What three attempts are: a refused row has one, and busy servers count half."""
    return {"long": 1, "418": 1, "429": 6, "503": 6}.get(word, 3)


def test_every_row_ends_answered_or_failed_by_name_and_the_cost_is_the_servers(tmp_path: Path) -> None:
    texts = [f"a{i}|{words}" for i, words in enumerate(ANSWERED)] + [f"f{i}|{word}" for i, word in enumerate(FAILED)]
    source, out = prompts(tmp_path / "in.jsonl", *texts), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=scripted)) as server:
        report = go(server, source, out, settings(**PRICES))
        asked = Counter(asked.prompt for asked in server.asked)
        again = go(server, source, out, settings(**PRICES))
    assert report.complete
    assert report.read == len(texts) == report.answered + report.failed.total()
    assert report.failed == Counter(FAILED.values())
    assert [row["conversations"][0]["content"] for row in rows_of(out)] == texts[: len(ANSWERED)]
    failed = rows_of(tmp_path / "out.failed.jsonl")
    assert [(row["line"], row["reason"]) for row in failed] == [
        (len(ANSWERED) + 1 + i, reason) for i, reason in enumerate(FAILED.values())
    ]
    assert [row["attempts"] for row in failed] == [tries(word) for word in FAILED]
    # As often as it took, and never again; a row that was refused is not asked twice.
    for text in texts:
        words = text.partition("|")[2].split(",")
        assert asked[text] == (len(words) if text[0] == "a" else tries(words[0])), text
    assert Counter(asked.prompt for asked in server.asked) == asked
    assert (again.reused, again.failed) == (len(ANSWERED), report.failed)
    assert report.totals.cost == server.ledger
    unknown = [
        asked
        for asked in server.asked
        if asked.act.kind in ("hang", "cut", "reset", "malformed", "no-usage", "error-chunk")
    ]
    assert report.totals.unknown_tries == len(unknown)
    assert report.tries["rate-limited"] == 1 + 1 + 6
    document = json.loads((tmp_path / "out.summary.json").read_text())
    assert Decimal(document["all_sessions"]["cost"]) == server.ledger
    assert document["read"] == document["reused"] + document["failed"]


def test_retry_after_is_honoured_in_seconds_and_as_a_date(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", "a|429s,ok", "b|503d,ok")
    with running(OpenAIServer(plan=scripted)) as server:
        report = go(server, source, tmp_path / "out.jsonl", settings(in_flight=1))
    assert report.answered == 2
    at = {(asked.prompt, asked.before): asked.at_s for asked in server.asked}
    assert at["a|429s,ok", 1] - at["a|429s,ok", 0] >= 1.0
    assert at["b|503d,ok", 1] - at["b|503d,ok", 0] >= 0.9  # a date has whole seconds


def test_what_comes_after_the_finish_takes_nothing_from_the_answer(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", "a|no-done")
    with running(OpenAIServer(plan=scripted)) as server:
        report = go(server, source, tmp_path / "out.jsonl", settings(**PRICES))
    assert (report.answered, len(server.asked)) == (1, 1)
    assert report.totals.cost == server.ledger > 0


@pytest.mark.parametrize("with_", ["last", "finish"])
def test_usage_is_taken_wherever_it_comes(tmp_path: Path, with_: str) -> None:
    with running(OpenAIServer(plan=lambda *_: Act(usage_with=with_))) as server:
        report = go(server, prompts(tmp_path / "in.jsonl", "a b c"), tmp_path / "out.jsonl", settings(**PRICES))
    assert (report.prompt_tokens, report.totals.cost) == (7, server.ledger)


def test_a_server_without_stream_options_is_asked_without_them(tmp_path: Path) -> None:
    with running(OpenAIServer(refuse_stream_options=True)) as server:
        report = go(server, prompts(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl", settings())
    assert (report.answered, report.failed.total(), len(server.asked)) == (2, 0, 2)


def test_whole_answers_can_be_asked_for_and_half_ones_are_not_taken(tmp_path: Path) -> None:
    def plan(body: dict[str, Any], before: int) -> Act:
        assert "stream_options" not in body
        assert body["stream"] is False
        return Act("half-plain" if before == 0 else "plain")

    with running(OpenAIServer(plan=plan)) as server:
        report = go(
            server, prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl", settings(stream=False, **PRICES)
        )
    assert (report.answered, len(server.asked), report.tries.total()) == (1, 2, 1)
    assert (report.totals.cost, report.totals.unknown_tries) == (server.ledger, 1)


# --- chats ------------------------------------------------------------------------------------------------------------


def chat(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"role": role, "content": text} for role, text in turns], **more}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_turn_is_asked_after_the_answer_before_it(tmp_path: Path) -> None:
    old = chat(
        ("system", "short"), ("user", "q1"), ("assistant", "old"), ("user", "q2"), ("assistant", "old"), ("user", "q3")
    )
    with running(OpenAIServer()) as server:
        report = go(server, written(tmp_path / "in.jsonl", old), tmp_path / "out.jsonl", settings(system="unused"))
    contexts = [[message["content"] for message in asked.body["messages"]] for asked in server.asked]
    first, second = "answer 2 to «q1»", "answer 4 to «q2»"
    assert contexts == [["short", "q1"], ["short", "q1", first, "q2"], ["short", "q1", first, "q2", second, "q3"]]
    assert report.turns == 3
    [row] = rows_of(tmp_path / "out.jsonl")
    assert [message["content"] for message in row["conversations"]] == [*contexts[2], "answer 6 to «q3»"]
    assert "old" not in json.dumps(row)
    assert not any("finish_reason" in message for asked in server.asked for message in asked.body["messages"])


def test_settings_reach_the_server(tmp_path: Path) -> None:
    cfg = settings(
        temperature=0.5,
        top_p=0.9,
        max_tokens=33,
        seed=7,
        system="be brief",
        extra_body={"top_k": 20, "provider": {"sort": "price"}},
    )
    with running(OpenAIServer()) as server:
        go(server, prompts(tmp_path / "in.jsonl", "q"), tmp_path / "out.jsonl", cfg)
    body = server.asked[0].body
    assert body.pop("messages") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert body == {
        "model": MODEL, "temperature": 0.5, "top_p": 0.9, "max_tokens": 33, "seed": 7, "top_k": 20,
        "provider": {"sort": "price"}, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert server.asked[0].authorization == "Bearer EMPTY"


def test_reasoning_and_calls_are_stored_and_end_what_they_end(tmp_path: Path) -> None:
    source = written(
        tmp_path / "in.jsonl",
        chat(("user", "a|think"), ("assistant", "x"), ("user", "b|length"), ("assistant", "y"), ("user", "never")),
        chat(("user", "c|call"), ("assistant", "x"), ("user", "never")),
    )
    with running(OpenAIServer(plan=scripted)) as server:
        go(server, source, tmp_path / "out.jsonl", settings())
    thought, called = rows_of(tmp_path / "out.jsonl")
    assert thought["conversations"][1]["reasoning_content"] == "let me see"
    assert [row["finish_reason"] for row in (thought, called)] == ["length", "tool_calls"]
    assert thought["conversations"][-1]["finish_reason"] == "length"
    assert called["conversations"][-1]["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Bern"}'}}
    ]
    assert "never" not in {asked.prompt for asked in server.asked}
    assert all(isinstance(row, Chat) for row in read_chats(tmp_path / "out.jsonl"))


def test_cut_answers_can_be_refused_and_cost_all_the_same(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", "a|length", "b")
    with running(OpenAIServer(plan=scripted)) as server:
        report = go(server, source, tmp_path / "out.jsonl", settings(on_length="drop", **PRICES))
    assert (report.answered, report.failed, len(server.asked)) == (1, Counter(length=1), 2)
    assert report.totals.cost == server.ledger


def test_rows_that_cannot_be_asked_are_skipped_by_name(tmp_path: Path) -> None:
    rows = [
        chat(("user", "fine")),
        {"prompt_ids": [1], "answer_ids": [2]},
        chat(("system", "alone")),
        chat(("user", " ")),
        {"nothing": 1},
    ]
    source = written(tmp_path / "in.jsonl", *rows)
    with source.open("a") as file:
        file.write('{"conversations": [{"role": "us')
    with running(OpenAIServer()) as server:
        report = go(server, source, tmp_path / "out.jsonl", settings())
    assert report.answered == 1
    assert report.skipped == Counter(
        dict.fromkeys(("sampled", "no-prompt", "empty-prompt", "unknown-columns", "bad-json"), 1)
    )
    assert report.examples["no-prompt"] == [f"{source}:3"]
    assert report.read == 6 == report.finished


def test_nothing_to_ask_is_an_error(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", {"nothing": 1})
    with running(OpenAIServer()) as server, pytest.raises(ConfigError, match="no row can be asked"):
        go(server, source, tmp_path / "out.jsonl", settings())


# --- resume -----------------------------------------------------------------------------------------------------------


def test_edited_and_reordered_inputs_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with running(OpenAIServer()) as server:
        go(server, prompts(tmp_path / "in.jsonl", "a", "b", "c", "a"), out, settings())
        report = go(server, prompts(tmp_path / "in.jsonl", "c", "new", "a", "b"), out, settings())
    assert Counter(asked.prompt for asked in server.asked) == {"a": 2, "b": 1, "c": 1, "new": 1}
    assert (report.answered, report.reused, report.others) == (1, 3, 1)
    assert [row["conversations"][0]["content"] for row in rows_of(out)] == ["c", "new", "a", "b", "a"]


def test_the_output_is_in_input_order_whatever_order_answers_came_in(tmp_path: Path) -> None:
    def slow_first(body: dict[str, Any], before: int) -> Act:
        return Act(pause_s=0.3 if body["messages"][-1]["content"] in ("p0", "p3") else 0.0)

    texts = [f"p{i}" for i in range(12)]
    out = tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=slow_first)) as server:
        go(server, prompts(tmp_path / "in.jsonl", *texts), out, settings())
        assert server.highest > 2
    assert [row["id"] for row in rows_of(out)] == [f"r{i}" for i in range(12)]


def test_failed_rows_are_asked_again_only_when_told_to_and_keep_their_answered_turns(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", chat(("user", "a"), ("assistant", "x"), ("user", "b|500,500,500,ok")))
    out = tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=scripted)) as server:
        first = go(server, source, out, settings(**PRICES))
        assert (first.failed, len(rows_of(tmp_path / "out.failed.jsonl"))) == (Counter({"server-error": 1}), 1)
        go(server, source, out, settings(**PRICES))
        assert len(server.asked) == 4
        last = go(server, source, out, settings(**PRICES), retry_failed=True)
    assert (last.answered, last.failed.total()) == (1, 0)
    assert [asked.prompt for asked in server.asked].count("a") == 1
    assert not (tmp_path / "out.failed.jsonl").exists()
    assert last.totals.cost == server.ledger
    assert rows_of(out)[0]["usage"]["prompt_tokens"] == 5 + (5 + 8 + 5)


def test_other_settings_than_those_of_the_answers_are_refused_by_name(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    with running(OpenAIServer()) as server:
        go(server, source, out, settings(temperature=0.5))
        for change, name in (
            ({"temperature": 0.7}, "temperature: 0.5, now 0.7"),
            ({"temperature": 0.5, "system": "x"}, "system"),
        ):
            with pytest.raises(ConfigError, match=name):
                go(server, source, out, settings(**change))


def test_an_output_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with running(OpenAIServer()) as server, pytest.raises(ConfigError, match="not written by this command"):
        go(server, source, out, settings())
    assert out.read_text() == "precious\n"


def test_a_finished_output_needs_no_server(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    with running(OpenAIServer()) as server:
        go(server, source, out, settings())
    before = out.read_bytes()
    assert go(server, source, out, settings()).reused == 1
    assert out.read_bytes() == before


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    met: list[EyasError] = []

    def second(body: dict[str, Any], before: int) -> Act:
        code = (
            "import sys; from pathlib import Path; from eyas.data.regenerate.answers import Answers\n"
            "from eyas.errors import StoreError\n"
            "try: Answers(Path(sys.argv[1]))\n"
            "except StoreError as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(out)], check=True, capture_output=True, text=True)
        met.append(StoreError(done.stdout))
        return Act()

    with running(OpenAIServer(plan=second)) as server:
        go(server, source, out, settings(timeout_s=30))
    assert "another process" in met[0].what
    assert str(out) in met[0].what


# --- money ------------------------------------------------------------------------------------------------------------


def test_the_limit_is_never_passed_by_the_servers_own_ledger(tmp_path: Path) -> None:
    texts = [f"a{i}|ok" if i % 3 else f"a{i}|empty,cut,ok" for i in range(60)]
    source, out = prompts(tmp_path / "in.jsonl", *texts), tmp_path / "out.jsonl"
    cfg = settings(max_tokens=40, max_cost=0.012, price_prompt=1.0, price_completion=50.0)
    with running(OpenAIServer(plan=scripted, prices=("1", "50"))) as server:
        report = go(server, source, out, cfg)
        assert report.over_budget and not report.complete
        assert 0 < report.answered < 60
        assert report.totals.cost == server.ledger
        assert server.ledger + report.totals.unknown <= Decimal("0.012")
        stopped = go(server, source, out, cfg)  # what was spent is remembered
        assert stopped.over_budget
        assert stopped.totals.cost == server.ledger
        assert server.ledger + stopped.totals.unknown <= Decimal("0.012")
        more = go(server, source, out, cfg.model_copy(update={"max_cost": 1.0}))
    assert more.complete and more.answered + more.reused == 60
    assert more.totals.cost == server.ledger


def test_prices_are_the_servers_when_it_lists_them(tmp_path: Path) -> None:
    entry = {"id": MODEL, "pricing": {"prompt": "0.000001", "completion": "0.000002", "request": "0"}}
    with running(OpenAIServer(models=[entry, {"id": "other", "pricing": {"prompt": "-1"}}])) as server:
        report = go(
            server, prompts(tmp_path / "in.jsonl", "a b c"), tmp_path / "out.jsonl", settings(max_cost=1.0), model=MODEL
        )
    assert report.totals.cost == server.ledger > 0


def test_a_limit_without_prices_cannot_be_kept_and_is_refused(tmp_path: Path) -> None:
    with running(OpenAIServer()) as server, pytest.raises(ConfigError, match="max_cost needs prices"):
        go(server, prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl", settings(max_cost=1.0))
    assert not server.asked


# --- servers ----------------------------------------------------------------------------------------------------------


def test_requests_go_to_the_server_with_the_fewest_in_flight(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(24)))
    slow, quick = OpenAIServer(plan=lambda *_: Act(pause_s=0.4)), OpenAIServer(plan=lambda *_: Act(pause_s=0.02))
    with running(slow), running(quick):
        report = regenerate(
            [source],
            tmp_path / "out.jsonl",
            servers=[slow.url, quick.url],
            cfg=settings(in_flight=6),
            console=Console(quiet=True),
        )
    assert report.answered == 24
    assert 3 <= len(slow.asked) < len(quick.asked)


def test_a_server_that_goes_away_is_rested_and_comes_back(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(30)))
    first, second = OpenAIServer(plan=lambda *_: Act(pause_s=0.1)), OpenAIServer(plan=lambda *_: Act(pause_s=0.1))
    done = threading.Event()

    def leave() -> None:
        with running(second):
            time.sleep(0.4)
        done.set()
        with running(second):
            time.sleep(6)

    with running(first):
        leaver = threading.Thread(target=leave, daemon=True)
        leaver.start()
        while not second.port:
            time.sleep(0.01)
        report = regenerate(
            [source],
            tmp_path / "out.jsonl",
            servers=[first.url, second.url],
            cfg=settings(in_flight=4),
            console=Console(quiet=True),
        )
    assert (report.answered, report.failed.total()) == (30, 0)
    assert done.is_set()
    assert first.asked and second.asked


def at_most_at_once(most: int) -> OpenAIServer:
    """Refuses what comes while it has `most` in hand."""
    server = OpenAIServer()
    server.plan = lambda *_: Act("status", status=429) if server.working >= most else Act(pause_s=0.2)
    return server


def at_most_in_a_window(most: int, window_s: float) -> OpenAIServer:
    """Refuses all but the first `most` requests of each `window_s` seconds."""
    taken = Counter[int]()

    def plan(*_: object) -> Act:
        window = int(time.monotonic() / window_s)
        taken[window] += 1
        return Act(pause_s=0.05) if taken[window] <= most else Act("status", status=429)

    return OpenAIServer(plan=plan)


def down_at_first(status: int, seconds: float) -> OpenAIServer:
    """What stands before a server that is being restarted."""
    began: list[float] = []

    def plan(*_: object) -> Act:
        began.append(time.monotonic())
        return Act("status", status=status) if began[-1] - began[0] < seconds else Act()

    return OpenAIServer(plan=plan)


@pytest.mark.parametrize(
    "busy",
    [at_most_at_once(3), at_most_in_a_window(12, 0.8), *(down_at_first(status, 1.5) for status in (429, 502, 503))],
    ids=["at once", "in a window", "429", "502", "503"],
)
def test_no_row_fails_because_a_server_is_busy(tmp_path: Path, busy: OpenAIServer) -> None:
    source = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(60)))
    with running(busy) as server:
        report = go(server, source, tmp_path / "out.jsonl", settings(in_flight=40, attempts=4, retry_wait_s=0.05))
    assert (report.answered, report.failed.total()) == (60, 0), report.failed


def test_a_server_that_stays_busy_ends_the_run(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(60)))
    with running(OpenAIServer(plan=lambda *_: Act("status", status=503))) as server:
        with pytest.raises(EngineError, match=r"no server has answered for 0.6 s.*same command goes on"):
            go(server, source, tmp_path / "out.jsonl", settings(in_flight=8, attempts=9, retry_wait_s=0.1, away_s=0.6))
        assert len(server.asked) < 30


def test_no_server_at_the_start_is_told_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match="no server answers"):
        regenerate(
            [prompts(tmp_path / "in.jsonl", "a")],
            tmp_path / "out.jsonl",
            servers=["http://127.0.0.1:9/v1"],
            cfg=settings(),
        )
    assert time.monotonic() - began < 5


def test_servers_away_for_too_long_end_the_run_which_can_go_on(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(12))), tmp_path / "out.jsonl"
    server = OpenAIServer(plan=lambda *_: Act(pause_s=0.15))
    leaving = threading.Event()

    def serve() -> None:
        with running(server):
            while len(server.asked) < 4:
                time.sleep(0.01)
        leaving.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    while not server.port:
        time.sleep(0.01)
    with pytest.raises(EngineError, match=r"no server has answered for 0.5 s.*same command goes on"):
        go(server, source, out, settings(in_flight=2, away_s=0.5))
    assert leaving.is_set()
    kept = len(rows_of(out))
    with running(server):
        report = go(server, source, out, settings())
    assert (report.reused, report.answered) == (kept, 12 - kept)
    assert kept


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, None, EngineError, "refuses us"),
        (402, None, EngineError, "no credit"),
        (403, None, EngineError, "refuses us"),
        (404, None, EngineError, "no chat completions"),
        (404, {"error": {"message": "The model `x` does not exist."}}, ConfigError, "does not know the model"),
        (400, {"error": {"message": "x is not a valid model ID"}}, ConfigError, "does not know the model"),
        (400, {"error": {"message": "temperature is too high"}}, ConfigError, "refuses every request.*too high"),
        (307, None, EngineError, "elsewhere"),
    ],
)
def test_what_no_row_would_fare_better_with_ends_the_run(
    tmp_path: Path, status: int, body: Any, error: type[EyasError], words: str
) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(9))), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=lambda *_: Act("status", status=status, body=body))) as server:
        with pytest.raises(error, match=words):
            go(server, source, out, settings(in_flight=3))
        assert len(server.asked) <= 5
    with running(OpenAIServer()) as server:  # no row is marked as failed for it
        assert go(server, source, out, settings()).answered == 9


def test_a_server_in_trouble_does_not_fail_every_row(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(200))), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=lambda *_: Act("status", status=500))) as server:
        with pytest.raises(EngineError, match=r"the last \d+ rows have failed.*--retry-failed"):
            go(server, source, out, settings(attempts=1))
        assert 50 <= len(server.asked) < 90
    with running(OpenAIServer()) as server:
        report = go(server, source, out, settings(), retry_failed=True)
    assert (report.answered, report.failed.total()) == (200, 0)


@pytest.mark.parametrize(
    ("words", "flags", "code", "said"),
    [
        ("ok", [], 0, "1 answered"),
        ("long", [], 6, "1 rows have no answer"),
        ("ok", ["--max-cost", "0.000001"], 6, "max_cost would be passed"),
        ("401", [], 3, "refuses us"),
        ("ok", ["--model", "unheard-of"], 2, "does not know the model"),
    ],
)
def test_exit_codes(tmp_path: Path, words: str, flags: list[str], code: int, said: str) -> None:
    source = prompts(tmp_path / "in.jsonl", f"a|{words}")
    out, priced = tmp_path / "out.jsonl", ["--set", "regenerate.price_prompt=1"]
    with running(OpenAIServer(plan=scripted)) as server:
        argv = ["regenerate", str(source), "--server", server.url, "--out", str(out), *priced, *flags]
        done = CliRunner().invoke(app, argv)
    assert done.exit_code == code, done.output
    assert said in done.output


def test_a_flagged_prompt_and_missing_tool_support_fail_the_row_alone(tmp_path: Path) -> None:
    flagged = {"error": {"message": "flagged", "code": 403, "metadata": {"reasons": ["violence"]}}}
    no_tools = {"error": {"message": "No endpoints found that support tool use", "code": 404}}

    def plan(body: dict[str, Any], before: int) -> Act:
        match body["messages"][-1]["content"]:
            case "bad":
                return Act("status", status=403, body=flagged)
            case "tools":
                return Act("status", status=404, body=no_tools)
            case _:
                return Act()

    with running(OpenAIServer(plan=plan)) as server:
        report = go(server, prompts(tmp_path / "in.jsonl", "bad", "tools", "fine"), tmp_path / "out.jsonl", settings())
    assert (report.answered, report.failed) == (1, Counter({"moderated": 1, "tools-unsupported": 1}))


def test_the_only_model_is_the_default_and_a_wrong_one_is_refused_with_the_nearest(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    with running(OpenAIServer(models=["org/tiny-7b", "org/other"])) as server:
        with pytest.raises(ConfigError, match="which of the server's models"):
            go(server, source, out, settings())
        with pytest.raises(ConfigError, match=r"does not know the model: org/tiny-7.*org/tiny-7b"):
            go(server, source, out, settings(), model="org/tiny-7")
        assert (
            go(server, source, tmp_path / "other.jsonl", settings(), model="org/tiny-7b:free").model
            == "org/tiny-7b:free"
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_body": {"n": 2}}, "may not hold n"),
        ({"extra_body": {"messages": []}}, "may not hold messages"),
        ({"extra_body": {"max_tokens": 5}}, "set regenerate.max_tokens"),
        *(({"extra_body": {"max_completion_tokens": bad}}, "number of tokens") for bad in (None, 0, "9", 2.5, True)),
    ],
)
def test_extra_fields_that_would_break_the_run_are_refused(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        regenerate(
            [prompts(tmp_path / "in.jsonl", "a")], tmp_path / "o.jsonl", servers=["http://x"], cfg=settings(**changes)
        )


def test_inputs_and_output_are_told_apart(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", "a")
    with pytest.raises(ConfigError, match="among the inputs"):
        regenerate([source], source, servers=["http://x"])
    with pytest.raises(ConfigError, match="no server is named"):
        regenerate([source], tmp_path / "o.jsonl")
    with pytest.raises(ConfigError, match="no input is named"):
        regenerate([], tmp_path / "o.jsonl", servers=["http://x"])
    with pytest.raises(ConfigError, match="is JSON lines"):
        regenerate([source], tmp_path / "o.json", servers=["http://x"])


@pytest.mark.parametrize(
    ("given", "out"),
    [
        *((given, "o.jsonl") for given in ("", "*.jsonl", "*", "**/*.jsonl", "../d/o*")),
        *((given, "deep/o.jsonl") for given in ("", "**/*.jsonl", "*")),
    ],
)
def test_an_output_that_would_be_read_next_time_is_refused_the_first_time(tmp_path: Path, given: str, out: str) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    prompts(folder / "in.jsonl", "a")
    with pytest.raises(ConfigError, match="among the inputs"):
        regenerate([folder / given], folder / out, servers=["http://x"])
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def test_an_output_beside_a_folder_of_inputs_is_not_in_it(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    prompts(tmp_path / "d" / "in.jsonl", "a")
    for number, given in enumerate((tmp_path / "d", tmp_path / "d" / "**" / "*.jsonl", tmp_path / "i*.jsonl")):
        prompts(tmp_path / "in.jsonl", "a")
        with running(OpenAIServer()) as server:
            assert go(server, given, tmp_path / f"out{number}.jsonl", settings()).answered == 1


def test_a_start_that_failed_can_be_mended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    with pytest.raises(EngineError, match="no server answers"):
        go(OpenAIServer(port=9), source, out, settings(), model=MODEL)
    with running(OpenAIServer(models=("a", "b"))) as server:
        with pytest.raises(ConfigError, match="which of the server's models"):
            go(server, source, out, settings())
        with pytest.raises(ConfigError, match="does not know the model"):
            go(server, source, out, settings(), model="c")
        with pytest.raises(ConfigError, match="max_cost needs prices"):
            go(server, source, out, settings(max_cost=1.0, temperature=0.1), model="a")
        assert list(tmp_path.iterdir()) == [source]
        assert go(server, source, out, settings(), model="a").answered == 1


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_is_in_no_file_and_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)

    def echoing(body: dict[str, Any], before: int) -> Act:
        says = {"error": {"message": f"what is this key: {KEY}?", "code": 500}}
        match body["messages"][-1]["content"]:
            case "status":
                return Act("status", status=500, body=says)
            case "row":
                return Act("status", status=400, body={"error": {"message": f"prompt too odd for {KEY}"}})
            case "text":
                return Act("status", status=503, body=f"plain {KEY}".encode())
            case "stream":
                return Act("error-chunk", body=says)
            case "answer":
                return Act(text=f"your key is {KEY}")
            case "stop":
                return Act("status", status=403, body={"error": {"message": f"{KEY} is not allowed"}})
            case _:
                return Act()

    source = prompts(tmp_path / "in.jsonl", "fine", "status", "row", "text", "stream", "answer")
    cfg = settings(api_key_env="MY_KEY")
    console = Console(record=True, width=200)
    with running(OpenAIServer(plan=echoing)) as server:
        report = regenerate([source], tmp_path / "out.jsonl", servers=[server.url], cfg=cfg, console=console)
        assert report.failed.total() == 5
        prompts(source, "stop")
        with pytest.raises(EngineError) as stopped:
            regenerate([source], tmp_path / "out.jsonl", servers=[server.url], cfg=cfg, console=console)
    assert KEY not in "".join(traceback.format_exception(stopped.value))
    assert {asked.authorization for asked in server.asked} == {f"Bearer {KEY}"}
    said = (
        "\n".join(report.lines())
        + str(stopped.value)
        + console.export_text()
        + caplog.text
        + "".join(capfd.readouterr())
    )
    assert KEY not in said
    assert "<key>" in said
    for path in tmp_path.iterdir():
        assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="the API key") as refused:
        regenerate([prompts(tmp_path / "in.jsonl", "a")], tmp_path / "o.jsonl", servers=["http://127.0.0.1:9"])
    assert key not in str(refused.value)


def test_a_password_in_the_url_is_refused_unseen(tmp_path: Path) -> None:
    for url in ("http://me:hunter2@localhost:1/v1", "http://localhost:1/v1?key=hunter2"):
        with pytest.raises(ConfigError, match="no password and no query") as refused:
            regenerate([prompts(tmp_path / "in.jsonl", "a")], tmp_path / "o.jsonl", servers=[url])
        assert "hunter2" not in str(refused.value)


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_lets_answers_in_flight_finish_and_the_run_goes_on_later(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(20))), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=lambda *_: Act(pause_s=0.3))) as server:

        def interrupt() -> None:
            while len(server.asked) < 6:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=interrupt, daemon=True).start()
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="the same command goes on") as stopped:
            go(server, source, out, settings(in_flight=4, timeout_s=5))
        assert signal.getsignal(signal.SIGTERM) is before
        assert stopped.value.exit_code == 130
        asked = len(server.asked)
        assert len(rows_of(out)) == asked < 20  # none of those asked was lost
        report = go(server, source, out, settings())
    assert (report.reused, report.answered, len(server.asked)) == (asked, 20 - asked, 20)


def test_a_hang_does_not_keep_ctrl_c_longer_than_its_drain(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", "a|ok", "b|hang"), tmp_path / "out.jsonl"
    cfg = settings(timeout_s=60, drain_s=0.3, **PRICES)
    with running(OpenAIServer(plan=scripted)) as server:

        def interrupt() -> None:
            while len(server.asked) < 2:
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(Interrupted):
            go(server, source, out, cfg)
        assert time.monotonic() - began < 5
    document = json.loads((tmp_path / "out.summary.json").read_text())
    assert document["all_sessions"]["tries_of_unknown_cost"] == 1  # it was in flight: it may be charged
    assert (document["answered"], document["complete"]) == (1, False)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}|hang" for i in range(4))), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=scripted)) as server:

        def interrupt() -> None:
            while len(server.asked) < 4:
                time.sleep(0.01)
            for _ in range(2):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(Interrupted):
            go(server, source, out, settings(timeout_s=60, drain_s=60, **PRICES))
        assert time.monotonic() - began < 10
    assert json.loads((tmp_path / "out.summary.json").read_text())["all_sessions"]["tries_of_unknown_cost"] == 4


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", *(f"p{i}" for i in range(200))), tmp_path / "out.jsonl"
    code = (
        "import resource, sys; from pathlib import Path; from eyas.config import RegenerateConfig\n"
        "from eyas.data.regenerate import regenerate; from eyas.errors import StoreError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try: regenerate([sys.argv[1]], Path(sys.argv[2]), servers=[sys.argv[3]])\n"
        "except StoreError as error: print(error)\n"
    )
    with running(OpenAIServer()) as server:
        command = [sys.executable, "-c", code, str(source), str(out), server.url]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "disk full" in done.stdout
        assert "Traceback" not in done.stderr
        kept = {row["conversations"][0]["content"] for row in rows_of(out)}
        report = go(server, source, out, settings())
    assert 0 < len(kept) < 200
    assert (report.complete, len(rows_of(out))) == (True, 200)
    assert all(count == 1 for text, count in Counter(asked.prompt for asked in server.asked).items() if text in kept)
    assert echo({"messages": [{"content": "p0"}]}) == rows_of(out)[0]["conversations"][-1]["content"]
