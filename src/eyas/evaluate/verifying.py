"""Which drafts the target accepts, and the token that it adds. Pure functions of what it says after each draft.

greedy   the target's likeliest token, as long as it was drafted: the text is the target's own greedy one.
drawn    a token is drawn from the target's distribution, and is accepted where it was drafted. So a draft x is accepted
         with p(x), and what is emitted otherwise follows p without the drafts: the target's distribution to the letter,
         whatever was drafted. This is what SGLang (`tree_speculative_sampling_target_only`) and vLLM (drafts without
         probabilities) do for drafts that were not sampled: the case q = 1 of the rule below.
ratio    drafts sampled from q along a chain: x is accepted with min(1, p(x) / q(x)), and what replaces the first that
         is not follows max(0, p - q), normalised. (Leviathan et al., arXiv 2211.17192, section 2.3 and appendix A.1.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.evaluate.drafting import Tree


class Verdict(NamedTuple):
    """What becomes of a cycle.

    Attributes:
        path: the drafts accepted, by number, in the order of the text.
        token: the target's own, which follows them.
    """

    path: tuple[int, ...]
    token: int


def greedy(tree: Tree, likeliest: Sequence[int]) -> Verdict:
    """By the target's likeliest tokens.

    Args:
        tree: n drafts.
        likeliest: [1 + n] after the text, and after each draft.
    """
    return _walk(tree, lambda node: likeliest[node + 1])


def drawn(tree: Tree, probs_nV: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """By draws from the target's distribution.

    Args:
        tree: n drafts.
        probs_nV: [1 + n, V] the target's, after the text and after each draft.
        generator: of the draws.
    """
    return _walk(tree, lambda node: draw(probs_nV[node + 1], generator))


def ratio(tree: Tree, probs_nV: Tensor, drafted_nV: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """By the ratio of the two distributions, for a chain of sampled drafts.

    Args:
        tree: n drafts, a chain.
        probs_nV: [1 + n, V] the target's, after the text and after each draft.
        drafted_nV: [n, V] what each draft was sampled from, over the target's tokens.
        generator: of the draws.
    """
    for node, token in enumerate(tree.tokens):
        target, drafter = probs_nV[node], drafted_nV[node]
        if float(torch.rand((), generator=generator, device=target.device)) * float(drafter[token]) < float(
            target[token]
        ):
            continue
        left = (target - drafter).clamp(min=0)
        # Equal distributions leave nothing but rounding, and never reject but by it.
        return Verdict(tuple(range(node)), draw(left if bool(left.sum() > 0) else target, generator))
    return Verdict(tuple(range(len(tree.tokens))), draw(probs_nV[-1], generator))


def follow(tree: Tree, text: Sequence[int]) -> Verdict:
    """By a text that is already there, at least as long as the tree is deep, or ended: then its token is -1.

    Args:
        tree: n drafts.
        text: what the target wrote behind the place where the drafts begin.
    """
    ends = len(text)
    return _walk(tree, lambda node: text[at] if (at := tree.depths[node] + 1 if node >= 0 else 0) < ends else -1)


def draw(weights_V: Tensor, generator: torch.Generator | None = None) -> int:
    """A token by its weight: [V], not negative, not all zero."""
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _walk(tree: Tree, choose: Callable[[int], int]) -> Verdict:
    path: list[int] = []
    node = -1
    while True:
        token = choose(node)
        found = tree.children(node).get(token)
        if found is None:
            return Verdict(tuple(path), token)
        path.append(found)
        node = found
