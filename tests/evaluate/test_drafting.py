"""Drafts against the training step written out plainly: what a server feeds is what was trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.errors import ConfigError
from eyas.evaluate.drafting import Drafter, Drafting, Tree
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.vocab import DraftVocab
from train.reference_step import Document, states

VOCAB, DRAFTED = 40, torch.arange(2, 38, 3)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "num_kv_heads": 1},
}


def make_draft(**changes: Any) -> Eagle3Draft:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": len(DRAFTED), "target_hidden_size": 12, "aux_layers": (0, 1, 3)}
    generator = torch.Generator().manual_seed(3)
    config = Eagle3Config(**{**shape, **sizes, **changes})
    draft = Eagle3Draft(config, torch.randn(VOCAB, 16, generator=generator), generator).double()
    for parameter in draft.parameters():
        parameter.data.uniform_(-0.6, 0.6, generator=generator)
    draft.embed_tokens = draft.embed_tokens.double()
    return draft


def make_drafter(**changes: Any) -> Drafter:
    return Drafter(make_draft(**changes), DraftVocab(DRAFTED, VOCAB))


def make_text(rows: int = 7) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (rows + 1,), generator=generator).tolist()
    return tokens, torch.randn(rows, 36, generator=generator, dtype=torch.float64)


def trained(draft: Eagle3Draft, tokens: list[int], aux: Tensor, row: int, drafts: list[int]) -> Tensor:
    """[steps, Vd] probabilities by the training step, of row `row` behind which `drafts` were drafted."""
    text = [*tokens[: row + 2], *drafts]
    padded = torch.cat([aux[: row + 1], torch.zeros(len(text) - row - 1, aux.shape[1], dtype=aux.dtype)])
    out = states(draft, Document(text, [True] * len(text), padded, padded), len(drafts))
    return torch.stack([(draft.lm_head.weight @ out[row, k]).softmax(-1) for k in range(len(drafts))])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_is_the_training_step_on_its_own_drafts(shape: str) -> None:
    drafter = make_drafter(**SHAPES[shape])
    tokens, aux = make_text()
    drafter.extend(aux, torch.tensor(tokens[1:]))
    for row in (0, 3, 6):
        tree = drafter.draft(Drafting.of(4, temperature=1.0), row, torch.Generator().manual_seed(row))
        assert tree.probs is not None
        expected = trained(drafter._draft, tokens, aux, row, list(tree.tokens))
        assert torch.allclose(tree.probs.double(), expected, atol=1e-6)
        likeliest = drafter.draft(Drafting.of(4), row)
        expected = trained(drafter._draft, tokens, aux, row, list(likeliest.tokens))
        assert likeliest.tokens == tuple(DRAFTED[expected.argmax(-1)].tolist())
        assert (likeliest.parents, likeliest.depths) == ((-1, 0, 1, 2), (0, 1, 2, 3))


def test_rows_may_come_in_parts_and_drafts_leave_nothing_behind() -> None:
    tokens, aux = make_text()
    whole, parts = make_drafter(), make_drafter()
    whole.extend(aux, torch.tensor(tokens[1:]))
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        parts.extend(aux[start:stop], torch.tensor(tokens[start + 1 : stop + 1]))
        for plan in (Drafting.of(3), Drafting.of(3, 2)):
            parts.draft(plan)
    plan = Drafting.of(5, temperature=1.0)
    first, second = (one.draft(plan, generator=torch.Generator().manual_seed(1)) for one in (whole, parts))
    assert first.tokens == second.tokens
    assert first.probs is not None
    assert second.probs is not None
    assert torch.allclose(first.probs, second.probs, atol=1e-6)
    parts.reset()
    assert parts.rows == 0
    with pytest.raises(ValueError, match="not among those extended last"):
        parts.draft(plan)


def probabilities_behind(drafter: Drafter, tokens: list[int], aux: Tensor, path: list[int]) -> Tensor:
    """[Vd] of the step behind a path of drafts, by the training step."""
    return trained(drafter._draft, tokens, aux, len(aux) - 1, [*path, 0])[-1]


def path_of(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*path_of(tree, tree.parents[node]), tree.tokens[node]]


def test_a_tree_with_ancestors_keys_is_a_chain_down_each_path() -> None:
    """Every node's score is the product of the training step's probabilities down to it, and the likeliest were taken:
    of all nodes that a beam of `topk` expands, computed here from chains alone."""
    drafter, topk, depth, count = make_drafter(), 3, 3, 11
    tokens, aux = make_text()
    drafter.extend(aux, torch.tensor(tokens[1:]))
    frontier: list[tuple[float, list[int]]] = [(1.0, [])]
    every: list[tuple[float, list[int]]] = []
    for _ in range(depth):
        grown = []
        for score, path in frontier:
            likely = probabilities_behind(drafter, tokens, aux, path).topk(topk)
            pairs = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
            grown += [(score * share, [*path, int(DRAFTED[index])]) for share, index in pairs]
        every += grown
        frontier = sorted(grown, reverse=True)[:topk]
    expected = sorted(path for _, path in sorted(every, reverse=True)[:count])
    plan = Drafting(depth, topk, count, keys="ancestors")
    tree = drafter.draft(plan)
    assert sorted(path_of(tree, node) for node in range(count)) == expected
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert list(tree.depths) == [len(path_of(tree, node)) - 1 for node in range(count)]
    assert drafter.draft(Drafting(depth, 1, depth)).tokens == tuple(
        path_of(drafter.draft(Drafting.of(depth)), depth - 1)
    )


def test_a_branch_reads_the_keys_of_its_own_place_as_in_sglang() -> None:
    """The same weights with the keys of places, written out: branch j at step i attends to what branch j fed before,
    whichever node that was, while state and score go on from the node that was chosen."""
    drafter, topk, depth = make_drafter(), 3, 4
    tokens, aux = make_text()
    drafter.extend(aux, torch.tensor(tokens[1:]))
    places = drafter.draft(Drafting(depth, topk, 30))
    ancestors = drafter.draft(Drafting(depth, topk, 30, keys="ancestors"))
    chain = drafter.draft(Drafting.of(depth))
    differ = [path_of(places, i) for i in range(30)] != [path_of(ancestors, i) for i in range(30)]
    assert differ, "no branch changed its place: the test sees nothing"
    expected = by_places(drafter, aux, topk, depth)
    assert [path_of(places, node) for node in range(30)] == expected[:30]
    assert list(chain.tokens) in [path_of(ancestors, node) for node in range(30)]


@torch.inference_mode()
def by_places(drafter: Drafter, aux: Tensor, topk: int, depth: int) -> list[list[int]]:
    """Paths of the likeliest nodes in the order in which they were made, one branch and key at a time."""
    row = len(aux) - 1
    memory: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(topk)]
    logits = drafter._draft.lm_head(drafter._predicts[-1:])[0]
    likely = logits.softmax(-1).topk(topk)
    made = [(float(p), [int(DRAFTED[i])], 0) for p, i in zip(likely.values, likely.indices, strict=True)]
    every = list(made)
    branches = [(p, path, drafter._states[-1:]) for p, path, _ in made]
    for step in range(1, depth):
        grown = []
        for place, (score, path, state) in enumerate(branches):
            keys = torch.cat([drafter._keys, *(k for k, _ in memory[place])], 1)
            values = torch.cat([drafter._values, *(v for _, v in memory[place])], 1)
            out = drafter._layer(torch.tensor(path[-1:]), state, torch.tensor([row + step]), keys, values, None)
            memory[place].append((out.keys, out.values))
            likely = drafter._draft.lm_head(out.predicts)[0].softmax(-1).topk(topk)
            pairs = zip(likely.values, likely.indices, strict=True)
            grown += [(score * float(p), [*path, int(DRAFTED[i])], out.state) for p, i in pairs]
        every += grown
        branches = sorted(grown, key=lambda one: -one[0])[:topk]
    likeliest = sorted(range(len(every)), key=lambda i: -every[i][0])[:30]
    return [every[i][1] for i in sorted(likeliest)]


def test_drafts_are_target_ids_and_probabilities_are_of_the_targets_tokens() -> None:
    drafter = make_drafter()
    tokens, aux = make_text()
    drafter.extend(aux, torch.tensor(tokens[1:]))
    tree = drafter.draft(Drafting.of(3, 3))
    assert set(tree.tokens) <= set(DRAFTED.tolist())
    assert tree.children(-1) == {tree.tokens[i]: i for i in range(len(tree.tokens)) if tree.parents[i] == -1}
    shares = torch.rand(len(DRAFTED))
    whole = drafter.probabilities(shares, VOCAB)
    assert torch.equal(whole[DRAFTED], shares)
    assert float(whole.sum()) == pytest.approx(float(shares.sum()))


def test_more_branches_than_draft_tokens_are_all_of_them() -> None:
    drafter = make_drafter()
    tokens, aux = make_text()
    drafter.extend(aux, torch.tensor(tokens[1:]))
    tree = drafter.draft(Drafting.of(3, 20, 200))
    assert len(tree.children(-1)) == len(DRAFTED)


@pytest.mark.parametrize(
    ("depth", "topk", "tokens", "temperature", "what"),
    [
        (3, 1, 4, 0.0, "a chain of 3 steps drafts 3 tokens, not 4"),
        (2, 2, 7, 0.0, "7 draft tokens, but 2 steps of 2 branches make 6"),
        (3, 2, None, 1.0, "along a chain only"),
    ],
)
def test_what_cannot_be_drafted_is_refused(
    depth: int, topk: int, tokens: int | None, temperature: float, what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        Drafting.of(depth, topk, tokens, temperature)


def test_the_number_of_drafts_where_none_is_given() -> None:
    assert Drafting.of(5).tokens == 5
    assert Drafting.of(5, 4).tokens == 20
    assert Drafting.of(1, 4).tokens == 4
    assert Drafting.of(2, 2, 6).tokens == 6
