"""Verification keeps the target's distribution: counted on a tiny vocabulary, with seeds that are fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.evaluate.drafting import Tree
from eyas.evaluate.verifying import Verdict, draw, drawn, follow, greedy, ratio

#: 7 -> 1, 2; 7 1 -> 3; 7 1 3 -> 5: drafts 0, 1, 2, 3
TREE = Tree((1, 2, 3, 5), (-1, -1, 0, 2), (0, 0, 1, 2))
DRAWS = 6000


def test_greedy_goes_down_the_tree_as_far_as_the_target_agrees() -> None:
    assert greedy(TREE, [9, 0, 0, 0, 0]) == Verdict((), 9)
    assert greedy(TREE, [2, 0, 8, 0, 0]) == Verdict((1,), 8)
    assert greedy(TREE, [1, 3, 0, 5, 6]) == Verdict((0, 2, 3), 6)
    assert greedy(TREE, [1, 2, 0, 0, 0]) == Verdict((0,), 2), "2 is a draft, but not one behind 1"


def test_a_text_is_followed_to_its_end() -> None:
    assert follow(TREE, [1, 3, 5, 7]).path == (0, 2, 3)
    assert follow(TREE, [1, 3]).path == (0, 2), "the draft behind the end was not in the text"
    assert follow(TREE, [2, 3, 5]).path == (1,)
    assert follow(TREE, [4]).path == ()
    assert follow(TREE, []).path == ()


def chi_square(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Standardised: about 0 with deviation 1 where the counts are of the distribution."""
    assert set(found) <= {key for key, share in expected.items() if share > 0}
    wanted = np.array([share * draws for share in expected.values() if share > 0])
    seen = np.array([found[key] for key, share in expected.items() if share > 0])
    return float((((seen - wanted) ** 2 / wanted).sum() - (len(wanted) - 1)) / np.sqrt(2 * (len(wanted) - 1)))


def emitted(verdict: Verdict, tree: Tree) -> tuple[int, ...]:
    return (*(tree.tokens[node] for node in verdict.path), verdict.token)


def completed(first: tuple[int, ...], rows: Callable[[tuple[int, ...]], Tensor], generator: torch.Generator) -> tuple:
    """Two tokens: what a cycle emitted, and where that is one token the target's next."""
    return first[:2] if len(first) > 1 else (*first, draw(rows(first), generator))


def target_after(text: tuple[int, ...]) -> Tensor:
    """[4] what a made-up target says behind a text: token 3 never follows token 0."""
    weights = torch.rand(
        4, generator=torch.Generator().manual_seed(sum((3 * i + t + 1) ** 2 for i, t in enumerate(text)))
    )
    if text[-1:] == (0,):
        weights[3] = 0.0
    return weights / weights.sum()


EXACT = {(a, b): float(target_after(())[a] * target_after((a,))[b]) for a in range(4) for b in range(4)}


@pytest.mark.parametrize("tree", [Tree((1, 2), (-1, 0), (0, 1)), Tree((1, 3, 0, 2), (-1, -1, 0, 0), (0, 0, 1, 1))])
def test_drawn_tokens_follow_the_target_whatever_was_drafted(tree: Tree) -> None:
    texts = [()] + [tuple(text_of(tree, node)) for node in range(len(tree.tokens))]
    probs = torch.stack([target_after(text) for text in texts])
    generator = torch.Generator().manual_seed(11)
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(DRAWS):
        verdict = drawn(tree, probs, generator)
        accepted += bool(verdict.path)
        found[completed(emitted(verdict, tree), target_after, generator)] += 1
    assert abs(chi_square(found, EXACT, DRAWS)) < 3
    share = sum(float(probs[0, token]) for token in tree.children(-1))
    assert accepted / DRAWS == pytest.approx(share, abs=0.02), "a draft is accepted with the target's probability"


def text_of(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*text_of(tree, tree.parents[node]), tree.tokens[node]]


def drafter_after(text: tuple[int, ...]) -> Tensor:
    """[4] what a made-up drafter says; it cannot draft token 2."""
    weights = torch.tensor([0.5, 0.2, 0.0, 0.3 + 0.5 * len(text)])
    return weights / weights.sum()


def test_the_ratio_keeps_the_targets_distribution_and_accepts_what_both_share() -> None:
    generator = torch.Generator().manual_seed(5)
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(DRAWS):
        first = draw(drafter_after(()), generator)
        second = draw(drafter_after((first,)), generator)
        tree = Tree((first, second), (-1, 0), (0, 1))
        probs = torch.stack([target_after(text) for text in ((), (first,), (first, second))])
        drafted = torch.stack([drafter_after(()), drafter_after((first,))])
        verdict = ratio(tree, probs, drafted, generator)
        accepted += bool(verdict.path)
        found[completed(emitted(verdict, tree), target_after, generator)] += 1
    assert abs(chi_square(found, EXACT, DRAWS)) < 3
    shared = float(torch.minimum(target_after(()), drafter_after(())).sum())
    assert accepted / DRAWS == pytest.approx(shared, abs=0.02)


def test_equal_distributions_accept_everything() -> None:
    probs = torch.stack([target_after(()), target_after((1,)), target_after((1, 2))])
    tree = Tree((1, 2), (-1, 0), (0, 1))
    generator = torch.Generator().manual_seed(0)
    assert all(ratio(tree, probs, probs[:2], generator).path == (0, 1) for _ in range(200))


def test_what_the_target_never_says_is_never_accepted() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    drafted = torch.tensor([[1.0, 0.0, 0.0]])
    tree = Tree((0,), (-1,), (0,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        assert ratio(tree, probs, drafted, generator) == Verdict((), 1)
        assert drawn(tree, probs, generator) == Verdict((), 1)
