"""The training-time test: the loss of K steps in which the drafter reads its own features. Pure.

For a batch of N packed tokens, row t at step k (EAGLE-3, arXiv 2503.01840; the rules of `eyas.train.batch`):

    h_0 = fc(aux)
    read    [norm(embed(x[t+1+k])) | norm(h_k[t])]  -> q, k, v, rotated at position t + k
    attend  to the keys of step 0 up to t, and to row t's own of steps 1 .. k      (`eyas.train.attention`)
    h' = h_k[t] + o(attended);   h_{k+1}[t] = h' + mlp(norm(h'))
    predict x[t+2+k] by lm_head(norm(h_{k+1}[t])), taught by softmax(lm_head_target(last[t+1+k]))

    loss = sum_k w_k / normaliser_k * sum over the rows that count of KL(teacher || drafter),   w_k = decay ** k

FLOPs of matrix products, multiply and add apart, forward; n_k rows work at step k, M states teach, and backward costs
twice as much again (fc once: its input is not trained; the teacher nothing):

    all N      fc 2 A Ht H;  step-0 keys and values 2 H 2 kv;  embedding half of q, k, v 2 H (q + 2 kv), one product
               for all steps: step k reads it k positions further on
    each n_k   queries 2 H q;  keys and values 2 H 2 kv (k >= 1 only);  o 2 q H;  MLP 6 H F;  lm_head 2 H Vd
    each M     teacher 2 H Vd, once for all steps

`eyas.train.flops` counts them for a batch. At H 4096, F 14336, Vd 32000, K 7 and rows of 300 tokens that is 8.9 GFLOP
a token, forward and backward, where 60 % of the tokens are trained, and 15.1 where all are; attention over a single
document of 8192 adds 1.3 and 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.train.attention import AttentionKind, StepMask, step_masks
from eyas.train.batch import Batch
from eyas.train.compiled import grows, ready
from eyas.train.draft import Eagle3Draft
from eyas.train.loss import Teacher, TeacherHead, head_loss, loss_math, teach, teacher_math, wide_of
from eyas.train.step import Carried, Layer, Rows, Weights, first_step, later_step, matrices

Normaliser = Sequence[float] | Sequence[int] | Tensor
NormaliserRule = Literal["valid", "classic"]


@dataclass(frozen=True, slots=True)
class ObjectiveOptions:
    """How the loss is computed.

    Attributes:
        step_decay: w_k = step_decay ** k.
        oov: rows whose most likely token is outside the draft vocabulary: `keep` them, taught by the softmax over the
            draft vocabulary, or `drop` them from the loss (EAGLE's rule). They stay in the normaliser, which is known
            before any forward pass. Dropping needs the target's logits over its whole vocabulary: 2 H (V - Vd) FLOPs
            more a teaching state, and `TeacherHead.outside`.
        attention: `flex` on a GPU, `sdpa` anywhere.
        dtype: of matrix products.
        compile: the steps (`flex` only) and the loss's pointwise part, by torch.compile; a string names another backend
            than its own.
        checkpoint: recompute each step in the backward pass.
        chunk_bytes: most bytes of logits that exist at once; None for what suits the device.
    """

    step_decay: float = 0.8
    oov: Literal["keep", "drop"] = "keep"
    attention: AttentionKind = "sdpa"
    dtype: torch.dtype = torch.float32
    compile: bool | str = False
    checkpoint: bool = False
    chunk_bytes: int | None = None


class StepReport(NamedTuple):
    """What one batch gave; tensors on its device, nothing read back. K steps, R rows as in `Batch.rows`.

    A tuple, since wrappers for several ranks look for tensors in what a forward pass gives.

    Attributes:
        loss: scalar, with gradient; the only field that has one.
        loss_sums: [K] divergences summed over the rows that counted.
        counted: [K] int64, how many did: `Batch.valid_counts`, less the dropped.
        agreed: [K] int64, of them with the teacher's most likely token.
        right: [K] int64, of them with the token that follows in the text.
        accepted: [K] int64, of them with right tokens at all of the steps 0 .. k: divided by `counted`, the share of
            drafts of which a server that samples this text accepts at least k + 1 tokens.
        agreed_KR, right_KR: [K, R] bool, the same by row; False where a row does not count.
    """

    loss: Tensor
    loss_sums: Tensor
    counted: Tensor
    agreed: Tensor
    right: Tensor
    accepted: Tensor
    agreed_KR: Tensor
    right_KR: Tensor


def normaliser_of(batches: Sequence[Batch], rule: NormaliserRule = "valid") -> list[int]:
    """[K] what each step's sum is divided by, over micro-batches of this rank; at least 1. Add up those of all ranks.

    `valid`: the rows that count. `classic`: the tokens of the batches, whether they count or not.
    """
    if rule == "classic":
        return [max(1, sum(batch.tokens_used for batch in batches))] * batches[0].steps
    return [max(1, sum(counts)) for counts in zip(*(batch.valid_counts for batch in batches), strict=True)]


class Objective(nn.Module):
    """Loss of a drafter on a batch. A module, so that data parallel wrappers see its forward pass.

    Args:
        draft: its parameters are trained; the only ones here.
        teacher_head: the target's, cut to the draft vocabulary. Cast to the compute dtype; not part of the state.
        draft_ids: [Vd] int64, the target's id of each draft token (i + d2t[i]).
        options: how.

    Raises:
        ValueError: shapes do not fit, or rows are to be dropped and the head has no other rows.
    """

    draft_ids: Tensor

    def __init__(
        self, draft: Eagle3Draft, teacher_head: TeacherHead, draft_ids: Tensor, options: ObjectiveOptions
    ) -> None:
        super().__init__()
        wanted = (draft.config.draft_vocab_size, draft.config.target_hidden_size)
        if tuple(teacher_head.weight.shape) != wanted or len(draft_ids) != wanted[0]:
            raise ValueError(f"teacher {tuple(teacher_head.weight.shape)}, {len(draft_ids)} draft ids, not {wanted}")
        if options.oov == "drop" and teacher_head.outside is None:
            raise ValueError("rows can be dropped only by the target's whole lm_head")
        self.draft, self.options = draft, options
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._head = teacher_head.to(options.dtype)
        if options.oov == "keep":
            self._head = TeacherHead(
                self._head.weight, self._head.bias, None, None, self._head.scale, self._head.softcap
            )
        self._matrices = ready(matrices, options.compile)
        # The SDPA path walks over blocks whose limits differ from batch to batch: nothing to compile once.
        compile_steps = options.attention == "flex" and options.compile
        self._first, self._later = ready(first_step, compile_steps), ready(later_step, compile_steps)
        self._loss_math = ready(loss_math, options.compile)
        self._teacher_math = ready(teacher_math, options.compile)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Objective:
        super()._apply(fn, recurse)
        self._head = self._head.to(self.draft_ids.device)  # follows to the device, keeps its dtype
        return self

    def forward(self, batch: Batch, normaliser: Normaliser) -> StepReport:
        """One batch, on the module's device.

        Args:
            batch: of `eyas.train.batch.pack`.
            normaliser: [K], what each step's sum is divided by: over all ranks and accumulated batches, so that the
                losses of all of them add up to the loss. A tensor stays on the device.
        """
        plan = _Plan.of(batch, normaliser, self.options)
        if not plan.counts:
            return _nothing(self.draft, batch)
        teacher = teach(
            batch.last.to(self.options.dtype),
            self._head,
            math=self._teacher_math,
            chunk_bytes=self.options.chunk_bytes,
        )
        state_SH = self._states(batch, plan)
        coefficient_S, scored_S = plan.coefficient_S, plan.scored_S
        if teacher.kept is not None:
            kept_S = teacher.kept[plan.teacher_S]
            coefficient_S = coefficient_S * kept_S
            scored_S = kept_S if scored_S is None else scored_S & kept_S
        loss, divergence_S, best_S = head_loss(
            state_SH,
            self.draft.lm_head.weight,
            teacher,
            plan.teacher_S,
            coefficient_S,
            math=self._loss_math,
            chunk_bytes=self.options.chunk_bytes,
        )
        return self._report(batch, plan, teacher, scored_S, (loss, divergence_S, best_S))

    def _states(self, batch: Batch, plan: _Plan) -> Tensor:
        """[S, H] what `lm_head` reads, all rows of step 0, then of step 1, and so on."""
        draft, config, dtype = self.draft, self.draft.config, self.options.dtype
        weights = Weights.of(draft)
        layer = Layer(
            self._matrices(weights, dtype),
            weights,
            draft.rope,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.norm_output,
        )
        embedded_NH = F.embedding(torch.roll(batch.tokens, -1), draft.embed_tokens).to(dtype)
        rows = [Rows(*parts) for parts in zip(plan.at, plan.inverse, plan.positions, plan.masks, strict=True)]
        # A single row would be compiled apart.
        first = self._first if plan.counts[0] > 1 else first_step
        carried, shared = self._run(first, layer, batch.aux.to(dtype), embedded_NH, batch.positions, rows[0])
        out = [carried.predicts]
        for n, at in zip(plan.counts[1:], rows[1:], strict=True):
            before = Carried(
                grows(carried.state[:n]),
                grows(carried.predicts[:n]),
                grows(carried.keys[:, :n], 1),
                grows(carried.values[:, :n], 1),
            )
            carried = self._run(self._later if n > 1 else later_step, layer, before, shared, at)
            out.append(carried.predicts)
        return torch.cat(out)

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        if self.options.checkpoint and torch.is_grad_enabled():
            return checkpoint(step, *args, use_reentrant=False)
        return step(*args)

    @torch.no_grad()
    def _report(
        self,
        batch: Batch,
        plan: _Plan,
        teacher: Teacher,
        scored_S: Tensor | None,
        result: tuple[Tensor, Tensor, Tensor],
    ) -> StepReport:
        loss, divergence_S, best_S = result
        agreed_S = best_S == teacher.best[plan.teacher_S]
        right_S = self.draft_ids[best_S] == plan.label_S
        counts_S = torch.ones_like(agreed_S) if scored_S is None else scored_S
        shape = (batch.steps, len(batch.rows))
        scored, agreed, right = (torch.zeros(shape, dtype=torch.bool, device=loss.device) for _ in range(3))
        sums = divergence_S.new_zeros(batch.steps)
        flags = (counts_S, agreed_S & counts_S, right_S & counts_S, divergence_S * counts_S)
        start = 0
        for k, n in enumerate(plan.counts):
            part = slice(start, start + n)
            scored[k, :n], agreed[k, :n], right[k, :n] = flags[0][part], flags[1][part], flags[2][part]
            sums[k] = flags[3][part].sum()
            start += n
        all_right = right.int().cumprod(0)
        return StepReport(loss, sums, scored.sum(1), agreed.sum(1), right.sum(1), all_right.sum(1), agreed, right)


class _Plan(NamedTuple):
    """Index vectors of a batch: K' steps that have rows, S rows of all steps one after another.

    Attributes:
        counts: [K'] rows of each step, none of them 0.
        at, inverse, positions, masks: of each step's `Rows`.
        teacher_S, label_S, coefficient_S: teacher's row, token to predict (-1: none) and weight of each row.
        scored_S: which rows count; None for all.
    """

    counts: tuple[int, ...]
    at: tuple[Tensor, ...]
    inverse: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    masks: tuple[StepMask, ...]
    teacher_S: Tensor
    label_S: Tensor
    coefficient_S: Tensor
    scored_S: Tensor | None

    @classmethod
    def of(cls, batch: Batch, normaliser: Normaliser, options: ObjectiveOptions) -> _Plan:
        counts = tuple(n for n in batch.counts if n)
        rows, length, wide = batch.rows, len(batch.tokens), wide_of(options.dtype)
        if not counts:
            return cls((), (), (), (), (), rows, rows, rows.to(wide), None)
        parts = [grows(rows[:n] + k) for k, n in enumerate(counts)]
        at_S, start_S = torch.cat(parts), torch.cat([rows[:n] for n in counts])
        positions_R = batch.positions[rows]
        weights = [options.step_decay**k / normaliser[k] for k in range(len(counts))]
        coefficients = [
            w.to(wide).expand(n) if isinstance(w, Tensor) else torch.full((n,), w, dtype=wide, device=rows.device)
            for w, n in zip(weights, counts, strict=True)
        ]
        coefficient_S, scored_S = torch.cat(coefficients), None
        if batch.scored is not None:
            scored_S = torch.cat([batch.scored[k, :n] for k, n in enumerate(counts)])
            coefficient_S = coefficient_S * scored_S
        following_S = (at_S + 2).clamp(max=length - 1)  # past the text: not a row of the serving rule
        followed_S = (at_S + 2 < length) & (batch.document[following_S] == batch.document[start_S])
        inverse = torch.full((len(counts) + length,), -1, dtype=torch.int64, device=rows.device)
        inverse[rows + len(counts)] = torch.arange(len(rows), device=rows.device)
        return cls(
            counts,
            tuple(parts),
            tuple(inverse[len(counts) - k :][:length] for k in range(len(counts))),
            tuple(grows(positions_R[:n] + k) for k, n in enumerate(counts)),
            tuple(step_masks(batch, options.attention)),
            batch.teacher_at[at_S + 1].clamp(min=0),  # -1 only where a row does not count
            torch.where(followed_S, batch.tokens[following_S], -1),
            coefficient_S,
            scored_S,
        )


def _nothing(draft: Eagle3Draft, batch: Batch) -> StepReport:
    """No row drafts: a loss of 0 that every parameter is part of, so that ranks still reduce together."""
    loss = sum(
        (parameter.sum() * 0.0 for parameter in draft.parameters()), start=torch.zeros((), device=batch.rows.device)
    )
    sums = torch.zeros(batch.steps, device=batch.rows.device)
    none = torch.zeros((batch.steps, 0), dtype=torch.bool, device=batch.rows.device)
    counts = sums.long()
    return StepReport(loss, sums, counts, counts, counts, counts, none, none)
