"""Which positions a drafter learns from. Pure.

The target has emitted x[p], the first token of an answer, when the drafter first runs: on row p - 1, to predict
x[p + 1]. So row t counts at step k iff tokens t+1 .. t+2+k all belong to one assistant turn, and the teacher of that
row is `last[t + 1 + k]`. The positions of `last` that training ever reads are therefore
L = {s : mask[s] and mask[s + 1]}: the token at s and the one it predicts are both trained, and s is never the last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


def loss_positions(loss_mask: npt.ArrayLike) -> Int32s:
    """Positions s with mask[s] and mask[s + 1], ascending: [T] 0/1 mask -> [L] int32."""
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int32)


def kept_positions(loss_mask: npt.ArrayLike, last: str) -> Int32s:
    """Positions at which `last` is kept under a spec's `last` mode (`loss` or `all`): [L] int32."""
    mask = np.asarray(loss_mask)
    return np.arange(len(mask), dtype=np.int32) if last == "all" else loss_positions(mask)


def kept_runs(loss_mask: npt.ArrayLike, last: str) -> list[int]:
    """`kept_positions` as flat runs [start, stop, ...], the form in which a request carries them."""
    mask = np.asarray(loss_mask, dtype=bool)
    if last == "all":
        return [0, len(mask)] if len(mask) else []
    kept = np.zeros(len(mask) + 2, dtype=np.int8)
    kept[1:-2] = mask[:-1] & mask[1:]
    return np.flatnonzero(np.diff(kept)).tolist()


def kept_counts(n_tokens: Int32s, n_positions: Int32s, last: str) -> Int32s:
    """How many positions each row keeps under a spec's `last` mode: [N] from token and loss-position counts [N]."""
    return n_tokens if last == "all" else n_positions
