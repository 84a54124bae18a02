"""The run around the step: accumulate, clip, evaluate, save, and stop where it can be gone on from.

Before each optimiser step all ranks exchange on the host what they count and what the step before gave (`World.sum`);
so the loss has one normaliser over ranks and accumulated batches, all take the same steps, and the device is never
waited for except for numbers that it computed a step ago.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from eyas.acceptance import acceptance
from eyas.config import TrainConfig
from eyas.errors import Interrupted, TrainError
from eyas.signals import StopSignals
from eyas.train.batch import Batch
from eyas.train.distributed import Shared, World
from eyas.train.feed import EpochBatches
from eyas.train.guard import suspects
from eyas.train.metrics import EvalFacts, Recorder, StepFacts
from eyas.train.objective import Objective, StepReport
from eyas.train.optimizer import Schedule, gradient_norm, set_lr, step_clipped
from eyas.train.reader import TrainReader
from eyas.train.state import Checkpoints, Progress
from eyas.train.view import TrainView

_SHOWN_ROWS: Final = 20


class _StoppedWaiting(Exception):
    """Raised by a signal's handler in a rank that waits for data."""


@dataclass(slots=True)
class Parts:
    """What a run is made of.

    Attributes:
        shared: the objective, as it is spread over the ranks; `objective` is the module itself.
        schedule: of the learning rate, for the whole run.
        recorder, view: only rank 0's say anything.
    """

    world: World
    objective: Objective
    shared: Shared
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    reader: TrainReader
    checkpoints: Checkpoints
    recorder: Recorder
    view: TrainView
    signals: StopSignals


@dataclass(slots=True)
class _Launched:
    """A step that the device may still be computing."""

    step: int
    batches: list[Batch]
    rows_K: tuple[int, ...]
    tokens: int
    lr: float
    wait_s: float
    numbers: torch.Tensor  # [2 + K] loss of this rank, norm, right ones of this rank; on the host once `ready`
    ready: torch.cuda.Event | None


class Trainer:
    """Trains to the end of the run, from where `progress` is.

    Args:
        cfg: settings.
        parts: what the run is made of.
        progress: where it is: of a checkpoint that was loaded, or a new run's.
    """

    def __init__(self, cfg: TrainConfig, parts: Parts, progress: Progress) -> None:
        self._cfg, self._parts, self.progress = cfg, parts, progress
        self._parameters = [p for p in parts.objective.parameters() if p.requires_grad]
        self._launched: _Launched | None = None
        self._unlogged: list[StepFacts] = []
        self._stopping = self._waiting = False
        self._saved_step = self._evaluated_step = progress.step if progress.step else -1
        self._mark_s = time.monotonic()
        self.evaluated: EvalFacts | None = None
        self.tokens_now, self.began_s, self.seconds = 0, time.monotonic(), 0.0

    # --- the loop ---

    def run(self) -> Progress:
        """Train, evaluate and save until the last step.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the state is saved.
            TrainError: a loss that is no number, or a rank that is gone.
            StoreError, IntegrityError: the data or the disk.
        """
        with self._parts.signals.heard_by(self._stop):
            self.began_s = time.monotonic()
            if self.progress.step == 0:
                self._evaluate()
                self.progress = replace(self.progress, untrained=self.progress.metric)
            self._mark_s = time.monotonic()
            for epoch, batches in self._epochs():
                self._epoch(epoch, batches)
                if self._ended or self._stopping:
                    break
            self._finish_step()
            self._log()
            self.seconds = time.monotonic() - self.began_s
            if self._stopping:
                self._save()
                steps = f"{self.progress.step:,} of about {self.progress.total:,} steps are done"
                raise Interrupted(f"stopped: {steps}", self._parts.checkpoints.folder, "the same command resumes")
            if self._evaluated_step != self.progress.step:
                self._evaluate()
            self._save()
        return self.progress

    @property
    def _ended(self) -> bool:
        return self._cfg.max_steps is not None and self.progress.step >= self._cfg.max_steps

    def _epochs(self) -> Iterator[tuple[int, EpochBatches]]:
        first, start = int(self.progress.data.get("epoch", 0)), int(self.progress.data.get("batch", 0))
        if self._ended:
            return
        for epoch in range(first, self._cfg.epochs):
            with self._parts.reader.epoch(epoch, start if epoch == first else 0) as batches:
                yield epoch, batches

    def _epoch(self, epoch: int, batches: EpochBatches) -> None:
        self._at(epoch, batches.number)
        while not self._ended:
            self._make_room(batches.number)
            waited_s = batches.stats.wait_s
            micro = self._take(batches)
            if not self._step(micro, batches.stats.wait_s - waited_s):
                break
            self._at(epoch, self._batch + len(micro))
            self._after_step()
        if not (self._ended or self._stopping):
            self._at(epoch + 1, 0)

    def _at(self, epoch: int, batch: int) -> None:
        """Where a checkpoint that is saved now would go on."""
        self._epoch_number, self._batch = epoch, batch

    def _take(self, batches: EpochBatches) -> list[Batch]:
        """The micro-batches of one step; fewer at the end of the epoch, or where the run is told to stop."""
        try:
            return self._wait_for(batches)
        except _StoppedWaiting:
            return []

    def _wait_for(self, batches: EpochBatches) -> list[Batch]:
        taken: list[Batch] = []
        self._waiting = True
        while not self._stopping and len(taken) < self._cfg.accumulate:
            if (batch := next(batches, None)) is None:
                break
            taken.append(batch)
        self._waiting = False
        return taken

    def _stop(self) -> None:
        if self._parts.world.ending.is_set():
            return
        if self._stopping:  # the second time it is not waited for
            raise KeyboardInterrupt
        self._stopping = True
        if self._waiting:
            self._waiting = False
            raise _StoppedWaiting

    # --- one optimiser step ---

    def _step(self, micro: Sequence[Batch], wait_s: float) -> bool:
        """Take a step if every rank has its batches and nobody was told to stop; whether it was taken."""
        parts, cfg = self._parts, self._cfg
        steps = cfg.steps
        valid_K = [sum(batch.valid_counts[k] for batch in micro) for k in range(steps)]
        tokens = sum(batch.tokens_used for batch in micro)
        ready = len(micro) == cfg.accumulate
        found = parts.world.sum([ready, self._stopping, tokens, *valid_K])
        if found[1]:
            self._stopping = True  # someone was told to: all stop here
        if found[1] or found[0] < parts.world.size:
            return False
        rows_K = tuple(int(n) for n in found[3:])
        divisor = [found[2]] * steps if cfg.normaliser == "classic" else [max(1.0, n) for n in found[3:]]
        lr = cfg.lr * parts.schedule.factor(self.progress.step)
        numbers = self._gradients(micro, divisor)
        set_lr(parts.optimizer, lr)
        step_clipped(parts.optimizer, numbers[1], cfg.clip)
        parts.optimizer.zero_grad(set_to_none=True)
        step, tokens = self.progress.step + 1, int(found[2])
        launched = _Launched(step, list(micro), rows_K, tokens, lr, wait_s, *_to_host(numbers))
        self._finish_step()
        self._launched = launched
        self.progress = replace(self.progress, step=step, tokens=self.progress.tokens + tokens, metric=None)
        return True

    def _gradients(self, micro: Sequence[Batch], divisor: Sequence[float]) -> torch.Tensor:
        """Backward of all micro-batches: [2 + K] this rank's share of the loss, the gradient's norm, right rows."""
        parts = self._parts
        loss = right = None
        for number, batch in enumerate(micro):
            moved = batch.to(parts.world.device, non_blocking=True)
            report: StepReport = parts.shared(moved, divisor, last=number == len(micro) - 1)
            parts.shared.backward(report.loss)
            loss = report.loss.detach() if loss is None else loss + report.loss.detach()
            right = report.right if right is None else right + report.right
        assert loss is not None and right is not None
        norm = gradient_norm(self._parameters)
        return torch.cat([loss.reshape(1), norm.reshape(1).to(loss.dtype), right.to(loss.dtype)])

    def _finish_step(self) -> None:
        """Read the numbers of the step that was launched last."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        if launched.ready is not None:
            launched.ready.synchronize()
        mine = launched.numbers.tolist()
        loss, *right = self._parts.world.sum([mine[0], *mine[2:]])
        now_s = time.monotonic()
        facts = StepFacts(
            step=launched.step,
            loss=loss,
            norm=mine[1],
            lr=launched.lr,
            tokens=launched.tokens,
            seconds=now_s - self._mark_s,
            wait_s=launched.wait_s,
            rows_K=launched.rows_K,
            right_K=tuple(int(n) for n in right),
        )
        self._mark_s = now_s
        self._guard(facts, mine[0], launched)
        self.tokens_now += facts.tokens
        self._unlogged.append(facts)
        self._parts.view.step(facts)
        if facts.step % self._cfg.log_every == 0:
            self._log()

    def _log(self) -> None:
        self._parts.recorder.steps(self._unlogged)
        self._unlogged.clear()

    def _guard(self, facts: StepFacts, mine: float, launched: _Launched) -> None:
        """Raises TrainError for a step whose loss or gradient is no number; it has changed no weight."""
        if torch.isfinite(torch.tensor([facts.loss, facts.norm])).all():
            return
        world = self._parts.world
        told = world.gather(suspects(launched.batches, loss=mine))
        if any(one.bad_states for one in told):
            rows = sorted({row for one in told for row in one.bad_states})
            what, hint = "states that are no numbers", "`eyas verify` names the shard; extract these rows again"
        else:
            own_loss = {row for one in told for row in one.bad_loss}
            rows = sorted(own_loss or {row for one in told for row in one.rows})
            what = f"the loss is {facts.loss}, the gradient's norm {facts.norm}"
            hint = "a lower train.lr, a longer train.warmup_share, or train.dtype=f32; the last checkpoint is good"
        more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
        shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + more
        self._parts.recorder.note("not_finite", step=facts.step, rows=rows, loss=facts.loss, norm=facts.norm)
        raise TrainError(f"step {facts.step:,}: {what}", f"corpus rows {shown}", hint)

    # --- between steps ---

    def _after_step(self) -> None:
        """Evaluate and save where it is time to; never twice at one step."""
        step, cfg = self.progress.step, self._cfg
        last = self._is_last()
        evaluate, save = last or step % cfg.eval_every == 0, last or step % cfg.save_every == 0
        if not (evaluate or save):
            return
        self._finish_step()
        best = self.progress.best
        if evaluate:
            self._evaluate()
        if save or self.progress.best != best:
            self._save()
        self._mark_s = time.monotonic()  # neither counts as time of the steps

    def _is_last(self) -> bool:
        """Whether no step follows, as far as that is known."""
        all_batches = self._parts.reader.batches(self._epoch_number)
        done = all_batches is not None and self._batch >= all_batches
        return self._ended or (done and self._epoch_number == self._cfg.epochs - 1)

    def _make_room(self, batch: int) -> None:
        """Under a disk budget: save, so that shards which only earlier batches used can go."""
        if self._cfg.disk_budget is None or not self._parts.world.sum([self._parts.reader.due(batch)])[0]:
            return
        self._finish_step()
        self._save()
        with self._parts.world.main_first("remove consumed shards"):
            freed = self._parts.reader.release(batch)
        self._parts.recorder.note("released", step=self.progress.step, bytes=freed)

    def _save(self) -> None:
        if self._saved_step == self.progress.step and self.progress.step:
            return
        parts = self._parts
        data = parts.reader.state(self._epoch_number, self._batch)
        self.progress = replace(self.progress, data=data)
        path = parts.checkpoints.save(parts.objective.draft, parts.optimizer, self.progress, parts.world)
        self._saved_step = self.progress.step
        parts.recorder.note("checkpoint", step=self.progress.step, path=str(path), metric=self.progress.metric)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The rows held out: accuracy by depth, simulated acceptance length; a new best is remembered."""
        parts, cfg = self._parts, self._cfg
        if not cfg.eval_share:
            return
        self._evaluated_step = self.progress.step
        sums = torch.zeros(3, cfg.steps, dtype=torch.float64)  # divergence, counted, right
        chains: list[tuple[list[int], list[int]]] = []
        rows = 0
        with parts.reader.evaluation() as batches:
            for batch in batches:
                report: StepReport = parts.shared(batch.to(parts.world.device), [1.0] * cfg.steps)
                sums += torch.stack([report.loss_sums, report.counted, report.right]).double().cpu()
                chains.append(chain_counts(batch, report.right_KR.cpu()))
                rows += len(batch.samples)
        told = parts.world.gather((sums, chains, rows))
        total = torch.stack([one[0] for one in told]).sum(0)
        all_chains = [pair for one in told for pair in one[1]]
        rows = sum(one[2] for one in told)
        if not rows:
            return
        counted_K = total[1].clamp(min=1)
        weights = torch.tensor([cfg.step_decay**k for k in range(cfg.steps)], dtype=torch.float64)
        found = acceptance([pair[0] for pair in all_chains], [pair[1] for pair in all_chains], seed=cfg.seed)
        loss = float((weights * total[0] / counted_K).sum())
        accuracy = tuple((total[2] / counted_K).tolist())
        self.evaluated = EvalFacts(self.progress.step, rows, loss, accuracy, found)
        parts.recorder.evaluation(self.evaluated)
        parts.view.evaluation(self.evaluated)
        self.progress = replace(self.progress, metric=found.length)
        if self.progress.step and (self.progress.best is None or found.length > self.progress.best):
            self.progress = replace(self.progress, best=found.length, best_step=self.progress.step)


def chain_counts(batch: Batch, right_KR: torch.Tensor) -> tuple[list[int], list[int]]:
    """Chains of a batch for `eyas.acceptance`: ([K] rows that count at k with all steps before right, [K] right too).

    Args:
        batch: the batch. right_KR: [K, R] bool, as in `StepReport`.
    """
    so_far_R = torch.ones(right_KR.shape[1], dtype=torch.bool)
    reached, right = [], []
    for k, n in enumerate(batch.counts):
        counts_R = torch.zeros_like(so_far_R)
        counts_R[:n] = True if batch.scored is None else batch.scored[k, :n]
        reached.append(int((so_far_R & counts_R).sum()))
        so_far_R &= right_KR[k] & counts_R
        right.append(int(so_far_R.sum()))
    return reached, right


def _to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Numbers on their way to the host, and what tells when they are there."""
    if not numbers.is_cuda:
        return numbers, None
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return on_host, ready
