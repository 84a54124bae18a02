"""The probe's states recomputed by the target, at the layers that a server would read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eyas.compare import TOLERANCE, Distance, Tolerance, distance, tolerance_for
from eyas.config import ExportConfig
from eyas.export.evidence import Drafter
from eyas.export.findings import CheckReport
from eyas.export.probe import Probe
from eyas.export.replay import Document, acceptance_of
from eyas.extract.hf import hidden_states, load_model
from eyas.target.checkpoint import Target

#: Of the target's most likely tokens, by its recorded last states and by recomputed ones: near-ties flip.
_AGREE: Final = 0.9
#: Of the acceptance length on recorded states and on recomputed ones.
_ALIKE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Text:
    """A document and what the target makes of it: layer -> [T, H], and its most likely tokens [T]."""

    document: Document
    states: Mapping[int, Tensor]
    best: Tensor


def compare_states(
    target: Target,
    drafter: Drafter,
    layers: tuple[int, ...],
    probe: Probe,
    readers: Mapping[str, tuple[int, ...]],
    cfg: ExportConfig,
    report: CheckReport,
) -> None:
    """Recompute and compare; adds findings.

    Args:
        target: is loaded by transformers.
        drafter: the checkpoint's, over the probe's embeddings.
        layers: that it was trained on.
        probe: what was recorded.
        readers: server -> the layers it would read.
        cfg: device and dtype of the target.
        report: is added to.

    Raises:
        EngineError: the target cannot be loaded.
    """
    count = target.num_layers
    near = {layer + by for layers in readers.values() for layer in layers for by in (-1, 0, 1)}
    model = load_model(target, cfg.device, cfg.target_dtype)
    texts = _recomputed(model, probe, sorted(layer for layer in near if -1 <= layer < count))
    ran_in = {torch.float32: "f32", torch.float16: "f16"}.get(model.dtype, "bf16")
    coarsest = max((probe.dtype, ran_in), key=lambda dtype: TOLERANCE[dtype].median)
    tolerance = tolerance_for(coarsest, target.is_routed)
    for name, read in readers.items():
        for slot, layer in enumerate(read):
            if not _is(texts, slot, layer, len(read), tolerance):
                held = next((i for i in sorted(texts[0].states) if _is(texts, slot, i, len(read), tolerance)), None)
                whose = "of no layer near it" if held is None else f"layer {held}'s"
                what = f"{name} would give it layer {layer}'s output where it was trained on states {whose}"
                hint = "another target" if held is None else "the layer ids are wrong: eyas export writes them"
                report.refuse("states", what, hint)
                return
    if (agreed := _agreement(texts)) < _AGREE:
        what = f"lm_head on the recorded last states gives the target's token at {agreed:.0%} of positions only"
        report.refuse("states", what, "the store's last states were not those after the final norm: train on others")
        return
    again = [replace(text.document, aux=torch.cat([text.states[i] for i in layers], dim=-1)) for text in texts]
    before, now = (acceptance_of(drafter.run(found)).length for found in ([t.document for t in texts], again))
    if abs(now - before) > _ALIKE * before:
        report.refuse("states", f"{now:.2f} tokens a cycle on recomputed states, {before:.2f} on those recorded")
        return
    unclear = [
        layer
        for slot, layer in enumerate(layers)
        if any(_is(texts, slot, other, len(layers), tolerance) for other in (layer - 1, layer + 1))
    ]
    said = f"layers {list(layers)} as {', '.join(readers)} read them give the recorded states"
    if unclear:
        report.leave_open("states", f"{said}, but so do the neighbours of {unclear}", "texts of other lengths may tell")
        return
    report.passed("states", f"{said}, their neighbours do not; {now:.2f} tokens a cycle, {before:.2f} recorded")


def _recomputed(model: PreTrainedModel, probe: Probe, layers: Sequence[int]) -> list[_Text]:
    head: Any = model.get_output_embeddings()
    texts = []
    for document in probe.documents:
        states, last = hidden_states(model, document.tokens.tolist(), layers)
        best = torch.full((len(last),), -1)
        known = document.best >= 0
        if head is not None:
            with torch.inference_mode():
                best[known] = head(last[known.to(last.device)].to(head.weight.dtype)).argmax(-1).cpu()
        texts.append(_Text(document, {layer: state.cpu().float() for layer, state in states.items()}, best))
    return texts


def _is(texts: Sequence[_Text], slot: int, layer: int, slots: int, tolerance: Tolerance) -> bool:
    """Whether the recorded states in this slot are the outputs of this layer, in all texts."""
    if layer not in texts[0].states:
        return False
    return all(_distance(text, slot, layer, slots, tolerance).within(tolerance) for text in texts)


def _distance(text: _Text, slot: int, layer: int, slots: int, tolerance: Tolerance) -> Distance:
    return distance(text.document.aux.chunk(slots, dim=-1)[slot], text.states[layer], tolerance.strays)


def _agreement(texts: Sequence[_Text]) -> float:
    """Share of positions whose recorded and recomputed most likely tokens are the same; 1 where none is known."""
    pairs = [(text.document.best[text.best >= 0], text.best[text.best >= 0]) for text in texts]
    total = sum(len(recorded) for recorded, _ in pairs)
    return sum(int((recorded == now).sum()) for recorded, now in pairs) / total if total else 1.0
