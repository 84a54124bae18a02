"""What a training run's log says, its sessions joined where one went on from another's checkpoint.

A session that goes on begins at a checkpoint. What came after that one in earlier sessions was trained again and counts
as it went the second time; what came before it, evaluations at the checkpoint itself included, stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.logs import Event, Session, read_number, read_numbers, read_object, read_sessions, read_text


@dataclass(frozen=True, slots=True)
class TrainStep:
    """An entry of the log: the mean of some steps. accuracy: [K] share of right rows by depth.

    t: when it was written. tokens: positions read in all of its steps.
    """

    step: float
    t: float
    loss: float | None
    lr: float | None
    norm: float | None
    tokens: float | None
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


@dataclass(frozen=True, slots=True)
class TrainEnd:
    """The last word of a session that ended: steps and tokens of the run until then, 0 where it does not tell."""

    step: int
    tokens: int


@dataclass(slots=True)
class TrainLog:
    """What a run's log tells.

    Attributes:
        steps, evals: in the order of steps; what was trained again after a resume counts once, as it went on.
        starts: (step, when it began) of each session.
        settings: of the last session. versions: of the last one that tells.
        total: expected steps.
        seconds: of all sessions, each from its first word to its last.
        ended: the last session's last word is its end.
        end: of the last session that had one.
        faults: what stopped a session, as it said.
    """

    steps: list[TrainStep] = field(default_factory=list)
    evals: list[EvalStep] = field(default_factory=list)
    starts: list[tuple[float, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    total: float | None = None
    parameters: float | None = None
    draft_vocab: float | None = None
    ranks: float | None = None
    device: str = ""
    seconds: float = 0.0
    ended: bool = False
    end: TrainEnd | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Optimiser steps that the log knows of."""
        return max([0.0, *(entry.step for entry in self.steps), *(entry.step for entry in self.evals)])

    @property
    def tokens(self) -> float:
        """Positions trained on, by the entries that count."""
        return sum(entry.tokens or 0.0 for entry in self.steps)

    @property
    def untrained(self) -> EvalStep | None:
        """The evaluation before the first step."""
        return next((one for one in self.evals if one.step == 0), None)

    @property
    def best(self) -> EvalStep | None:
        """The first of the longest evaluations after the first step: the drafter that is published."""
        judged = [one for one in self.evals if one.step > 0 and one.length is not None]
        return max(judged, key=lambda one: (one.length or 0.0, -one.step), default=None)


def read_train_log(run: Path) -> TrainLog:
    """What the logs in a run's folder tell; empty where there are none. A line that was cut off is passed over."""
    found = TrainLog()
    for session in read_sessions(run):
        start = next(iter(session.of("start")), {})
        if start:
            found.starts.append((read_number(start, "step") or 0.0, session.began))
        _join(found, session, read_number(start, "step"))
        _note(found, session, start)
    return found


def _join(found: TrainLog, session: Session, began: float | None) -> None:
    """Take up what a session did that went on from step `began`.

    Where its start was lost or does not tell, nobody knows what it took again: it adds what no other session tells.
    """
    last = math.inf if began is None else began
    steps = {entry.step: entry for entry in found.steps if entry.step <= last}
    evals = {entry.step: entry for entry in found.evals if entry.step <= last}
    for event in session.events:
        if (step := read_number(event, "step")) is None:
            continue
        match event.get("event"):
            case "train":
                steps.setdefault(step, _train_step(event, step))
            case "eval":
                evals.setdefault(step, _eval_step(event, step))
            case _:
                continue
    found.steps = [steps[step] for step in sorted(steps)]
    found.evals = [evals[step] for step in sorted(evals)]


def _note(found: TrainLog, session: Session, start: Event) -> None:
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
    for end in ends:
        found.end = TrainEnd(int(read_number(end, "step") or 0), int(read_number(end, "tokens") or 0))
    last = float(session.events[-1]["t"])
    found.seconds += max(0.0, last - session.began)
    for event in session.of("not_finite"):
        found.faults.append(f"step {read_text(event, 'step')}: the loss or its gradient was no number")


def _train_step(event: Event, step: float) -> TrainStep:
    return TrainStep(
        step=step,
        t=float(event["t"]),
        loss=read_number(event, "loss"),
        lr=read_number(event, "lr"),
        norm=read_number(event, "norm"),
        tokens=read_number(event, "tokens"),
        tokens_per_s=read_number(event, "tokens_per_s"),
        wait_share=read_number(event, "wait_share"),
        accuracy=read_numbers(event, "accuracy"),
    )


def _eval_step(event: Event, step: float) -> EvalStep:
    return EvalStep(
        step=step,
        rows=read_number(event, "eval_rows"),
        loss=read_number(event, "loss"),
        length=read_number(event, "accept_length"),
        low=read_number(event, "accept_length_low"),
        high=read_number(event, "accept_length_high"),
        acceptance=read_numbers(event, "acceptance"),
        accuracy=read_numbers(event, "accuracy"),
    )
