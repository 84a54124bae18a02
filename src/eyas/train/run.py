"""`train(cfg)`: from settings to a run's parts, and the drafter that it leaves.

OUT/vocab.safetensors   the draft vocabulary
OUT/checkpoints/        see `eyas.train.state`
OUT/events/             the log, one file a session
OUT/draft/              the drafter as servers load it: the best checkpoint's, or the last one's where none is best
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from safetensors.torch import load_file

from eyas.acceptance import Acceptance
from eyas.config import TrainConfig
from eyas.config.train import FREE
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, StoreError, TrainError
from eyas.events import versions
from eyas.rates import human_time
from eyas.signals import StopSignals
from eyas.store.documents import read_store_info
from eyas.store.files import disk_errors, lock_file, make_folder
from eyas.store.format import StoreInfo
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.target.head import Head
from eyas.train.batch import pack
from eyas.train.checkpoint_format import DraftCheckpoint, save_checkpoint
from eyas.train.distributed import Shared, World, open_world
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.loss import TeacherHead
from eyas.train.metrics import Recorder, settings_told
from eyas.train.objective import Objective, ObjectiveOptions
from eyas.train.optimizer import Schedule, make_adamw
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling
from eyas.train.start import start_like_target
from eyas.train.state import WEIGHTS, Checkpoints, Progress
from eyas.train.trainer import Parts, Trainer
from eyas.train.view import TrainView
from eyas.train.vocab import DraftVocab

VOCAB: Final = "vocab.safetensors"
DRAFT: Final = "draft"
CHECKPOINTS: Final = "checkpoints"
_LOCK: Final = "train.lock"
_DTYPES: Final = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """How a run ended.

    Attributes:
        steps, tokens: optimiser steps and positions of the whole run.
        seconds, tokens_per_s: of this session, evaluations and checkpoints included.
        accept_length, best_step: simulated acceptance length of the drafter that was written, and its step; None where
            nothing was evaluated.
        untrained: the one before the first step.
        acceptance: of the last evaluation in this session.
        draft: the drafter's folder.
    """

    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    accept_length: float | None
    best_step: int | None
    untrained: float | None
    acceptance: Acceptance | None
    draft: Path

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        speed = f"{self.tokens_per_s:,.0f} tokens/s over {human_time(self.seconds)}"
        lines = [
            ("steps", f"{self.steps:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("speed", speed if self.tokens_per_s else "nothing left to do"),
        ]
        if self.accept_length is not None:
            before = "" if self.untrained is None else f", untrained {self.untrained:.3f}"
            lines.append(("accepted", f"{self.accept_length:.3f} tokens a cycle at step {self.best_step:,}{before}"))
        return [*lines, ("draft", str(self.draft))]


def train(cfg: TrainConfig, *, console: Console | None = None) -> TrainSummary:
    """Train a drafter; the same call goes on where an earlier session of it was stopped or killed.

    Under torchrun each process calls it.

    Args:
        cfg: settings; `store`, `corpus` and `out` must be named.
        console: where progress goes.

    Raises:
        ConfigError: settings, inputs that do not belong together, or a checkpoint of other settings.
        StoreError, IntegrityError: the data, the checkpoints or the disk.
        TrainError: a loss that is no number, or a rank that is gone.
        Interrupted: Ctrl-C or SIGTERM, after saving.
    """
    for name in ("store", "corpus", "out"):
        if getattr(cfg, name) is None:
            raise ConfigError(f"no {name} is named", f"train.{name}", f"--{name}, or {name}: in section train")
    ending = threading.Event()

    def stop() -> None:
        if not ending.is_set():
            raise KeyboardInterrupt

    with (
        StopSignals() as signals,
        signals.heard_by(stop),
        open_world(cfg.device, timeout_s=cfg.timeout_s, ending=ending) as world,
    ):
        spoken = (console or Console(stderr=True)) if world.is_main else Console(file=io.StringIO())
        inputs = Inputs.open(cfg)
        with world.named(), _locked(cfg, world):
            try:
                return _train(cfg, inputs, world, signals, spoken)
            except torch.OutOfMemoryError as error:
                hint = "less train.batch_tokens and more train.accumulate, or train.checkpoint_activations=true"
                raise TrainError("out of memory", world.device, hint) from error


def _train(cfg: TrainConfig, inputs: Inputs, world: World, signals: StopSignals, console: Console) -> TrainSummary:
    assert cfg.out is not None
    torch.manual_seed(cfg.seed + world.rank)
    checkpoints = _checkpoints(cfg, inputs, world)
    latest = checkpoints.latest()
    vocab = _vocabulary(cfg, inputs, world, fresh=latest is None)
    objective = make_objective(cfg, inputs, vocab, world.device)
    shared = Shared(objective, world, cfg.parallel)
    optimizer = make_adamw(objective, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(make_reader(cfg, world, say))
        recorder = Recorder(cfg.out if world.is_main else None, _session(), board=cfg.tensorboard)
        stack.callback(recorder.close)
        progress = Progress(total=_total_steps(cfg, reader))
        if latest is not None:
            progress = checkpoints.load(latest, objective.draft, optimizer, world)
            reader.check(progress.data)
            say(f"resumed at step {progress.step:,} of about {progress.total:,}: {latest}")
        recorder.note(
            "start", step=progress.step, total=progress.total, ranks=world.size, device=str(world.device),
            parameters=objective.draft.num_parameters, draft_vocab=len(vocab),
            settings=settings_told(cfg, inputs.target), versions=versions(),
        )  # fmt: skip
        with TrainView(console, progress.total, progress.step) as view:
            parts = Parts(
                world, objective, shared, optimizer, make_schedule(cfg, progress.total),
                reader, checkpoints, recorder, view, signals,
            )  # fmt: skip
            trainer = Trainer(cfg, parts, progress)
            done = trainer.run()
        with world.main_first("write the drafter"), signals.heard_by(lambda: None):
            if world.is_main:
                _publish(cfg.out / DRAFT, checkpoints, objective.draft.config, vocab, inputs.target)
        recorder.note("end", step=done.step, tokens=done.tokens, accept_length=done.best, seconds=trainer.seconds)
    return TrainSummary(
        steps=done.step,
        tokens=done.tokens,
        seconds=trainer.seconds,
        tokens_per_s=trainer.tokens_now / trainer.seconds if trainer.tokens_now else 0.0,
        accept_length=done.best,
        best_step=done.best_step,
        untrained=done.untrained,
        acceptance=trainer.evaluated.acceptance if trainer.evaluated else None,
        draft=cfg.out / DRAFT,
    )


def _session() -> str:
    """A name for this session's log that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


# --- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is trained from, all of one kind."""

    info: StoreInfo
    corpus: Corpus
    target: Target

    @classmethod
    def open(cls, cfg: TrainConfig) -> Inputs:
        """Open store, corpus and target.

        Raises:
            ConfigError: one of them is absent or of another kind than the others. StoreError: no store.
        """
        assert cfg.store is not None and cfg.corpus is not None
        info, corpus = read_store_info(cfg.store), Corpus.open(cfg.corpus)
        if info.corpus["digest"] != corpus.digest:
            what = f"the store is of corpus {info.corpus['digest'][:8]}, not of {corpus.digest[:8]}"
            raise ConfigError(what, cfg.store, "name the corpus that it was extracted from")
        target = Target.load(cfg.target or corpus.meta.model)
        mine = target.fingerprint()
        if mine is not None and mine != info.spec.model:
            what = f"the store was captured from another model than {target.model}"
            hint = f"name it by --target; its fingerprint is {info.spec.model[:8]}, not {mine[:8]}"
            raise ConfigError(what, cfg.store, hint)
        if (target.vocab_size, target.hidden_size) != (info.spec.vocab_size, info.spec.hidden_size):
            what = f"{target.model} has other sizes than the model that the store was captured from"
            raise ConfigError(what, cfg.store, "name it by --target")
        return cls(info, corpus, target)


def make_objective(
    cfg: TrainConfig, inputs: Inputs, vocab: DraftVocab, device: torch.device | str = "cpu"
) -> Objective:
    """The drafter with its loss, on the device, weights drawn by the seed or read from `init_from`.

    Raises:
        ConfigError: shapes that cannot be, or a target whose embeddings or lm_head cannot be read.
    """
    target, device = inputs.target, torch.device(device)
    masters = torch.float64 if cfg.dtype == "f64" else torch.float32
    if cfg.init_from is not None:
        draft = starting_point(cfg, inputs).build(target, masters)
    else:
        shape = {**cfg.draft, "aux_layers": inputs.info.spec.layers, "draft_vocab_size": len(vocab)}
        config = Eagle3Config.from_target(target, **shape)
        generator = torch.Generator().manual_seed(cfg.seed)
        embeddings = input_embeddings(target)
        draft = Eagle3Draft(config, embeddings, generator).to(masters)
        draft.embed_tokens = embeddings  # not cast with the parameters
        start_like_target(draft, target, vocab)
    on_gpu = device.type == "cuda"
    teacher = _teacher_head(target, vocab, cfg.oov)
    options = ObjectiveOptions(
        step_decay=cfg.step_decay,
        oov=cfg.oov,
        attention=("flex" if on_gpu else "sdpa") if cfg.attention == "auto" else cfg.attention,
        dtype=_DTYPES[cfg.dtype],
        compile=cfg.compile and on_gpu,
        checkpoint=cfg.checkpoint_activations,
    )
    return Objective(draft, teacher, vocab.target_ids, options).to(device)


def starting_point(cfg: TrainConfig, inputs: Inputs) -> DraftCheckpoint:
    """The published draft that `train.init_from` names.

    Raises:
        ConfigError: it cannot be read, or reads other layers than the store holds; or `train.draft` would change its
            shape. `train.draft.aux_layers` says which layers it reads where its own config is wrong about that.
    """
    assert cfg.init_from is not None
    if changed := cfg.draft.keys() - {"aux_layers"}:
        hint = "its shape is that of the weights"
        raise ConfigError(f"train.draft.{min(changed)} beside train.init_from", cfg.init_from, hint)
    start = DraftCheckpoint.load(cfg.init_from, inputs.target, cfg.draft.get("aux_layers"))
    theirs, stored = start.config.aux_layers, inputs.info.spec.layers
    if theirs != stored:
        what = f"the draft reads layers {list(theirs)}, the store holds {list(stored)}"
        hint = "capture those; if it was trained on the store's, name these in train.draft.aux_layers"
        raise ConfigError(what, cfg.init_from, hint)
    return start


def _teacher_head(target: Target, vocab: DraftVocab, oov: str) -> TeacherHead:
    """The target's lm_head, only the rows that are needed."""
    inside = Head.load(target, rows=vocab.target_ids)
    outside = Head.load(target, rows=torch.nonzero(~vocab.t2d)[:, 0]) if oov == "drop" else None
    return TeacherHead(
        weight=inside.weight,
        bias=inside.bias,
        outside=outside and outside.weight,
        outside_bias=outside and outside.bias,
        scale=inside.scale,
        softcap=inside.softcap,
    )


def make_reader(cfg: TrainConfig, world: World, say: Any) -> TrainReader:
    """The reader of this rank."""
    assert cfg.store is not None
    sampling = Sampling(
        budget=cfg.batch_tokens,
        seed=cfg.seed,
        world_size=world.size,
        accumulation=cfg.accumulate,
        held_out=cfg.eval_share,
    )
    reading = Reading(
        threads=cfg.readers,
        prefetch=cfg.prefetch,
        pin=world.device.type == "cuda",
        follow=cfg.follow,
        disk_budget=cfg.disk_budget,
        eval_rows=cfg.eval_rows,
    )
    # Compiled code wants one shape; without it padding would only be work.
    budget = cfg.batch_tokens if world.device.type == "cuda" else None
    packed = functools.partial(pack, steps=cfg.steps, budget=budget, mask=cfg.mask)
    return TrainReader(cfg.store, sampling, packed, rank=world.rank, reading=reading, say=say)


def make_schedule(cfg: TrainConfig, total: int) -> Schedule:
    """The learning rate over `total` steps."""
    return Schedule(
        cfg.schedule,
        total,
        warmup=round(cfg.warmup_share * total),
        decay=round(cfg.decay_share * total),
        floor=cfg.min_lr,
    )


def _total_steps(cfg: TrainConfig, reader: TrainReader) -> int:
    an_epoch = reader.expected_batches() // cfg.accumulate
    known = max(1, an_epoch * cfg.epochs)
    return known if cfg.max_steps is None else min(known, cfg.max_steps)


def _checkpoints(cfg: TrainConfig, inputs: Inputs, world: World) -> Checkpoints:
    assert cfg.out is not None
    places = {"store", "corpus", "target"}  # they may move; what they hold may not
    settings = {k: v for k, v in cfg.model_dump(mode="json").items() if k not in FREE | places}
    identity = {
        "corpus": inputs.corpus.digest,
        "capture": inputs.info.spec.spec_id,
        "ranks": world.size,
    }
    found = Checkpoints(cfg.out / CHECKPOINTS, settings, identity, keep_last=cfg.keep_last)
    if world.is_main:
        found.sweep()
    return found


def _vocabulary(cfg: TrainConfig, inputs: Inputs, world: World, *, fresh: bool) -> DraftVocab:
    """The run's draft vocabulary: made by rank 0 in a new run, read by all."""
    assert cfg.out is not None
    path = cfg.out / VOCAB
    with world.main_first("make the draft vocabulary"):
        if world.is_main and fresh:
            if cfg.init_from is not None:
                vocab = starting_point(cfg, inputs).vocab.bound_to(inputs.corpus, cfg.init_from)
            else:
                coverage = None if cfg.vocab_size else cfg.vocab_coverage
                vocab = DraftVocab.of_corpus(inputs.corpus, inputs.target, size=cfg.vocab_size, coverage=coverage)
            vocab.save(path)
    vocab = DraftVocab.load(path)
    vocab.check(inputs.corpus, path)
    return vocab


def _publish(folder: Path, checkpoints: Checkpoints, config: Eagle3Config, vocab: DraftVocab, target: Target) -> None:
    source = checkpoints.best() or checkpoints.latest()
    assert source is not None
    save_checkpoint(folder, config, load_file(source / WEIGHTS), vocab, target)


@contextlib.contextmanager
def _locked(cfg: TrainConfig, world: World) -> Iterator[None]:
    """The run's folder, for this run alone."""
    assert cfg.out is not None
    fd, made = None, False
    with world.main_first("take the run's folder"):
        if world.is_main:
            made = not cfg.out.exists()
            with disk_errors(cfg.out):
                make_folder(cfg.out)
                fd = lock_file(cfg.out / _LOCK, create=True)
            if fd is None:
                raise StoreError("another process trains into this folder", cfg.out, "name another --out")
    try:
        yield
    except ConfigError:
        if made and not (cfg.out / CHECKPOINTS).exists():  # nothing was begun: leave nothing behind
            shutil.rmtree(cfg.out, ignore_errors=True)
        raise
    finally:
        if fd is not None:
            os.close(fd)
