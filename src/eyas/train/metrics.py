"""What a training run records: JSON lines (`eyas.events`), and event files for tensorboard where they are wanted."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from eyas.acceptance import Acceptance
from eyas.config import TrainConfig
from eyas.disk import is_folder_there
from eyas.errors import ConfigError
from eyas.events import EVENTS_DIR, EventLog
from eyas.target.checkpoint import Target

BOARD_DIR: Final = "tensorboard"
_NEVER_IDS: Final = ("store", "corpus", "out")
_OFTEN_IDS: Final = ("target", "init_from")  # of the hub, else folders


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimiser step, over all ranks.

    Attributes:
        step: how many are done with it.
        loss: the objective, weighted sum over the K steps.
        norm: of the gradient, before clipping.
        lr: the learning rate it was taken with.
        tokens: positions read in it.
        seconds, wait_s: wall time since the step before, and the part of it in which no batch was there.
        rows_K: rows that count, by depth. right_K: those whose most likely token is the teacher's.
    """

    step: int
    loss: float
    norm: float
    lr: float
    tokens: int
    seconds: float
    wait_s: float
    rows_K: tuple[int, ...]
    right_K: tuple[int, ...]

    @property
    def accuracy(self) -> tuple[float, ...]:
        """[K] share of right rows by depth."""
        return tuple(right / rows if rows else 0.0 for right, rows in zip(self.right_K, self.rows_K, strict=True))


@dataclass(frozen=True, slots=True)
class EvalFacts:
    """One evaluation.

    Attributes:
        step: optimiser steps done.
        rows: of the store that were evaluated.
        loss: the objective over them, normalised as one batch.
        accuracy: [K] share of right rows by depth, whatever the depths before.
        acceptance: of simulated chains.
    """

    step: int
    rows: int
    loss: float
    accuracy: tuple[float, ...]
    acceptance: Acceptance


class Recorder:
    """Writes facts to the log and, where asked, to tensorboard; of several steps at once their means.

    Args:
        folder: the run's; None records nothing (every rank but the first).
        session: names the log.
        board: whether tensorboard's files are written.

    Raises:
        ConfigError: `board` without tensorboard installed.
    """

    def __init__(self, folder: Path | None, session: str, *, board: bool = False) -> None:
        self._log = EventLog(folder / EVENTS_DIR / f"{session}.jsonl" if folder else None)
        self._board = _board(folder / BOARD_DIR) if board and folder else None

    def note(self, event: str, **fields: Any) -> None:
        """An event of the run itself: start, resume, checkpoint, end."""
        self._log.emit(event, **_finite(fields))

    def steps(self, facts: Sequence[StepFacts]) -> None:
        """Consecutive steps as one entry: means of loss, norm and accuracy, the last learning rate."""
        if not facts:
            return
        seconds, tokens = sum(f.seconds for f in facts), sum(f.tokens for f in facts)
        rows, right = (np.array([getattr(f, name) for f in facts]).sum(0) for name in ("rows_K", "right_K"))
        entry: dict[str, Any] = {
            "step": facts[-1].step,
            "loss": float(np.mean([f.loss for f in facts])),
            "norm": float(np.mean([f.norm for f in facts])),
            "lr": facts[-1].lr,
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1) if seconds else None,
            "wait_share": round(sum(f.wait_s for f in facts) / seconds, 4) if seconds else None,
            "rows": rows.tolist(),
            "accuracy": [round(float(a), 6) for a in np.divide(right, rows, out=np.zeros(len(rows)), where=rows > 0)],
        }
        self.note("train", **entry)
        self._draw("train", entry, facts[-1].step)

    def evaluation(self, facts: EvalFacts) -> None:
        """One evaluation."""
        found = facts.acceptance
        entry: dict[str, Any] = {
            "step": facts.step,
            "eval_rows": facts.rows,
            "loss": facts.loss,
            "accuracy": list(facts.accuracy),
            "accept_length": found.length,
            "accept_length_low": found.low,
            "accept_length_high": found.high,
            "acceptance": list(found.by_position),
            "chains": found.rows,
        }
        self.note("eval", **entry)
        self._draw("eval", entry, facts.step)

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        if self._board is not None:
            self._board.close()

    def _draw(self, group: str, entry: Mapping[str, Any], step: int) -> None:
        if self._board is None:
            return
        for name, value in entry.items():
            if isinstance(value, list):
                for k, one in enumerate(value):
                    self._board.add_scalar(f"{group}/{name}/{k}", one, step)
            elif value is not None and name != "step":
                self._board.add_scalar(f"{group}/{name}", value, step)


def settings_told(cfg: TrainConfig, target: Target) -> dict[str, Any]:
    """The settings for the log, which is read later and from other folders: with places that mean the same there."""
    said = cfg.model_dump(mode="json") | {"target": target.model}
    for name in (*_NEVER_IDS, *_OFTEN_IDS):
        if said[name] is not None and (name in _NEVER_IDS or is_folder_there(Path(said[name]))):
            said[name] = str(Path(said[name]).absolute())
    return said


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is no number."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def _board(folder: Path) -> Any:
    try:
        writer: Any = importlib.import_module("torch.utils.tensorboard")  # an extra
    except ImportError as error:
        raise ConfigError("tensorboard is not installed", "train.tensorboard", "pip install 'eyas[tensorboard]'") from (
            error
        )
    return writer.SummaryWriter(str(folder))
