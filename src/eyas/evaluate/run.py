"""`eyas evaluate` without a server: simulation on a store, or decoding of questions in this process."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from rich.console import Console

from eyas.capture.contract import field_hash, token_hash
from eyas.config import EvaluateConfig
from eyas.data.corpus import Corpus
from eyas.data.template import Template
from eyas.errors import ConfigError, Interrupted
from eyas.evaluate.conversation import Conversations
from eyas.evaluate.decode import Sampling, TargetModel, decode
from eyas.evaluate.drafting import Drafting
from eyas.evaluate.head import Head, load_drafter
from eyas.evaluate.journal import Journal
from eyas.evaluate.progress import PromptsView
from eyas.evaluate.questions import benchmark_of, digest_of, read_questions
from eyas.evaluate.results import Evaluation, PromptCounts, by_category, without_secrets
from eyas.evaluate.walk import answers, walk
from eyas.extract.hf import load_model, torch_device
from eyas.signals import StopSignals
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import DraftCheckpoint
from eyas.train.sampler import is_held_out

_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_NO_CATEGORY: Final = "none"
#: Fields of an evaluation that its counts depend on.
_COUNTED: Final = (
    "head", "head_digest", "target", "engine", "depth", "topk", "draft_tokens", "prompts_digest", "sampling",
    "versions",
)  # fmt: skip


class Evaluated(NamedTuple):
    """An evaluation and the file that keeps it."""

    evaluation: Evaluation
    path: Path


class _Setting(NamedTuple):
    """What both ways need."""

    head: Head
    cfg: EvaluateConfig
    plan: Drafting
    target: Target
    console: Console
    command: str

    @property
    def device(self) -> torch.device:
        return torch_device(self.cfg.device)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.cfg.dtype]

    def read_from(self, checkpoint: DraftCheckpoint) -> _Setting:
        """With the folder that the drafter was read from: that of a hub id is known only then."""
        return self._replace(head=dataclasses.replace(self.head, model=str(checkpoint.folder)))


def evaluate(draft: str | Path, cfg: EvaluateConfig, *, console: Console | None = None, command: str = "") -> Evaluated:
    """Measure a drafter offline; the file goes to `cfg.out`, else the drafter's run, else the current folder.

    One that was stopped goes on where it was.

    Args:
        draft: its folder, its run's, or a hub id.
        cfg: `store` or `questions` must be named, not both.
        console: where progress goes.
        command: kept in the file.

    Raises:
        ConfigError: settings, or inputs that do not belong together.
        StoreError, IntegrityError: the store or the disk. EngineError: the target cannot be loaded.
        Interrupted: Ctrl-C or SIGTERM.
    """
    if (cfg.store is None) == (cfg.questions is None):
        hint = "--store STORE simulates, --questions FILE decodes, --server URL asks a server"
        raise ConfigError("one thing to measure on must be named", "eyas evaluate", hint)
    if cfg.sample_drafts and not cfg.temperature:
        raise ConfigError("sampled drafts need a temperature", "evaluate.sample_drafts", "set evaluate.temperature")
    drafts_by = cfg.temperature if cfg.sample_drafts else 0.0
    plan = dataclasses.replace(Drafting.of(cfg.depth, cfg.topk, cfg.draft_tokens, drafts_by), keys=cfg.tree_keys)
    head = Head.find(str(draft))
    console = console or Console(stderr=True)
    with StopSignals():
        corpus = Corpus.open(path) if (path := head.corpus(cfg.corpus)) else None
        target = head.target(cfg.target, corpus.meta.model if corpus else None)
        setting = _Setting(head, cfg, plan, target, console, command)
        return _simulate(setting, corpus) if cfg.store is not None else _decode(setting)


# --- on a store -------------------------------------------------------------------------------------------------------


def _simulate(setting: _Setting, corpus: Corpus | None) -> Evaluated:
    cfg, target = setting.cfg, setting.target
    assert cfg.store is not None
    if cfg.temperature:
        hint = "the store's text is what was written; --questions decodes at a temperature"
        raise ConfigError("a simulation has no temperature", "evaluate.temperature", hint)
    reader = StoreReader(cfg.store)
    if cfg.corpus is None and corpus is not None and corpus.digest != reader.info.corpus["digest"]:
        corpus = None  # the run's, and nobody said that this store is of it
    _check_store(reader, corpus, target)
    drafter, checkpoint = load_drafter(setting.head, target, setting.device, setting.dtype)
    setting = setting.read_from(checkpoint)
    columns = _columns(reader.spec.layers, drafter.config.aux_layers, cfg.store)
    is_trained_on = checkpoint.vocab.corpus_digest == reader.info.corpus["digest"]
    bare = StoreReader(cfg.store, raw=True)  # for what is not states: quantised ones stay as they are
    chosen, note = _rows(bare, setting, is_trained_on)
    prompts, rows = hashlib.sha256(), hashlib.sha256()
    for index in chosen:
        row = bare[index]
        start = next(iter(answers(row.loss_mask.numpy())), (0, 0))[0]
        prompts.update(token_hash(row.tokens[:start].tolist()).encode())
        source = corpus[row.row].source if corpus else ""
        rows.update(json.dumps([row.row, len(row.tokens), source]).encode())
        rows.update(row.tokens.numpy().tobytes() + row.loss_mask.numpy().tobytes())

    def counts(index: int) -> PromptCounts:
        row = reader[index]
        read = dataclasses.replace(row, aux=row.aux[:, columns]) if columns else row
        cycles = walk(drafter, read, setting.plan)
        source = corpus[row.row].source if corpus else ""
        return PromptCounts(source or _NO_CATEGORY, int(row.loss_mask.sum()), cycles)

    head = _evaluation(setting, "store", "offline-simulated", cfg.store.resolve().name, prompts.hexdigest()[:32])
    key = {"drafter": repr(drafter.config), "rows": rows.hexdigest(), "spec": repr(reader.spec)}
    key |= {"corpus": reader.info.corpus["digest"], "provenance": reader.provenance}
    return _finish(setting, head, chosen, counts, key, [note] if note else [])


def _rows(reader: StoreReader, setting: _Setting, is_trained_on: bool) -> tuple[list[int], str]:
    """Which rows, and what a reader should know about them."""
    cfg, everything = setting.cfg, range(len(reader))
    share, note = cfg.held_out, ""
    if share is None and is_trained_on:
        share = setting.head.settings.get("eval_share") or 0.0
        if not share:
            note = "the drafter was trained on this corpus, and which rows it did not see is not known"
    chosen = list(everything)
    if share and share < 1:
        hashes = np.array([field_hash(reader[i].tokens.numpy().tobytes()) for i in everything], dtype=np.uint64)
        chosen = np.flatnonzero(is_held_out(hashes, share)).tolist()
        note = f"{len(chosen):,} of {len(everything):,} rows, those that training with eval_share {share:g} holds out"
        if not chosen:
            raise ConfigError(f"a share of {share:g} of {len(everything)} rows holds none out", "evaluate.held_out")
    return chosen[: cfg.limit], note


def _check_store(reader: StoreReader, corpus: Corpus | None, target: Target) -> None:
    info = reader.info
    if corpus is not None and info.corpus["digest"] != corpus.digest:
        what = f"the store is of corpus {info.corpus['digest'][:8]}, not of {corpus.digest[:8]}"
        raise ConfigError(what, reader.path, "name the corpus that it was extracted from")
    mine = target.fingerprint()
    if mine is not None and info.spec.model and mine != info.spec.model:
        what = f"the store was captured from another model than {target.model}"
        raise ConfigError(what, reader.path, f"name it by --target; its fingerprint is {info.spec.model[:8]}")


def _columns(stored: tuple[int, ...], read: tuple[int, ...], store: Path) -> list[int]:
    """Where the drafter's layers lie among the stored ones; empty where they are all of them."""
    if missing := [layer for layer in read if layer not in stored]:
        what = f"the drafter reads layers {list(read)}, the store holds {list(stored)}"
        raise ConfigError(what, store, f"capture layer {missing[0]} too")
    return [] if read == stored else [stored.index(layer) for layer in read]


# --- in this process --------------------------------------------------------------------------------------------------


def _decode(setting: _Setting) -> Evaluated:
    cfg, target = setting.cfg, setting.target
    assert cfg.questions is not None
    questions = read_questions(cfg.questions, cfg.limit)
    template = Template.load(str(target.dir))
    drafter, checkpoint = load_drafter(setting.head, target, setting.device, setting.dtype)
    setting = setting.read_from(checkpoint)
    model = load_model(target, setting.device, cfg.dtype)
    sampling = Sampling(cfg.temperature, cfg.max_new_tokens, template.end_ids)
    with TargetModel(model, drafter.config.aux_layers, target.num_layers) as watched:
        room = None if watched.longest is None else watched.longest - sampling.max_new_tokens - setting.plan.depth

        def counts(number: int) -> PromptCounts:
            """All turns of a question, as far as the target has positions for them."""
            question = questions[number]
            generator = torch.Generator(setting.device).manual_seed(cfg.seed * 1_000_003 + number)
            conversations = Conversations(template, room, f"the target's {watched.longest or 0:,} tokens")
            talk, decoded = conversations.begin(number, question), []
            while (prompt := talk.prompt) is not None:
                found = decode(watched, drafter, setting.plan, list(prompt.ids), sampling, generator)
                decoded.append(found)
                talk.answer(found.tokens)
            return PromptCounts(
                question.category,
                sum(len(found.tokens) for found in decoded),
                [cycle for found in decoded for cycle in found.cycles],
                [count for found in decoded for count in found.accepted],
                conversations.left_out,
            )

        benchmark = benchmark_of(cfg.questions)
        head = _evaluation(setting, "transformers", "offline-decoded", benchmark, digest_of(questions))
        key = {"drafter": repr(drafter.config), "categories": [(one.id, one.category) for one in questions]}
        key |= {"template": template.template_hash, "tokenizer": template.tokenizer_hash}
        return _finish(setting, head, range(len(questions)), counts, key, [])


# --- both -------------------------------------------------------------------------------------------------------------


def _evaluation(setting: _Setting, engine: str, mode: Any, benchmark: str, prompts_digest: str) -> Evaluation:
    """The evaluation without its results."""
    cfg, plan = setting.cfg, setting.plan
    decoded = {
        "temperature": cfg.temperature,
        "seed": cfg.seed,
        "max_new_tokens": cfg.max_new_tokens,
        "sample_drafts": cfg.sample_drafts,
    }
    return Evaluation(
        head=setting.head.name,
        head_digest=setting.head.digest(),
        target=setting.target.model,
        engine=engine,
        mode=mode,
        benchmark=benchmark,
        depth=plan.depth,
        topk=plan.topk,
        draft_tokens=plan.tokens,
        prompts_digest=prompts_digest,
        sampling=decoded if mode == "offline-decoded" else {"temperature": None},
        versions={
            "eyas": importlib.metadata.version("eyas"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        command=without_secrets(setting.command),
        results=(),
    )


def _finish(
    setting: _Setting,
    head: Evaluation,
    numbers: Any,
    counts: Callable[[int], PromptCounts],
    key: Mapping[str, Any],
    notes: list[str],
) -> Evaluated:
    """Count prompt after prompt, as far as an earlier session did not, and write the file.

    `key` is what the counts depend on besides the evaluation's own fields.
    """
    folder = setting.cfg.out or setting.head.run or Path()
    fields = dataclasses.asdict(head)
    settings = {name: fields[name] for name in _COUNTED} | {"device": setting.device.type, "dtype": setting.cfg.dtype}
    settings |= {"keys": setting.plan.keys, "fingerprint": setting.target.fingerprint(), **key}
    with Journal(head.path_in(folder), settings) as journal:
        if journal.done:
            text = f"goes on: {len(journal.done):,} of {len(numbers):,} are done"
            setting.console.print(text, highlight=False, soft_wrap=True)
        try:
            for number in _shown(setting.console, [n for n in numbers if n not in journal.done], len(numbers)):
                journal.add(number, counts(number))
        except KeyboardInterrupt:
            what = f"stopped, {len(journal.done):,} of {len(numbers):,} done"
            raise Interrupted(what, journal.path, "the same command goes on") from None
        prompts = [journal.done[number] for number in numbers]
        results = by_category(prompts, setting.plan.depth, setting.cfg.seed)
        if not results[0].cycles:
            raise ConfigError("no answer of two tokens or more: nothing was drafted", head.benchmark)
        told = (*notes, *(note for prompt in prompts for note in prompt.notes))
        done = dataclasses.replace(head, results=results, notes=told)
        path = done.write(folder)
        journal.finish()
    return Evaluated(done, path)


def _shown(console: Console, numbers: list[int], total: int) -> Iterator[int]:
    """The numbers, told as they are done."""
    with PromptsView(console) as view:
        view.count(total - len(numbers), total)
        for done, number in enumerate(numbers, total - len(numbers) + 1):
            yield number
            view.count(done, total)
