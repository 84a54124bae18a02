"""Which positions a drafter learns from. Pure; see docs/positions in the capture contract.

The target has emitted x[p], the first token of an answer, when the drafter first runs: on row p - 1, to predict
x[p + 1]. So row t counts at step k iff tokens t+1 .. t+2+k all belong to one assistant turn, and the teacher of that
row is `last[t + 1 + k]`. The positions of `last` that training ever reads are therefore
L = {s : mask[s] and mask[s + 1]}: the token at s and the one it predicts are both trained, and s is never the last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def loss_positions(loss_mask: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Positions s with mask[s] and mask[s + 1], ascending: [T] 0/1 mask -> [L] int32."""
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int32)


def kept_positions(loss_mask: npt.ArrayLike, last: str) -> npt.NDArray[np.int32]:
    """Positions at which `last` is kept under a spec's `last` mode (`loss` or `all`): [L] int32."""
    mask = np.asarray(loss_mask)
    return np.arange(len(mask), dtype=np.int32) if last == "all" else loss_positions(mask)
