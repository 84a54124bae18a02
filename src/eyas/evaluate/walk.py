"""Simulated decoding on stored states: cycles begin where a server's would, not at every row.

A server's first cycle of an answer drafts on the row before it, when the target has written its first token; each next
one begins behind what was accepted and the target's own token. A walk over the stored text does the same, and accepts
what the text says: it is what decoding would do where the text is the target's own. The drafter's cache holds what it
makes of the target's states at every row, as after a server's re-extension, so that one pass over a row serves all of
its cycles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from eyas.evaluate.drafting import Drafter, Drafting
from eyas.evaluate.verifying import follow
from eyas.store.reader import StoreRow


def walk(drafter: Drafter, row: StoreRow, plan: Drafting) -> list[tuple[int, int]]:
    """The cycles of one row's answers.

    Args:
        drafter: reset here.
        row: tokens [T], loss mask [T], states [T, A, Ht] of the layers that the drafter reads.
        plan: how to draft.

    Returns:
        (accepted, possible) of each cycle, for `eyas.acceptance.cycle_counts`.
    """
    tokens = row.tokens.tolist()
    found = answers(row.loss_mask.numpy())
    drafter.reset()
    cycles: list[tuple[int, int]] = []
    if not found or found[-1][1] < 2:  # an answer of one token and nothing before it: no row is fed
        return cycles
    rows = found[-1][1] - 1  # row t is fed with token t + 1; what follows the last answer is not drafted from
    drafter.extend(row.aux[:rows].flatten(1), torch.tensor(tokens[1 : rows + 1]))
    for start, stop in found:
        at = start - 1 if start else 0  # a row without a prompt begins with a token that no row precedes
        while at + 2 < stop:
            rest = tokens[at + 2 : min(stop, at + 2 + plan.depth)]
            accepted = len(follow(drafter.draft(plan, row=at), rest).path)
            cycles.append((accepted, len(rest)))
            at += accepted + 1
    return cycles


def answers(loss_mask: npt.ArrayLike) -> list[tuple[int, int]]:
    """First token and end of each answer: the runs of ones in a [T] mask."""
    edges = np.flatnonzero(np.diff(np.asarray(loss_mask, dtype=np.int8), prepend=0, append=0))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
