"""AdamW, its learning rate as a pure function of the step, its gradient clipped and checked on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_FUSED_ON: Final = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over a run of `total` optimiser steps, as a factor of the peak.

    Attributes:
        kind: after the warm-up, `cosine` falls along a half cosine (Loshchilov and Hutter, arXiv 1608.03983), `wsd`
            stays and then falls linearly over the last `decay` steps (warm-up, stable, decay: Hu et al., arXiv
            2404.06395), `constant` stays.
        total: optimiser steps of the run.
        warmup: steps of the linear rise; the last of them has the peak.
        decay: wsd only.
        floor: the last step's factor.
    """

    kind: Literal["cosine", "wsd", "constant"]
    total: int
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def factor(self, step: int) -> float:
        """The factor of step `step`, counted from 0; steps beyond the last keep the last one's."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                done = _progress(step, self.warmup, self.total)
                return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
            case "wsd":
                done = _progress(step, max(self.warmup, self.total - self.decay), self.total)
                return 1 - (1 - self.floor) * done


def _progress(step: int, start: int, total: int) -> float:
    """0 just before the first falling step, 1 at the last step of the run."""
    return min(1.0, max(0.0, (step - start + 1) / max(1, total - start)))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices decay, vectors (norms, biases) do not."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = (
        ([p for _, p in trained if p.ndim >= 2], weight_decay),
        ([p for _, p in trained if p.ndim < 2], 0.0),
    )
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def make_adamw(
    module: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the trained parameters, one fused kernel a group."""
    device = next(module.parameters()).device
    groups = parameter_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=device.type in _FUSED_ON)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients as one number on the device; of sharded ones over all ranks. [] float32."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step_clipped(optimizer: torch.optim.Optimizer, norm: torch.Tensor, clip: float | None) -> None:
    """One optimiser step, the gradient scaled to a norm of at most `clip`; none at all where `norm` is no number.

    Both without waiting for the device: the fused kernel divides by a scale and skips the step by a flag that lie
    there, as under `torch.amp.GradScaler`. The caller looks at `norm` when it is convenient.
    """
    state: Any = optimizer
    state.found_inf = (~torch.isfinite(norm)).to(torch.float32)
    scale = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
    state.grad_scale = torch.nan_to_num(scale, nan=1.0, posinf=1.0).to(torch.float32)
    try:
        optimizer.step()
    finally:
        del state.found_inf, state.grad_scale
