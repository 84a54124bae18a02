"""The training step equals its plain float64 description: loss, counts and every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference_step import Answer, Document, reference_step
from torch.nn.attention import flex_attention as torch_flex

from eyas.train.batch import Batch, MaskRule, Sample, pack
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.loss import TeacherHead
from eyas.train.objective import Objective, ObjectiveOptions, StepReport, normaliser_of
from eyas.train.rope import RopeConfig

VOCAB, DRAFT_VOCAB = 23, 11
BASE = Eagle3Config(
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    target_hidden_size=10,
    aux_layers=(1, 3, 5),
)


def made_draft(config: Eagle3Config = BASE, seed: int = 0) -> Eagle3Draft:
    g = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(config, torch.randn(config.vocab_size, config.hidden_size, generator=g), g).double()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 1:  # norms that are not 1 show where they are missing
                parameter.copy_(torch.rand(parameter.shape, generator=g) + 0.5)
            elif name.startswith("lm_head"):
                parameter.mul_(2)
    return draft


class World:
    """Documents, a target and a draft vocabulary that all fit together."""

    def __init__(self, masks: Sequence[str], config: Eagle3Config = BASE, seed: int = 1) -> None:
        g = torch.Generator().manual_seed(seed)
        ht = config.target_hidden_size
        self.head = torch.randn(config.vocab_size, ht, generator=g, dtype=torch.float64) * 0.6
        self.ids = sorted(torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].tolist())
        self.documents = []
        for mask in masks:
            n = len(mask)
            tokens = torch.randint(0, config.vocab_size, (n,), generator=g)
            self.documents.append(
                Document(
                    tokens.tolist(),
                    [c == "1" for c in mask],
                    torch.randn(n, config.aux_size, generator=g, dtype=torch.float64),
                    torch.randn(n, ht, generator=g, dtype=torch.float64),
                )
            )

    def samples(self, keep: str = "loss") -> list[Sample]:
        out = []
        for row, d in enumerate(self.documents):
            m = torch.tensor(d.mask)
            kept = torch.arange(len(m)) if keep == "all" else torch.nonzero(m[:-1] & m[1:])[:, 0]
            out.append(Sample(row, torch.tensor(d.tokens), m, d.aux, d.last[kept], kept))
        return out

    def teacher(self, whole: bool = False, **more) -> TeacherHead:
        others = [i for i in range(len(self.head)) if i not in self.ids]
        return TeacherHead(self.head[self.ids], outside=self.head[others] if whole else None, **more)

    def objective(self, draft: Eagle3Draft, **options) -> Objective:
        options = {"dtype": torch.float64, **options}
        teacher = self.teacher(options.get("oov") == "drop")
        return Objective(draft, teacher, torch.tensor(self.ids), ObjectiveOptions(**options))


def gradients(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    out = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad(set_to_none=True)
    return out


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-9) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, f"{name}: nothing to compare"
        torch.testing.assert_close(got[name], gradient, rtol=rtol, atol=rtol * float(gradient.abs().max()), msg=name)


def assert_counts(report: StepReport, wanted) -> None:
    assert report.counted.tolist() == wanted.kept
    assert report.right.tolist() == wanted.right
    assert report.agreed.tolist() == wanted.agreed
    assert report.accepted.tolist() == wanted.accepted
    torch.testing.assert_close(report.loss_sums.tolist(), wanted.sums, rtol=1e-9, atol=1e-12)


_KNOWN: dict[str, tuple[Answer, dict[str, torch.Tensor]]] = {}  # the slow part, the same for both attention paths


def by_reference(masks: Sequence[str], config: Eagle3Config, seed: int, steps: int, rule: MaskRule, oov: str) -> Any:
    key = repr((masks, config, seed, steps, rule, oov))
    if key not in _KNOWN:
        world, draft = World(masks, config, seed), made_draft(config)
        wanted = reference_step(draft, world.documents, world.head, world.ids, steps=steps, rule=rule, oov=oov)
        wanted.loss.backward()
        _KNOWN[key] = wanted, gradients(draft)
    return _KNOWN[key]


def check(
    masks: Sequence[str],
    config: Eagle3Config = BASE,
    *,
    steps: int,
    seed: int = 1,
    budget: int | None = None,
    rule: MaskRule = "serving",
    **options: Any,
) -> tuple[Batch, StepReport]:
    """Our step against the reference, from the same weights."""
    wanted, reference = by_reference(masks, config, seed, steps, rule, options.get("oov", "keep"))
    world, draft = World(masks, config, seed), made_draft(config)
    batch = pack(world.samples("loss" if rule == "serving" else "all"), steps=steps, budget=budget, mask=rule)
    assert list(batch.valid_counts) == wanted.counts
    report = world.objective(draft, **options)(batch, normaliser_of([batch]))
    report.loss.backward()
    torch.testing.assert_close(report.loss, wanted.loss, rtol=1e-10, atol=0)
    assert_same(gradients(draft), reference)
    assert_counts(report, wanted)
    for i, t in enumerate(batch.rows.tolist()):
        document, position = int(batch.document[t]), int(batch.positions[t])
        for k in range(steps):
            flags = wanted.by_row.get((document, position, k), (False, False))
            assert (bool(report.right_KR[k, i]), bool(report.agreed_KR[k, i])) == flags
    return batch, report


@pytest.fixture(params=["sdpa", "flex"])
def attention(request, monkeypatch) -> str:
    if request.param == "flex":
        # torch refuses gradients of flex attention on a CPU by this check alone: what it computes there uncompiled has
        # them. A GPU compiles the same calls; benchmarks/train_check_gpu.py compares those.
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
        monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return request.param


TURNS = ["0001111111110", "11110011", "0111111111"]


@pytest.mark.parametrize("steps", range(1, 8))
def test_equals_the_reference_at_every_number_of_steps(attention: str, steps: int) -> None:
    batch, _ = check(TURNS, steps=steps, budget=40, attention=attention)
    assert len(set(batch.counts)) == steps, "every step has other rows"


@pytest.mark.parametrize("masks", [["0001111111110"], ["1111", "0111110", "0", "01", "0110", "0000", "1111111"]])
@pytest.mark.parametrize("budget", [None, 64])
def test_equals_the_reference_packed_or_not_and_padded_or_not(
    attention: str, masks: list[str], budget: int | None
) -> None:
    batch, _ = check(masks, steps=4, budget=budget, attention=attention)
    assert len(batch.tokens) == (budget or sum(map(len, masks)))


CONFIGS = {
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "both norms": {"fc_norm": True, "norm_output": True},
    "every head its own keys": {"num_kv_heads": 4},
    "one key for all heads": {"num_kv_heads": 1},
    "heads wider than the state": {"head_dim": 8},
    "two layers read": {"aux_layers": (0, 7)},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "rope linear": {"rope": RopeConfig("linear", 100.0, 64, {"factor": 4.0})},
    "rope llama3": {
        "rope": RopeConfig(
            "llama3",
            50.0,
            64,
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        )
    },
    "rope yarn": {"rope": RopeConfig("yarn", 100.0, 64, {"factor": 4.0, "original_max_position_embeddings": 16})},
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS.keys())
def test_equals_the_reference_for_every_kind_of_draft(attention: str, change: dict) -> None:
    config = dataclasses.replace(BASE, **change)
    check(TURNS, config, steps=3, budget=48, attention=attention)


@pytest.mark.parametrize("rule", ["serving", "classic", "shifted"])
@pytest.mark.parametrize("oov", ["keep", "drop"])
def test_equals_the_reference_for_every_mask_and_rule(attention: str, rule: str, oov: str) -> None:
    masks = ["0001111011110", "11010011", "0111111111"]  # rows that skip a step under the rules that allow it
    batch, report = check(masks, steps=4, budget=40, rule=rule, attention=attention, oov=oov)
    assert (batch.scored is None) == (rule == "serving")
    assert (sum(report.counted.tolist()) < sum(batch.valid_counts)) == (oov == "drop")


def test_accepted_counts_rows_that_were_right_at_every_step_so_far() -> None:
    config = dataclasses.replace(BASE, vocab_size=2, draft_vocab_size=2)
    _, report = check(["0" + "1" * 14], config, seed=0, steps=4)
    right, accepted = report.right.tolist(), report.accepted.tolist()
    assert accepted[0] == right[0] and 0 < accepted[3] < right[3], "some rows are right now and were wrong before"


def test_the_same_in_small_chunks_and_recomputed(attention: str) -> None:
    world, draft = World(["0" + "1" * 80, "1" * 30]), made_draft()
    batch = pack(world.samples(), steps=7)
    assert sum(batch.counts) > 512, "several chunks"
    losses, all_gradients = [], []
    for options in ({}, {"chunk_bytes": 1, "checkpoint": True, "attention": attention}):
        report = world.objective(draft, **options)(batch, normaliser_of([batch]))
        report.loss.backward()
        losses.append(report.loss.item())
        all_gradients.append(gradients(draft))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert_same(all_gradients[1], all_gradients[0])


def test_micro_batches_add_up_to_one_bigger_batch(attention: str) -> None:
    world, draft = World([*TURNS, "011", "0110111111"]), made_draft()
    objective, samples = world.objective(draft, attention=attention), world.samples()
    whole = pack(samples, steps=5, budget=64)
    report = objective(whole, normaliser_of([whole]))
    report.loss.backward()
    wanted = gradients(draft)
    parts = [pack(samples[i:j], steps=5, budget=32) for i, j in ((0, 1), (1, 4), (4, 5))]
    assert len({part.valid_counts for part in parts}) == 3
    total = 0.0
    for part in parts:
        one = objective(part, torch.tensor(normaliser_of(parts), dtype=torch.float64))
        one.loss.backward()
        total += one.loss.item()
    assert total == pytest.approx(report.loss.item(), rel=1e-12)
    assert_same(gradients(draft), wanted)


def test_the_classic_normaliser_divides_by_every_token() -> None:
    world, draft = World(TURNS), made_draft()
    batch = pack(world.samples("all"), steps=3, budget=64, mask="classic")
    tokens = sum(map(len, TURNS))
    assert normaliser_of([batch, batch], "classic") == [2 * tokens] * 3
    wanted = reference_step(
        draft, world.documents, world.head, world.ids, steps=3, rule="classic", normaliser=[tokens] * 3
    )
    got = world.objective(draft)(batch, normaliser_of([batch], "classic"))
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-10, atol=0)


def test_what_the_target_does_to_its_logits_is_done_to_the_teachers() -> None:
    world, draft = World(TURNS), made_draft()
    more = {"bias": torch.linspace(-1, 1, VOCAB, dtype=torch.float64), "scale": 0.7, "softcap": 2.0}
    wanted = reference_step(draft, world.documents, world.head, world.ids, steps=2, oov="drop", **more)
    batch = pack(world.samples(), steps=2)
    others = [i for i in range(VOCAB) if i not in world.ids]
    bias = more["bias"]
    head = TeacherHead(world.head[world.ids], bias[world.ids], world.head[others], bias[others], 0.7, 2.0)
    options = ObjectiveOptions(dtype=torch.float64, oov="drop")
    got = Objective(draft, head, torch.tensor(world.ids), options)(batch, normaliser_of([batch]))
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-10, atol=0)
    assert_counts(got, wanted)


def test_a_batch_in_which_no_row_drafts_has_a_loss_of_zero_that_every_weight_is_part_of() -> None:
    world, draft = World(["0000", "0100"]), made_draft()
    batch = pack(world.samples(), steps=3, budget=16)
    report = world.objective(draft)(batch, normaliser_of([batch]))
    report.loss.backward()
    assert report.loss.item() == 0 and report.counted.tolist() == [0, 0, 0] and report.right_KR.shape == (3, 0)
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


def test_without_gradients_the_same_numbers_and_no_graph() -> None:
    world, draft = World(TURNS), made_draft()
    batch = pack(world.samples(), steps=3)
    wanted = world.objective(draft)(batch, normaliser_of([batch]))
    with torch.no_grad():
        got = world.objective(draft)(batch, normaliser_of([batch]))
    assert got.loss.item() == wanted.loss.item() and not got.loss.requires_grad
    assert got.accepted.tolist() == wanted.accepted.tolist()


def test_a_factor_of_the_loss_is_one_of_every_gradient() -> None:
    world, draft = World(TURNS), made_draft()
    batch = pack(world.samples(), steps=3)
    objective = world.objective(draft)
    objective(batch, normaliser_of([batch])).loss.backward()
    wanted = {name: -2.5 * gradient for name, gradient in gradients(draft).items()}
    (-2.5 * objective(batch, normaliser_of([batch])).loss).backward()
    assert_same(gradients(draft), wanted, 1e-12)


def test_backward_runs_once() -> None:
    world, draft = World(TURNS), made_draft()
    batch = pack(world.samples(), steps=2)
    loss = world.objective(draft)(batch, normaliser_of([batch])).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_bfloat16_is_close_and_keeps_float32_gradients() -> None:
    world = World(TURNS)
    draft = made_draft()
    batch = pack(world.samples(), steps=7, budget=64)
    world.objective(draft)(batch, normaliser_of([batch])).loss.backward()
    wanted = gradients(draft)
    draft = draft.float()
    report = world.objective(draft, dtype=torch.bfloat16)(batch, normaliser_of([batch]))
    report.loss.backward()
    for name, gradient in gradients(draft).items():
        assert gradient.dtype == torch.float32
        gap = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert gap < 0.05, name
    assert report.loss.dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused() -> None:
    world, draft = World(TURNS), made_draft()
    with pytest.raises(ValueError, match="draft ids"):
        Objective(draft, world.teacher(), torch.tensor(world.ids[:-1]), ObjectiveOptions())
    with pytest.raises(ValueError, match="whole lm_head"):
        Objective(draft, world.teacher(), torch.tensor(world.ids), ObjectiveOptions(oov="drop"))


def test_moving_the_objective_keeps_the_teachers_dtype() -> None:
    world, draft = World(TURNS), made_draft()
    objective = world.objective(draft.float(), dtype=torch.bfloat16)
    assert objective.to("cpu")._head.weight.dtype == torch.bfloat16
    assert set(objective.state_dict()) == {f"draft.{name}" for name in draft.state_dict()}


@pytest.mark.parametrize("oov", ["keep", "drop"])
@pytest.mark.parametrize("rule", ["serving", "classic"])
def test_no_step_waits_for_the_device(oov: str, rule: MaskRule) -> None:
    """The meta device has no values: what reads one back, or sizes a tensor by one, fails."""
    world = World(TURNS)
    objective = world.objective(made_draft(), oov=oov).to("meta")
    batch = pack(world.samples("all"), steps=4, budget=48, mask=rule)
    divisor = torch.ones(4, dtype=torch.float64, device="meta")
    report = objective(batch.to("meta"), divisor)
    report.loss.backward()
    assert report.accepted.shape == (4,) and report.right_KR.shape == (4, len(batch.rows))
    assert all(p.grad is not None and p.grad.shape == p.shape for p in objective.parameters())
    moved = batch.to("meta").index
    assert moved is not None
    for step in moved.open().steps:
        assert step.at.is_meta and len(step.tables.kv_number[0, 0]) == 1
