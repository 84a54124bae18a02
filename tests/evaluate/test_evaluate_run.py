"""`eyas evaluate` as a user meets it: both ways, on a tiny target; what it refuses; stopped and gone on with."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from evaluate.conftest import Tiny
from eyas.acceptance import cycle_counts
from eyas.cli import app
from eyas.config import EvaluateConfig
from eyas.errors import ConfigError, Interrupted
from eyas.evaluate import run
from eyas.evaluate.drafting import Drafting
from eyas.evaluate.head import Head, load_drafter
from eyas.evaluate.results import read_evaluation
from eyas.evaluate.run import Evaluated, evaluate
from eyas.evaluate.walk import walk
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.train.batch import pack
from eyas.train.checkpoint_format import DraftCheckpoint, save_checkpoint
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling

TURNS = [["Hello there", "Again"], ["Count to three"], ["What?"]]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "bench" / "question.jsonl"
    path.parent.mkdir()
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": turns} for i, turns in enumerate(TURNS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measured(tiny: Tiny, out: Path, draft: Path | None = None, **settings: Any) -> Evaluated:
    given = {"out": out, "device": "cpu", "max_new_tokens": 12, **settings}
    return evaluate(draft or tiny.run, EvaluateConfig(**given), console=Console(file=io.StringIO()), command="eyas ...")


def test_a_simulation_walks_the_rows_that_training_held_out(tiny: Tiny, tmp_path: Path) -> None:
    done = measured(tiny, tmp_path, store=tiny.store)
    drafter, _ = load_drafter(
        Head.find(str(tiny.run)), Target.load(str(tiny.model)), torch.device("cpu"), torch.float32
    )
    counts = {row.row: cycle_counts(walk(drafter, row, Drafting.of(3)), 3) for row in StoreReader(tiny.store)}
    held = [row for row in counts if row in held_out_rows(tiny)]
    found = done.evaluation.results[0]
    assert 0 < len(held) < len(counts) / 2
    assert found.prompts == len(held)
    assert found.reached == tuple(sum(counts[row][0] for row in held))
    assert found.right == tuple(sum(counts[row][1] for row in held))
    assert done.evaluation.notes[0].startswith(f"{len(held)} of 36 rows")
    assert [result.category for result in done.evaluation.results] == ["all", "even", "odd"]
    assert sum(result.prompts for result in done.evaluation.results[1:]) == len(held)
    assert found.counters is None
    whole = measured(tiny, tmp_path, store=tiny.store, held_out=0.0).evaluation
    assert whole.results[0].prompts == 36
    assert whole.notes == ()
    assert measured(tiny, tmp_path, store=tiny.store, held_out=0.0, limit=5).evaluation.results[0].prompts == 5


def held_out_rows(tiny: Tiny) -> set[int]:
    """By the training's own record: every row is evaluated or trained."""
    sampling = Sampling(budget=128, seed=0, held_out=0.25)
    with TrainReader(
        tiny.store, sampling, lambda samples: pack(samples, steps=3), reading=Reading(threads=0)
    ) as reader:
        return {row for batch in reader.evaluation() for row in batch.samples}


def test_decoding_answers_every_turn_and_counts_as_servers_do(tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    done = measured(tiny, tmp_path, questions=questions)
    everything = done.evaluation.results[0]
    assert done.path == tmp_path / "evaluation-bench-offline-decoded-d3.json"
    assert (everything.prompts, [result.category for result in done.evaluation.results]) == (3, ["all", "a", "b"])
    assert done.evaluation.results[1].prompts == 2
    assert everything.tokens >= 4
    assert everything.counters is not None
    assert everything.counters["drafts"] == everything.cycles
    assert all(a >= r for a, r in zip(everything.counters["accepted"], everything.right, strict=True))
    assert not list(tmp_path.glob("*.partial"))
    again = measured(tiny, tmp_path, questions=questions)
    assert dataclasses.replace(again.evaluation, date=done.evaluation.date) == done.evaluation


def test_sampling_is_repeatable_and_says_so(tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"questions": questions, "temperature": 1.0, "seed": 3}
    one, two = measured(tiny, tmp_path, **settings), measured(tiny, tmp_path, **settings)
    assert one.evaluation.results == two.evaluation.results
    assert one.path.name == "evaluation-bench-offline-decoded-d3-t1.json"
    other = measured(tiny, tmp_path, **settings | {"seed": 4})
    assert other.evaluation.results != one.evaluation.results
    ratio = measured(tiny, tmp_path, **settings, sample_drafts=True)
    assert ratio.evaluation.sampling["sample_drafts"] is True


def test_the_file_holds_what_is_documented(tiny: Tiny, tmp_path: Path) -> None:
    done = measured(tiny, tmp_path, store=tiny.store)
    value = read_evaluation(done.path)
    documented = (run.__file__ or "").replace("run.py", "__init__.py")
    text = Path(documented).read_text()
    for key in [*value, *value["results"][0]]:
        assert f'"{key}":' in text, f"{key} is not in the documented format"
    assert (value["format"], value["mode"], value["depth"], value["command"]) == (1, "offline-simulated", 3, "eyas ...")
    assert value["head_digest"] == Head.find(str(tiny.run / "draft")).digest() != ""
    assert [len(value["results"][0][key]) for key in ("accept_by_position", "reached", "right", "ci95")] == [3, 3, 3, 2]


def test_a_stopped_evaluation_goes_on_where_it_was(
    tiny: Tiny, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the second question goes to disk; then the rest, which gives what one session gives."""
    whole = measured(tiny, tmp_path / "whole", questions=questions)
    synced = []

    def interrupted(_fd: int) -> None:
        synced.append(1)
        if len(synced) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with pytest.raises(Interrupted, match="stopped, 1 of 3 done") as caught:
            measured(tiny, tmp_path, questions=questions)
    assert caught.value.exit_code == 130
    journal = Path(caught.value.where)
    assert not list(tmp_path.glob("evaluation-*.json"))
    lines = journal.read_text().splitlines()
    journal.write_text(lines[0] + "\n" + lines[1][:40])  # torn, as by a lost machine
    words = io.StringIO()
    again = evaluate(
        tiny.run,
        EvaluateConfig(out=tmp_path, device="cpu", max_new_tokens=12, questions=questions),
        console=Console(file=words),
    )
    assert "goes on: 1 of 3 are done" in words.getvalue()
    assert again.evaluation.results == whole.evaluation.results
    assert not journal.exists()


def test_a_journal_of_other_settings_is_not_gone_on_with(tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    done = measured(tiny, tmp_path, questions=questions)
    journal = done.path.with_name(done.path.name + ".partial")
    line = {"key": "other", "number": 0, "category": "x", "tokens": 9, "cycles": [], "accepted": None, "notes": []}
    journal.write_text(json.dumps(line) + "\n")
    assert measured(tiny, tmp_path, questions=questions).evaluation.results == done.evaluation.results


def test_turns_beyond_the_targets_positions_are_left_out_and_told(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    longest = json.loads((tiny.model / "config.json").read_text())["max_position_embeddings"]
    path.write_text(json.dumps({"question_id": 7, "turns": ["short", "x" * longest]}))
    done = measured(tiny, tmp_path, questions=path)
    assert done.evaluation.notes == (f"question 7 from turn 2 on is longer than the target's {longest:,} tokens",)
    assert done.evaluation.results[0].tokens > 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_inputs_that_do_not_belong_together_are_refused(tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    def refused(what: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=what):
            measured(tiny, tmp_path / "out", **settings)
        assert not (tmp_path / "out").exists(), "a refusal leaves something behind"

    refused("one thing to measure on")
    refused("one thing to measure on", store=tiny.store, questions=questions)
    refused("has no temperature", store=tiny.store, temperature=1.0)
    refused("need a temperature", questions=questions, sample_drafts=True)
    refused("drafts 3 tokens, not 5", questions=questions, draft_tokens=5)
    refused("no such folder", questions=questions, target=str(tmp_path / "nowhere"))
    refused("cannot read the questions", questions=tmp_path / "nowhere.jsonl")
    shutil.copytree(tiny.run / "draft", tmp_path / "copy")
    refused("which target", questions=questions, draft=tmp_path / "copy")
    refused("no drafter there", store=tiny.store, draft=tiny.store)
    refused("no such folder or hub", questions=questions, draft=tmp_path / "nowhere", target=str(tiny.model))


def test_a_store_without_the_drafters_layers_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    target, folder = Target.load(str(tiny.model)), tmp_path / "draft"
    draft = DraftCheckpoint.load(tiny.run / "draft", target)
    stored = draft.config.aux_layers
    other = next(layer for layer in range(target.num_layers) if layer not in stored)
    config = dataclasses.replace(draft.config, aux_layers=tuple(sorted([other, *stored[1:]])))
    save_checkpoint(folder, config, draft.tensors, draft.vocab, target)
    with pytest.raises(ConfigError, match="the drafter reads layers"):
        measured(tiny, tmp_path, folder, store=tiny.store, corpus=tiny.corpus)


def test_a_drafter_without_its_run_tells_that_it_saw_these_rows(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.run / "draft", tmp_path / "draft")
    done = measured(tiny, tmp_path, tmp_path / "draft", store=tiny.store, corpus=tiny.corpus)
    assert "was trained on this corpus" in done.evaluation.notes[0]
    assert done.evaluation.results[0].prompts == 36
    share = measured(tiny, tmp_path, tmp_path / "draft", store=tiny.store, corpus=tiny.corpus, held_out=0.25)
    assert share.evaluation.results == measured(tiny, tmp_path, store=tiny.store).evaluation.results


def test_the_command_prints_a_table_and_one_error(tiny: Tiny, tmp_path: Path) -> None:
    words = ["evaluate", str(tiny.run), "--store", str(tiny.store), "--set", f"evaluate.out={tmp_path}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "by position" in done.output
    assert "evaluation-store-offline-simulated-d3.json" in done.output.replace("\n", "")
    failed = CliRunner().invoke(app, ["evaluate", str(tiny.run), "--questions", str(tmp_path / "none.jsonl")])
    assert failed.exit_code == 2
    assert failed.output.count("error ") == 1
