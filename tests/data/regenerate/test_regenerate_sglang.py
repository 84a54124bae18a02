"""Regeneration against the real SGLang server on CPU: SmolLM2, greedy, killed with `kill -9` and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai_server import CountingProxy, running
from rich.console import Console

from eyas.config import RegenerateConfig
from eyas.data.regenerate import regenerate
from eyas.data.regenerate.answer_files import open_sealed
from eyas.data.rows import Chat
from eyas.data.sources import read_chats
from servers import Server, sglang_server

pytestmark = pytest.mark.sglang

PROMPTS = Path(__file__).parents[3] / "src" / "eyas" / "demo_prompts.jsonl"
#: Most answers end with their first clause, so that chats go on; the others are cut.
STOPS = [".", ",", ":", ";", "\n"]
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "in_flight": 4, "extra_body": {"stop": STOPS}}
SINGLE, DOUBLE = 10, 8
KILLED_AFTER = (5, 13)  # answered turns


@pytest.fixture(scope="module")
def server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sglang_server(smollm2_dir, tmp_path_factory.mktemp("server"), capture=False) as running_server:
        yield running_server


@pytest.fixture
def proxy(server: Server) -> Iterator[CountingProxy]:
    parts = urlsplit(server.url)
    with running(CountingProxy((parts.hostname or "", parts.port or 0))) as counting:
        yield counting


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Real prompts, short ones: some as chats of one turn, some two by two as the turns of one chat."""
    texts = [json.loads(line)["conversations"][0]["content"] for line in PROMPTS.read_text().splitlines()]
    texts = sorted(texts, key=len)[: SINGLE + 2 * DOUBLE]
    chats = [[text] for text in texts[:SINGLE]] + [list(pair) for pair in zip(*[iter(texts[SINGLE:])] * 2, strict=True)]
    rows = [{"id": i, "conversations": [{"role": "user", "content": t} for t in chat]} for i, chat in enumerate(chats)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def journalled(out: Path) -> set[tuple[str, int]]:
    """(key, turn) of the answers on disk."""
    path = out.with_name(f"{out.name}.journal")
    if not path.exists():
        return set()
    entries = [open_sealed(line + b"\n") for line in path.read_bytes().split(b"\n")[:-1]]
    return {(entry["turn"], entry["index"]) for entry in entries if "turn" in entry}


def contexts(out: Path) -> dict[tuple[str, int], str]:
    """What was asked for each answer of a finished output, by key and turn."""
    found = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = [at for at, message in enumerate(row["conversations"]) if message["role"] == "assistant"]
        for index, at in enumerate(turns):
            found[row["key"], index] = asked_as(row["conversations"][:at])
    return found


def asked_as(messages: list[dict[str, Any]]) -> str:
    return json.dumps([[message["role"], message["content"]] for message in messages])


def test_killed_and_resumed_it_loses_nothing_and_asks_nothing_twice(
    server: Server, proxy: CountingProxy, source: Path, tmp_path: Path
) -> None:
    calm, out = tmp_path / "calm.jsonl", tmp_path / "out.jsonl"
    cfg = RegenerateConfig(**SETTINGS)
    whole = regenerate([source], calm, servers=[server.url], cfg=cfg, console=Console(quiet=True))
    assert (whole.complete, whole.answered, whole.failed.total()) == (True, SINGLE + DOUBLE, 0)
    assert SINGLE + DOUBLE < whole.turns <= SINGLE + 2 * DOUBLE
    assert whole.turns == len(contexts(calm))

    flags = [word for name, value in SETTINGS.items() for word in ("--set", f"regenerate.{name}={json.dumps(value)}")]
    argv = [sys.executable, "-m", "eyas", "regenerate", str(source), "--server", proxy.url, "--out", str(out), *flags]
    durable: list[tuple[int, set[tuple[str, int]]]] = []
    for goal in KILLED_AFTER:
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(journalled(out)) < goal and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None
        process.kill()
        process.wait()
        durable.append((len(proxy.asked), journalled(out)))
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    rows, calmly = (list(read_chats(path)) for path in (out, calm))
    assert all(isinstance(row, Chat) for row in rows)
    assert [row.id for row in rows] == [row.id for row in calmly]  # pyright: ignore
    named = contexts(out)
    for asked_before, turns in durable:
        assert len(turns) >= KILLED_AFTER[0]
        later = [asked_as(body["messages"]) for body in proxy.asked[asked_before:]]
        assert not {named[turn] for turn in turns} & set(later)
    same = sum(a == b for a, b in zip(out.read_text().splitlines(), calm.read_text().splitlines(), strict=True))
    print(f"{same} of {len(rows)} rows equal the uninterrupted run's; {len(proxy.asked)} requests")
    assert same >= 0.9 * len(rows)


def test_usage_and_finish_come_with_every_answer(server: Server, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cfg = RegenerateConfig(**SETTINGS, price_prompt=1, price_completion=1)
    inputs = tmp_path / "two.jsonl"
    inputs.write_text("".join(source.read_text().splitlines(keepends=True)[:2]))
    report = regenerate([inputs], out, servers=[server.url], cfg=cfg, console=Console(quiet=True))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        usage = row["usage"]
        assert usage["prompt_tokens"] > 10
        assert (usage["completion_tokens"] == SETTINGS["max_tokens"]) == (row["finish_reason"] == "length")
    assert report.totals.unknown_tries == 0
    assert report.totals.cost * 10**6 == report.prompt_tokens + report.completion_tokens
    assert report.model.endswith("SmolLM2-135M-Instruct")


def test_too_long_a_prompt_fails_its_row_alone(server: Server, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = ["word " * 40_000, "Say hi."]
    rows = [{"conversations": [{"role": "user", "content": text}]} for text in texts]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = RegenerateConfig(**SETTINGS)
    report = regenerate([source], tmp_path / "out.jsonl", servers=[server.url], cfg=cfg, console=Console(quiet=True))
    assert (report.answered, dict(report.failed)) == (1, {"prompt-too-long": 1})
