"""What a drafter drafts on texts whose states are known, as a server runs it; float32, one document at a time.

Row t of a document drafts x[t+2] from the target's state at t and token x[t+1]; step k goes on from the drafter's own
state of the step before and token x[t+1+k], at position t + k, and sees the keys of step 0 up to t and its own of the
steps since (EAGLE-3, arXiv 2503.01840; SGLang and vLLM keep them in their KV cache in this order). Tokens are those of
the text: a chain counts as accepted up to its first draft that the text does not have, and until there they are the
drafted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.acceptance import Acceptance, acceptance
from eyas.train.batch import valid_steps
from eyas.train.draft import Eagle3Draft
from eyas.train.rope import rotate

Embed = Callable[[Tensor], Tensor]
Teach = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the target's states.

    Attributes:
        tokens: [T] int64. loss_mask: [T] bool, what the target emitted.
        aux: [T, A * Ht] layer outputs side by side.
        last: [T, Ht] states after the final norm; zeros where `best` is -1. Of none, [0, Ht].
        best: [T] int64, the target's most likely next token at each position; -1 where that is not known.
        best_before_norm: [T] int64, the one that lm_head would give on the state before the final norm; -1 likewise.
    """

    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    best: Tensor
    best_before_norm: Tensor


@dataclass(frozen=True, slots=True)
class Replay:
    """Drafts of one document: R rows, K steps.

    Attributes:
        rows: [R] int64, ascending.
        drafts: [K, R] int64, the target's id of each draft; -1 where a row does not draft at a step.
        logits, margins: [K, R] float32, of the draft, and how far the next likely one lies below it; 0 likewise.
        right: [K, R] bool, drafts that the text has.
        scores: [K, R] float32, minus the divergence from the target's distribution over the draft vocabulary, which is
            what training makes small. NaN where nothing is drafted, or no teacher was given.
    """

    rows: Tensor
    drafts: Tensor
    logits: Tensor
    margins: Tensor
    right: Tensor
    scores: Tensor

    @property
    def reached(self) -> Tensor:
        """[K, R] bool: all drafts before were right, and the text goes on."""
        before = torch.cat([torch.ones_like(self.right[:1]), self.right[:-1]]).int().cumprod(0).bool()
        return before & (self.drafts >= 0)


def drafting_rows(loss_mask: Tensor, steps: int) -> Tensor:
    """[K, T] bool: which rows a server drafts from, and how deep the text can tell."""
    mask = loss_mask.numpy().astype(np.bool_)
    return torch.from_numpy(valid_steps(mask, np.full(len(mask), len(mask), dtype=np.int64), steps))


@torch.no_grad()
def replay(
    draft: Eagle3Draft, ids: Tensor, document: Document, embed: Embed, steps: int, teach: Teach | None = None
) -> Replay:
    """Draft `steps` tokens from every row of a document.

    Args:
        draft: float32.
        ids: [Vd] the target's id of each draft token.
        document: T tokens.
        embed: [...] token ids -> [..., H] float32 input embeddings.
        steps: K.
        teach: [n, Ht] states after the final norm -> [n, Vd] the target's logits of the draft vocabulary.
    """
    valid = drafting_rows(document.loss_mask, steps)
    rows = torch.nonzero(valid[0])[:, 0]
    shape = (steps, len(rows))
    drafts, logits, margins = torch.full(shape, -1), torch.zeros(shape), torch.zeros(shape)
    right, scores = torch.zeros(shape, dtype=torch.bool), torch.full(shape, torch.nan)
    layer = _Layer.over(draft, document, embed)
    state, keys, values = layer.states[rows], list[Tensor](), list[Tensor]()
    for k in range(steps):
        alive = valid[k][rows]
        if not bool(alive.any()):
            break
        state, predicts = layer.step(k, rows, state, keys, values)
        given = draft.lm_head(predicts[alive])
        best = given.topk(min(2, len(ids)), dim=-1)
        drafts[k, alive] = ids[best.indices[:, 0]]
        logits[k, alive] = best.values[:, 0]
        margins[k, alive] = best.values[:, 0] - best.values[:, -1]
        right[k, alive] = drafts[k, alive] == document.tokens[rows[alive] + 2 + k]
        if teach is not None:
            wanted = teach(document.last[rows[alive] + 1 + k]).log_softmax(-1).cpu()
            scores[k, alive] = (wanted.exp() * (given.log_softmax(-1) - wanted)).sum(-1)
    return Replay(rows, drafts, logits, margins, right, scores)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The draft layer over one document: what step 0 computes at every position, and what a step adds."""

    draft: Eagle3Draft
    states: Tensor  # [T, H]
    embedded: Tensor  # [T, H], at t that of token t + 1; the last one repeats
    keys: Tensor  # [T, kv, D]
    values: Tensor

    @classmethod
    def over(cls, draft: Eagle3Draft, document: Document, embed: Embed) -> _Layer:
        following = torch.cat([document.tokens[1:], document.tokens[-1:]])
        embedded = draft.midlayer.input_layernorm(embed(following))
        states = draft.fuse(document.aux.float())
        self = cls(draft, states, embedded, states, states)
        _, keys, values = self._project(embedded, states, torch.arange(len(states)))
        return cls(draft, states, embedded, keys, values)

    def _project(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, heads, D] and keys [n, kv, D], rotated, and values."""
        attention, config = self.draft.midlayer.self_attn, self.draft.config
        read = torch.cat([embedded, self.draft.midlayer.hidden_norm(states)], dim=-1)
        cos, sin = self.draft.rope(positions)
        query = attention.q_proj(read).view(-1, config.num_heads, config.head_dim)
        keys = attention.k_proj(read).view(-1, config.num_kv_heads, config.head_dim)
        values = attention.v_proj(read).view(-1, config.num_kv_heads, config.head_dim)
        return rotate(query, cos, sin), rotate(keys, cos, sin), values

    def step(
        self, k: int, rows: Tensor, state: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """([R, H] what the next step reads, [R, H] what lm_head reads); adds the rows' own keys and values."""
        draft, length = self.draft, len(self.states)
        at = (rows + k).clamp(max=length - 1)  # rows whose text has ended compute on, and count no more
        query, own_keys, own_values = self._project(self.embedded[at], state, rows + k)
        if k:
            keys.append(own_keys)
            values.append(own_values)
        state = state + draft.midlayer.self_attn.o_proj(self._attend(query, rows, keys, values))
        state = state + draft.midlayer.mlp(draft.midlayer.post_attention_layernorm(state))
        predicts = draft.norm(state)
        return (predicts if draft.config.norm_output else state), predicts

    def _attend(self, query: Tensor, rows: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """[R, heads * D]: over the document's keys up to each row and the row's own of later steps."""
        groups = query.shape[1] // self.keys.shape[1]
        scale = query.shape[2] ** -0.5
        shared = torch.einsum("rhd,thd->rht", query, self.keys.repeat_interleave(groups, 1)) * scale
        later = torch.arange(len(self.keys)) > rows[:, None]
        shared = shared.masked_fill(later[:, None], -torch.inf)
        own = [(query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) * scale for key in keys]
        weights = torch.cat([shared, *own], dim=-1).softmax(-1)
        out = torch.einsum("rht,thd->rhd", weights[..., : len(self.keys)], self.values.repeat_interleave(groups, 1))
        for number, value in enumerate(values):
            share = weights[..., len(self.keys) + number, None]
            out = out + share * value.repeat_interleave(groups, 1)
        return out.flatten(1)


def acceptance_of(replays: Sequence[Replay]) -> Acceptance:
    """Acceptance of chains begun at every row, documents as what was drawn."""
    reached = np.array([replay.reached.sum(1).tolist() for replay in replays])
    right = np.array([(replay.reached & replay.right).sum(1).tolist() for replay in replays])
    return acceptance(reached, right)
