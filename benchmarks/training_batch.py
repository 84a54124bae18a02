"""A made-up training batch, the same for every trainer: real row lengths, random states."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.train.batch import Sample
from eyas.train.draft import Eagle3Config
from eyas.train.rope import RopeConfig

#: Tokens and turns of 72 conversations of MT-Bench-101 and Open Assistant, in SmolLM2's template and shuffled.
REAL_ROWS = (
    (179, 3), (172, 3), (477, 3), (380, 3), (304, 3), (689, 2), (294, 3), (158, 2), (744, 3),
    (241, 2), (276, 2), (294, 4), (652, 3), (231, 3), (227, 3), (112, 2), (234, 3), (486, 2),
    (195, 3), (316, 3), (407, 4), (410, 4), (157, 2), (540, 4), (127, 2), (274, 3), (254, 2),
    (253, 2), (609, 4), (238, 3), (139, 2), (268, 3), (424, 3), (251, 4), (1256, 2), (106, 2),
    (133, 2), (363, 3), (274, 3), (122, 2), (168, 2), (476, 5), (202, 3), (538, 3), (217, 3),
    (499, 2), (215, 3), (210, 4), (1045, 5), (336, 3), (79, 1), (357, 4), (395, 2), (325, 3),
    (277, 4), (277, 3), (228, 3), (197, 3), (252, 4), (110, 2), (285, 5), (164, 2), (352, 2),
    (277, 5), (406, 2), (215, 5), (359, 2), (334, 2), (351, 3), (395, 3), (532, 4), (203, 3),
)  # fmt: skip

_LLAMA = Eagle3Config(
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    draft_vocab_size=32000,
    target_hidden_size=4096,
    aux_layers=(2, 16, 29),
    rope=RopeConfig("default", 500000.0, 16384),
    rms_norm_eps=1e-5,
)
_SMOL = Eagle3Config(
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=16384,
    target_hidden_size=576,
    aux_layers=(2, 15, 26),
    rope=RopeConfig("default", 100000.0, 16384),
    rms_norm_eps=1e-5,
)
_TINY = Eagle3Config(64, 128, 4, 2, 16, 512, 256, 64, (1, 3, 5), RopeConfig("default", 10000.0, 16384), 1e-5)


@dataclass(frozen=True)
class TrainShape:
    """A draft, and the batches to train it with: `batch` rows of each of `seq_lens` tokens."""

    draft: Eagle3Config
    seq_lens: tuple[int, ...]
    batch: int
    draft_vocabs: tuple[int, ...]

    def with_vocab(self, size: int) -> Eagle3Config:
        return replace(self.draft, draft_vocab_size=size)


SHAPES = {
    "8b": TrainShape(_LLAMA, (2048, 4096, 8192, 16384), 1, (32000,)),
    "smol": TrainShape(_SMOL, (2048,), 4, (16384, 49152)),
    "tiny": TrainShape(_TINY, (384,), 2, (256,)),
}


@dataclass(frozen=True)
class Made:
    """B rows of T tokens, each cut into documents; tensors on the CPU.

    Attributes:
        tokens: [B, T] int64. trained: [B, T] bool. aux: [B, T, A * Ht] bf16. last: [B, T, Ht] bf16.
        lengths: of each row's documents; they sum to T.
        embeddings, head: [V, Ht] bf16, of the target. draft_ids: [Vd] int64, ascending.
    """

    tokens: Tensor
    trained: Tensor
    aux: Tensor
    last: Tensor
    lengths: list[list[int]]
    embeddings: Tensor
    head: Tensor
    draft_ids: Tensor

    def samples(self) -> list[Sample]:
        """The documents; each keeps the states that a store for serving keeps."""
        found = []
        for b, lengths in enumerate(self.lengths):
            for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True):
                part = slice(stop - length, stop)
                mask = self.trained[b, part]
                at = torch.nonzero(mask[:-1] & mask[1:])[:, 0]
                found.append(
                    Sample(len(found), self.tokens[b, part], mask, self.aux[b, part], self.last[b, part][at], at)
                )
        return found


def make(
    draft: Eagle3Config,
    batch: int,
    seq_len: int,
    share: float,
    *,
    one: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Made:
    """Random tokens and states, real lengths.

    Args:
        draft: the shape.
        batch, seq_len: B and T.
        share: of each turn that is answer, and trained; 1 trains every token.
        one: each row is one document, of a turn for every 512 tokens, instead of REAL_ROWS.
        seed: of everything.
        device: random numbers are drawn there.
    """
    g = torch.Generator(device=device).manual_seed(seed)
    rows = itertools.cycle([(seq_len, max(1, seq_len // 512))] if one else REAL_ROWS)
    lengths: list[list[int]] = []
    masks: list[Tensor] = []
    for _ in range(batch):
        left, cut, mask = seq_len, [], torch.zeros(seq_len, dtype=torch.bool)
        while left:
            length, turns = next(rows)
            length = min(length, left)
            start = seq_len - left
            edges = [start + length * i // turns for i in range(turns + 1)]
            for a, b in itertools.pairwise(edges):
                mask[b - round((b - a) * share) : b] = True
            cut.append(length)
            left -= length
        lengths.append(cut)
        masks.append(mask)
    keep = torch.randperm(draft.vocab_size, generator=g, device=device)[: draft.draft_vocab_size].sort().values

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        parts = [torch.randn(n, *shape[1:], generator=g, device=device) for n in _pieces(shape[0])]
        return torch.cat([(part * scale).bfloat16().cpu() for part in parts])

    width = draft.target_hidden_size
    head = normal(draft.vocab_size, width, scale=3 / math.sqrt(width))  # logits spread by 3: a teacher with some shape
    outside = torch.ones(draft.vocab_size, dtype=torch.bool)
    outside[keep.cpu()] = False
    head[outside] *= 0.5  # the most likely token is mostly in the draft vocabulary, as it is in life
    return Made(
        tokens=torch.randint(0, draft.vocab_size, (batch, seq_len), generator=g, device=device).cpu(),
        trained=torch.stack(masks),
        aux=normal(batch * seq_len, draft.aux_size).view(batch, seq_len, -1),
        last=normal(batch * seq_len, width).view(batch, seq_len, -1),
        lengths=lengths,
        embeddings=normal(draft.vocab_size, draft.hidden_size),
        head=head,
        draft_ids=keep.cpu(),
    )


def _pieces(total: int, size: int = 8192) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
