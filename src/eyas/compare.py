"""When do two sets of hidden states agree? Pure functions, used by `eyas verify --against` and the tests.

The measure is the relative error of one token: |stored - reference| / |reference| over the hidden dimension, in
float32. It is per token because a few tokens (the first, mostly) carry activations a thousand times larger than the
rest; over a whole row they would hide everything else, wrong layers included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the relative error of a token: of the median token, and of the worst one.

    float32 against float32 differs by the order of summation only. bf16 keeps 8 bits: one rounding is 2^-9 = 0.002,
    and the layers' own roundings add up to about a hundredth in the residual stream; single tokens stray further
    where a router or a softmax sits near a tie. docs/verification.md has the measured values.
    """

    median: float
    worst: float


TOLERANCE = {
    "f32": Tolerance(median=1e-3, worst=1e-3),
    "f16": Tolerance(median=1e-2, worst=0.1),
    "bf16": Tolerance(median=3e-2, worst=0.3),
}
#: A control (a state that must not match) has to be this many times further away than the right one.
SEPARATION = 3.0


@dataclass(frozen=True, slots=True)
class Distance:
    """Relative error over the tokens of one row: the median, and the worst; `cosine` is the lowest of any token."""

    median: float
    worst: float
    cosine: float

    def within(self, tolerance: Tolerance) -> bool:
        """NaN is never within."""
        return self.median <= tolerance.median and self.worst <= tolerance.worst


def distance(stored: torch.Tensor, reference: torch.Tensor) -> Distance:
    """Distance of two [T, H] tensors of any float dtype. An empty pair is at distance 0.

    Raises:
        ValueError: the shapes differ.
    """
    if stored.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(stored.shape)} and {tuple(reference.shape)}")
    if not stored.numel():
        return Distance(0.0, 0.0, 1.0)
    mine, theirs = stored.float(), reference.float()
    error = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)
    return Distance(error.median().item(), error.max().item(), cosine.min().item())


def rejects(control: Distance, right: Distance, tolerance: Tolerance) -> bool:
    """Whether a control is told apart: outside the tolerance, and well further away than the right states are."""
    return not control.within(tolerance) and control.median > SEPARATION * right.median
