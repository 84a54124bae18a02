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

from eyas.train.attention import AttentionKind, StepMask, row_spans
from eyas.train.batch import Batch
from eyas.train.compiled import grows, ready
from eyas.train.draft import Eagle3Draft
from eyas.train.loss import Teacher, TeacherHead, head_loss, loss_math, teach, teacher_math
from eyas.train.step import Carried, Layer, Rows, Weights, first_step, later_step, matrices
from eyas.train.step_index import OpenIndex

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
        if batch.index is None:
            return _nothing(self.draft, batch)
        index, counts = batch.index.open(), batch.index.counts
        teacher = teach(
            batch.last.to(self.options.dtype),
            self._head,
            math=self._teacher_math,
            chunk_bytes=self.options.chunk_bytes,
        )
        state_SH = self._states(batch, index)
        coefficient_S = _coefficients(counts, normaliser, self.options.step_decay, teacher.lse)
        scored_S = index.scored_S
        if teacher.kept is not None:
            kept_S = teacher.kept[index.teacher_S]
            scored_S = kept_S if scored_S is None else scored_S & kept_S
        if scored_S is not None:
            coefficient_S = coefficient_S * scored_S
        result = head_loss(
            state_SH,
            self.draft.lm_head.weight,
            teacher,
            index.teacher_S,
            coefficient_S,
            math=self._loss_math,
            chunk_bytes=self.options.chunk_bytes,
        )
        return self._report(batch, index, teacher, scored_S, result)

    def _states(self, batch: Batch, index: OpenIndex) -> Tensor:
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
        masks: Sequence[StepMask] = (
            [step.tables for step in index.steps] if self.options.attention == "flex" else row_spans(batch)
        )
        rows = [
            Rows(step.at, step.inverse, step.positions, mask) for step, mask in zip(index.steps, masks, strict=True)
        ]
        # A single row would be compiled apart.
        first = self._first if len(rows[0].at) > 1 else first_step
        predicts, carried, shared = self._run(first, layer, batch.aux.to(dtype), embedded_NH, batch.positions, rows[0])
        out = [predicts]
        for at in rows[1:]:
            before = Carried(grows(carried.state), grows(carried.keys, 1), grows(carried.values, 1))
            step = self._later if len(at.at) > 1 else later_step
            predicts, carried = self._run(step, layer, before, shared, at)
            out.append(predicts)
        return torch.cat(out)

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        if self.options.checkpoint and torch.is_grad_enabled():
            return checkpoint(step, *args, use_reentrant=False)
        return step(*args)

    @torch.no_grad()
    def _report(
        self,
        batch: Batch,
        index: OpenIndex,
        teacher: Teacher,
        scored_S: Tensor | None,
        result: tuple[Tensor, Tensor, Tensor],
    ) -> StepReport:
        loss, divergence_S, best_S = result
        shape = (batch.steps, len(batch.rows))

        def table(x_S: Tensor) -> Tensor:
            counted = x_S if scored_S is None else x_S * scored_S
            return x_S.new_zeros(shape[0] * shape[1]).index_copy(0, index.cell_S, counted).view(shape)

        scored = table(torch.ones_like(best_S, dtype=torch.bool))
        agreed = table(best_S == teacher.best[index.teacher_S])
        right = table(self.draft_ids[best_S] == index.label_S)
        all_right = right.int().cumprod(0)
        sums = table(divergence_S).sum(1)
        return StepReport(loss, sums, scored.sum(1), agreed.sum(1), right.sum(1), all_right.sum(1), agreed, right)


def _coefficients(counts: Sequence[int], normaliser: Normaliser, decay: float, like: Tensor) -> Tensor:
    """[S] the weight of each row in the loss: w_k / normaliser_k."""
    weights = [decay**k / normaliser[k] for k in range(len(counts))]
    return torch.cat(
        [
            w.to(like.dtype).expand(n) if isinstance(w, Tensor) else like.new_full((n,), w)
            for w, n in zip(weights, counts, strict=True)
        ]
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
