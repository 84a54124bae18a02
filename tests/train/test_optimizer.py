"""The learning rate as a function of the step, and a step that equals the textbook's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eyas.train.optimizer import Schedule, gradient_norm, make_adamw, parameter_groups, set_lr, step_clipped

schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    total=st.integers(1, 500),
    warmup=st.integers(0, 50),
    decay=st.integers(0, 200),
    floor=st.floats(0, 1),
)


@given(schedules, st.integers(0, 600))
def test_a_factor_lies_between_nothing_and_the_peak(schedule: Schedule, step: int) -> None:
    assert 0 <= schedule.factor(step) <= 1 + 1e-12
    if step >= schedule.warmup:
        assert schedule.factor(step) >= min(1.0, schedule.floor) - 1e-12
        assert schedule.factor(step + 1) <= schedule.factor(step) + 1e-12, "after the warm-up it never rises"
    else:
        assert schedule.factor(step) > 0, "no step is wasted"


def test_the_shapes() -> None:
    cosine = Schedule("cosine", total=110, warmup=10, floor=0.1)
    assert [cosine.factor(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert cosine.factor(59) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert cosine.factor(109) == pytest.approx(0.1)
    wsd = Schedule("wsd", total=100, warmup=10, decay=20, floor=0.0)
    assert [wsd.factor(s) for s in (9, 50, 79)] == pytest.approx([1, 1, 1])
    assert [wsd.factor(s) for s in (80, 89, 99)] == pytest.approx([0.95, 0.5, 0.0])
    assert {Schedule("constant", total=5).factor(s) for s in range(9)} == {1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def textbook(parameter: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """AdamW as its paper writes it."""
    value, first, second = parameter.clone(), torch.zeros_like(parameter), torch.zeros_like(parameter)
    for t, grad in enumerate(grads, 1):
        first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
        update = (first / (1 - 0.9**t)) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
        value = value - lr * decay * value - lr * update
    return value


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_steps_equal_the_textbook(clip: float | None) -> None:
    module = net()
    optimizer = make_adamw(module, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    set_lr(optimizer, 3e-2)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in start}
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step)
        module(torch.randn(5, 6, dtype=torch.float64)).pow(2).sum().backward()
        grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        norm = gradient_norm(module.parameters())
        assert float(norm.detach()) == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads.values())))
        scale = 1.0 if clip is None else min(1.0, clip / float(norm.detach()))
        for name, grad in grads.items():
            seen[name].append(grad * scale)
        step_clipped(optimizer, norm, clip)
    for name, parameter in module.named_parameters():
        decay = 0.1 if parameter.ndim >= 2 else 0.0
        expected = textbook(start[name], seen[name], 3e-2, decay)
        assert torch.allclose(parameter, expected, atol=1e-7, rtol=1e-6), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad: float) -> None:
    module = net()
    optimizer = make_adamw(module, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def once(poison: float | None) -> None:
        optimizer.zero_grad()
        module(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        if poison is not None:
            next(module.parameters()).grad[0, 0] = poison  # type: ignore[index]
        step_clipped(optimizer, gradient_norm(module.parameters()), 0.5)

    once(None)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    states = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    once(bad)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    for old, new in zip(states, optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    once(None)
    assert not all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_only_matrices_decay_and_what_is_frozen_is_left_out() -> None:
    module = net()
    module.two.weight.requires_grad_(False)
    matrices, vectors = parameter_groups(module, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert len(vectors["params"]) == 3
