"""Settings of `eyas train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from eyas.config.fields import Bytes, Section

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """From a store to a drafter."""

    store: Path | None = None
    """The states that `eyas extract` wrote; `--store`."""
    corpus: Path | None = None
    """What `eyas prepare` wrote, for the draft vocabulary; `--corpus`."""
    target: str | None = None
    """The target, a folder or hub id, for its embeddings and lm_head; default: the one the corpus was made for."""
    out: Path | None = None
    """Folder for checkpoints, the log and the drafter; an unfinished run there is resumed; `--out`."""
    init_from: str | None = None
    """A published draft checkpoint to start from; default: a new layer between the target's last captured layer and
    its head."""
    draft: dict[str, Any] = {}
    """The drafter's shape where it shall differ from the one derived from the target: `{intermediate_size: 8192}`."""
    vocab_size: Positive | None = None
    """Tokens that the drafter can draft; default: by `vocab_coverage`."""
    vocab_coverage: Annotated[float, Field(gt=0, le=1)] = 0.995
    """Share of the corpus's trained tokens that the draft vocabulary covers, where `vocab_size` is not given."""

    steps: Annotated[int, Field(ge=1, le=16)] = 7
    """K: how many tokens deep the drafter is trained on its own features."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Step k's loss has the weight step_decay ** k."""
    mask: Literal["serving", "classic", "shifted"] = "serving"
    """Which rows count: those that a server drafts from; or as in EAGLE's own code (classic) or in speculators
    (shifted), for comparisons: these need a store with `last: all`."""
    normaliser: Literal["valid", "classic"] = "valid"
    """What a step's loss is divided by: the rows that count over all ranks and accumulated batches, or the number of
    positions, as in EAGLE's own code."""
    oov: Literal["keep", "drop"] = "keep"
    """Rows whose most likely token lies outside the draft vocabulary: kept, or dropped as in EAGLE's own code."""
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """auto: flex attention on a GPU, else SDPA. The numbers are the same."""

    batch_tokens: Annotated[int, Field(ge=16)] = 8192
    """Positions in one packed batch of one rank; a longer row is cut."""
    accumulate: Positive = 1
    """Batches of each rank in one optimiser step."""
    epochs: Positive = 1
    """How often every row is seen."""
    max_steps: Positive | None = None
    """Optimiser steps after which the run ends, whatever `epochs` says."""
    seed: int = 0
    """Of the weights, the order of rows and the evaluation split."""
    readers: Annotated[int, Field(ge=0, le=64)] = 4
    """Threads that read ahead; 0 reads between the steps."""
    prefetch: Positive = 8
    """Packed batches that wait, read, for their turn."""
    follow: bool = False
    """Read a store that is still being written: its complete shards, in their order, and wait for more."""
    disk_budget: Bytes | None = None
    """With `follow`: consumed shards are deleted so that the store stays below this many bytes. One epoch only."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate. The loss is a mean over the rows that count: rates of trainers that divide by all positions
    do not transfer."""
    min_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate, as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: a half cosine; constant, then linear over the last `decay_share` of the steps; or constant."""
    warmup_share: Share = 0.02
    """Share of the steps in which the learning rate rises linearly."""
    decay_share: Share = 0.2
    """wsd: share of the steps in which it falls."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled; matrices only, never norms."""
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Largest norm of the gradient of one optimiser step; null does not clip."""

    device: str = "auto"
    """torch device: auto is a GPU where there is one."""
    dtype: Literal["bf16", "f32", "f64"] = "bf16"
    """What matrix products are computed in. The weights that are trained are kept in float32 (float64 for f64)."""
    compile: bool = True
    """torch.compile the parts that gain by it; on a CPU nothing is compiled."""
    checkpoint_activations: bool = False
    """Recompute the drafter's steps in the backward pass: less memory, more time."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks (torchrun): whole copies of the drafter, or its weights and optimiser's state in shares (FSDP2)."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Several ranks: longest wait for one another."""

    eval_share: Share = 0.02
    """Share of the rows set aside for evaluation, by a hash of their tokens; 0 evaluates nothing."""
    eval_rows: Positive = 512
    """At most so many rows are evaluated."""
    eval_every: Positive = 500
    """Optimiser steps between evaluations; the last step is always evaluated."""
    save_every: Positive = 500
    """Optimiser steps between checkpoints; the last step is always saved."""
    keep_last: Positive = 2
    """Checkpoints kept, the latest ones; the best one by simulated acceptance length is kept besides."""
    log_every: Positive = 10
    """Optimiser steps between entries of the log."""
    tensorboard: bool = False
    """Write event files for tensorboard, too; needs `pip install 'eyas[tensorboard]'`."""


#: Settings that may change between the sessions of one run: the curve does not depend on them.
FREE = frozenset(
    {
        "out",
        "readers",
        "prefetch",
        "timeout_s",
        "eval_rows",
        "eval_every",
        "save_every",
        "keep_last",
        "log_every",
        "tensorboard",
    }
)
