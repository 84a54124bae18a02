"""Attention of the training-time test: causal over the keys of step 0, diagonal over those of the later steps.

The query of row t at step k reads the step-0 keys of its own document up to position t, and from each of the steps
1 .. k one key: row t's own. (EAGLE-3, arXiv 2503.01840, section 3.1 and figure 6.) So a step needs the N keys of step 0
and k keys a row, never k * N.

    flex   flex attention over the step-0 keys with a block mask of the rows' order; the diagonal keys are merged in by
           log-sum-exp: out = (e^lse0 out0 + sum_j e^s_j v_j) / (e^lse0 + sum_j e^s_j). For GPUs, compiled.
    sdpa   PyTorch's scaled_dot_product_attention over one block of rows at a time, the keys that the block can see and
           the diagonal ones side by side under a mask. Nothing to compile; the reference for the other.

FLOPs of a row and step, forward: 4 * heads * head_dim * (keys seen + k); 2.5 times that backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eyas.train.batch import BLOCK, Batch
from eyas.train.compiled import grows

AttentionKind = Literal["flex", "sdpa"]


@dataclass(frozen=True, slots=True)
class RowSpans:
    """What the rows of one step may read, for the SDPA path.

    Attributes:
        rows, starts: [n], each row's position and its document's first.
        spans: for each `BLOCK` rows the positions [low, high) that any of them reads.
    """

    rows: Tensor
    starts: Tensor
    spans: tuple[tuple[int, int], ...]


class BlockTables(NamedTuple):
    """What the rows of one step may read, for flex attention: the tables of a `BlockMask`, and what decides inside.

    Attributes:
        kv_number, kv_at, kv_whole_number, kv_whole_at: for each block of queries the blocks of keys seen in part, and
            those seen whole.
        q_number, q_at, q_whole_number, q_whole_at: the same the other way round.
        rows, starts: [N], each query's position and its document's first; -1 and N after the last query.
    """

    kv_number: Tensor
    kv_at: Tensor
    kv_whole_number: Tensor
    kv_whole_at: Tensor
    q_number: Tensor
    q_at: Tensor
    q_whole_number: Tensor
    q_whole_at: Tensor
    rows: Tensor
    starts: Tensor

    def block_mask(self, queries: int, keys: int) -> BlockMask:
        """As flex attention takes it. Made inside what is compiled, so that the sizes stay open."""
        rows, starts = self.rows, self.starts

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= rows[query]) & (key >= starts[query])

        return BlockMask(
            seq_lengths=(queries, keys),
            kv_num_blocks=self.kv_number,
            kv_indices=self.kv_at,
            full_kv_num_blocks=self.kv_whole_number,
            full_kv_indices=self.kv_whole_at,
            q_num_blocks=self.q_number,
            q_indices=self.q_at,
            full_q_num_blocks=self.q_whole_number,
            full_q_indices=self.q_whole_at,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=sees,
        )


StepMask = BlockTables | RowSpans


def step_masks(batch: Batch, kind: AttentionKind) -> list[StepMask]:
    """One mask for each step with a row in it. [K] at most; no host sync."""
    starts = batch.rows - batch.positions[batch.rows]
    counts = [count for count in batch.counts if count]
    if kind == "flex":
        return [*block_tables(batch.rows, starts, counts, len(batch.tokens))]
    return [RowSpans(batch.rows[:n], starts[:n], batch.key_spans[: -(-n // BLOCK)]) for n in counts]


def block_tables(rows_R: Tensor, starts_R: Tensor, counts: Sequence[int], length: int) -> list[BlockTables]:
    """Tables of the prefixes `rows[:count]` over `length` keys, without the [R, N] mask behind them.

    A block of keys counts as seen in part, or whole, by all R rows; a prefix of the rows drops whole blocks of queries,
    and its last block may name keys that none of its own rows sees: the mask inside decides.

    Args:
        rows_R, starts_R: each query's position and its document's first.
        counts: sizes of the prefixes, none of them 0.
        length: N.
    """
    blocks_q, blocks_kv = -(-len(rows_R) // BLOCK), -(-length // BLOCK)
    rows = F.pad(rows_R, (0, max(length, blocks_q * BLOCK) - len(rows_R)), value=-1)
    starts = F.pad(starts_R, (0, len(rows) - len(rows_R)), value=length)
    first_B = torch.arange(blocks_kv, device=rows_R.device) * BLOCK
    last_B = (first_B + BLOCK - 1).clamp(max=length - 1)
    last_R, first_R = rows[: blocks_q * BLOCK, None], starts[: blocks_q * BLOCK, None]
    seen_QB = ((last_R >= first_B) & (first_R <= last_B)).view(blocks_q, BLOCK, blocks_kv).any(1)
    whole_RB = ((last_R >= last_B) & (first_R <= first_B)) | (first_R == length)  # padding is not in the way
    whole_QB = whole_RB.view(blocks_q, BLOCK, blocks_kv).all(1)
    part_QB = seen_QB & ~whole_QB
    part_by_query, whole_by_query = _Ordered.of(part_QB), _Ordered.of(whole_QB)
    part_by_key, whole_by_key = _Ordered.of(part_QB.T), _Ordered.of(whole_QB.T)
    tables: list[BlockTables] = []
    for count in counts:
        used = -(-count // BLOCK)
        tables.append(
            BlockTables(
                grows(part_by_query.number[None, None, :used], 2),
                grows(part_by_query.indices[None, None, :used], 2),
                grows(whole_by_query.number[None, None, :used], 2),
                grows(whole_by_query.indices[None, None, :used], 2),
                # Ascending lists: the first entries of a longer one are the shorter one's.
                part_QB[:used].sum(0).int()[None, None],
                grows(part_by_key.indices[None, None, :, :used].contiguous(), 3),
                whole_QB[:used].sum(0).int()[None, None],
                grows(whole_by_key.indices[None, None, :, :used].contiguous(), 3),
                rows,
                starts,
            )
        )
    return tables


@dataclass(frozen=True, slots=True)
class _Ordered:
    """For each line of a table of booleans how many are true, and where: those first, ascending."""

    number: Tensor
    indices: Tensor

    @classmethod
    def of(cls, table: Tensor) -> _Ordered:
        order = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
        return cls(table.sum(-1).int().contiguous(), order.int().contiguous())


def attend(
    query_nhd: Tensor,
    keys_Ngd: Tensor,
    values_Ngd: Tensor,
    own_keys_kngd: Tensor,
    own_values_kngd: Tensor,
    mask: StepMask,
) -> Tensor:
    """Attention of n rows at one step.

    Args:
        query_nhd: [n, heads, D], rotated.
        keys_Ngd, values_Ngd: [N, kv heads, D] of step 0, keys rotated.
        own_keys_kngd, own_values_kngd: [k, n, kv heads, D], the rows' own of steps 1 .. k; k is 0 at step 0.
        mask: of this step.

    Returns:
        [n, heads * D].
    """
    if isinstance(mask, RowSpans):
        return _sdpa(query_nhd, keys_Ngd, values_Ngd, own_keys_kngd, own_values_kngd, mask).flatten(1)
    out_1hnd, aux = flex_attention(
        _heads_first(query_nhd),
        _heads_first(keys_Ngd),
        _heads_first(values_Ngd),
        block_mask=mask.block_mask(len(query_nhd), len(keys_Ngd)),
        enable_gqa=query_nhd.shape[1] != keys_Ngd.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out_nhd = out_1hnd[0].transpose(0, 1)
    if len(own_keys_kngd):
        assert aux.lse is not None
        out_nhd = _merge(out_nhd, aux.lse[0].T, query_nhd, own_keys_kngd, own_values_kngd)
    return out_nhd.flatten(1)


def _merge(out_nhd: Tensor, lse_nh: Tensor, query_nhd: Tensor, keys_kngd: Tensor, values_kngd: Tensor) -> Tensor:
    """Attention over the step-0 keys, with its log-sum-exp, and k more keys of each row: as over all at once."""
    wide = torch.promote_types(query_nhd.dtype, torch.float32)
    n, heads, dim = query_nhd.shape
    shared = keys_kngd.shape[2]
    query_ngrd = query_nhd.view(n, shared, heads // shared, dim).to(wide)
    scores_kngr = (query_ngrd * keys_kngd[:, :, :, None].to(wide)).sum(-1) * dim**-0.5
    first_1ngr = lse_nh.view(1, n, shared, heads // shared).to(wide)
    weights = torch.cat([first_1ngr, scores_kngr]).softmax(0)[..., None]
    merged = out_nhd.view(n, shared, heads // shared, dim).to(wide) * weights[0]
    merged = merged + (weights[1:] * values_kngd[:, :, :, None].to(wide)).sum(0)
    return merged.view(n, heads, dim).to(query_nhd.dtype)


def _sdpa(
    query_nhd: Tensor,
    keys_Ngd: Tensor,
    values_Ngd: Tensor,
    own_keys_kngd: Tensor,
    own_values_kngd: Tensor,
    mask: RowSpans,
) -> Tensor:
    parts: list[Tensor] = []
    steps = len(own_keys_kngd)
    for number, (low, high) in enumerate(mask.spans):
        rows = slice(number * BLOCK, min((number + 1) * BLOCK, len(query_nhd)))
        at = torch.arange(low, high, device=query_nhd.device)
        causal = (at <= mask.rows[rows, None]) & (at >= mask.starts[rows, None])
        own = torch.eye(len(causal), dtype=torch.bool, device=query_nhd.device).repeat(1, steps)
        keys = torch.cat([keys_Ngd[low:high], own_keys_kngd[:, rows].flatten(0, 1)])
        values = torch.cat([values_Ngd[low:high], own_values_kngd[:, rows].flatten(0, 1)])
        out = F.scaled_dot_product_attention(
            _heads_first(query_nhd[rows]),
            _heads_first(keys),
            _heads_first(values),
            attn_mask=torch.cat([causal, own], dim=1),
            enable_gqa=query_nhd.shape[1] != keys_Ngd.shape[1],
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _heads_first(x_nhd: Tensor) -> Tensor:
    return x_nhd.transpose(0, 1)[None]
