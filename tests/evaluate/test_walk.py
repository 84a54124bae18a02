"""A walk over stored text makes the cycles that decoding makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluate.conftest import PROMPT, Tiny
from eyas.acceptance import acceptance, cycle_counts
from eyas.evaluate.decode import Sampling, TargetModel, decode
from eyas.evaluate.drafting import Drafting
from eyas.evaluate.head import Head, load_drafter
from eyas.evaluate.walk import answers, walk
from eyas.store.reader import StoreReader, StoreRow
from eyas.target.checkpoint import Target

CPU = torch.device("cpu")


def test_answers_are_the_runs_of_trained_tokens() -> None:
    assert answers([0, 0, 1, 1, 0, 1]) == [(2, 4), (5, 6)]
    assert answers([1, 1]) == [(0, 2)]
    assert answers([0, 0]) == answers([]) == []


@pytest.mark.parametrize("plan", [Drafting.of(3), Drafting.of(3, 2, 6)], ids=["chain", "tree"])
def test_a_walk_makes_the_cycles_of_decoding(tiny: Tiny, plan: Drafting) -> None:
    """Cycle for cycle: where each began, what it accepted, and how much room the answer left it."""
    target = Target.load(str(tiny.model))
    drafter, _ = load_drafter(Head.find(str(tiny.run)), target, CPU, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(target.dir, dtype=torch.float32)
    reached = right = 0
    with TargetModel(model, drafter.config.aux_layers, target.num_layers) as watched:
        for row in [*StoreReader(tiny.root / "exact")][:12]:
            tokens = row.tokens.tolist()
            sampling = Sampling(max_new_tokens=len(tokens) - PROMPT)
            found = decode(watched, drafter, plan, tokens[:PROMPT], sampling)
            assert found.tokens == tokens[PROMPT:]
            assert walk(drafter, row, plan) == found.cycles
            counts = cycle_counts(found.cycles, plan.depth)
            reached, right = reached + counts[0], right + counts[1]
    assert acceptance(reached, right).length > 1.3, "hardly anything was accepted: the test sees little"


def test_cycles_begin_on_the_row_before_the_answer_and_go_on_behind_what_was_accepted(tiny: Tiny) -> None:
    """With a drafter that says which rows it drafted from."""
    target = Target.load(str(tiny.model))
    drafter, _ = load_drafter(Head.find(str(tiny.run)), target, CPU, torch.float32)
    asked: list[int] = []
    made = drafter.draft

    def draft(plan: Drafting, row: int | None = None) -> object:
        assert row is not None
        asked.append(row)
        return made(plan, row)

    drafter.draft = draft  # pyright: ignore[reportAttributeAccessIssue]
    rows = [*StoreReader(tiny.store)][:6]
    for row in rows:
        asked.clear()
        cycles = walk(drafter, row, Drafting.of(3))
        start, stop = answers(row.loss_mask.numpy())[0]
        steps = [accepted + 1 for accepted, _ in cycles]
        assert asked == [start - 1 + sum(steps[:i]) for i in range(len(steps))]
        assert [possible for _, possible in cycles] == [min(3, stop - at - 2) for at in asked]
        assert asked[-1] + steps[-1] + 2 >= stop, "the walk ends with the answer"


def test_each_turn_is_walked_and_a_row_may_begin_with_its_answer(tiny: Tiny) -> None:
    target = Target.load(str(tiny.model))
    drafter, _ = load_drafter(Head.find(str(tiny.run)), target, CPU, torch.float32)
    row = StoreReader(tiny.store)[0]
    mask = torch.zeros_like(row.loss_mask)
    mask[:5] = mask[8:11] = 1
    cycles = walk(drafter, with_mask(row, mask), Drafting.of(1))
    assert sum(accepted + 1 for accepted, _ in cycles) >= 3 + 2, "both answers, as far as each leaves room"
    deep = walk(drafter, with_mask(row, mask), Drafting.of(3))
    assert deep[0][1] == 3
    assert deep[-1][1] <= 2, "the last answer has room for two, though the row goes on"
    assert walk(drafter, with_mask(row, torch.zeros_like(mask)), Drafting.of(1)) == []
    single = torch.zeros_like(mask)
    single[6] = 1
    assert walk(drafter, with_mask(row, single), Drafting.of(1)) == [], "one token leaves nothing to draft"
    first = torch.zeros_like(mask)
    first[0] = 1
    assert walk(drafter, with_mask(row, first), Drafting.of(1)) == [], "nor does it as the first of the row"
    alone = StoreRow(row.row, row.tokens[:1], first[:1], row.aux[:1], row.last, row.last_index)
    assert walk(drafter, alone, Drafting.of(1)) == []


def with_mask(row: StoreRow, mask: torch.Tensor) -> StoreRow:
    return StoreRow(row.row, row.tokens, mask, row.aux, row.last, row.last_index)


def test_states_rounded_as_stores_round_them_agree_within_three_per_cent(tiny: Tiny) -> None:
    target = Target.load(str(tiny.model))
    drafter, _ = load_drafter(Head.find(str(tiny.run)), target, CPU, torch.float32)
    lengths = []
    for store in (tiny.store, tiny.root / "exact"):
        counts = [cycle_counts(walk(drafter, row, Drafting.of(3)), 3) for row in StoreReader(store)]
        lengths.append(acceptance(np.array([c[0] for c in counts]), np.array([c[1] for c in counts])).length)
    assert lengths[0] == pytest.approx(lengths[1], rel=0.03)
