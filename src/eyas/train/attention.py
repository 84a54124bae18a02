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

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from eyas.train.batch import Batch
from eyas.train.blocks import BLOCK, BlockTables

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


StepMask = BlockTables | RowSpans


def row_spans(batch: Batch) -> list[RowSpans]:
    """One mask for each step with a row in it, for the SDPA path. [K] at most; no host sync."""
    starts = batch.rows - batch.positions[batch.rows]
    return [RowSpans(batch.rows[:n], starts[:n], batch.key_spans[: -(-n // BLOCK)]) for n in batch.counts if n]


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
