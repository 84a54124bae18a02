"""Speculative decoding is the target's own text, and feeds the drafter the target's own states."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from evaluate.test_verifying import chi_square
from eyas.errors import ConfigError
from eyas.evaluate.decode import Decoded, Sampling, TargetModel, decode, decode_plainly
from eyas.evaluate.drafting import Drafter, Drafting, Tree
from eyas.extract.hf import hidden_states
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.vocab import DraftVocab

LAYERS = (0, 2, 3)
CHAIN, TREE = Drafting.of(3), Drafting.of(4, 3, 9)
PROMPT = [5, 17, 80, 3, 41]


def drafter_of(model: PreTrainedModel) -> Drafter:
    """A drafter with random weights over every other token."""
    text: Any = model.config.get_text_config(decoder=True)
    size, vocab_size = text.hidden_size, text.vocab_size
    vocab = DraftVocab(torch.arange(0, vocab_size, 2), vocab_size)
    shape = {"intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": vocab_size, "draft_vocab_size": len(vocab), "target_hidden_size": size}
    embeddings: Any = model.get_input_embeddings()
    config = Eagle3Config(hidden_size=size, aux_layers=LAYERS, **shape, **sizes)
    return Drafter(Eagle3Draft(config, embeddings.weight.detach(), torch.Generator().manual_seed(0)), vocab)


class Guessing(Drafter):
    """Knows the text, and is right for 0, 1, 2 .. drafts in turn; keeps what it is fed."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.reset()

    def reset(self) -> None:
        self.rows, self.cycle = 0, 0
        self.aux: list[Tensor] = []
        self.tokens: list[int] = []

    def extend(self, aux_TA: Tensor, next_tokens_T: Tensor) -> None:
        self.aux.append(aux_TA.clone())
        self.tokens += next_tokens_T.tolist()
        self.rows = len(self.tokens)

    def draft(self, plan: Drafting, row: int | None = None, generator: torch.Generator | None = None) -> Tree:
        """In a tree each true token has wrong siblings before and behind it, the first of which has a child."""
        rest = [*self.text[self.rows + 1 :], *[0] * plan.depth][: plan.depth]
        right, self.cycle = self.cycle % (plan.depth + 1), self.cycle + 1
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        parent = -1
        for depth, true in enumerate(rest):
            chosen = true if depth < right else (true + 1) % 7
            siblings = [chosen] if plan.topk == 1 else [(true + 2) % 7 + 7, chosen, (true + 3) % 7 + 14]
            first = len(tokens)
            tokens += siblings
            parents += [parent] * len(siblings)
            depths += [depth] * len(siblings)
            parent = first + siblings.index(chosen)
            if plan.topk > 1 and depth + 1 < plan.depth:
                tokens.append(rest[depth + 1])
                parents.append(first)
                depths.append(depth + 1)
        return Tree(tuple(tokens), tuple(parents), tuple(depths))


class Both(NamedTuple):
    """An answer by drafting, plainly, and who drafted."""

    found: Decoded
    plain: list[int]
    drafter: Guessing


def decoded(model: PreTrainedModel, plan: Drafting, sampling: Sampling) -> Both:
    text: Any = model.config.get_text_config(decoder=True)
    with TargetModel(model, LAYERS, text.num_hidden_layers) as target:
        plain = decode_plainly(target, PROMPT, sampling)
        whole = decode_plainly(target, PROMPT, Sampling(max_new_tokens=sampling.max_new_tokens + 8))
        drafter = Guessing([*PROMPT, *whole])
        return Both(decode(target, drafter, plan, PROMPT, sampling), plain, drafter)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_greedy_text_is_the_targets_own(family: str, plan: Drafting) -> None:
    found, plain, _ = decoded(tiny_models.MODELS[family](), plan, Sampling(max_new_tokens=40))
    assert found.tokens == plain
    assert len(plain) == 40
    assert set(found.accepted) == set(range(plan.depth + 1)), "not every case was met: the test sees too little"


def test_a_target_with_attention_windows_is_rolled_back_along_chains_and_refuses_trees() -> None:
    model = tiny_models.gemma3(sliding_window=8)  # shorter than the text
    found, plain, _ = decoded(model, CHAIN, Sampling(max_new_tokens=32))
    assert found.tokens == plain
    assert set(found.accepted) == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="windows"):
        decoded(model, TREE, Sampling(max_new_tokens=8))


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_drafter_is_fed_the_targets_states_of_the_text_and_nothing_else(plan: Drafting) -> None:
    """As a forward of the whole text gives them: no state of a rejected draft, no position off by one."""
    model = tiny_models.llama()
    found, _, drafter = decoded(model, plan, Sampling(max_new_tokens=40))
    text = [*PROMPT, *found.tokens]
    states, _ = hidden_states(model, text[:-1], LAYERS)
    expected = torch.cat([states[layer] for layer in LAYERS], -1)
    assert torch.allclose(torch.cat(drafter.aux)[: len(expected)], expected, atol=1e-4)
    assert drafter.tokens[: len(text) - 1] == text[1:]


def test_an_answer_ends_at_its_end_token_even_within_the_drafts() -> None:
    model = tiny_models.llama()
    whole = decoded(model, CHAIN, Sampling(max_new_tokens=40)).found
    begins = list(itertools.accumulate([1, *(accepted + 1 for accepted in whole.accepted)]))
    cycle = whole.accepted.index(3)
    end = whole.tokens[begins[cycle] + 1]  # the second of three drafts that one cycle accepts
    stop = whole.tokens.index(end) + 1
    assert stop == begins[cycle] + 2, "the token comes up before"
    found, plain, _ = decoded(model, CHAIN, Sampling(max_new_tokens=40, ends=(end,)))
    assert found.tokens == plain == whole.tokens[:stop]
    assert found.accepted == whole.accepted[: cycle + 1], "as a server counts"
    assert found.cycles == [*((accepted, 3) for accepted in whole.accepted[:cycle]), (2, 2)], "within the answer"


@pytest.mark.parametrize("longest", [1, 2, 7])
def test_an_answer_is_never_longer_than_asked(longest: int) -> None:
    found, plain, _ = decoded(tiny_models.llama(), CHAIN, Sampling(max_new_tokens=longest))
    assert found.tokens == plain
    assert len(plain) == longest
    assert bool(found.cycles) == (longest > 1)


def test_hooks_are_gone_afterwards() -> None:
    model = tiny_models.llama()
    decoded(model, CHAIN, Sampling(max_new_tokens=4))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv"])
def test_a_target_with_a_state_that_cannot_be_rolled_back_is_refused(kind: str) -> None:
    model = tiny_models.llama()
    model.config.layer_types = ["full_attention", kind, "full_attention", "full_attention"]
    with pytest.raises(ConfigError, match=kind):
        TargetModel(model, LAYERS, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["as servers draft", "sampled drafts"])
def test_sampled_text_has_the_targets_distribution(temperature: float) -> None:
    """Pairs of neighbours in the first three tokens of 250 answers, by a target of seven tokens, flat enough that the
    drafter's favourite is neither always right nor never."""
    model = tiny_models.llama(vocab_size=7, initializer_range=0.35)
    prompt, sampling, draws = [1, 5, 2], Sampling(temperature=3.0, max_new_tokens=3), 250
    drafter, plan = drafter_of(model), Drafting.of(2, temperature=temperature)
    drafter._draft.lm_head.weight.data.mul_(8.0)  # sure of itself: a rule that errs shows
    generator = torch.Generator().manual_seed(9)
    with TargetModel(model, LAYERS, 4) as target:
        texts = [decode(target, drafter, plan, prompt, sampling, generator) for _ in range(draws)]
    every = list(itertools.product(range(7), repeat=3))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text] for text in every])).logits[:, 2:5].float()
    shares = (logits / 3.0).softmax(-1).gather(-1, torch.tensor(every)[..., None])[..., 0].prod(-1).view(7, 7, 7)
    pairs = list(itertools.product(range(7), repeat=2))
    for first, exact in ((0, shares.sum(2)), (1, shares.sum(0))):
        expected = pooled(dict(zip(pairs, exact.flatten().tolist(), strict=True)), draws)
        found = Counter(tuple(text.tokens[first : first + 2]) for text in texts)
        counted: Counter[tuple[int, ...]] = Counter()
        for pair, count in found.items():
            counted[pair if pair in expected else ()] += count
        assert abs(chi_square(counted, expected, draws)) < 3
    assert sum(sum(text.accepted) for text in texts) > draws / 10


def pooled(shares: dict[tuple[int, ...], float], draws: int) -> dict[tuple[int, ...], float]:
    """Those that are too rare for a chi-square test together, as ()."""
    kept = {text: share for text, share in shares.items() if share * draws >= 5}
    return {**kept, (): float(np.clip(1 - sum(kept.values()), 1e-9, 1))}
