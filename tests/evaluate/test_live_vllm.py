"""The real vLLM on CPU runs a drafter that we exported, and counts what decoding in process counted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from test_evaluate_smollm2 import QUESTIONS, Made, made

from eyas.config import Config, ExportConfig, load
from eyas.errors import ConfigError
from eyas.evaluate.live import Live, evaluate_live
from eyas.evaluate.run import Evaluated, evaluate
from eyas.export.run import export_draft
from vllm_servers import require_vllm, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

__all__ = ["made"]

ASKED, LONGEST = 4, 32
SILENT = Console(file=io.StringIO())


class Measured(NamedTuple):
    """The same drafter and questions in both places."""

    offline: Evaluated
    live: Live


@pytest.fixture(scope="module")
def measured(made: Made, smollm2_dir: Path) -> Measured:
    require_vllm()
    root = made.root
    draft = root / "exported"
    export_draft(root / "run", draft, ExportConfig(run_target=False))
    questions = root / "question.jsonl"
    asked = [
        {"question_id": number, "category": "even" if number % 2 == 0 else "odd", "turns": [text]}
        for number, text in enumerate(QUESTIONS[:ASKED])
    ]
    asked[0]["turns"] = [QUESTIONS[0], QUESTIONS[1]]
    questions.write_text("".join(f"{json.dumps(one)}\n" for one in asked))

    def config(**settings: object) -> Config:
        said = {
            "questions": questions, "target": smollm2_dir, "out": root / "out", "max_new_tokens": LONGEST,
            "concurrency": "1,3", **settings,
        }  # fmt: skip
        return load(overrides=[f"evaluate.{key}={value}" for key, value in said.items()])

    with (
        vllm_server(smollm2_dir, root / "plain") as plain,
        vllm_server(smollm2_dir, root / "drafting", draft=draft) as drafting,
    ):
        offline = evaluate(draft, config().evaluate, console=SILENT)
        plain.wait()
        drafting.wait()
        with pytest.raises(ConfigError, match="drafts 3 tokens a cycle"):
            evaluate_live(draft, config(server=drafting.url, baseline_server=drafting.url), console=SILENT)
        live = evaluate_live(draft, config(server=drafting.url, baseline_server=plain.url), console=SILENT)
    return Measured(offline, live)


def test_acceptance_in_the_server_is_that_in_process(measured: Measured) -> None:
    """Within 3 % at every position. Both compute in float32: what differs is rounding."""
    offline, live = measured.offline.evaluation, measured.live.evaluation
    assert offline.prompts_digest == live.prompts_digest
    for one in (result for result in live.results if result.category == "all"):
        counted = offline.results[0].counters
        assert counted is not None and one.counters is not None
        assert one.tokens == offline.results[0].tokens
        assert one.counters["drafts"] == pytest.approx(counted["drafts"], rel=0.03)
        reached, theirs = counted["drafts"], one.counters["drafts"]
        for ours, other in zip(counted["accepted"], one.counters["accepted"], strict=True):
            assert other / theirs == pytest.approx(ours / reached, rel=0.03)
            reached, theirs = ours, other
    assert live.results[0].accept_length > 1.3, "hardly a draft was accepted: the test sees little"


def test_its_answers_are_those_without_speculation(measured: Measured) -> None:
    note = f"{ASKED + 1} of {ASKED + 1} answers are token for token those without speculation"
    assert note in measured.live.evaluation.notes


def test_speeds_with_and_without(measured: Measured) -> None:
    live, plain = measured.live.evaluation, measured.live.plain
    assert plain is not None and plain.depth == 0 and live.depth == 3
    for one, other in zip(live.results, plain.results, strict=True):
        assert (one.category, one.concurrency) == (other.category, other.concurrency)
        assert one.tokens_per_s and other.tokens_per_s and one.ttft_ms and other.ttft_ms
        assert one.speedup == pytest.approx(one.tokens_per_s / other.tokens_per_s)
