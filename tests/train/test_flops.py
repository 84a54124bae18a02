"""Counted operations are those that torch counts while the step runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_objective import BASE, World, made_draft
from torch.utils.flop_counter import FlopCounterMode

from eyas.train.batch import pack
from eyas.train.flops import step_flops
from eyas.train.objective import normaliser_of


@pytest.mark.parametrize("change", [{}, {"fc_norm": True}, {"num_kv_heads": 4, "draft_vocab_size": 19}])
@pytest.mark.parametrize("oov", ["keep", "drop"])
def test_products_are_counted_as_they_are_done(change: dict[str, Any], oov: str) -> None:
    config = dataclasses.replace(BASE, **change)
    world = World(["0001111111110", "11110011", "0111111111"], config)
    batch = pack(world.samples(), steps=5, budget=40)
    objective = world.objective(made_draft(config), oov=oov)
    with FlopCounterMode(display=False) as counter:
        objective(batch, normaliser_of([batch])).loss.backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))  # attention is not mm
    found = step_flops(config, batch, drop=oov == "drop")
    assert counted == found["total"] - found["attention"]
    assert found["total"] == sum(n for name, n in found.items() if name != "total")


def test_attention_counts_the_keys_that_are_seen() -> None:
    world = World(["0" + "1" * 9])
    batch = pack(world.samples(), steps=2)
    assert batch.counts == (8, 7)  # rows 0 .. 7, and 0 .. 6
    seen = sum(range(1, 9)) + sum(range(1, 8)) + 7  # itself and those before it; at step 1 one more
    assert step_flops(BASE, batch)["attention"] == 3.5 * 4 * BASE.q_size * seen


def test_nothing_drafts() -> None:
    batch = pack(World(["0000"]).samples(), steps=3)
    found = step_flops(BASE, batch)
    assert found["lm_head"] == found["attention"] == found["teacher"] == 0 < found["fc"]
    assert torch.tensor(list(found.values())).isfinite().all()
