"""The EAGLE-3 training step written out plainly, in float64: one document, row, step and key at a time.

It follows the step's description, not the package's code, of which it uses the container of parameters alone. Every
row takes every step that the text allows; which of them count is decided at the very end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Document:
    tokens: list[int]
    mask: list[bool]
    aux: Tensor  # [T, A * Ht]
    last: Tensor  # [T, Ht], the state at every position


@dataclass
class Answer:
    loss: Tensor
    sums: list[float]
    counts: list[int]  # rows that count by the mask, dropped ones included
    kept: list[int]
    right: list[int]
    agreed: list[int]
    accepted: list[int]
    by_row: dict[tuple[int, int, int], tuple[bool, bool]] = field(
        default_factory=dict
    )  # (document, t, k): right, agreed


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: Tensor, position: int, rope) -> Tensor:
    """One head [D] at a position: pairs (i, i + D/2)."""
    half = len(x) // 2
    angle = torch.tensor(float(position), dtype=torch.float32) * rope.inv_freq
    cos, sin = (angle.cos() * rope.factor).double(), (angle.sin() * rope.factor).double()
    a, b = x[:half], x[half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def counts_at(document: Document, t: int, k: int, rule: str) -> bool:
    m, length = document.mask, len(document.mask)
    if rule == "serving":
        needed = range(t + 1, t + 2 + k + 1)
        return all(i < length and m[i] for i in needed)
    if t + 1 + k > length - 1:
        return False
    return bool(m[t + k] if rule == "classic" else m[t + 1 + k])


def states(draft, document: Document, steps: int) -> dict[tuple[int, int], Tensor]:
    """(t, k) -> what lm_head reads."""
    c, layer = draft.config, draft.midlayer
    q_w, k_w, v_w = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")
    eps, dim, share = c.rms_norm_eps, c.head_dim, c.num_heads // c.num_kv_heads
    length = len(document.tokens)
    h: dict[int, Tensor] = {}
    for t in range(length):
        aux = document.aux[t].double()
        if draft.fc_norm is not None:
            width = c.target_hidden_size
            pieces = [aux[i * width : (i + 1) * width] for i in range(len(c.aux_layers))]
            aux = torch.cat([norm(x, n.weight, eps) for x, n in zip(pieces, draft.fc_norm, strict=True)])
        h[t] = draft.fc.weight @ aux
    keys: dict[tuple[int, int], Tensor] = {}  # (t, step) -> [kv heads, D]
    values: dict[tuple[int, int], Tensor] = {}
    out: dict[tuple[int, int], Tensor] = {}
    for k in range(steps):
        rows = [t for t in range(length) if t + 1 + k < length]
        queries: dict[int, Tensor] = {}
        for t in rows:
            embedded = draft.embed_tokens[document.tokens[t + 1 + k]].double()
            read = torch.cat(
                [norm(embedded, layer.input_layernorm.weight, eps), norm(h[t], layer.hidden_norm.weight, eps)]
            )
            queries[t] = torch.stack([turn(x, t + k, draft.rope) for x in (q_w @ read).view(-1, dim)])
            keys[t, k] = torch.stack([turn(x, t + k, draft.rope) for x in (k_w @ read).view(-1, dim)])
            values[t, k] = (v_w @ read).view(-1, dim)
        for t in rows:
            seen = [(s, 0) for s in range(t + 1)] + [(t, j) for j in range(1, k + 1)]
            heads = []
            for head in range(c.num_heads):
                scores = torch.stack([queries[t][head] @ keys[at][head // share] for at in seen]) / math.sqrt(dim)
                weights = torch.exp(scores) / torch.exp(scores).sum()
                heads.append(sum(w * values[at][head // share] for w, at in zip(weights, seen, strict=True)))
            h1 = h[t] + layer.self_attn.o_proj.weight @ torch.cat(heads)
            x = norm(h1, layer.post_attention_layernorm.weight, eps)
            gate, up = layer.mlp.gate_proj.weight @ x, layer.mlp.up_proj.weight @ x
            h2 = h1 + layer.mlp.down_proj.weight @ (gate / (1 + torch.exp(-gate)) * up)
            out[t, k] = norm(h2, draft.norm.weight, eps)
            h[t] = out[t, k] if c.norm_output else h2
    return out


def reference_step(
    draft,
    documents: list[Document],
    head: Tensor,  # [V, Ht] of the target
    draft_ids: list[int],
    *,
    steps: int,
    decay: float = 0.8,
    rule: str = "serving",
    oov: str = "keep",
    normaliser: list[float] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Answer:
    """The loss, with gradient, and what was counted."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    counts, kept, right, agreed, accepted = ([0] * steps for _ in range(5))
    by_row = {}
    for number, document in enumerate(documents):
        out = states(draft, document, steps)
        for t in range(len(document.tokens)):
            so_far = True
            for k in range(steps):
                if not counts_at(document, t, k, rule):
                    so_far = False
                    continue
                counts[k] += 1
                target = head @ document.last[t + 1 + k].double()
                if bias is not None:
                    target = target + bias
                target = target * scale
                if softcap is not None:
                    target = softcap * torch.tanh(target / softcap)
                if oov == "drop" and int(target.argmax()) not in draft_ids:
                    so_far = False
                    continue
                kept[k] += 1
                p = torch.exp(target[draft_ids]) / torch.exp(target[draft_ids]).sum()
                z = draft.lm_head.weight @ out[t, k]
                q = torch.exp(z) / torch.exp(z).sum()
                sums[k] = sums[k] + (p * (torch.log(p) - torch.log(q))).sum()
                choice = draft_ids[int(z.argmax())]
                is_right = t + 2 + k < len(document.tokens) and document.tokens[t + 2 + k] == choice
                is_agreed = int(z.argmax()) == int(p.argmax())
                so_far = so_far and is_right
                right[k] += is_right
                agreed[k] += is_agreed
                accepted[k] += so_far
                by_row[number, t, k] = (is_right, is_agreed)
    divisors = normaliser or [max(1, n) for n in counts]
    loss = sum(decay**k * sums[k] / divisors[k] for k in range(steps))
    assert isinstance(loss, Tensor)
    return Answer(loss, [s.item() for s in sums], counts, kept, right, agreed, accepted, by_row)
