"""Settings of `eyas evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from eyas.config.fields import PositiveInts, Section

Positive = Annotated[int, Field(ge=1)]


class EvaluateConfig(Section):
    """What a drafter is worth."""

    store: Path | None = None
    """Simulate on these states; `--store`."""
    corpus: Path | None = None
    """The corpus the store was made from, for categories and target; default: the one the drafter's run was trained on;
    `--corpus`."""
    questions: Path | None = None
    """Decode these questions, a question.jsonl in EAGLE's layout; `--questions`."""
    server: str | None = None
    """Ask this server, SGLang or vLLM with the drafter, those questions; `--server`."""
    baseline_server: str | None = None
    """The same target without a drafter: a server's URL, or the evaluation-*-live-d0.json of an earlier run;
    `--baseline-server`."""
    target: str | None = None
    """The target, a folder or hub id; default: the one that the drafter's run trained for, or the corpus was made for;
    `--target`."""
    out: Path | None = None
    """Folder of evaluation-*.json; default: the run that the drafter is of, else the folder you are in."""

    depth: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted one after another in a cycle (SGLang's `--speculative-num-steps`)."""
    topk: Annotated[int, Field(ge=1, le=32)] = 1
    """Branches at each step (SGLang's `--speculative-eagle-topk`); 1 is a chain."""
    tree_keys: Literal["places", "ancestors"] = "places"
    """With branches: what a draft attends to of those before it. SGLang keeps their keys in one place a branch, and
    reads the branch's own places; ancestors is what EAGLE's own code does."""
    draft_tokens: Positive | None = None
    """Tokens of a tree that the target verifies (SGLang's `--speculative-num-draft-tokens` less 1); default: `depth`
    for a chain, else 4 for each step."""

    limit: Positive | None = None
    """Only the first so many questions, or rows of the store."""
    held_out: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the store's rows, chosen as `train.eval_share` chooses them; 0 or 1 takes all. Default: the rows that
    the drafter's run held out, where it was trained on this corpus; else all."""
    concurrency: Annotated[PositiveInts, Field(min_length=1)] = (1, 4, 16)
    """Requests at a time, of a server; 1 is always among them, and acceptance is measured there."""
    max_new_tokens: Positive = 256
    """Longest answer of a turn."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    sample_drafts: bool = False
    """With a temperature: draft by sampling, and accept by the ratio of the two distributions. Otherwise the likeliest
    tokens are drafted, as SGLang and vLLM do. Chains only."""
    seed: int = 0
    """Of sampling, and of the bootstrap."""

    device: str = "auto"
    """torch device: auto is a GPU where there is one."""
    dtype: Literal["bf16", "f16", "f32"] = "f32"
    """Of target and drafter in process."""
