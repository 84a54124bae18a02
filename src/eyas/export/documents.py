"""Texts that a drafter is tried on: rows of a store that were held out, or the target's own answers to questions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eyas.config import ExportConfig
from eyas.data.template import Template
from eyas.errors import ConfigError
from eyas.export.evidence import SHIFTS
from eyas.export.replay import Document
from eyas.extract.hf import hidden_states, load_model
from eyas.store.documents import read_store_info
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from eyas.train.batch import Batch, Sample, pack
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling
from eyas.train.start import final_gain

_BUDGET: Final = 8192  # positions read of the store at once; longer rows are cut
_EVEN_SHARE: Final = 0.5  # of a store without rows held out, that one looks among


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents and where they come from.

    Attributes:
        documents: with the states of the drafter's layers.
        source: in words.
        dtype: that the states were stored or computed in, a key of `compare.TOLERANCE`.
        held_out: whether the drafter was never trained on them.
        others: name of an alternative -> the same documents with states of other layers.
    """

    documents: Sequence[Document]
    source: str
    dtype: str
    held_out: bool
    others: Mapping[str, Sequence[Document]] = field(default_factory=dict)


# --- from a store -----------------------------------------------------------------------------------------------------


def of_store(store: Path, target: Target, cfg: ExportConfig, held_out: float, longest: int = _BUDGET) -> Texts:
    """Rows that were held out of training, each up to `cfg.answer_tokens` beyond its prompt.

    Args:
        store: of the target.
        target: for its lm_head and the gain of its final norm.
        cfg: how many, how long.
        held_out: share of the rows that training kept for evaluation; 0 where it kept none.
        longest: rows were cut to so many tokens in training.

    Raises:
        StoreError, IntegrityError: the store. ConfigError: the target has no lm_head that can be read.
    """
    info = read_store_info(store)
    kept: list[Sample] = []

    def keep(samples: Sequence[Sample]) -> Batch:
        kept.extend(_copied(sample, cfg.answer_tokens) for sample in samples)
        return pack(samples, steps=1)

    sampling = Sampling(budget=min(_BUDGET, longest), held_out=held_out or _EVEN_SHARE)
    reading = Reading(threads=0, prefetch=1, pin=False, eval_rows=cfg.documents)
    with TrainReader(store, sampling, keep, reading=reading) as reader, reader.evaluation() as batches:
        for _ in batches:
            if len(kept) >= cfg.documents:
                break
    documents = _of_samples(kept[: cfg.documents], Head.load(target), final_gain(target))
    kind = "rows held out of training" if held_out else "rows of the store"
    return Texts(documents, f"{len(documents)} {kind}", info.spec.dtype, held_out > 0)


def _copied(sample: Sample, answer: int) -> Sample:
    """A row up to its first answer's so many tokens, in memory of its own."""
    trained = torch.nonzero(sample.loss_mask)[:, 0]
    length = min(len(sample.tokens), int(trained[0]) + answer) if len(trained) else 0
    kept = sample.last_index < length
    return Sample(
        sample.row,
        sample.tokens[:length].clone(),
        sample.loss_mask[:length].clone(),
        sample.aux[:length].clone(),
        sample.last[kept].clone(),
        sample.last_index[kept].clone(),
    )


def _of_samples(samples: Sequence[Sample], head: Head, gain: Tensor | None) -> list[Document]:
    if not samples:
        return []
    last, counts = torch.cat([sample.last for sample in samples]), [len(sample.last) for sample in samples]
    best = head.best(last).split(counts)
    before = [torch.full((count,), -1) for count in counts]
    if gain is not None and bool((gain != 0).all()):
        # RMS scales a state as a whole, which changes no argmax: less the gain it is the state before the norm.
        before = head.best(last.float() / gain).split(counts)
    return [_of_sample(*parts) for parts in zip(samples, best, before, strict=True)]


def _of_sample(sample: Sample, best_L: Tensor, before_L: Tensor) -> Document:
    best, before = (torch.full((len(sample.tokens),), -1) for _ in range(2))
    last = sample.last.new_zeros(len(sample.tokens), sample.last.shape[1])
    for whole, part in ((best, best_L), (before, before_L), (last, sample.last)):
        whole[sample.last_index] = part
    return Document(sample.tokens, sample.loss_mask, sample.aux, last, best, before)


# --- by the target ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """The target's greedy answers, and the target to take states from.

    Attributes:
        target: the checkpoint. model: as transformers loaded it.
        texts: token ids of question and answer, and where the answer starts.
    """

    target: Target
    model: PreTrainedModel
    texts: tuple[tuple[tuple[int, ...], int], ...]

    @classmethod
    def to(cls, path: Path, target: Target, cfg: ExportConfig) -> Self:
        """Answer the first turns of questions.

        Args:
            path: question.jsonl in EAGLE's layout: `turns` is a list of texts.
            target: is loaded by transformers.
            cfg: how many, how long, on what device.

        Raises:
            ConfigError: the file. EngineError: the target cannot be loaded.
        """
        prompts = read_questions(path, cfg.documents)
        template = Template.load(target.model, trust_remote_code=target.trust_remote_code)
        model = load_model(target, cfg.device, cfg.target_dtype)
        texts = []
        for prompt in prompts:
            ids = template.prompt_ids([{"role": "user", "content": prompt}])
            tokens = _answered(model, ids, template.end_ids, cfg.answer_tokens)
            if len(tokens) >= len(ids) + 2:  # nothing is drafted from a shorter answer
                texts.append((tuple(tokens), len(ids)))
        return cls(target, model, tuple(texts))

    def with_states(self, layers: Sequence[int]) -> Texts:
        """The texts with the states of these layers, and of their neighbours as alternatives."""
        count = self.target.num_layers
        shifts = {name: by for name, by in SHIFTS.items() if layers[-1] + by < count}
        wanted = sorted({layer + by for layer in layers for by in (0, *shifts.values())} | {count - 1})
        documents: list[Document] = []
        others: dict[str, list[Document]] = {name: [] for name in shifts}
        for tokens, start in self.texts:
            states, last = hidden_states(self.model, tokens, wanted)
            plain = _answer(self.model, tokens, start, states[count - 1], last)
            documents.append(plain(_aux(states, layers)))
            for name, by in shifts.items():
                others[name].append(plain(_aux(states, [layer + by for layer in layers])))
        dtype = {torch.float32: "f32", torch.float16: "f16"}.get(self.model.dtype, "bf16")
        return Texts(documents, f"the target's answers to {len(documents)} questions", dtype, True, others)


def read_questions(path: Path, limit: int) -> list[str]:
    """First turns of the first so many questions.

    Raises:
        ConfigError: no such file, or a line that is no question.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read the questions", path, getattr(error, "strerror", None) or "not UTF-8") from error
    found: list[str] = []
    for number, line in enumerate(lines, 1):
        if len(found) == limit:
            break
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            turn = question["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError):
            turn = None
        if not isinstance(turn, str):
            raise ConfigError("not a question", f"{path}:{number}", 'a line is {"question_id": 1, "turns": ["..."]}')
        found.append(turn)
    if not found:
        raise ConfigError("no questions", path)
    return found


def _answered(model: PreTrainedModel, prompt: Sequence[int], ends: frozenset[int], longest: int) -> list[int]:
    """Prompt and greedy answer, its end token included."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    generate: Any = model.generate
    with torch.inference_mode():
        out = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends),
        )
    return out[0].tolist()


def _answer(
    model: PreTrainedModel, tokens: Sequence[int], start: int, before_norm: Tensor, last: Tensor
) -> functools.partial[Document]:
    """A document but for its aux."""
    loss_mask = torch.arange(len(tokens)) >= start
    found = []
    for states in (last, before_norm):
        best = torch.full((len(tokens),), -1)
        head: Any = model.get_output_embeddings()
        if head is not None:
            with torch.inference_mode():
                best[start:] = head(states[start:].to(head.weight.dtype)).argmax(-1).cpu()
        found.append(best)
    ids = torch.tensor(list(tokens))
    return functools.partial(_document, ids, loss_mask, last.cpu(), found[0], found[1])


def _document(tokens: Tensor, loss_mask: Tensor, last: Tensor, best: Tensor, before: Tensor, aux: Tensor) -> Document:
    return Document(tokens, loss_mask, aux, last, best, before)


def _aux(states: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    return torch.cat([states[layer].cpu() for layer in layers], dim=-1)
