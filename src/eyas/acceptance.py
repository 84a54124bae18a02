"""How many tokens a drafter gains: acceptance by position, and the acceptance length, from counts. Pure.

One definition for training, simulation, decoding in process and a server's counters (docs/evaluation.md).

A server drafts K tokens in a chain and keeps those before the first that the target would not have chosen, then one
token of the target's own. So a cycle yields `1 + S_0 + S_0 S_1 ... ` tokens on average, with S_k the probability that
step k is right given that all before it were (Leviathan et al., arXiv 2211.17192, section 3.1, there for one rate at
all positions; the sum of products is the same expectation without that assumption). A tree of K steps is counted alike:
step k is right when the target's token is among the children of the node that step k - 1 ended on. A node without
children, cut away with the less likely branches, is a step that was reached and is not right.

The rows that training-time test evaluates are such chains: the tokens fed are the target's, which is what was drafted
as long as all steps so far were right. A chain that meets the end of its answer while all was right says nothing of
later steps: it is censored, like a patient who leaves a study alive. So S_k is the product-limit estimate (Kaplan and
Meier 1958): the product over j <= k of the share of right ones among the rows that reached step j.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Z95: Final = 1.959964  # of the normal distribution, both sides
_ROUNDS: Final = 2000
_FEWEST_CLUSTERS: Final = 20

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A drafter's simulated acceptance.

    Attributes:
        length: tokens a cycle yields, the target's own included: 1 <= length <= K + 1.
        low, high: its 95 % interval.
        by_position: [K] share of right ones among the rows that reached each step; 0 where none did.
        rows: that reached the first step, in number.
    """

    length: float
    low: float
    high: float
    by_position: tuple[float, ...]
    rows: int

    def at_depth(self, depth: int) -> float:
        """Acceptance length of chains that stop after `depth` <= K steps.

        Shallower chains begin elsewhere in the text, so that this is exact only as far as acceptance does not depend
        on where a cycle begins.
        """
        return accept_length(self.by_position[:depth])


def cycle_counts(cycles: Iterable[tuple[int, int]], depth: int) -> tuple[Counts, Counts]:
    """What `acceptance` takes, from cycles of drafting and verifying; the cluster is whoever made them.

    Args:
        cycles: (tokens accepted, tokens that the rest of the answer has room for); the second is what censors.
        depth: K, the steps drafted.

    Returns:
        Reached [K] and right [K].

    Raises:
        ValueError: more tokens accepted than were drafted, or than the answer has.
    """
    reached, right = np.zeros(depth, dtype=np.int64), np.zeros(depth, dtype=np.int64)
    for accepted, possible in cycles:
        if not 0 <= accepted <= min(possible, depth):
            raise ValueError(f"{accepted} tokens accepted of {depth} drafted, {possible} left")
        reached[: min(possible, accepted + 1, depth)] += 1
        right[:accepted] += 1
    return reached, right


def counter_counts(drafts: int, accepted_K: Sequence[int]) -> tuple[Counts, Counts]:
    """What `acceptance` takes, from a server's counters.

    A server counts before it trims an answer: what its last cycle accepted behind the end counts like the rest. So the
    length differs from that of `cycle_counts`, up or down, by less than K divided by the cycles of an answer.

    Args:
        drafts: cycles in which tokens were drafted.
        accepted_K: [K] cycles whose token k was accepted, and with it all before.

    Raises:
        ValueError: counts that rise.
    """
    right = np.asarray(accepted_K, dtype=np.int64)
    reached = np.concatenate([[drafts], right[:-1]]).astype(np.int64)[: len(right)]
    if (right > reached).any() or (right < 0).any():
        raise ValueError(f"{list(accepted_K)} of {drafts} drafts accepted: the counts must not rise")
    return reached, right


def histogram_counts(cycles_by_accepted: Sequence[int], depth: int) -> tuple[Counts, Counts]:
    """As `counter_counts`, from the number of cycles that accepted 0, 1, 2 .. tokens.

    Raises:
        ValueError: a cycle accepted more than `depth`, or a count is negative.
    """
    counts = np.zeros(depth + 1, dtype=np.int64)
    given = np.asarray(cycles_by_accepted, dtype=np.int64)
    if len(given) > depth + 1 and given[depth + 1 :].any():
        raise ValueError(f"cycles of more than {depth} accepted tokens: {given.tolist()}")
    counts[: len(given[: depth + 1])] = given[: depth + 1]
    at_least = counts[::-1].cumsum()[::-1]
    return counter_counts(int(at_least[0]), at_least[1:].tolist())


def accept_length(by_position: npt.ArrayLike) -> float:
    """1 + sum over k of the product of the conditional acceptances up to step k: [K] shares -> tokens a cycle."""
    return 1.0 + float(np.cumprod(np.asarray(by_position, dtype=np.float64)).sum())


def acceptance(reached_CK: npt.ArrayLike, right_CK: npt.ArrayLike, *, seed: int = 0) -> Acceptance:
    """Acceptance length with its interval, from counts by cluster and step.

    Rows of one answer are alike, so the interval takes clusters (batches, or documents) as what was drawn: by bootstrap
    over them (Efron 1979), 2,000 rounds, percentiles. With fewer than 20 clusters it is the analytic one, which takes
    rows as independent: `interval`.

    Args:
        reached_CK: [C, K] rows whose steps before k were all right and that count at k. [K] is one cluster.
        right_CK: [C, K] those of them that are right at k.
        seed: of the bootstrap.

    Raises:
        ValueError: counts of different shapes, or more right ones than rows.
    """
    reached = np.atleast_2d(np.asarray(reached_CK, dtype=np.int64))
    right = np.atleast_2d(np.asarray(right_CK, dtype=np.int64))
    if reached.shape != right.shape or (right > reached).any() or (right < 0).any():
        raise ValueError("counts of right rows that do not fit the rows that were reached")
    reached_K, right_K = reached.sum(0), right.sum(0)
    shares = _shares(reached_K, right_K)
    length = accept_length(shares)
    if len(reached) < _FEWEST_CLUSTERS:
        low, high = interval(reached_K, right_K)
    else:
        rng = np.random.default_rng(seed)
        draws = rng.multinomial(len(reached), np.full(len(reached), 1 / len(reached)), size=_ROUNDS)
        lengths = 1.0 + np.cumprod(_shares(draws @ reached, draws @ right), axis=1).sum(1)
        low, high = (float(q) for q in np.quantile(lengths, (0.025, 0.975)))
    return Acceptance(length, low, high, tuple(shares.tolist()), int(reached_K[0]) if len(reached_K) else 0)


def interval(reached_K: npt.ArrayLike, right_K: npt.ArrayLike) -> tuple[float, float]:
    """95 % interval of the acceptance length, rows independent, from counts [K].

    The length less one is a restricted mean of the product-limit estimate, whose variance is
    sum_j (sum_{k>=j} S_k)^2 (n_j - d_j) / (d_j n_j) with n_j rows reached and d_j right (Greenwood 1926; Klein and
    Moeschberger, Survival Analysis, 2nd ed., section 4.5). The interval is cut to [1, K + 1].
    """
    reached, right = np.asarray(reached_K, dtype=np.float64), np.asarray(right_K, dtype=np.float64)
    survival = np.cumprod(_shares(reached, right))
    tails = np.cumsum(survival[::-1])[::-1]
    counted = right > 0  # where none is right, every later product is zero, and so is its tail
    n, d = reached[counted], right[counted]
    error = math.sqrt(float((tails[counted] ** 2 * (n - d) / (d * n)).sum()))
    length = 1.0 + float(survival.sum())
    return max(1.0, length - Z95 * error), min(1.0 + len(survival), length + Z95 * error)


def _shares(reached: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    return np.divide(right, reached, out=np.zeros(reached.shape), where=reached != 0)
