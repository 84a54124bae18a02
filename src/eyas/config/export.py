"""Settings of `eyas export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from eyas.config.fields import Bytes, Ints, Section

Positive = Annotated[int, Field(ge=1)]


class ExportConfig(Section):
    """A drafter's folder for SGLang and vLLM, and what it is checked by."""

    target: str | None = None
    """The target, a folder or hub id; default: the one that the drafter's run trained for; `--target`."""
    store: Path | None = None
    """States that the drafter is tried on before it is exported; default: those of its run."""
    questions: Path | None = None
    """Try it on the target's own answers to these questions instead, a question.jsonl in EAGLE's layout;
    `--questions`."""
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    """Of the weights."""
    aux_layers: Ints | None = None
    """Layers whose outputs it was trained on, where its own config is wrong about that."""
    engines: tuple[Literal["sglang", "vllm"], ...] = ("sglang", "vllm")
    """By whose rules a folder is checked."""

    documents: Annotated[int, Field(ge=8)] = 32
    """Rows of the store, or questions, that it is tried on."""
    answer_tokens: Annotated[int, Field(ge=8)] = 64
    """Longest answer that it is tried on."""
    probe_tokens: Positive = 512
    """Tokens of the probe that goes with the folder."""
    probe_bytes: Bytes = 8 << 20
    """Most bytes of its states."""

    run_target: bool = True
    """Where a target is named: load it and compare its states with the probe's. False compares its files only."""
    device: str = "auto"
    """torch device of the target; auto is a GPU where there is one."""
    target_dtype: Literal["auto", "bf16", "f16", "f32"] = "auto"
    """What the target is run in; auto is the checkpoint's own."""
    trust_remote_code: bool = False
