"""A real model: decoding by drafting is lossless on a slice of MT-bench's kind of questions, and a walk agrees with it.

`benchmarks/lossless.py` does the first on whole benchmarks.
"""

from __future__ import annotations

import fcntl
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from eyas.acceptance import acceptance, cycle_counts
from eyas.config import TrainConfig, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.data.template import Template
from eyas.evaluate.decode import Decoded, Sampling, TargetModel, decode, decode_plainly
from eyas.evaluate.drafting import Drafter, Drafting
from eyas.evaluate.head import Head, load_drafter
from eyas.evaluate.walk import walk
from eyas.extract.hf import load_model
from eyas.extract.runner import extract
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import CONFIG_FILE
from eyas.train.run import DRAFT, train

pytestmark = pytest.mark.slow

DECODED, LONGEST, TIE = 5, 24, 1e-4
THINGS = ("tea", "the moon", "bees", "a bicycle", "rain", "bread", "the heart", "maps", "salt", "a lighthouse")
QUESTIONS = [f"{asks} {thing}." for thing in THINGS for asks in ("Tell me in one sentence about", "List three uses of")]
SAMPLING = Sampling(max_new_tokens=LONGEST)


class Made(NamedTuple):
    """A store of greedy answers in float32, a drafter that a few seconds trained on them, and the target."""

    root: Path
    prompts: list[list[int]]
    model: PreTrainedModel
    drafter: Drafter
    target: Target


@pytest.fixture(scope="module")
def made(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    template, target = Template.load(str(smollm2_dir)), Target.load(str(smollm2_dir))
    prompts = [template.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]
    model = load_model(target, "cpu", "f32")
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2-head"
    root.mkdir(exist_ok=True)
    with (root / "lock").open("w") as lock:  # files of other workers use it too: the first one makes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "run" / DRAFT / CONFIG_FILE).is_file():
            train_head(root, model, target, template.tokenizer_hash, prompts)
    drafter, _ = load_drafter(Head.find(str(root / "run")), target, torch.device("cpu"), torch.float32)
    return Made(root, prompts, model, drafter, target)


def train_head(
    root: Path, model: PreTrainedModel, target: Target, tokenizer_hash: str, prompts: list[list[int]]
) -> None:
    """`root` with corpus.parquet, store/ and run/."""
    quiet = Console(file=io.StringIO())
    meta = CorpusMeta(
        model=str(target.dir), tokenizer_hash=tokenizer_hash, template_hash="", vocab_size=target.vocab_size
    )
    with CorpusWriter(root / "corpus.parquet", meta) as writer:
        for number, (prompt, answer) in enumerate(zip(prompts, answers(model, prompts), strict=True)):
            writer.add(str(number), [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
    words = ["extract.engine=hf", "store.reserve_bytes=0", "extract.model_dtype=f32"]
    extract(root / "corpus.parquet", root / "store", cfg=load(overrides=words), console=quiet)
    settings: dict[str, Any] = {"steps": 3, "vocab_size": 512, "batch_tokens": 512, "epochs": 60, "max_steps": 24}
    places = {"store": root / "store", "corpus": root / "corpus.parquet", "out": root / "run"}
    free = {"eval_share": 0.0, "lr": 3e-3, "dtype": "f32", "device": "cpu", "readers": 0}
    train(TrainConfig(**settings, **places, **free), console=quiet)


def answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, all at once, padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
    with torch.inference_mode():
        whole = model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False, eos_token_id=None
        )
    return whole[:, width:].tolist()


@pytest.fixture(scope="module")
def decoded(made: Made) -> list[Decoded]:
    with TargetModel(made.model, made.drafter.config.aux_layers, made.target.num_layers) as target:
        return [decode(target, made.drafter, Drafting.of(3), prompt, SAMPLING) for prompt in made.prompts[:DECODED]]


def test_greedy_decoding_by_drafting_is_the_targets_own_text(made: Made, decoded: list[Decoded]) -> None:
    with TargetModel(made.model, made.drafter.config.aux_layers, made.target.num_layers) as target:
        plain = [decode_plainly(target, prompt, SAMPLING) for prompt in made.prompts[:2]]
        for prompt, tokens, found in zip(made.prompts, plain, decoded, strict=False):
            if tokens == found.tokens:
                continue
            at = next(i for i, pair in enumerate(zip(tokens, found.tokens, strict=True)) if len(set(pair)) > 1)
            target.reset()
            best = target.prefill([*prompt, *tokens[:at]]).logits[-1].topk(2)
            assert float(best.values[0] - best.values[1]) <= TIE, f"{prompt} parts at {at}, and not at a tie"
            assert set(best.indices.tolist()) == {tokens[at], found.tokens[at]}


def test_the_walk_over_the_store_agrees_with_decoding_within_three_per_cent(made: Made, decoded: list[Decoded]) -> None:
    """On the same prompts. The store keeps bfloat16, decoding has float32: a draft may differ at a near tie."""
    rows = [*StoreReader(made.root / "store")][:DECODED]
    for row, prompt, found in zip(rows, made.prompts, decoded, strict=False):
        assert row.tokens.tolist() == [*prompt, *found.tokens], "another text: there is nothing to compare"
    walked = length([walk(made.drafter, row, Drafting.of(3)) for row in rows])
    assert walked > 1.3, "hardly a draft was accepted: the test sees little"
    assert walked == pytest.approx(length([found.cycles for found in decoded]), rel=0.03)


def length(cycles: list[list[tuple[int, int]]]) -> float:
    counts = [cycle_counts(one, 3) for one in cycles]
    return acceptance(np.array([one[0] for one in counts]), np.array([one[1] for one in counts])).length
