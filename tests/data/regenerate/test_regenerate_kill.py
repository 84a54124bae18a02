"""`kill -9` at any point of a regeneration: the same command goes on, and asks nothing twice of what it kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from openai_server import Act, OpenAIServer, running

from eyas.data.regenerate.answer_files import open_sealed

ROWS, IN_FLIGHT = 60, 8
SETTINGS = {
    "in_flight": IN_FLIGHT,
    "retry_wait_s": 0.01,
    "price_prompt": 1,
    "price_completion": 2,
    "max_cost": 5,
}


def plan(body: dict[str, Any], before: int) -> Act:
    """Takes its time; every seventh prompt is busy at first, every eleventh is refused for good."""
    number = int(body["messages"][0]["content"].removeprefix("p"))
    if number % 7 == 3 and before == 0:
        return Act("status", status=503)
    if number % 11 == 5:
        return Act("status", status=400, body={"error": {"message": "maximum context length"}})
    return Act(pause_s=0.02 + (number % 5) / 100)


def conversations(path: Path) -> Path:
    """One to three turns each, two of them the same."""
    with path.open("w") as file:
        for number in range(ROWS):
            turns = [{"role": "user", "content": f"p{number % (ROWS - 1)}"}]
            for turn in range(number % 3):
                turns += [{"role": "assistant", "content": "old"}, {"role": "user", "content": f"t{turn}"}]
            file.write(json.dumps({"id": number, "conversations": turns}) + "\n")
    return path


def command(source: Path, out: Path, server: OpenAIServer) -> list[str]:
    flags = [word for name, value in SETTINGS.items() for word in ("--set", f"regenerate.{name}={value}")]
    return [sys.executable, "-m", "eyas", "regenerate", str(source), "--server", server.url, "--out", str(out), *flags]


def kept(out: Path) -> Counter[tuple[str, int]]:
    """(first prompt, turn) of every answer that is on disk, as often as it is there; the journal names them all."""
    journal = out.with_name(f"{out.name}.journal")
    found: Counter[tuple[str, int]] = Counter()
    if journal.exists():
        for line in journal.read_bytes().split(b"\n")[:-1]:
            entry = open_sealed(line + b"\n")
            if "turn" in entry:
                text = entry["message"]["content"]
                found[text, entry["index"]] += 1
    return found


def run_to_the_end(argv: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 6, done.stderr  # some rows fail on purpose
    assert "Traceback" not in done.stderr
    return done


def answered(server: OpenAIServer) -> Counter[str]:
    return Counter(json.dumps(asked.body["messages"]) for asked in server.asked if asked.act.kind == "answer")


@pytest.mark.slow
def test_killed_runs_go_on_and_end_in_the_same_bytes(tmp_path: Path) -> None:
    source = conversations(tmp_path / "in.jsonl")
    with running(OpenAIServer(plan=plan)) as calm:
        run_to_the_end(command(source, tmp_path / "calm.jsonl", calm))

    out, chance = tmp_path / "out.jsonl", random.Random(7)
    in_flight_at_kills, durable = 0, Counter[tuple[str, int]]()
    with running(OpenAIServer(plan=plan)) as server:
        argv = command(source, out, server)
        kills = 0
        while kills < 4:
            asked = len(server.asked)
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            goal = asked + chance.randrange(3, 20)
            while len(server.asked) < goal and process.poll() is None:
                time.sleep(0.001)
            if process.poll() is not None:
                break
            process.kill()
            process.communicate()
            kills += 1
            in_flight_at_kills += IN_FLIGHT
            now = kept(out)
            assert durable <= now, "an answer that was kept is gone"
            durable = now
            if kills == 2:  # a writer that was killed in the middle of a line
                with out.open("ab") as file:
                    file.write(b'{"id":"half a li')
                with out.with_name(f"{out.name}.journal").open("ab") as file:
                    file.write(b"0123456789abcdef {")
        done = run_to_the_end(argv)
    assert kills >= 3, done.stderr
    assert out.read_bytes() == (tmp_path / "calm.jsonl").read_bytes()
    failed, calmly = (path.with_name(f"{path.stem}.failed.jsonl") for path in (out, tmp_path / "calm.jsonl"))
    assert failed.read_bytes() == calmly.read_bytes() != b""

    # Asked again is only what was in flight at a kill: nothing of it had reached us whole.
    extra = answered(server) - answered(calm)
    assert not answered(calm) - answered(server)
    assert extra.total() <= in_flight_at_kills
    told = json.loads(out.with_name("out.summary.json").read_text())["all_sessions"]
    cost, unknown = Decimal(told["cost"]), Decimal(told["cost_unknown"])
    assert cost <= server.ledger <= cost + unknown
    assert told["tries_of_unknown_cost"] <= in_flight_at_kills


def test_what_is_on_disk_at_a_kill_is_never_asked_again(tmp_path: Path) -> None:
    source, out = conversations(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with running(OpenAIServer(plan=plan)) as server:
        argv = command(source, out, server)
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(server.asked) < 40 and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.wait()
        durable, asked = kept(out), len(server.asked)
        run_to_the_end(argv)
        later = Counter(
            f"answer {len(asked.body['messages'])} to «{asked.prompt}»"
            for asked in server.asked[asked:]
            if asked.act.kind == "answer"
        )
    first_turns = {text: count for (text, turn), count in durable.items() if turn == 0}
    assert len(first_turns) > 5
    for text, count in first_turns.items():
        twins = 2 if text == "answer 1 to «p0»" else 1
        assert later[text] == twins - count, text
