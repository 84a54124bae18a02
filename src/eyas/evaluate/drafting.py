"""The drafter as SGLang and vLLM run it: one sequence, a KV cache of its own, chains and trees of drafts.

What serving feeds it, and so does this:

    extend   Row t reads the target's own layer outputs at t and the embedding of token t + 1, at position t. It happens
             for the prompt, and after each verification for the rows whose tokens were accepted: what the drafter made
             of its own features in between is overwritten.
    draft    Step 0 is the output of the last row. Step k >= 1 reads the token drafted before it and the drafter's own
             state of the step before (before the final norm, unless `norm_output`), at position t + k; its keys are
             those of rows 0 .. t and of the drafts before it.

With `topk` > 1 SGLang keeps each step's keys in one place a branch, and a branch that goes on from another's node still
reads its own place: not its ancestors'. `keys="places"` does the same; `keys="ancestors"` is the tree attention of
EAGLE's own code. A chain knows no difference, and vLLM drafts chains only.

Sources: SGLang 0.5.23 eagle_worker_v2.py (`draft_forward`, `_draft_extend_for_decode`), spec_utils.py
(`select_top_k_tokens`), eagle_utils.py (`organize_draft_results`), cache_locs.py (`generate_draft_decode_kv_indices`);
vLLM 0.32 llm_base_proposer.py (`propose`); EAGLE-2 (arXiv 2406.16858) for the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.errors import ConfigError
from eyas.train.draft import Eagle3Draft, rms_norm
from eyas.train.rope import rotate
from eyas.train.vocab import DraftVocab

_CHUNK: Final = 1024  # rows extended at once: their mask over all rows before is held
_TREE_TOKENS: Final = 4  # a step, where no number is given


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a server is asked to draft.

    Attributes:
        depth: K, steps.
        topk: branches of each node; 1 is a chain.
        tokens: most drafts that are verified, the likeliest ones; of a chain all.
        temperature: of sampled drafts; 0 drafts the likeliest tokens. Chains only.
        keys: whose keys a branch of a tree reads.
    """

    depth: int = 3
    topk: int = 1
    tokens: int = 3
    temperature: float = 0.0
    keys: Literal["places", "ancestors"] = "places"

    @classmethod
    def of(cls, depth: int, topk: int = 1, tokens: int | None = None, temperature: float = 0.0) -> Drafting:
        """With the number of tokens filled in.

        Raises:
            ConfigError: a chain of another number of tokens than steps, more tokens than the tree has, or a tree of
                sampled drafts.
        """
        most = topk + (depth - 1) * topk * topk
        if topk == 1 and tokens not in (None, depth):
            raise ConfigError(f"a chain of {depth} steps drafts {depth} tokens, not {tokens}", "evaluate.draft_tokens")
        if tokens is not None and tokens > most:
            what = f"{tokens} draft tokens, but {depth} steps of {topk} branches make {most}"
            raise ConfigError(what, "evaluate.draft_tokens", "fewer tokens, or more steps or branches")
        if topk > 1 and temperature:
            raise ConfigError(
                "drafts are sampled along a chain only", "evaluate.sample_drafts", "topk 1, or no sampling"
            )
        chosen = depth if topk == 1 else min(tokens or _TREE_TOKENS * depth, most)
        return cls(depth, topk, chosen, temperature)


class Tree(NamedTuple):
    """Drafts of one cycle, parents before children; a chain is a tree of one branch.

    Attributes:
        tokens: [n] ids of the target.
        parents: [n] which draft each one follows; -1 follows the last token of the text.
        depths: [n] 0 for what follows the text.
        probs: [n, Vd] what each was sampled from, of a sampled chain; None otherwise.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    probs: Tensor | None = None

    def children(self, node: int) -> dict[int, int]:
        """token -> draft, of those that follow `node`."""
        return {self.tokens[i]: i for i, parent in enumerate(self.parents) if parent == node}


class Drafter:
    """A drafter with the cache of one sequence.

    Args:
        draft: its weights; in the dtype and on the device it shall run.
        vocab: its draft vocabulary.

    Attributes:
        rows: how many the cache holds.
    """

    def __init__(self, draft: Eagle3Draft, vocab: DraftVocab) -> None:
        self.config, self._draft = draft.config, draft.eval()
        self.dtype, self.device = draft.fc.weight.dtype, draft.fc.weight.device
        self.target_ids = vocab.target_ids.to(self.device)
        self._known = self.target_ids.tolist()
        attention = draft.midlayer.self_attn
        self._qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach()
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        shape = (self.config.num_kv_heads, 0, self.config.head_dim)
        self._keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._values = torch.empty_like(self._keys)
        self._first, self.rows = 0, 0
        self._states = self._predicts = torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def extend(self, aux_TA: Tensor, next_tokens_T: Tensor) -> None:
        """Take in rows of which the target's states are known.

        Args:
            aux_TA: [T, A * Ht], layer outputs side by side, shallow to deep.
            next_tokens_T: [T], the token behind each row's own.
        """
        states, predicts = [], []
        first = self.rows
        for start in range(0, len(aux_TA), _CHUNK):
            part = slice(start, start + _CHUNK)
            state_TH = self._draft.fuse(aux_TA[part].to(self.device, self.dtype))
            count = len(state_TH)
            at = torch.arange(self.rows, self.rows + count, device=self.device)
            sees = torch.arange(self.rows + count, device=self.device) <= at[:, None]
            out = self._layer(next_tokens_T[part].to(self.device), state_TH, at, self._keys, self._values, sees)
            self._grow(out.keys, out.values)
            states.append(out.state)
            predicts.append(out.predicts)
        self._first, self._states, self._predicts = first, torch.cat(states), torch.cat(predicts)

    @torch.inference_mode()
    def draft(self, plan: Drafting, row: int | None = None, generator: torch.Generator | None = None) -> Tree:
        """Drafts of one cycle; the cache stays as it is.

        Args:
            plan: how.
            row: t, of those extended last; the cache counts up to it. Default: the last one.
            generator: of sampled drafts.
        """
        row = self.rows - 1 if row is None else row
        if not self._first <= row < self.rows:
            raise ValueError(f"row {row} is not among those extended last, {self._first} to {self.rows - 1}")
        keys, values = self._keys[:, : row + 1], self._values[:, : row + 1]
        start = slice(row - self._first, row - self._first + 1)
        if plan.topk == 1:
            return self._chain(plan, row, keys, values, start, generator)
        return self._tree(plan, row, keys, values, start)

    def probabilities(self, probs_V: Tensor, vocab_size: int) -> Tensor:
        """Of draft tokens -> of the target's: [Vd] -> [V], zero for those that cannot be drafted."""
        return torch.zeros(vocab_size, dtype=probs_V.dtype, device=probs_V.device).index_copy_(
            0, self.target_ids, probs_V
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _chain(
        self,
        plan: Drafting,
        row: int,
        keys: Tensor,
        values: Tensor,
        start: slice,
        generator: torch.Generator | None,
    ) -> Tree:
        state, predicts = self._states[start], self._predicts[start]
        tokens: list[int] = []
        probs: list[Tensor] = []
        for step in range(plan.depth):
            if step:
                token = torch.tensor(tokens[-1:], device=self.device)
                at = torch.tensor([row + step], device=self.device)
                out = self._layer(token, state, at, keys, values, None)
                state, predicts = out.state, out.predicts
                keys, values = torch.cat([keys, out.keys], 1), torch.cat([values, out.values], 1)
            logits_V = self._draft.lm_head(predicts)[0].float()
            if plan.temperature:
                probs.append((logits_V / plan.temperature).softmax(-1))
                chosen = int(torch.multinomial(probs[-1], 1, generator=generator))
            else:
                chosen = int(logits_V.argmax())
            tokens.append(self._known[chosen])
        line = range(plan.depth)
        return Tree(tuple(tokens), tuple(step - 1 for step in line), tuple(line), torch.stack(probs) if probs else None)

    def _tree(self, plan: Drafting, row: int, keys: Tensor, values: Tensor, start: slice) -> Tree:
        state_kH, predicts_kH = self._states[start], self._predicts[start]
        grown = _Candidates([], [], [], [])
        leaves = torch.tensor([-1])  # which candidate each branch ends on
        scores_k = torch.ones(1, device=self.device)
        sees_kn = torch.ones((1, 0), dtype=torch.bool, device=self.device)  # which drafts' keys a branch reads
        for step in range(plan.depth):
            probs_kV = self._draft.lm_head(predicts_kH).float().softmax(-1)
            likely = probs_kV.topk(min(plan.topk, probs_kV.shape[1]), dim=-1)
            width, offset = likely.values.shape[1], len(grown.tokens)
            expanded = (scores_k[:, None] * likely.values).flatten()
            grown.add(self.target_ids[likely.indices].flatten(), leaves.repeat_interleave(width), step, expanded)
            if step == plan.depth - 1:
                break
            # A stable sort, so that of equally likely drafts the earlier ones stay: parents before their children.
            best = expanded.sort(descending=True, stable=True).indices[:width]
            branch, scores_k, leaves = best // width, expanded[best], offset + best.cpu()
            if plan.keys == "ancestors" or not step:
                sees_kn = sees_kn[branch]
            count = len(best)
            own = torch.eye(count, dtype=torch.bool, device=self.device)
            sees_kn = torch.cat([sees_kn, own], 1)
            sees = torch.cat([own.new_ones((count, row + 1)), sees_kn], 1)
            tokens = torch.tensor([grown.tokens[i] for i in leaves.tolist()], device=self.device)
            at = torch.full((count,), row + step + 1, device=self.device)
            out = self._layer(tokens, state_kH[branch], at, keys, values, sees)
            state_kH, predicts_kH = out.state, out.predicts
            keys, values = torch.cat([keys, out.keys], 1), torch.cat([values, out.values], 1)
        return grown.likeliest(plan.tokens)

    def _layer(
        self, tokens: Tensor, state_nH: Tensor, at: Tensor, keys: Tensor, values: Tensor, sees: Tensor | None
    ) -> _Output:
        """The decoder layer on n rows, over the keys before and their own."""
        config, layer = self.config, self._draft.midlayer
        table = F.embedding(tokens.long(), self._draft.embed_tokens).to(self.dtype)
        embedded = rms_norm(table, layer.input_layernorm.weight, config.rms_norm_eps)
        read = torch.cat([embedded, layer.hidden_norm(state_nH)], -1)
        qkv = F.linear(read, self._qkv).view(len(read), -1, config.head_dim)
        cos, sin = self._draft.rope(at)
        turned = rotate(qkv[:, : config.num_heads + config.num_kv_heads], cos, sin).transpose(0, 1)
        query, own_keys = turned[: config.num_heads], turned[config.num_heads :]
        own_values = qkv[:, config.num_heads + config.num_kv_heads :].transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            query[None],
            torch.cat([keys, own_keys], 1)[None],
            torch.cat([values, own_values], 1)[None],
            attn_mask=sees,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )[0]
        state_nH = state_nH + layer.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        state_nH = state_nH + layer.mlp(layer.post_attention_layernorm(state_nH))
        predicts = self._draft.norm(state_nH)
        return _Output(predicts if config.norm_output else state_nH, predicts, own_keys, own_values)

    def _grow(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = torch.cat([self._keys, keys], 1), torch.cat([self._values, values], 1)
        self.rows = self._keys.shape[1]


class _Output(NamedTuple):
    """Of n rows: [n, H] what the next step reads, [n, H] what `lm_head` reads, [kv heads, n, D] keys and values."""

    state: Tensor
    predicts: Tensor
    keys: Tensor
    values: Tensor


class _Candidates(NamedTuple):
    """Every draft of a tree, step by step: a node's score is the product of the probabilities down to it."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]

    def add(self, tokens: Tensor, parents: Tensor, depth: int, scores: Tensor) -> None:
        self.tokens.extend(tokens.tolist())
        self.parents.extend(parents.tolist())
        self.depths.extend([depth] * len(tokens))
        self.scores.extend(scores.tolist())

    def likeliest(self, count: int) -> Tree:
        """The `count` drafts of the highest scores. None is likelier than its parent, which is therefore among them."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))[:count]
        kept = sorted(order)
        number = {-1: -1} | {old: new for new, old in enumerate(kept)}
        return Tree(
            tuple(self.tokens[i] for i in kept),
            tuple(number[self.parents[i]] for i in kept),
            tuple(self.depths[i] for i in kept),
        )
