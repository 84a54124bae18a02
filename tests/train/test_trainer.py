"""Whole runs on a tiny target: they learn, and a run that is killed and gone on with is the run that was not."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from train_runs import curve, driven, events, make_inputs, run, settings

from eyas.acceptance import acceptance
from eyas.errors import ConfigError, StoreError, TrainError
from eyas.target.checkpoint import Target
from eyas.train.batch import Sample, pack
from eyas.train.checkpoint_format import DraftCheckpoint
from eyas.train.guard import suspects
from eyas.train.run import TrainSummary, train
from eyas.train.trainer import chain_counts


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainSummary]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    return out, run(inputs, out)


def test_a_run_learns_and_leaves_a_drafter(undisturbed: tuple[Path, TrainSummary], inputs: Path) -> None:
    out, summary = undisturbed
    losses = [event["loss"] for event in events(out, "train")]
    assert len(losses) == summary.steps > 12
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    assert summary.untrained is not None
    assert summary.accept_length is not None
    assert summary.accept_length > summary.untrained
    target = Target.load(str(inputs / "model"))
    draft = DraftCheckpoint.load(summary.draft, target)
    best = load_file(out / "checkpoints" / f"step-{summary.best_step:08d}" / "weights.safetensors")
    for name, tensor in draft.tensors.items():
        assert torch.equal(tensor, best[name].to(torch.bfloat16)), name
    assert dict(summary.lines())["accepted"].startswith(f"{summary.accept_length:.3f} tokens a cycle")


def test_what_is_evaluated_and_when(undisturbed: tuple[Path, TrainSummary]) -> None:
    out, summary = undisturbed
    evaluated = [event["step"] for event in events(out, "eval")]
    assert evaluated == sorted({0, *range(10, summary.steps, 10), summary.steps})
    last = events(out, "eval")[-1]
    assert last["accept_length_low"] <= last["accept_length"] <= last["accept_length_high"]
    assert len(last["acceptance"]) == len(last["accuracy"]) == 3
    assert {event["eval_rows"] for event in events(out, "eval")} == {last["eval_rows"]}


def test_a_finished_run_is_not_run_again(undisturbed: tuple[Path, TrainSummary], inputs: Path) -> None:
    out, summary = undisturbed
    before = curve(out)
    again = run(inputs, out)
    assert (again.steps, again.tokens_per_s, again.best_step) == (summary.steps, 0.0, summary.best_step)
    assert dict(again.lines())["speed"] == "nothing left to do"
    assert curve(out) == before


@pytest.fixture(scope="module")
def disturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("disturbed")
    return folder, driven("kill_and_resume", inputs, folder)


def test_killed_three_times_and_stopped_the_curve_is_the_same(
    disturbed: tuple[Path, dict[str, list[int]]], undisturbed: tuple[Path, TrainSummary]
) -> None:
    folder, codes = disturbed
    assert (codes["run"], codes["whole"]) == ([-9, 130, -9, -9, 0], [0])
    # Compared with a run of the same driver: it has one thread, and sums of several are of another order.
    assert curve(folder / "run") == curve(folder / "whole")
    assert curve(folder / "whole").keys() == curve(undisturbed[0]).keys()
    starts = [event["step"] for event in events(folder / "run", "start")]
    assert len(starts) == 5
    assert starts[0] == 0 < starts[1] < starts[2] <= starts[3] <= starts[4], "each went on where the one before was"
    last, whole = (max((folder / name / "checkpoints").iterdir()) for name in ("run", "whole"))
    assert last.name == whole.name
    for name in ("weights.safetensors", "optimizer.safetensors", "rng.safetensors"):
        assert (last / name).read_bytes() == (whole / name).read_bytes(), name


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_other_settings_do_not_go_on_with_a_run(undisturbed: tuple[Path, TrainSummary], inputs: Path) -> None:
    out, _ = undisturbed
    with pytest.raises(ConfigError, match=r"lr was 0\.003, is 0\.01"):
        run(inputs, out, lr=0.01)
    run(inputs, out, log_every=7, readers=0, keep_last=1)  # the curve does not depend on these


def test_two_runs_do_not_share_a_folder(disturbed: tuple[Path, dict[str, list[int]]]) -> None:
    _, codes = disturbed
    assert codes["second"] == [StoreError.exit_code]


def test_a_corpus_of_another_store_is_refused(inputs: Path, tmp_path: Path) -> None:
    other = make_inputs(tmp_path / "other", rows=3)
    with pytest.raises(ConfigError, match="not of"):
        train(settings(inputs, tmp_path / "run", corpus=other / "corpus.parquet"), console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


# --- what is no number ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_rows(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"step \d+: the loss is") as caught:
        run(inputs, tmp_path / "run", lr=1e300, clip=None, warmup_share=0.0, save_every=1)
    rows = [int(word) for word in caught.value.where.removeprefix("corpus rows ").split(", ")]
    assert 0 < len(rows) < 40
    (told,) = events(tmp_path / "run", "not_finite")
    assert told["rows"] == rows
    assert told["loss"] is None


def sample(row: int, length: int = 6) -> Sample:
    mask = torch.ones(length, dtype=torch.bool)
    at = torch.arange(length - 1)
    return Sample(row, torch.arange(length), mask, torch.zeros(length, 4), torch.zeros(length - 1, 2), at)


@pytest.mark.parametrize("kind", ["aux", "last"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_with_states_that_are_no_numbers_are_named(kind: str, value: float) -> None:
    samples = [sample(row) for row in (7, 8, 9)]
    getattr(samples[1], kind)[3, 1] = value
    found = suspects([pack(samples[:2], steps=2, budget=16), pack(samples[2:], steps=2, budget=16)], loss=value)
    assert (found.rows, found.bad_states, found.bad_loss) == ((7, 8, 9), (8,), (7, 8, 9))
    clean = suspects([pack([sample(1)], steps=2, budget=16)], loss=1.0)
    assert (clean.bad_states, clean.bad_loss) == ((), ())


# --- chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["serving", "classic"])
def test_chains_are_counted_as_they_are_walked(mask: str) -> None:
    rng, steps = np.random.default_rng(3), 4
    samples = [sample(row, length) for row, length in enumerate((9, 4, 12))]
    samples = [
        s._replace(loss_mask=torch.from_numpy(rng.random(len(s.tokens)) < 0.8), last=torch.zeros(len(s.tokens), 2),
                   last_index=torch.arange(len(s.tokens)))
        for s in samples
    ]  # fmt: skip
    batch = pack(samples, steps=steps, mask=mask)  # type: ignore[arg-type]
    right_KR = torch.from_numpy(rng.random((steps, len(batch.rows))) < 0.6)
    scored = torch.ones_like(right_KR) if batch.scored is None else batch.scored
    for k, n in enumerate(batch.counts):
        right_KR[k, n:] = False
    reached, right = [0] * steps, [0] * steps
    for row in range(len(batch.rows)):
        for k in range(steps):
            if row >= batch.counts[k] or not scored[k, row]:
                break
            reached[k] += 1
            if not right_KR[k, row]:
                break
            right[k] += 1
    found = chain_counts(batch, right_KR)
    if mask == "serving":
        assert found == (reached, right)
    assert acceptance(*found).length <= steps + 1


def test_a_summary_without_evaluation_says_nothing_of_acceptance(inputs: Path, tmp_path: Path) -> None:
    summary = run(inputs, tmp_path / "run", eval_share=0.0, max_steps=2)
    assert (summary.accept_length, summary.acceptance, summary.steps) == (None, None, 2)
    assert "accepted" not in dict(summary.lines())
    assert (summary.draft / "model.safetensors").is_file()
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["progress"]["metric"] is None
    assert dataclasses.asdict(summary)["untrained"] is None


@pytest.mark.parametrize("vocab", [{"vocab_coverage": 0.5}, {"vocab_size": 1024}])
def test_rows_outside_the_draft_vocabulary_may_be_dropped(
    inputs: Path, tmp_path: Path, vocab: dict[str, float]
) -> None:
    kept, dropped = tmp_path / "kept", tmp_path / "dropped"
    for out, oov in ((kept, "keep"), (dropped, "drop")):
        assert run(inputs, out, oov=oov, max_steps=2, **vocab).steps == 2
    same = [event["loss"] for event in events(kept, "train")] == [event["loss"] for event in events(dropped, "train")]
    assert same == ("vocab_size" in vocab), "with the whole vocabulary no row is outside"


def test_options_that_change_no_number_change_none(inputs: Path, tmp_path: Path) -> None:
    plain = {"max_steps": 3, "eval_share": 0.0}
    run(inputs, tmp_path / "plain", **plain)
    run(inputs, tmp_path / "other", **plain, checkpoint_activations=True, readers=0)
    one, two = (events(tmp_path / name, "train") for name in ("plain", "other"))
    assert [event["loss"] for event in one] == pytest.approx([event["loss"] for event in two], rel=1e-12)
