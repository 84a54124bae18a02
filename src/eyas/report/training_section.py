"""The section on training: loss and acceptance over the steps, learning rate, speed, and time spent without data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Final

from eyas.logs import read_text
from eyas.rates import human_time
from eyas.report.charts import Line, line_chart
from eyas.report.places import Places
from eyas.report.sections import Key, Missing, Section, Table, interval, moment, named, number, share
from eyas.report.svg import Axis
from eyas.train.log import EvalStep, TrainLog

_STEP: Final = Axis("optimiser step", zero=True)
_PLACES: Final = {"store": "--store", "corpus": "--corpus", "target": "--target", "out": "--out"}


def training_section(places: Places, found: TrainLog | None) -> Section:
    """The section; empty with a note where there is no training run."""
    section = Section("training", "Training")
    if found is None:
        command = f"eyas train --store {places.quoted('store')} --corpus {places.quoted('corpus')} --out run"
        section.missing.append(Missing("a training run", "", command))
        return section
    if not found.starts:
        section.missing.append(Missing("the training's log", f"{places.train}/events tells of no session"))
        return section
    _facts(section, found)
    _curves(section, found)
    _speed(section, found)
    _say_missing(section, found)
    return section


def _draw(section: Section, found: TrainLog, title: str, lines: Sequence[Line], y: Axis, note: str = "") -> None:
    went_on = [(step, f"session of {moment(began)}, from step {step:,.0f}") for step, began in found.starts[1:]]
    section.draw(title, line_chart(f"{title}, over the optimiser steps", lines, _STEP, y, marks=went_on), note)


def _curves(section: Section, found: TrainLog) -> None:
    steps, evals = [one.step for one in found.steps], [one.step for one in found.evals]
    losses = [
        Line("training", steps, [one.loss for one in found.steps]),
        Line("held out", evals, [one.loss for one in found.evals]),
    ]
    note = "The objective, all depths together: over batches as they were trained, and over rows held out."
    _draw(section, found, "Loss", losses, Axis("loss, nats"), note)
    ends = [one.low for one in found.evals], [one.high for one in found.evals]
    lengths = [Line("tokens a cycle", evals, [one.length for one in found.evals], *ends)]
    note = "Simulated on rows held out. The target's own token counts: 1 is no gain. The band is the 95 % interval."
    _draw(section, found, "Acceptance length", lengths, Axis("tokens a cycle"), note)
    shares = Axis("share", zero=True, at_most=1.0)
    positions = depths([one.acceptance for one in found.evals])
    lines = [Line(f"position {k + 1}", evals, ys) for k, ys in enumerate(positions)]
    note = "Held out: of the drafts whose earlier tokens were all right, the share that is right here too."
    _draw(section, found, "Acceptance by position", lines, shares, note)
    right = depths([one.accuracy for one in found.steps])
    lines = [Line(f"depth {k + 1}", steps, ys) for k, ys in enumerate(right)]
    note = "Training: the share whose likeliest token is the target's, whatever the earlier depths did."
    _draw(section, found, "Right tokens by depth", lines, shares, note)


def depths(entries: Sequence[tuple[float | None, ...]]) -> list[list[float | None]]:
    """[N] tuples of [K] -> K curves of N; shorter tuples are gaps."""
    most = max(map(len, entries), default=0)
    return [[entry[k] if k < len(entry) else None for entry in entries] for k in range(most)]


def _speed(section: Section, found: TrainLog) -> None:
    steps = [one.step for one in found.steps]
    rates = [Line("learning rate", steps, [one.lr for one in found.steps])]
    _draw(section, found, "Learning rate", rates, Axis("learning rate", zero=True))
    norms = [Line("norm", steps, [one.norm for one in found.steps])]
    _draw(section, found, "Gradient norm", norms, Axis("norm", zero=True), "Before clipping.")
    speed = [Line("tokens/s", steps, [one.tokens_per_s for one in found.steps])]
    _draw(section, found, "Speed", speed, Axis("tokens/s", zero=True), "Evaluations and checkpoints left out.")
    waits = [None if one.wait_share is None else 100 * one.wait_share for one in found.steps]
    note = "Time in which no batch was there. Near zero, reading keeps up with the device."
    _draw(section, found, "Waiting for data", [Line("waiting", steps, waits)], Axis("% of the time", zero=True), note)


def _facts(section: Section, found: TrainLog) -> None:
    settings, ranks = found.settings, found.ranks
    waits = [one.wait_share for one in found.steps if one.wait_share is not None]
    planned = f" of about {found.total:,.0f}" if found.total and found.total > found.step else ""
    section.facts += [
        ("steps", f"{found.step:,.0f}{planned}"),
        ("tokens", f"{found.tokens:,.0f} positions read"),
        ("sessions", f"{len(found.starts):,}, {human_time(found.seconds)} in all"),
        ("began", moment(found.starts[0][1])),
        ("drafter", f"{number(found.parameters)} trained parameters, draft vocabulary {number(found.draft_vocab)}"),
        ("device", f"{found.device or 'not known'}, {number(ranks)} rank{'' if ranks == 1 else 's'}"),
        ("objective", _chosen(settings, ("steps", "step_decay", "mask", "normaliser", "oov"))),
        ("optimiser", _chosen(settings, ("lr", "min_lr", "schedule", "warmup_share", "betas", "weight_decay", "clip"))),
        ("batches", _chosen(settings, ("batch_tokens", "accumulate", "epochs", "max_steps", "seed", "dtype"))),
    ]
    if target := read_text(settings, "target"):
        section.facts.append(("target", target))
    if waits:
        section.facts.append(("waiting for data", f"{share(sum(waits) / len(waits))} of the time"))
    if (best := found.best) is not None:
        text = f"{interval(best.length, best.low, best.high, 3)} tokens a cycle at step {best.step:,.0f}"
        section.facts.append(("best", f"{text}, on {number(best.rows)} rows"))
        before = f"untrained {number(found.untrained.length, 2)}" if found.untrained else f"at step {best.step:,.0f}"
        section.keys.append(Key("acceptance, held out", number(best.length, 2), f"tokens a cycle; {before}"))
        section.tables.append(_before_and_after(found.untrained, best))
    section.commands.append(_command(settings))
    section.versions.append(("training", named(found.versions)))


def _before_and_after(untrained: EvalStep | None, best: EvalStep) -> Table:
    shown = [("untrained", untrained), ("best", best)] if untrained else [("best", best)]
    positions = max(len(one.acceptance) for _, one in shown if one)
    rows = [
        (
            name,
            number(one.step),
            interval(one.length, one.low, one.high, 3),
            *(share(one.acceptance[k]) if k < len(one.acceptance) else "-" for k in range(positions)),
        )
        for name, one in shown
        if one
    ]
    head = ("", "step", "tokens a cycle (95 %)", *(f"position {k + 1}" for k in range(positions)))
    return Table("Simulated acceptance on rows held out", head, rows, frozenset(range(1, 3 + positions)))


def _chosen(settings: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {_said(settings[name])}" for name in names if settings.get(name) is not None)


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _command(settings: dict[str, Any]) -> str:
    """The run as a command, from the settings that it recorded: all of them, so that other defaults change nothing."""
    words = ["eyas", "train"]
    for name, flag in _PLACES.items():
        if value := settings.get(name):
            words += [flag, str(value)]
    for name, value in settings.items():
        if name not in _PLACES and value is not None and value != {}:
            words += ["--set", f"train.{name}={_said(value)}"]
    return shlex.join(words)


def _say_missing(section: Section, found: TrainLog) -> None:
    section.problems += found.faults
    if not found.ended:
        command = _command(found.settings).split(" --set ", maxsplit=1)[0]
        why = f"the log stops at step {found.step:,.0f} of about {number(found.total)}; the same command goes on"
        section.missing.append(Missing("the end of the training", why, command))
    if not found.evals:
        section.missing.append(Missing("acceptance during training", "no evaluation yet, or train.eval_share is 0"))
