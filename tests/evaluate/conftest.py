"""A tiny target, a store of its own greedy answers, and a drafter trained on them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from eyas.config import TrainConfig, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.evaluate.decode import Sampling, TargetModel, decode_plainly
from eyas.extract.runner import extract
from eyas.train.run import train
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

PROMPT = 6
QUIET = Console(file=io.StringIO())


class Tiny(NamedTuple):
    """Attributes: root: holds model/, corpus.parquet, store/ (bf16), exact/ (float32) and run/ (the training's)."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.parquet"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def run(self) -> Path:
        return self.root / "run"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = Tiny(tmp_path_factory.mktemp("evaluated"))
    tiny_llama(made.model, hidden_size=32)
    rng, model = np.random.default_rng(0), AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32)
    meta = CorpusMeta(model=str(made.model), tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)
    with CorpusWriter(made.corpus, meta) as writer, TargetModel(model, (), 4) as target:
        for row in range(36):
            prompt = rng.integers(6, VOCAB_SIZE, PROMPT).tolist()
            answer = decode_plainly(target, prompt, Sampling(max_new_tokens=int(rng.integers(8, 20))))
            mask = [0] * PROMPT + [1] * len(answer)
            writer.add(str(row), [*prompt, *answer], mask, source="even" if row % 2 == 0 else "odd")
    for name, dtype in (("store", "bf16"), ("exact", "f32")):
        words = ["extract.engine=hf", "store.reserve_bytes=0", "store.shard_bytes=80KB", f"capture.dtype={dtype}"]
        extract(made.corpus, made.root / name, cfg=load(overrides=words), console=QUIET)
    settings = {"steps": 3, "batch_tokens": 128, "epochs": 20, "lr": 3e-3, "eval_share": 0.25, "eval_every": 10_000}
    places = {"store": made.store, "corpus": made.corpus, "out": made.run}
    train(TrainConfig(**settings, **places, vocab_coverage=1.0, dtype="f32", device="cpu"), console=QUIET)
    return made
