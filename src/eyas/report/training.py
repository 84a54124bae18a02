"""A training run's log as curves: sessions joined where one went on from another's checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.report.logs import Event, Session, read_number, read_numbers, read_object, read_text

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class TrainStep:
    """An entry of the log: the mean of some steps. accuracy: [K] share of right rows by depth."""

    step: float
    loss: float | None
    lr: float | None
    norm: float | None
    tokens_per_s: float | None
    wait_share: float | None
    accuracy: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class EvalStep:
    """An evaluation; acceptance: [K] conditional shares, accuracy: [K] shares whatever came before."""

    step: float
    rows: float | None
    loss: float | None
    length: float | None
    low: float | None
    high: float | None
    acceptance: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


@dataclass(slots=True)
class Training:
    """What a run's logs tell.

    Attributes:
        steps, evals: in the order of steps; what was trained again after a resume counts once, as it went on.
        starts: (step, when it began) of each session.
        settings: of the last session. versions: of the last one that tells.
        total: expected steps. tokens: positions trained on, by the entries that count.
        ended: the last session's last word is its end.
        faults: what stopped a session, as it said.
    """

    steps: list[TrainStep] = field(default_factory=list)
    evals: list[EvalStep] = field(default_factory=list)
    starts: list[tuple[float, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    total: float | None = None
    tokens: float = 0.0
    parameters: float | None = None
    draft_vocab: float | None = None
    ranks: float | None = None
    device: str = ""
    seconds: float = 0.0
    ended: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Optimiser steps that the log knows of."""
        return max([0.0, *(entry.step for entry in self.steps), *(entry.step for entry in self.evals)])

    @property
    def untrained(self) -> EvalStep | None:
        """The evaluation before the first step."""
        return next((one for one in self.evals if one.step == 0), None)

    @property
    def best(self) -> EvalStep | None:
        """The evaluation with the longest acceptance after the first step: the drafter that is published."""
        judged = [one for one in self.evals if one.step and one.length is not None]
        return max(judged, key=lambda one: (one.length or 0.0, -one.step), default=None)


def read_training(logs: Sequence[Session]) -> Training:
    """What the logs of a training run tell, in the order of time."""
    found = Training()
    sessions = [(session, start) for session in logs for start in session.of("start")[:1]]
    tokens: list[tuple[float, float]] = []
    for session, start in sessions:
        began = read_number(start, "step") or 0.0
        # Steps after the checkpoint it went on from were taken again; evaluated and saved is what stays.
        found.steps = [entry for entry in found.steps if entry.step <= began]
        found.evals = [entry for entry in found.evals if entry.step <= began]
        tokens = [entry for entry in tokens if entry[0] <= began]
        found.starts.append((began, session.began))
        found.steps += [_train_step(event) for event in session.of("train") if read_number(event, "step") is not None]
        known = {entry.step for entry in found.evals}
        evals = [_eval_step(event) for event in session.of("eval") if read_number(event, "step") is not None]
        found.evals += [entry for entry in evals if entry.step not in known]
        tokens += [(read_number(e, "step") or 0.0, read_number(e, "tokens") or 0.0) for e in session.of("train")]
        _note(found, session, start)
    found.tokens = sum(count for _, count in tokens)
    return found


def _note(found: Training, session: Session, start: Event) -> None:
    """What the session says of itself; the last one's word counts."""
    found.settings = read_object(start, "settings") or found.settings
    versions = {name: read_text(start["versions"], name) for name in read_object(start, "versions")}
    found.versions = versions or found.versions
    found.total = read_number(start, "total") or found.total
    found.parameters = read_number(start, "parameters") or found.parameters
    found.draft_vocab = read_number(start, "draft_vocab") or found.draft_vocab
    found.ranks = read_number(start, "ranks") or found.ranks
    found.device = read_text(start, "device") or found.device
    ends = session.of("end")
    found.ended = bool(ends)
    last = float(session.events[-1]["t"])
    found.seconds += max(0.0, last - session.began)
    for event in session.of("not_finite"):
        found.faults.append(f"step {read_text(event, 'step')}: the loss or its gradient was no number")


def _train_step(event: Event) -> TrainStep:
    return TrainStep(
        step=read_number(event, "step") or 0.0,
        loss=read_number(event, "loss"),
        lr=read_number(event, "lr"),
        norm=read_number(event, "norm"),
        tokens_per_s=read_number(event, "tokens_per_s"),
        wait_share=read_number(event, "wait_share"),
        accuracy=read_numbers(event, "accuracy"),
    )


def _eval_step(event: Event) -> EvalStep:
    return EvalStep(
        step=read_number(event, "step") or 0.0,
        rows=read_number(event, "eval_rows"),
        loss=read_number(event, "loss"),
        length=read_number(event, "accept_length"),
        low=read_number(event, "accept_length_low"),
        high=read_number(event, "accept_length_high"),
        acceptance=read_numbers(event, "acceptance"),
        accuracy=read_numbers(event, "accuracy"),
    )


def depths(entries: Sequence[tuple[float | None, ...]]) -> list[Values]:
    """[N] tuples of [K] -> K curves of N; shorter tuples are gaps."""
    most = max(map(len, entries), default=0)
    return [[entry[k] if k < len(entry) else None for entry in entries] for k in range(most)]
