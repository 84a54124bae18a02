"""The model card: what the folder is, what it was made from, what it is worth, and how it is served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from jinja2 import Environment, StrictUndefined

from eyas.export.launch import Drafting, launch_words
from eyas.export.record import TargetFacts
from eyas.export.source import RunFacts
from eyas.train.draft import Eagle3Config
from eyas.train.vocab import DraftVocab

CARD: Final = "README.md"
_TEMPLATE: Final = "card.md.jinja"
_HERE: Final = "path/to/this/folder"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card says of the drafter itself.

    Attributes:
        target, fingerprint: the model it drafts for.
        config, vocab, parameters, dtype: its shape.
    """

    target: TargetFacts
    fingerprint: str
    config: Eagle3Config
    vocab: DraftVocab
    parameters: int
    dtype: torch.dtype


def card(facts: CardFacts, run: RunFacts | None) -> str:
    """Markdown; the same for the same drafter and run, wherever they lie.

    Args:
        facts: of the drafter.
        run: it was trained in, None for one that was imported.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    template = environment.from_string(files("eyas.export").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    commands = {
        engine: shlex.join(launch_words(engine, facts.target.name, _HERE, Drafting())) for engine in ("sglang", "vllm")
    }
    return template.render(
        **commands,
        target=facts.target,
        fingerprint=facts.fingerprint,
        config=facts.config,
        layers=facts.config.aux_layers,
        parameters=facts.parameters,
        dtype=str(facts.dtype).removeprefix("torch."),
        coverage=facts.vocab.coverage,
        data=_data(run) if run else [],
        results=_results(run) if run else [],
    )


def _data(run: RunFacts) -> list[tuple[str, str]]:
    said, settings = run.data, run.settings
    rows = [
        ("corpus", f"{said['rows']:,} rows, {said['tokens']:,} tokens, digest `{said['digest']}`") if said else None,
        ("capture", f"spec `{run.spec_id}`") if run.spec_id else None,
        ("steps", f"{run.steps:,}, {run.tokens:,} tokens read") if run.steps else None,
        ("settings", ", ".join(f"{key} {settings[key]}" for key in _SHOWN if key in settings)),
        ("eyas", run.version) if run.version else None,
    ]
    return [row for row in rows if row is not None]


_SHOWN: Final = ("steps", "step_decay", "batch_tokens", "accumulate", "epochs", "lr", "schedule", "mask", "oov", "seed")


def _results(run: RunFacts) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    if (found := run.evaluation) is not None:
        shares = found.by_position
        span = f"{found.low:.2f} to {found.high:.2f}" if found.low is not None and found.high is not None else ""
        depth = str(len(shares)) if shares else ""
        rows.append(("held-out rows", "all", "in training", depth, f"{found.length:.2f}", span, _shares(shares)))
    for path in run.evaluations:
        rows += _of_file(path)
    return rows


def _of_file(path: Path) -> list[Sequence[str]]:
    """Rows of an evaluation-*.json; none for a file that is no such thing."""
    try:
        said: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        how = f"{said['mode']}, {said['engine']}"
        return [
            (
                str(said["benchmark"]), str(one["category"]), how, str(said["depth"]), f"{one['accept_length']:.2f}",
                f"{one['ci95'][0]:.2f} to {one['ci95'][1]:.2f}", _shares(one["accept_by_position"]),
            )
            for one in said["results"] if one["accept_length"] is not None
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return []


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
