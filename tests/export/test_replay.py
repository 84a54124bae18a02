"""Drafts on known texts: the ones that the training objective computes, row by row, though by other code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.export.replay import Document, replay
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head
from eyas.train.batch import Sample, pack
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.loss import TeacherHead
from eyas.train.objective import Objective, ObjectiveOptions
from tiny_models import llama

IDS = torch.arange(3, 259, 4)
STEPS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    llama().save_pretrained(folder)
    return Target.load(str(folder))


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "num_kv_heads": 1, "head_dim": 12}])
def test_as_the_objective_drafts(options: dict[str, object], target: Target) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = Eagle3Config.from_target(target, aux_layers=[0, 1, 3], draft_vocab_size=len(IDS), **options)
    embeddings = input_embeddings(target).float()
    draft = Eagle3Draft(shape, embeddings, generator)
    for parameter in draft.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    head = Head.load(target, rows=IDS)
    tokens = IDS[torch.randint(0, 8, (40,), generator=generator)]  # few, so that some drafts are right
    mask = torch.ones(40, dtype=torch.bool)
    mask[:5] = mask[20:23] = mask[37:] = False
    aux = torch.randn(40, shape.aux_size, generator=generator)
    last = torch.randn(40, shape.target_hidden_size, generator=generator)
    best = torch.zeros(40, dtype=torch.int64)
    document = Document(tokens, mask, aux, last, best, best)
    found = replay(draft, IDS, document, lambda ids: embeddings[ids], STEPS, head.logits)

    teacher = TeacherHead(head.weight, head.bias, None, None, head.scale, head.softcap)
    batch = pack([Sample(0, tokens, mask, aux, last, torch.arange(40))], steps=STEPS)
    report = Objective(draft, teacher, IDS, ObjectiveOptions())(batch, list(batch.valid_counts))
    order = batch.rows.argsort()
    assert torch.equal(batch.rows[order], found.rows)
    assert torch.equal(report.right_KR[:, order], found.right)
    assert int(found.right.sum()) > 0
    sums = found.scores.nan_to_num().sum(1)
    assert torch.allclose(-sums, report.loss_sums.float(), rtol=1e-4, atol=1e-4)
    assert ((found.drafts >= 0).sum(1) == torch.tensor(batch.valid_counts)).all()
    # The logits are of the draft that was most likely, and the margin is what the next one lacks.
    assert bool((found.margins >= 0).all())
    other = replay(draft, IDS, replace(document, aux=aux.roll(1, 0)), lambda ids: embeddings[ids], STEPS, head.logits)
    assert not torch.equal(other.logits, found.logits)
