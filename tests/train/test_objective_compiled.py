"""The compiled step: one graph, the same numbers, and no new one for batches of other counts."""

from __future__ import annotations

import pytest
import torch
from test_objective import World, assert_same, gradients, made_draft
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex

from eyas.train.batch import pack
from eyas.train.objective import normaliser_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_compiles_whole_and_once_for_every_batch(monkeypatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    counters.clear()
    draft, graphs = made_draft(), []
    for seed, turns in enumerate([["0001111111", "0011111"], ["011111", "0111111111", "0001111111"]]):
        world = World(turns, seed=seed)
        plain, compiled = (world.objective(draft, attention=kind, compile=how) for kind, how in HOW)
        if not graphs:
            steps = compiled._matrices, compiled._first, compiled._later, compiled._loss_math, compiled._teacher_math
        else:  # a run has one objective; here each has its own target
            compiled._matrices, compiled._first, compiled._later, compiled._loss_math, compiled._teacher_math = steps
        batch = pack(world.samples(), steps=3, budget=64)
        results = []
        for objective in (plain, compiled):
            report = objective(batch, normaliser_of([batch]))
            report.loss.backward()
            results.append((report.loss.item(), report.accepted.tolist(), gradients(draft)))
        assert results[1][0] == pytest.approx(results[0][0], rel=1e-7)
        assert results[1][1] == results[0][1]
        assert_same(results[1][2], results[0][2], 1e-6)  # cosines are float32, and folded otherwise
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0, "compiled anew for a batch of other counts"


HOW = (("sdpa", False), ("flex", "aot_eager"))
