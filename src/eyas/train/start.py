"""Where a new draft starts: at what the target already makes of its own states."""

from __future__ import annotations

import torch

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from eyas.target.norm import FinalNorm
from eyas.train.draft import Eagle3Draft
from eyas.train.vocab import DraftVocab


@torch.no_grad()
def start_like_target(draft: Eagle3Draft, target: Target, vocab: DraftVocab) -> bool:
    """Let a draft of the target's width begin by reading tokens off the deepest layer as the target's own head would.

    `fc` passes on the last of the layer outputs; `norm` is the target's final norm, and `lm_head` its rows, both
    brought to size 1: they give directions, and confidence is left to training. At full size a first draft is sure of
    what it has not learned, and takes longer than a random one. The decoder layer stays as it was drawn, and all of it
    is trained.

    Args:
        draft: as built; changed in place where it is as wide as the target.
        target: complete enough to read its `lm_head`.
        vocab: the draft's.

    Returns:
        Whether it was changed.

    Raises:
        ConfigError: the target's `lm_head` cannot be read.
    """
    config = draft.config
    size = config.hidden_size
    if size != config.target_hidden_size:
        return False
    rows = Head.load(target, rows=vocab.target_ids).weight.float()
    draft.lm_head.weight.copy_(rows / rows.pow(2).sum(-1).mean().sqrt())
    if (gain := final_gain(target)) is not None:
        draft.norm.weight.copy_(gain / gain.pow(2).mean().sqrt())
    draft.fc.weight.zero_()
    draft.fc.weight[:, -size:].fill_diagonal_(1.0)
    return True


def final_gain(target: Target) -> torch.Tensor | None:
    """[H] factors of the target's final norm if that is an RMS norm, in whatever form its weights are kept.

    An RMS norm turns ones into its factors and minus ones into their opposites; one that subtracts a mean, or adds a
    bias, does not.
    """
    try:
        norm = FinalNorm.load(target)
    except ConfigError:  # no model of transformers': the draft's norm begins at one, as it was
        return None
    ones = torch.ones(1, target.hidden_size)
    up, down = norm(ones)[0], norm(-ones)[0]
    return up if torch.allclose(up, -down) and bool(up.abs().max() > 0) else None
