"""A new draft that starts like its target: what it reads off the deepest layer, over families of final norms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head
from eyas.target.norm import FinalNorm
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.start import start_like_target
from eyas.train.vocab import DraftVocab
from tiny_models import deepseek_v3, gemma3, llama, qwen3

VOCAB = DraftVocab(torch.tensor([3, 7, 8, 150, 299]), 300)


def started(folder: Path, model: PreTrainedModel, **overrides: Any) -> tuple[Eagle3Draft, Target, bool]:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones or zeros as built
            parameter.data.uniform_(0.2, 3.0)
    model.save_pretrained(folder)
    target = Target.load(str(folder))
    options = {"aux_layers": [0, 1, 2], "draft_vocab_size": len(VOCAB)} | overrides
    config = Eagle3Config.from_target(target, **options)
    embeddings = torch.zeros(300, config.hidden_size) if "hidden_size" in overrides else input_embeddings(target)
    draft = Eagle3Draft(config, embeddings, torch.Generator().manual_seed(0))
    return draft, target, start_like_target(draft, target, VOCAB)


@pytest.mark.parametrize("make", [llama, qwen3, gemma3, deepseek_v3])
def test_the_deepest_layer_is_read_as_the_target_would(make: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Its own head over its own norm, but for one factor; Gemma keeps its norm's weights less one."""
    draft, target, changed = started(tmp_path, make())
    assert changed
    aux = torch.randn(40, 3 * target.hidden_size)
    deepest = aux[:, -target.hidden_size :]
    ours = draft.lm_head(draft.norm(draft.fuse(aux)))
    theirs = FinalNorm.load(target)(deepest) @ Head.load(target).weight[VOCAB.target_ids].float().T
    factor = (ours * theirs).sum() / theirs.pow(2).sum()
    assert factor > 0
    torch.testing.assert_close(ours, factor * theirs, rtol=1e-4, atol=1e-4)


def test_directions_are_taken_over_and_sizes_are_not(tmp_path: Path) -> None:
    draft, _, _ = started(tmp_path, llama(initializer_range=1.0))
    assert float(draft.lm_head.weight.detach().pow(2).sum(-1).mean()) == pytest.approx(1.0, rel=1e-5)
    assert float(draft.norm.weight.detach().pow(2).mean()) == pytest.approx(1.0, rel=1e-5)


def test_the_layer_stays_as_it_was_drawn(tmp_path: Path) -> None:
    draft, _, _ = started(tmp_path, llama())
    drawn = Eagle3Draft(draft.config, draft.embed_tokens, torch.Generator().manual_seed(0))
    for name, parameter in drawn.midlayer.named_parameters():
        assert torch.equal(parameter, draft.midlayer.get_parameter(name)), name


def test_a_norm_that_is_no_rms_norm_is_not_taken_over(tmp_path: Path) -> None:
    """Cohere's subtracts the mean."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = CohereForCausalLM(CohereConfig(vocab_size=300, num_hidden_layers=4, **sizes))
    draft, _, changed = started(tmp_path, model)
    assert changed
    assert torch.equal(draft.norm.weight, torch.ones(32))


def test_a_model_that_transformers_does_not_know_lends_its_head_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "text_config", lambda _: None)
    draft, _, changed = started(tmp_path, llama())
    assert changed
    assert torch.equal(draft.norm.weight, torch.ones(32))


def test_a_draft_of_another_width_stays_as_it_was_drawn(tmp_path: Path) -> None:
    draft, _, changed = started(tmp_path, llama(), hidden_size=16)
    assert not changed
    drawn = Eagle3Draft(draft.config, draft.embed_tokens, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(drawn.parameters(), draft.parameters(), strict=True))
