"""Floating point operations of one training step: those of matrix products, a multiplication and an addition apart.

What is counted is what is done, not what a step would take that trained every row: model FLOPs utilisation of a step
is `total / seconds / peak`. Recomputed activations are not counted. A product costs its forward pass again for each of
the two gradients, but for `fc` (its input is not trained, unless norms stand before it) and the teacher (no gradient).
"""

from __future__ import annotations

from collections.abc import Mapping

from eyas.train.batch import Batch
from eyas.train.draft import Eagle3Config

_BACKWARD_OF_ATTENTION = 2.5  # five products for two: the scores are made again (FlashAttention, arXiv 2205.14135)


def step_flops(config: Eagle3Config, batch: Batch, *, drop: bool = False) -> Mapping[str, float]:
    """FLOPs of one batch by part, forward and backward.

    Args:
        config: the draft's shape.
        batch: on the CPU; its N tokens with the padding, its rows and steps.
        drop: the target's whole head is computed, for `oov: drop`.

    Returns:
        fc, layer (all projections and the MLP), attention, lm_head, teacher, and their sum, total.
    """
    hidden, queries, pair = config.hidden_size, config.q_size, 2 * config.kv_size
    size, drafting = len(batch.tokens), sum(batch.counts)
    embedding_half = size * hidden * (queries + pair)
    keys_and_values = (size + drafting - batch.counts[0]) * hidden * pair
    per_row = hidden * queries + queries * hidden + 3 * hidden * config.intermediate_size
    positions = batch.positions[batch.rows]
    seen = sum(int(positions[:n].sum()) + n * (1 + k) for k, n in enumerate(batch.counts))
    vocabulary = config.vocab_size if drop else config.draft_vocab_size
    found = {
        "fc": (6.0 if config.fc_norm else 4.0) * size * config.aux_size * hidden,
        "layer": 6.0 * (embedding_half + keys_and_values + drafting * per_row),
        "attention": (1 + _BACKWARD_OF_ATTENTION) * 4 * queries * seen,
        "lm_head": 6.0 * drafting * hidden * config.draft_vocab_size,
        "teacher": 2.0 * len(batch.last) * config.target_hidden_size * vocabulary,
    }
    return found | {"total": sum(found.values())}
