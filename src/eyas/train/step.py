"""One step of the training-time test: the draft layer on the rows that draft. Pure functions of tensors.

Attention reads `[norm(embed(x)) | norm(h)]` through q, k and v; their products are taken apart. The half that reads
the embedding depends on the position only, so that one product serves all steps; the other is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from eyas.train.attention import StepMask, attend
from eyas.train.draft import Eagle3Draft, embedding_half, hidden_half, rms_norm
from eyas.train.rope import rotate

Rotations = Callable[[Tensor], tuple[Tensor, Tensor]]


class Weights(NamedTuple):
    """A draft's weights but its head's, as they are kept.

    Attributes:
        fc, qkv, out, gate, up, down: of matrices; qkv are three.
        fc_norms: A of them or none.
        embed_norm, state_norm, mlp_norm, final_norm: of norms.
    """

    fc: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    fc_norms: tuple[Tensor, ...]
    embed_norm: Tensor
    state_norm: Tensor
    mlp_norm: Tensor
    final_norm: Tensor

    @classmethod
    def of(cls, draft: Eagle3Draft) -> Weights:
        """The draft's parameters."""
        layer, attention, mlp = draft.midlayer, draft.midlayer.self_attn, draft.midlayer.mlp
        return cls(
            fc=draft.fc.weight,
            qkv=(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            out=attention.o_proj.weight,
            gate=mlp.gate_proj.weight,
            up=mlp.up_proj.weight,
            down=mlp.down_proj.weight,
            fc_norms=() if draft.fc_norm is None else tuple(norm.weight for norm in draft.fc_norm),  # pyright: ignore[reportArgumentType]
            embed_norm=layer.input_layernorm.weight,
            state_norm=layer.hidden_norm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            final_norm=draft.norm.weight,
        )


class Matrices(NamedTuple):
    """The matrices in the compute dtype, those that read the same side by side; cast once for all steps.

    Attributes:
        fc: [H, A * Ht]. embed_qkv, state_qkv: [q + 2 kv, H]. out: [H, q]. gate_up: [2 F, H]. down: [H, F].
    """

    fc: Tensor
    embed_qkv: Tensor
    state_qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def matrices(weights: Weights, dtype: torch.dtype) -> Matrices:
    """Cast and put side by side."""
    return Matrices(
        weights.fc.to(dtype),
        torch.cat([embedding_half(weight).to(dtype) for weight in weights.qkv]),
        torch.cat([hidden_half(weight).to(dtype) for weight in weights.qkv]),
        weights.out.to(dtype),
        torch.cat([weights.gate.to(dtype), weights.up.to(dtype)]),
        weights.down.to(dtype),
    )


class Layer(NamedTuple):
    """All that a step computes with, and its sizes.

    Attributes:
        rope: cosines and sines of positions.
        norm_output: the next step reads the state after the final norm (EAGLE-3.1).
    """

    matrices: Matrices
    weights: Weights
    rope: Rotations
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    norm_output: bool


class Rows(NamedTuple):
    """Where the n rows of a step are.

    Attributes:
        at: [n] t + k, where the embedding half of row t lies at step k.
        inverse: [N], position p -> number of the row with t + k = p, or -1; may name rows beyond the n.
        positions: [n], where queries and keys of the step are rotated to.
        mask: what attention may read.
    """

    at: Tensor
    inverse: Tensor
    positions: Tensor
    mask: StepMask


class Shared(NamedTuple):
    """What step 0 leaves to all steps.

    Attributes:
        keys, values: [N, kv heads, D], keys rotated.
        embedded: [N, q + 2 kv] the embedding half of q, k and v; at position t that of token t + 1.
    """

    keys: Tensor
    values: Tensor
    embedded: Tensor


class Carried(NamedTuple):
    """What a step hands to the next one.

    Attributes:
        state: [n, H] what the next step reads.
        keys, values: [k, n, kv heads, D] the rows' own of the steps 1 .. k.
    """

    state: Tensor
    keys: Tensor
    values: Tensor


def first_step(
    layer: Layer, aux_NA: Tensor, embedded_NH: Tensor, positions_N: Tensor, rows: Rows
) -> tuple[Tensor, Carried, Shared]:
    """Step 0: keys and values at all N positions, everything else on the rows that draft.

    Args:
        layer: the draft's.
        aux_NA: [N, A * Ht]. embedded_NH: [N, H], embedding of token t + 1 at position t.
        positions_N: [N] within the document.
        rows: of the step; `at` is t itself.

    Returns:
        [n, H] what `lm_head` reads, and what the next step and all steps do.
    """
    weights, matrix, eps = layer.weights, layer.matrices, layer.eps
    if weights.fc_norms:
        parts = aux_NA.chunk(len(weights.fc_norms), dim=-1)
        aux_NA = torch.cat([rms_norm(part, norm, eps) for part, norm in zip(parts, weights.fc_norms, strict=True)], -1)
    state_NH = aux_NA @ matrix.fc.T
    embedded = rms_norm(embedded_NH, weights.embed_norm, eps) @ matrix.embed_qkv.T
    normed_NH = rms_norm(state_NH, weights.state_norm, eps)
    queries, shape = layer.heads * layer.head_dim, (-1, 2 * layer.kv_heads, layer.head_dim)
    kv = torch.addmm(embedded[:, queries:], normed_NH, matrix.state_qkv[queries:].T).view(shape)
    keys, values = kv.chunk(2, dim=1)
    keys = rotate(keys, *layer.rope(positions_N))
    embedded_n, normed_nH, state_nH = (
        _TakeRows.apply(x, rows.at, rows.inverse) for x in (embedded[:, :queries], normed_NH, state_NH)
    )
    query = torch.addmm(embedded_n, normed_nH, matrix.state_qkv[:queries].T)
    query = rotate(query.view(-1, layer.heads, layer.head_dim), *layer.rope(rows.positions))
    none = keys.new_empty((0, len(query), layer.kv_heads, layer.head_dim))
    state, predicts = _rest_of_layer(layer, state_nH, attend(query, keys, values, none, none, rows.mask))
    return predicts, Carried(state, none, none), Shared(keys, values, embedded)


def later_step(layer: Layer, carried: Carried, shared: Shared, rows: Rows) -> tuple[Tensor, Carried]:
    """Step k >= 1, all of it on its n rows.

    Args:
        layer: the draft's.
        carried: of the step before, which has as many rows or more: its first are this one's.
        shared: of step 0.
        rows: of this step.

    Returns:
        [n, H] what `lm_head` reads, and what the next step does.
    """
    # Cut here rather than before, so that the gradient's zeros are written by what is compiled.
    n = len(rows.at)
    carried = Carried(carried.state[:n], carried.keys[:, :n], carried.values[:, :n])
    embedded_n = _TakeRows.apply(shared.embedded, rows.at, rows.inverse)
    normed_nH = rms_norm(carried.state, layer.weights.state_norm, layer.eps)
    qkv = torch.addmm(embedded_n, normed_nH, layer.matrices.state_qkv.T)
    qkv = qkv.view(-1, layer.heads + 2 * layer.kv_heads, layer.head_dim)
    turned, values = qkv.split([layer.heads + layer.kv_heads, layer.kv_heads], dim=1)
    query, keys = rotate(turned, *layer.rope(rows.positions)).split([layer.heads, layer.kv_heads], dim=1)
    own_keys, own_values = torch.cat([carried.keys, keys[None]]), torch.cat([carried.values, values[None]])
    attended = attend(query, shared.keys, shared.values, own_keys, own_values, rows.mask)
    state, predicts = _rest_of_layer(layer, carried.state, attended)
    return predicts, Carried(state, own_keys, own_values)


def _rest_of_layer(layer: Layer, state_nH: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """([n, H] what the next step reads, [n, H] what `lm_head` reads)."""
    weights, matrix = layer.weights, layer.matrices
    state_nH = torch.addmm(state_nH, attended, matrix.out.T)
    gate, up = (rms_norm(state_nH, weights.mlp_norm, layer.eps) @ matrix.gate_up.T).chunk(2, dim=-1)
    state_nH = torch.addmm(state_nH, F.silu(gate) * up, matrix.down.T)
    predicts = rms_norm(state_nH, weights.final_norm, layer.eps)
    return (predicts if layer.norm_output else state_nH), predicts


class _TakeRows(Function):
    """`x[rows]` of distinct rows, whose gradient is a gather too: no atomics, so that every run sums alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        inside = (inverse >= 0) & (inverse < len(grad))
        return torch.where(inside[:, None], grad[inverse.clamp(0, len(grad) - 1)], 0.0), None, None
