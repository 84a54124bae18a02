"""Verbs on drafters: train, evaluate, demo."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import eyas
from eyas.cli.console import err, out, say_figures, say_table
from eyas.cli.options import ConfigFile, Overrides


def train(
    run: Annotated[Path | None, typer.Argument(help="YAML file of settings; the same as --config.")] = None,
    store: Annotated[Path | None, typer.Option(help="What `eyas extract` wrote.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="What `eyas prepare` wrote: its folder or the .parquet file.")] = (
        None
    ),
    model: Annotated[
        str | None, typer.Option("--target", "--model", help="Default: the one the corpus was prepared for.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for checkpoints, log and drafter; an unfinished run is resumed."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Train a drafter on a store; the same command resumes.

    Example: `eyas train run.yaml`, or `eyas train --store store --corpus corpus --out run --set train.lr=2e-4`

    Several GPUs: `torchrun --nproc-per-node 8 -m eyas train run.yaml`
    """
    if run is not None and config is not None:
        raise eyas.ConfigError("two files of settings", f"{run} and --config {config}", "name one")
    flags = {
        "--store": ("train.store", store),
        "--corpus": ("train.corpus", corpus),
        "--target": ("train.target", model),
        "--out": ("train.out", folder),
    }
    summary = eyas.train_drafter(eyas.load_config(config or run, overrides, flags).train, console=err)
    if int(os.environ.get("RANK", "0")) == 0:
        say_table(summary.lines())


def evaluate(
    draft: Annotated[str, typer.Argument(help="A drafter's folder, its run's, or a hub id.")],
    store: Annotated[Path | None, typer.Option(help="Simulate decoding on these states.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="What the store was made from; default: the run's.")] = None,
    questions: Annotated[Path | None, typer.Option(help="Decode these questions here: a question.jsonl.")] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Ask this SGLang or vLLM server, which runs the drafter, those questions."),
    ] = None,
    baseline_server: Annotated[
        str | None, typer.Option(help="The same without a drafter: a URL, or what an earlier run of it left.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--target", "--model", help="Default: the run's, or the corpus's.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Acceptance length of a drafter: simulated on a store, by speculative decoding in this process, or in a server.

    Example: `eyas evaluate run --store store`, or `eyas evaluate run --questions mt_bench/question.jsonl`

    In servers: `eyas evaluate run --questions mt_bench/question.jsonl --server http://localhost:30000
    --baseline-server http://localhost:30001`

    It leaves evaluation-*.json in the drafter's run, else here; see docs/evaluation.md. A stopped one goes on;
    with --server it begins anew.
    """
    flags = {
        "--store": ("evaluate.store", store),
        "--corpus": ("evaluate.corpus", corpus),
        "--questions": ("evaluate.questions", questions),
        "--server": ("evaluate.server", server),
        "--baseline-server": ("evaluate.baseline_server", baseline_server),
        "--target": ("evaluate.target", model),
    }
    cfg, command = eyas.load_config(config, overrides, flags), shlex.join(["eyas", *sys.argv[1:]])
    if cfg.evaluate.server or cfg.evaluate.baseline_server:
        live = eyas.evaluate_served(draft, cfg, console=err, command=command)
        say_figures(live.table())
        say_table(live.lines())
        return
    done = eyas.evaluate_draft(draft, cfg.evaluate, console=err, command=command)
    say_figures(done.evaluation.table())
    say_table([*(("note", note) for note in done.evaluation.notes), ("written", str(done.path))])


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where it goes; a second run reuses it.")] = Path("runs/demo"),
    cache: Annotated[Path | None, typer.Option(help="Where the converted model is kept.")] = None,
) -> None:
    """The whole job on this machine's CPU: SmolLM2-135M, 96 real prompts, no server; ends with a small drafter."""
    eyas.run_demo(folder, cache, console=out)
