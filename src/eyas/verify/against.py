"""Sampled rows recomputed by transformers: every captured layer and `last`, with controls that must not match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from rich.console import Console
from rich.progress import track

from eyas.capture.contract import CaptureSpec
from eyas.compare import Distance, Tolerance, distance, is_informative, rejects, tolerance_for
from eyas.config import ExtractConfig
from eyas.errors import ConfigError
from eyas.extract.hf import hidden_states, load_model
from eyas.store.reader import StoreReader, StoreRow
from eyas.target.checkpoint import Target
from eyas.verify.sampling import NAME_THE_MODEL, coarsest_dtype, sample_rows

LAST: Final = "last"


@dataclass(slots=True)
class Comparison:
    """Rows recomputed with transformers.

    Attributes:
        rows: how many were.
        worst: for every captured state (a layer's number, or `last`) its largest distance of any row.
        nearest: for every control (`3 as 2`: layer 3 where 2 is stored) its smallest distance of any row in which it
            could be told apart at all.
        told_apart, alike: for every control, rows in which it was, and rows in which it is too close to say.
        mismatches: states that are not what they should be, and controls that could not be told apart.
    """

    rows: int = 0
    worst: dict[str, Distance] = field(default_factory=dict)
    nearest: dict[str, Distance] = field(default_factory=dict)
    told_apart: Counter[str] = field(default_factory=Counter)
    alike: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)


def compare_with_model(
    reader: StoreReader, model: str, sample: int, cfg: ExtractConfig, console: Console
) -> Comparison:
    """Recompute rows with transformers in float32 and compare every state, and every control.

    Raises:
        ConfigError: the model is not the one the store was captured from.
    """
    target = Target.load(model, trust_remote_code=cfg.trust_remote_code)
    spec = reader.spec
    theirs = target.spec(spec.layers, spec.last, spec.dtype)
    if theirs.model and theirs.model != spec.model:
        differing = f"fingerprint {theirs.model}, in the store {spec.model}"
        raise ConfigError(f"the store was captured from another model ({differing})", model, NAME_THE_MODEL)
    network = load_model(target, device=cfg.device, dtype="f32")
    tolerance = tolerance_for(coarsest_dtype(reader), target.is_routed)
    rows = sample_rows(len(reader), sample)
    result = Comparison()
    for index in track(rows, "recomputing", console=console, disable=not console.is_terminal):
        row = reader[index]
        layers = sorted(
            {near for layer in spec.layers for near in (layer - 1, layer, layer + 1)} | {spec.num_layers - 1}
        )
        states, last = hidden_states(network, row.tokens.tolist(), [n for n in layers if n < spec.num_layers])
        compare_row(row, spec, tolerance, states, last, result)
    return result


def compare_row(
    row: StoreRow,
    spec: CaptureSpec,
    tolerance: Tolerance,
    states: Mapping[int, torch.Tensor],
    last: torch.Tensor,
    result: Comparison,
) -> None:
    """Compare one stored row with recomputed states and add to `result`.

    Args:
        row: as stored.
        spec: the store's.
        tolerance: what counts as equal.
        states: recomputed outputs [T, H] of the captured layers, of their neighbours (-1 is the embedding's output),
            and of the last layer.
        last: recomputed state after the final norm, [T, H].
        result: is added to.
    """
    result.rows += 1
    for column, layer in enumerate(spec.layers):
        stored = row.aux[:, column]
        controls = {str(near): states[near] for near in (layer - 1, layer + 1) if near in states and near != layer}
        _compare(result, row, str(layer), stored, states[layer], controls, tolerance)
    kept = row.last_index.long()
    if len(kept):
        controls = {"pre-norm": states[spec.num_layers - 1][kept]}
        _compare(result, row, LAST, row.last, last[kept], controls, tolerance)


def _compare(
    result: Comparison,
    row: StoreRow,
    name: str,
    stored: torch.Tensor,
    reference: torch.Tensor,
    controls: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
) -> None:
    right = distance(stored, reference, tolerance.strays)
    if not right.within(tolerance):
        result.mismatches.append(
            f"row {row.row}, {name}: error median {right.median:.1e}, worst {right.worst:.1e} of {tolerance}"
        )
    known = result.worst.get(name)
    result.worst[name] = right if known is None else _larger(known, right)
    shifted = {"shifted by one": reference.roll(1, 0)} if len(reference) > 1 else {}
    for control, states in {**controls, **shifted}.items():
        key = f"{control} as {name}"
        if not is_informative(states, reference, tolerance):
            result.alike[key] += 1
            continue
        away = distance(stored, states)
        result.told_apart[key] += 1
        if key not in result.nearest or away.median < result.nearest[key].median:
            result.nearest[key] = away
        if not rejects(away, right, tolerance):
            result.mismatches.append(f"row {row.row}: {control} cannot be told from {name} (error {away.median:.1e})")


def _larger(one: Distance, other: Distance) -> Distance:
    return Distance(
        max(one.median, other.median),
        max(one.worst, other.worst),
        max(one.bounded, other.bounded),
        min(one.cosine, other.cosine),
        max(one.stretch, other.stretch),
    )
