"""A run that starts from a published draft: its weights, its vocabulary, and what must agree with the store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import make_inputs, run, settings

from eyas.errors import ConfigError
from eyas.target.embeddings import input_embeddings
from eyas.train import layer_ids
from eyas.train.checkpoint_format import DraftCheckpoint, save_checkpoint
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.run import Inputs, make_objective, starting_point
from eyas.train.vocab import DraftVocab


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=12)


@pytest.fixture
def published(inputs: Path, tmp_path: Path) -> Path:
    """A draft for the target, trained on another corpus with a smaller vocabulary; it has fc_norm."""
    found = Inputs.open(settings(inputs, tmp_path / "unused"))
    target = found.target
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size, "e" * 32)
    shape = Eagle3Config.from_target(
        target, aux_layers=found.info.spec.layers, draft_vocab_size=len(vocab), fc_norm=True, intermediate_size=40
    )
    draft = Eagle3Draft(shape, input_embeddings(target), torch.Generator().manual_seed(9))
    save_checkpoint(tmp_path / "draft", shape, draft.state_dict(), vocab, target, dtype=torch.float32)
    return tmp_path / "draft"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_its_weights_and_vocabulary_are_where_the_run_starts(inputs: Path, published: Path, tmp_path: Path) -> None:
    cfg = settings(inputs, tmp_path / "run", init_from=str(published), max_steps=1, lr=1e-12, vocab_size=5)
    found = Inputs.open(cfg)
    start = DraftCheckpoint.load(published, found.target)
    summary = run(inputs, tmp_path / "run", init_from=str(published), max_steps=1, lr=1e-12, vocab_size=5)
    vocab = DraftVocab.load(tmp_path / "run" / "vocab.safetensors")
    assert torch.equal(vocab.target_ids, start.vocab.target_ids)
    assert vocab.corpus_digest == found.corpus.digest != start.vocab.corpus_digest
    ended = DraftCheckpoint.load(summary.draft, found.target)
    assert ended.config == start.config
    for name, tensor in start.tensors.items():
        assert torch.equal(ended.tensors[name], tensor.bfloat16()), name
    objective = make_objective(cfg, found, vocab)
    assert objective.draft.config.fc_norm
    assert all(torch.equal(objective.draft.state_dict()[name].float(), start.tensors[name]) for name in start.tensors)


def test_it_must_read_the_layers_that_the_store_holds(inputs: Path, published: Path, tmp_path: Path) -> None:
    """Layers are read by place, so that others would train, and draft, without a word."""
    cfg = settings(inputs, tmp_path / "run", init_from=str(published))
    found = Inputs.open(cfg)
    stored = found.info.spec.layers
    others = [stored[0] - 1, *stored[1:]]
    ids = layer_ids.to_config(others, found.target.num_layers, "llama")
    rewritten(published, lambda raw: raw | ids | {"eyas": {"aux_layers": others}})
    what = re.escape(f"the draft reads layers {others}, the store holds {list(stored)}")
    with pytest.raises(ConfigError, match=what):
        starting_point(cfg, found)
    believed = settings(inputs, tmp_path / "run", init_from=str(published), draft={"aux_layers": list(stored)})
    assert starting_point(believed, found).config.aux_layers == stored


def test_its_shape_is_that_of_the_weights(inputs: Path, published: Path, tmp_path: Path) -> None:
    cfg = settings(inputs, tmp_path / "run", init_from=str(published), draft={"intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"train\.draft\.intermediate_size beside train\.init_from"):
        starting_point(cfg, Inputs.open(cfg))


def test_another_tokenizers_vocabulary_is_refused(inputs: Path, published: Path, tmp_path: Path) -> None:
    facts = {"tokenizer_hash": "a" * 32, "corpus_digest": "e" * 32, "coverage": 1.0}
    rewritten(published, lambda raw: raw | {"eyas": raw["eyas"] | {"vocab": facts}})
    found = Inputs.open(settings(inputs, tmp_path / "run"))
    corpus = found.corpus
    start = starting_point(settings(inputs, tmp_path / "run", init_from=str(published)), found)
    corpus.meta = replace(corpus.meta, tokenizer_hash="b" * 32)
    with pytest.raises(ConfigError, match="tokenizer aaaaaaaa, the corpus of another"):
        start.vocab.bound_to(corpus)
