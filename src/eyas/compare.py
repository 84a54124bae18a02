"""When do two sets of hidden states agree? Pure functions, used by `eyas verify --against` and the tests.

The error of one token is |stored - reference| / |reference| over the hidden dimension, in float32. It is per token,
and taken twice: over all dimensions, and over the ordinary ones, those within ten times the median magnitude. A few
tokens (the first, mostly) carry a few activations a thousand times larger than the rest ("massive activations", Sun et
al. 2024, arXiv 2402.17762); they hardly change from layer to layer, and would hide everything else, wrong layers
included. The larger of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the error of the tokens of a row.

    float32 against float32 differs by the order of summation only. bf16 keeps 8 bits: one rounding is up to 2^-8, and
    the layers' own roundings add up to a few hundredths; a single token may stray far, where an attention sink, a
    router or a softmax sits near a tie. docs/verification.md has the measured values.

    Attributes:
        median: of the row's tokens.
        worst: of any token, but for `strays`, the share of tokens (rounded down) that may lie beyond.
    """

    median: float
    worst: float
    strays: float = 0.0


TOLERANCE = {
    "f32": Tolerance(median=1e-4, worst=1e-3),
    "f16": Tolerance(median=1e-2, worst=0.1, strays=0.02),
    "bf16": Tolerance(median=6e-2, worst=0.3, strays=0.02),
    "fp8_e4m3": Tolerance(median=7e-2, worst=0.3, strays=0.02),
}
#: Strays where a router picks experts: half precision flips near ties, and such a token's states differ altogether.
ROUTED_STRAYS = 0.2
#: A control (a state that must not match) has to be this many times further away than the right one.
SEPARATION = 3.0
#: Neighbouring tokens of which no half may stray: rounding strays here and there, a wrong chunk in one stretch.
STRETCH = 32
#: Dimensions up to this many times a token's median magnitude are ordinary.
ORDINARY = 10.0


@dataclass(frozen=True, slots=True)
class Distance:
    """Error over the tokens of one row: the median, the worst, and the worst but for the strays a tolerance allows.

    `cosine` is the lowest of any token, `stretch` the `worst_stretch`.
    """

    median: float
    worst: float
    bounded: float
    cosine: float
    stretch: float

    def within(self, tolerance: Tolerance) -> bool:
        """NaN is never within."""
        return self.median <= tolerance.median and max(self.bounded, self.stretch) <= tolerance.worst


def tolerance_for(dtype: str, routed: bool) -> Tolerance:
    """The bounds for states stored in `dtype`, of a model with routed experts or without."""
    known = TOLERANCE[dtype]
    return replace(known, strays=ROUTED_STRAYS) if routed and known.strays else known


def distance(stored: torch.Tensor, reference: torch.Tensor, strays: float = 0.0) -> Distance:
    """Distance of two [T, H] tensors of any float dtype. An empty pair is at distance 0.

    Args:
        stored, reference: the two.
        strays: share of tokens that `bounded` leaves out.

    Raises:
        ValueError: the shapes differ.
    """
    if stored.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(stored.shape)} and {tuple(reference.shape)}")
    if not stored.numel():
        return Distance(0.0, 0.0, 0.0, 1.0, 0.0)
    mine, theirs = stored.to(reference.device).float(), reference.float()
    size = theirs.abs()
    ordinary = size <= ORDINARY * size.median(dim=-1, keepdim=True).values
    error = torch.maximum(_relative(mine, theirs), _relative(mine * ordinary, theirs * ordinary))
    ranked = error.sort().values  # NaN sorts last, so it is the worst
    bounded = ranked[-1 - int(strays * len(ranked))]
    cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)
    return Distance(error.median().item(), ranked[-1].item(), bounded.item(), cosine.min().item(), worst_stretch(error))


def worst_stretch(error_T: torch.Tensor) -> float:
    """Largest median of any STRETCH neighbouring errors, or of all where there are fewer; T is at least 1."""
    stretches = error_T.nan_to_num(nan=torch.inf).unfold(0, min(STRETCH, len(error_T)), 1)
    return stretches.median(dim=-1).values.max().item()


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)


def is_informative(control: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether a control can be told from the right states at all, judged by the two recomputations alone.

    In a row of one token, the massive one, neighbouring layers differ by less than bf16 resolves.
    """
    return distance(control, reference).median > SEPARATION * tolerance.median


def rejects(control: Distance, right: Distance, tolerance: Tolerance) -> bool:
    """Whether a control is told apart: outside the tolerance, and well further away than the right states are."""
    return not control.within(tolerance) and control.median > SEPARATION * right.median
