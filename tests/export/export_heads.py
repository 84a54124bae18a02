"""A tiny target whose texts can be learned, a run that trained a drafter on them, and heads with faults."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.config import TrainConfig, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.export.probe import PROBE
from eyas.export.record import Record, tensors_digest, with_record
from eyas.extract.runner import extract
from eyas.train.layer_ids import KEY
from eyas.train.run import train
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

Raw = dict[str, Any]
Tensors = dict[str, torch.Tensor]
ROWS, PROMPT, ANSWER = 360, 6, 24
SPOKEN = 64  # tokens that the target ever emits: few enough to be learned in seconds
QUIET = Console(file=io.StringIO())
TRAINING: dict[str, Any] = {
    "dtype": "f32",
    "vocab_coverage": 1.0,
    "steps": 3,
    "batch_tokens": 1024,
    "epochs": 5,
    "lr": 1e-2,
    "eval_share": 0.1,
    "eval_every": 1000,
    "save_every": 1000,
    "readers": 0,
    "device": "cpu",
}


def make_target(folder: Path) -> Path:
    """Eight layers of 32; its final norm decides often, and only the tokens 6 to 63 are emitted."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(folder, hidden_size=32))
    with torch.no_grad():
        model.lm_head.weight[SPOKEN:] = 0
        model.lm_head.weight[:6] = 0
        model.model.norm.weight.copy_(torch.linspace(0.2, 3.0, 32)[torch.randperm(32, generator=_seed(3))])
    model.save_pretrained(folder)
    return folder


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_corpus(folder: Path, target: Path) -> Path:
    """Greedy answers to random prompts."""
    model = AutoModelForCausalLM.from_pretrained(target)
    prompts = torch.from_numpy(np.random.default_rng(0).integers(6, SPOKEN, (ROWS, PROMPT)))
    with torch.inference_mode():
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=False,
            pad_token_id=2,
        )
    meta = CorpusMeta(model=str(target), tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)
    with CorpusWriter(folder / "corpus.parquet", meta) as writer:
        for row, text in enumerate(texts.numpy()):
            writer.add(str(row), text, np.arange(len(text)) >= PROMPT)
    return folder / "corpus.parquet"


def make_store(corpus: Path, store: Path, target: Path) -> Path:
    cfg = load(overrides=["extract.engine=hf", "store.reserve_bytes=0"])
    extract(corpus, store, cfg=cfg, model=str(target), console=QUIET)
    return store


def make_run(out: Path, store: Path, corpus: Path, target: Path, **changes: Any) -> Path:
    places = {"store": store, "corpus": corpus, "target": str(target), "out": out}
    train(TrainConfig(**{**TRAINING, **places, **changes}), console=QUIET)
    return out


def changed(
    folder: Path,
    config: Callable[[Raw], Raw] = dict,
    tensors: Callable[[Tensors], Tensors] = dict,
) -> Path:
    """Another version of a draft's folder, in its place."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def foreign(folder: Path) -> Path:
    """The same head as a peer would publish it: no record, no probe, ids in SGLang's place and vLLM's."""
    layers = json.loads((folder / "config.json").read_text())["eyas"]["aux_layers"]
    shutil.rmtree(folder / "eyas", ignore_errors=True)
    changed(folder, lambda raw: {key: value for key, value in raw.items() if key != "eyas"})
    return with_ids(folder, layers)


def with_ids(folder: Path, layers: Sequence[int]) -> Path:
    """Layer ids written out in both places, of these layers' outputs."""
    ids = {"eagle_config": {"use_aux_hidden_state": True, KEY: list(layers)}, KEY: [layer + 1 for layer in layers]}
    return changed(folder, lambda raw: raw | ids)


def shifted(by: int) -> Callable[[Path], Path]:
    """Ids off by one, in both places alike."""

    def change(folder: Path) -> Path:
        raw = json.loads((folder / "config.json").read_text())
        layers = raw["eagle_config"].get(KEY) or raw["eyas"]["aux_layers"]
        return with_ids(folder, [layer + by for layer in layers])

    return change


def resealed(folder: Path) -> Path:
    """The record made anew, as a tool that got it wrong from the start would have written it."""
    raw = json.loads((folder / "config.json").read_text())
    record = Record.of(raw, folder)
    assert record is not None
    if "aux_layers" in raw["eyas"] and KEY in raw:
        raw["eyas"]["aux_layers"] = [layer - 1 for layer in raw[KEY]]
    probe = folder / PROBE
    sealed = with_record(
        raw,
        spec_id=record.spec_id,
        target=record.target,
        tensors=tensors_digest(load_file(folder / "model.safetensors")),
        probe=probe.read_bytes() if probe.is_file() else None,
    )
    (folder / "config.json").write_text(json.dumps(sealed))
    return folder
