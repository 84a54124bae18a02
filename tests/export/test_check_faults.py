"""Every known fault of a drafter's folder is refused, and for its own reason: as an edit of an export, as an export
that was wrong from the start, and as a stranger's head that nothing but its drafts can tell."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_heads import (
    Raw,
    Tensors,
    changed,
    foreign,
    make_run,
    make_store,
    resealed,
    shifted,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eyas.config import ExportConfig
from eyas.errors import ConfigError, IntegrityError
from eyas.export.check import check_draft
from eyas.export.documents import Answers
from eyas.export.findings import CheckReport, Verdict
from eyas.export.judge import judge_acceptance
from eyas.export.probe import PROBE
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import DraftCheckpoint

Copy = Callable[[], Path]
Fault = Callable[[Path], Path]


def without(*names: str) -> Fault:
    return lambda folder: changed(
        folder, tensors=lambda held: {name: tensor for name, tensor in held.items() if name not in names}
    )


def plus(**settings: Any) -> Fault:
    return lambda folder: changed(folder, lambda raw: raw | settings)


def unrenamed(folder: Path) -> Path:
    def other(held: Tensors) -> Tensors:
        return {name.replace("midlayer.", "mid_layer."): tensor for name, tensor in held.items()}

    return changed(folder, tensors=other)


def random_embeddings(folder: Path) -> Path:
    embeddings = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    return changed(folder, tensors=lambda held: held | {"embed_tokens.weight": embeddings})


def swapped_aux(folder: Path) -> Path:
    """A head whose layers lie deep to shallow."""

    def other(held: Tensors) -> Tensors:
        return held | {"fc.weight": torch.cat(held["fc.weight"].chunk(3, 1)[::-1], 1).contiguous()}

    return changed(folder, tensors=other)


def descending_ids(folder: Path) -> Path:
    return plus(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 3, 1]}, eagle_aux_hidden_state_layer_ids=[5, 4, 2]
    )(folder)


def stale_map(folder: Path) -> Path:
    """The map of another run: as many tokens, and others."""

    def other(held: Tensors) -> Tensors:
        ids = held["d2t"] + torch.arange(len(held["d2t"]))
        ids = ids.roll(7)
        t2d = torch.zeros_like(held["t2d"])
        t2d[ids] = True
        return held | {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}

    return changed(folder, tensors=other)


def not_a_number(folder: Path) -> Path:
    def other(held: Tensors) -> Tensors:
        held["midlayer.mlp.up_proj.weight"][3, 5] = torch.nan
        return held

    return changed(folder, tensors=other)


def other_dtype(folder: Path) -> Path:
    def other(held: Tensors) -> Tensors:
        return {name: t.bfloat16() if t.is_floating_point() else t for name, t in held.items()}

    return changed(folder, tensors=other)


def norm_output(folder: Path) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    return plus(norm_output=not raw["norm_output"])(folder)


def other_rope(folder: Path) -> Path:
    return changed(
        folder,
        lambda raw: raw | {"rope_theta": 100.0, "rope_parameters": {**raw["rope_parameters"], "rope_theta": 100.0}},
    )


def in_one_place(folder: Path) -> Path:
    """SpecForge's place only: vLLM takes the ids for others."""
    return plus(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})(folder)


def stray_weights(folder: Path) -> Path:
    shutil.copy(folder / "model.safetensors", folder / "backup.safetensors")
    return folder


def without_probe(folder: Path) -> Path:
    (folder / PROBE).unlink()
    return folder


# name of the fault -> (how it is made, what refuses it as an edit, what refuses it under a record made anew)
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "ids one too high": (shifted(1), "trained on layers", "layer 1's"),
    "ids one too low": (shifted(-1), "trained on layers", "layer 1's"),
    "no d2t": (without("d2t"), "finds no d2t", "finds no d2t"),
    "no maps": (without("d2t", "t2d"), "finds no d2t", "finds no d2t"),
    "a layer that was not renamed": (unrenamed, "finds no layers.0", "finds no layers.0"),
    "a lost norm": (without("norm.weight"), r"finds no norm\.weight", r"finds no norm\.weight"),
    "random embeddings": (random_embeddings, "the weights changed", "not the target's"),
    "layers in another order": (swapped_aux, "the weights changed", "on the probe are not the recorded"),
    "ids in another order": (descending_ids, "ascending", "ascending"),
    "norm_output at odds": (norm_output, "config.json changed", "on the probe are not the recorded"),
    "another RoPE": (other_rope, "config.json changed", "on the probe are not the recorded"),
    "a map of another run": (stale_map, "the weights changed", "on the probe are not the recorded"),
    "no numbers": (not_a_number, "no numbers", "no numbers"),
    "another dtype": (other_dtype, "the config says float32", "the config says float32"),
    "ids in one place": (in_one_place, "vLLM would read", "vLLM would read"),
    "a second file": (stray_weights, "backup.safetensors", "backup.safetensors"),
    "no probe": (without_probe, "probe.safetensors changed", ""),
}


def refusal(report: CheckReport) -> str:
    with pytest.raises(IntegrityError) as error:
        report.check()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_was_edited(fault: str, copy: Copy, target: Path) -> None:
    """Without a target at hand: the record and the names are enough."""
    spoil, reason, _ = FAULTS[fault]
    report = check_draft(spoil(copy()))
    assert re.search(reason, refusal(report))


@pytest.mark.parametrize("fault", [name for name, (_, _, reason) in FAULTS.items() if reason])
def test_an_export_that_was_wrong_from_the_start(fault: str, copy: Copy, target: Path) -> None:
    """The record agrees with the fault. What the probe holds does not."""
    spoil, _, reason = FAULTS[fault]
    report = check_draft(resealed(spoil(copy())), ExportConfig(target=str(target)))
    assert re.search(reason, refusal(report))
    verdicts = {finding.name: finding.verdict for finding in report.findings}
    if "probe" in reason or "layer" in reason:
        assert verdicts.get("record", Verdict.PASSED) == Verdict.PASSED  # it alone would have let it through


def test_the_export_itself(exported: Path, target: Path) -> None:
    report = check_draft(exported)
    report.check()
    assert [finding.name for finding in report.unproven] == ["states"]
    assert report.lines()[-1] == ("verdict", "passed; not proven: states")
    report = check_draft(exported, ExportConfig(target=str(target)))
    report.check()
    assert not report.unproven
    text = next(finding.text for finding in report.findings if finding.name == "states")
    assert "layers [1, 3, 4] as SGLang, vLLM" in text


# --- files beside the weights, and embeddings of its own --------------------------------------------------------------


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "pytorch_model.bin", "scheduler.bin", "a.txt"])
def test_files_that_no_server_reads(name: str, copy: Copy) -> None:
    bare = check_draft(folder := copy())
    (folder / name).write_bytes(b"x")
    report = check_draft(folder)
    assert report.findings == bare.findings
    assert not report.refused


def test_consolidated_weights_are_vllms(copy: Copy) -> None:
    """It reads them instead, SGLang does not."""
    folder = copy()
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    what = r"vLLM would load consolidated\.safetensors instead of model\.safetensors"
    assert re.search(what, refusal(check_draft(folder)))
    check_draft(folder, ExportConfig(engines=("sglang",))).check()


def with_embeddings(folder: Path, target: Path) -> Path:
    """The target's own, as some publish them."""
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"].clone()
    return changed(folder, tensors=lambda held: held | {"embed_tokens.weight": theirs})


def test_embeddings_of_its_own_where_the_targets_are_not_here(copy: Copy, target: Path, tmp_path: Path) -> None:
    """Not proven, as serving does not need them here; an error where the target was to be run."""
    head = foreign(with_embeddings(copy(), target))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(target / "config.json", bare)
    report = check_draft(head, ExportConfig(target=str(bare), run_target=False))
    report.check()
    open_ones = {finding.name: finding.text for finding in report.unproven}
    assert "cannot be told here" in open_ones["embeddings"]
    with pytest.raises(ConfigError, match="embeddings"):
        check_draft(head, ExportConfig(target=str(bare)))
    found = check_draft(head, ExportConfig(target=str(target), run_target=False)).findings
    assert "bit for bit" in next(finding.text for finding in found if finding.name == "embeddings")


# --- a stranger's head: nothing to go by but its drafts ---------------------------------------------------------------

STRANGERS: dict[str, tuple[Fault, str]] = {
    "ids one too high": (shifted(1), "its ids are one too high"),
    "ids one too low": (shifted(-1), "its ids are one too low"),
    "layers in another order": (swapped_aux, r"in the order \[3, 2, 1\]"),
    "norm_output at odds": (norm_output, "trained otherwise than norm_output = true"),
    "a map of another run": (stale_map, "vocabulary map is another run's"),
}


@pytest.fixture(scope="module")
def trying(target: Path, questions: Path) -> ExportConfig:
    return ExportConfig(target=str(target), questions=questions, documents=24, answer_tokens=20)


@pytest.fixture(scope="module")
def answers(target: Path, trying: ExportConfig) -> Answers:
    assert trying.questions is not None
    return Answers.to(trying.questions, Target.load(str(target)), trying)


def judged(folder: Path, answers: Answers) -> CheckReport:
    """What `--check --target --questions` finds last, without answering anew for every head."""
    report = CheckReport(str(folder))
    checkpoint = DraftCheckpoint.load(folder, answers.target)
    judge_acceptance(checkpoint, answers.target, answers.with_states(checkpoint.config.aux_layers), report)
    return report


def test_a_strangers_head_that_is_right(copy: Copy, trying: ExportConfig, answers: Answers) -> None:
    folder = foreign(copy())
    with pytest.raises(ConfigError, match="whose draft is this"):
        check_draft(folder)
    report = check_draft(folder, trying.model_copy(update={"documents": 10}))
    report.check()
    found = {finding.name: finding for finding in report.findings}
    assert found["record"].verdict == found["weights"].verdict == Verdict.UNPROVEN
    assert found["acceptance"].verdict != Verdict.REFUSED
    assert "all of 8 alternatives do worse" in judged(folder, answers).findings[0].text
    # Without questions it says what it cannot tell.
    report = check_draft(folder, ExportConfig(target=trying.target))
    report.check()
    assert "ids off by one" in next(one.text for one in report.unproven if one.name == "acceptance")


@pytest.mark.parametrize("fault", STRANGERS)
def test_a_strangers_head_with_a_fault(fault: str, copy: Copy, answers: Answers) -> None:
    spoil, reason = STRANGERS[fault]
    assert re.search(reason, refusal(judged(spoil(foreign(copy())), answers)))


def test_a_head_trained_on_states_before_the_final_norm(
    place: Path, target: Path, corpus: Path, answers: Answers
) -> None:
    """Its teacher is lm_head on the states before the norm: that of a target whose final norm has no gain."""
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    other = shutil.copytree(target, place / "without-gain")
    model.save_pretrained(other)
    store = make_store(corpus, place / "before-norm", other)
    run = make_run(place / "run-before-norm", store, corpus, other, max_steps=40)
    head = foreign(shutil.copytree(run / "draft", place / "before-norm-draft"))
    assert "states before the final norm" in refusal(judged(head, answers))


def test_what_texts_cannot_tell_is_no_pass(copy: Copy, answers: Answers) -> None:
    """The right head, on as few texts as are compared at all: some alternative is neither better nor clearly worse."""
    report = judged(foreign(copy()), replace(answers, texts=answers.texts[:8]))
    assert [finding.verdict for finding in report.findings] == [Verdict.UNPROVEN]
    assert "cannot tell whether" in report.findings[0].text


def test_too_few_texts_prove_nothing(copy: Copy, answers: Answers) -> None:
    few = replace(answers, texts=answers.texts[:7])
    report = judged(swapped_aux(foreign(copy())), few)
    assert [finding.verdict for finding in report.findings] == [Verdict.UNPROVEN]


# --- another target ---------------------------------------------------------------------------------------------------


def test_another_target(copy: Copy, place: Path, target: Path) -> None:
    """By its fingerprint; by its embeddings, where that says nothing; and else by what its layers give."""
    model = AutoModelForCausalLM.from_pretrained(target)
    other = shutil.copytree(target, place / "other-target")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(-1)
    model.save_pretrained(other)
    report = check_draft(copy(), ExportConfig(target=str(other)))  # the norms, and so the fingerprint, are the same
    assert "of no layer near it" in refusal(report)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    model.save_pretrained(other)
    report = check_draft(copy(), ExportConfig(target=str(other), run_target=False))
    assert "another target" in refusal(report)
    with torch.no_grad():
        model.model.layers[5].input_layernorm.weight.mul_(2)
    model.save_pretrained(other)
    assert "another target" in refusal(check_draft(copy(), ExportConfig(target=str(other))))


def test_a_probe_that_is_damaged(copy: Copy) -> None:
    folder = copy()
    whole = (folder / PROBE).read_bytes()
    for data in (b"", whole[:100], whole[:-8], b"\xff" * 64, whole.replace(b'"K"', b'"k"')[: len(whole) // 2]):
        (folder / PROBE).write_bytes(data)
        report = check_draft(resealed(folder))
        assert "the probe cannot be read" in refusal(report)


def test_configs_of_other_types_are_refused(copy: Copy, target: Path) -> None:
    """Anybody may have written it."""
    for spoil in (
        plus(eagle_config=[1], num_aux_hidden_states=None, fc_norm=True),
        plus(eagle_aux_hidden_state_layer_ids="123"),
        plus(eagle_aux_hidden_state_layer_ids=[1, "b"]),
        plus(architectures="x"),
        plus(draft_vocab_size=[3]),
        plus(dtype=["float32"], torch_dtype=None),
        plus(dtype={}, torch_dtype={"float32": 1}),
    ):
        refusal(check_draft(spoil(copy()), ExportConfig(target=str(target))))
    broken: list[Raw] = [{"export": 1}, {"export": {"format": 2}}, {"export": {"format": 1, "target": {}}}]
    for section in broken:
        assert "record" in refusal(check_draft(plus(eyas=section)(copy())))
