"""Teacher and loss: forward KL from the target's distribution over the draft vocabulary to the drafter's.

    KL_s = sum_v p_v (log p_v - log q_v) = sum_v p_v log p_v - sum_v p_v z_v + logsumexp(z)

with p the softmax of the target's logits over the Vd tokens of the draft vocabulary and z the drafter's logits. The
gradient with respect to z is (q - p) * coefficient: it is made in the forward pass, chunk after chunk, together with
the products that carry it to the states and to `lm_head`, so that no logits outlive their chunk. The gradient of
`lm_head` is summed over all chunks of all steps in float32.

FLOPs: teacher 2 H Vd a row of `last` (2 H V if rows are dropped by the target's own choice); student 6 H Vd a row and
step, no product more than logits and two gradients need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from eyas.train.compiled import grows

#: Most bytes of one chunk's logits: on a GPU, so that a product fills it; on a CPU, so that they stay near its caches.
CHUNK_BYTES_GPU: Final = 1 << 29
CHUNK_BYTES_CPU: Final = 1 << 24

LossMath = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """The target's last layer, cut to the draft vocabulary.

    Attributes:
        weight: [Vd, H] rows of its lm_head, in the order of the draft vocabulary.
        bias: [Vd], or None.
        outside: [V - Vd, H] the other rows, where rows are to be dropped whose most likely token is none of the
            draft vocabulary; None keeps every row.
        outside_bias: [V - Vd], or None.
        scale, softcap: what the target does to its logits (`eyas.target.head.Head`).
    """

    weight: Tensor
    bias: Tensor | None = None
    outside: Tensor | None = None
    outside_bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def to(self, *args: Any, **kwargs: Any) -> TeacherHead:
        """As `Tensor.to`, of every tensor."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(*args, **kwargs)

        weight = self.weight.to(*args, **kwargs)
        return replace(
            self, weight=weight, bias=move(self.bias), outside=move(self.outside), outside_bias=move(self.outside_bias)
        )

    def logits(self, last_MH: Tensor) -> Tensor:
        """[M, Vd] in the dtype of the weights."""
        return self._logits(last_MH, self.weight, self.bias)

    def _logits(self, last_MH: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = last_MH @ weight.T
        if bias is not None:
            logits += bias
        if self.scale != 1.0:
            logits *= self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def best_outside(self, last_MH: Tensor, chunk_bytes: int | None = None) -> Tensor | None:
        """[M] the largest logit outside the draft vocabulary; None where that is not asked for, or there is none."""
        if self.outside is None or not len(self.outside):
            return None
        size = chunk_rows(last_MH, len(self.outside), chunk_bytes)
        parts = [self._logits(part, self.outside, self.outside_bias).amax(-1) for part in last_MH.split(size)]
        return torch.cat(parts)


class Teacher(NamedTuple):
    """What M states of the target teach; computed once and read by every step.

    Attributes:
        logits: [M, Vd] in the compute dtype.
        lse: [M] their log-sum-exp. plogp: [M] sum of p log p. Both float32, or float64.
        best: [M] int64, the most likely token of the draft vocabulary.
        kept: [M] bool, whether it is the most likely of all tokens; None where every row is kept.
    """

    logits: Tensor
    lse: Tensor
    plogp: Tensor
    best: Tensor
    kept: Tensor | None


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32, or float64."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(states_SH: Tensor, vocabulary: int, most_bytes: int | None = None) -> int:
    """Rows whose logits take at most `most_bytes`; a multiple of 128, so that products stay on whole tiles.

    Args:
        states_SH: what the logits are made of: their dtype and device.
        vocabulary: logits of a row.
        most_bytes: None for what suits the device.
    """
    if most_bytes is None:
        most_bytes = CHUNK_BYTES_CPU if states_SH.device.type == "cpu" else CHUNK_BYTES_GPU
    return max(128, most_bytes // (vocabulary * states_SH.element_size()) // 128 * 128)


def teacher_math(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[M, Vd] logits -> log-sum-exp, sum of p log p, argmax, each [M]."""
    z = logits.to(wide_of(logits.dtype))
    lse = z.logsumexp(-1)
    plogp = ((z - lse[:, None]).exp() * z).sum(-1) - lse
    return lse, plogp, logits.argmax(-1)


@torch.no_grad()
def teach(
    last_MH: Tensor, head: TeacherHead, *, math: Callable[..., Any] = teacher_math, chunk_bytes: int | None = None
) -> Teacher:
    """The target's distributions at M positions.

    Args:
        last_MH: [M, H] states after the final norm, in the head's dtype.
        head: the target's.
        math: `teacher_math`, or that compiled.
        chunk_bytes: most bytes of the logits that are reduced at once; None for what suits the device.
    """
    logits = head.logits(last_MH)
    parts = [math(grows(part)) for part in logits.split(chunk_rows(last_MH, len(head.weight), chunk_bytes))]
    lse, plogp, best = (torch.cat(column) for column in zip(*parts, strict=True))
    outside = head.best_outside(last_MH, chunk_bytes)
    kept = None
    if head.outside is not None:
        inside = logits.gather(1, best[:, None])[:, 0]
        kept = torch.ones_like(inside, dtype=torch.bool) if outside is None else inside >= outside
    return Teacher(logits, lse, plogp, best, kept)


def loss_math(
    z_sV: Tensor, logits_MV: Tensor, lse_M: Tensor, plogp_M: Tensor, teacher_s: Tensor, coefficient_s: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and choice of s rows; `z_sV` is overwritten with the gradient.

    Args:
        z_sV: [s, Vd] the drafter's logits.
        logits_MV, lse_M, plogp_M: of the teacher.
        teacher_s: [s] int64, each row's teacher among M.
        coefficient_s: [s], of each row's loss in the sum.

    Returns:
        [s] KL divergence, [s] int64 the drafter's most likely token.
    """
    wide = wide_of(z_sV.dtype)
    z = z_sV.to(wide)
    lse = z.logsumexp(-1)
    p = (logits_MV[teacher_s].to(wide) - lse_M[teacher_s][:, None]).exp()
    divergence = plogp_M[teacher_s] - (p * z).sum(-1) + lse
    best = z.argmax(-1)
    gradient = ((z - lse[:, None]).exp() - p) * coefficient_s[:, None]
    z_sV.copy_(gradient)
    return divergence, best


class _HeadLoss(Function):
    """Sum of coefficient * KL over rows; every gradient is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        state_SH: Tensor,
        weight_VH: Tensor,
        teacher: Teacher,
        teacher_S: Tensor,
        coefficient_S: Tensor,
        math: LossMath,
        rows: int,
        learn: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cast_VH = weight_VH.detach().to(state_SH.dtype)
        wide = wide_of(state_SH.dtype)
        learn_weight = learn and ctx.needs_input_grad[1]
        grad_state = torch.empty_like(state_SH) if learn else None
        grad_weight: Tensor | None = None
        divergences: list[Tensor] = []
        choices: list[Tensor] = []
        taught = [grows(tensor) for tensor in (teacher.logits, teacher.lse, teacher.plogp)]
        for start in range(0, len(state_SH), rows):
            part = slice(start, start + rows)
            z = state_SH[part] @ cast_VH.T
            divergence, best = math(grows(z), *taught, grows(teacher_S[part]), grows(coefficient_S[part]))
            divergences.append(divergence)
            choices.append(best)
            if grad_state is not None:
                torch.mm(z, cast_VH, out=grad_state[part])
            if learn_weight:
                product = z.T @ state_SH[part]
                grad_weight = product.to(wide) if grad_weight is None else grad_weight.add_(product)
        ctx.gradients = (grad_state, None if grad_weight is None else grad_weight.to(weight_VH.dtype))
        divergence_S, best_S = torch.cat(divergences), torch.cat(choices)
        ctx.mark_non_differentiable(divergence_S, best_S)
        return (divergence_S * coefficient_S).sum(), divergence_S, best_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were handed out already: backward runs once")
        grad_state, grad_weight = ctx.gradients
        ctx.gradients = None
        if grad_state is not None:
            grad_state.mul_(grads[0])
        if grad_weight is not None:
            grad_weight.mul_(grads[0])
        return grad_state, grad_weight, None, None, None, None, None, None


def head_loss(
    state_SH: Tensor,
    weight_VH: Tensor,
    teacher: Teacher,
    teacher_S: Tensor,
    coefficient_S: Tensor,
    *,
    math: LossMath = loss_math,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The drafter's loss over S rows of all steps.

    Args:
        state_SH: [S, H] what `lm_head` reads, in the compute dtype.
        weight_VH: [Vd, H] of `lm_head`, in the dtype it is kept in.
        teacher: of the batch.
        teacher_S: [S] int64, each row's teacher.
        coefficient_S: [S] float32 (float64), of each row's divergence in the loss; 0 leaves a row out.
        math: `loss_math`, or that compiled.
        chunk_bytes: most bytes of logits that exist at once; None for what suits the device.

    Returns:
        The loss (a scalar, differentiable once); [S] divergences and [S] int64 choices, which are not.
    """
    learn = torch.is_grad_enabled() and state_SH.requires_grad
    rows = chunk_rows(state_SH, len(weight_VH), chunk_bytes)
    return _HeadLoss.apply(state_SH, weight_VH, teacher, teacher_S, coefficient_S, math, rows, learn)  # pyright: ignore[reportReturnType]
