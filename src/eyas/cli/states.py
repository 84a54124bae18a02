"""Verbs on hidden states: extract, verify, store info, store move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eyas
from eyas.cli.console import err, out, say_figures, say_table
from eyas.cli.options import ConfigFile, Overrides


def extract(  # noqa: PLR0913, PLR0917  flags are for people
    corpus: Annotated[Path, typer.Argument(help="What `eyas prepare` wrote: its folder or the .parquet file.")],
    store: Annotated[Path, typer.Argument(help="Folder for the states; an unfinished one is resumed.")],
    server: Annotated[
        list[str] | None,
        typer.Option(help="URL of an `eyas serve` server; may be repeated. Without one, transformers here."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--target", "--model", help="Default: the one the corpus was prepared for.")
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Where a server that was patched to dump states makes its folders.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers whose outputs are captured, such as 2,30,57.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="What states are stored in; fp8_e4m3 halves the bytes.", metavar="bf16|f16|f32|fp8_e4m3"),
    ] = None,
    last: Annotated[
        str | None, typer.Option(help="What such a server dumps as last states.", metavar="pre-norm|post-norm")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what it would need; writes nothing.")] = False,
    workers: Annotated[int, typer.Option(help="Processes, each with its own window.", min=1)] = 1,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try rows again that failed earlier.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Capture the target's hidden states for every row of CORPUS into STORE.

    Example: `eyas extract corpus store --server http://localhost:30000`
    """
    flags = {
        "--dump-dir": ("dumpdir.folder", dump_dir),
        "--layers": ("capture.layers", layers),
        "--dtype": ("capture.dtype", dtype),
        "--last": ("dumpdir.last", last),
    }
    cfg = eyas.load_config(config, overrides, flags)
    if plan:
        forecast = eyas.plan_extraction(corpus, store, cfg=cfg, model=model, server=server)
        say_figures(forecast.table())
        forecast.check(store)
        return
    summary = eyas.extract_states(
        corpus, store, cfg=cfg, model=model, server=server, workers=workers, retry_failed=retry_failed, console=err
    )
    say_table(summary.lines())
    for line in summary.first_failures:
        err.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if summary.failed:
        raise eyas.RowsFailed(f"{summary.failed:,} rows could not be captured", store, "--retry-failed tries again")


def verify(
    store: Annotated[Path, typer.Argument(help="The store.")],
    corpus: Annotated[Path | None, typer.Option(help="Compare tokens and masks with this corpus.")] = None,
    against: Annotated[str | None, typer.Option(help="Recompute sampled rows with this model in transformers.")] = None,
    logits: Annotated[
        str | None, typer.Option(help="Compare sampled rows with the log-probabilities of this SGLang server.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--target", "--model", help="Whose lm_head --logits uses; default: the corpus's.")
    ] = None,
    sample: Annotated[int, typer.Option(help="How many rows --against and --logits look at; 0 is all.", min=0)] = 16,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Check a store: structure, checksums, finiteness; identity against the corpus; values against the model.

    Example: `eyas verify store --corpus corpus --against HuggingFaceTB/SmolLM2-135M-Instruct`

    A target too large to load here: `eyas verify store --corpus corpus --logits http://localhost:30000`
    """
    if model and not logits:
        raise eyas.ConfigError("--target names whose lm_head --logits uses", "--target", "add --logits URL")
    cfg = eyas.load_config(config, overrides)
    report = eyas.verify_store(
        store, corpus=corpus, against=against, logits=logits, model=model, sample=sample, cfg=cfg, console=err
    )
    say_table(report.lines())
    report.check()


def store_info(store: Annotated[Path, typer.Argument(help="The store.")]) -> None:
    """Say what a store holds and how far it is."""
    say_table(eyas.describe_store(store))


def store_move(
    store: Annotated[Path, typer.Argument(help="The store.")],
    to: Annotated[Path, typer.Option(help="An existing folder on the other disk.")],
    shards: Annotated[list[str] | None, typer.Argument(help="Shard file names; default: all complete ones.")] = None,
) -> None:
    """Move complete shards to another disk, also while a run goes on; links stay in their place.

    Example: `eyas store move store --to /mnt/second`
    """
    for move in eyas.move_shards(store, shards or None, to):
        out.print(f"{move.name}  {move.state}", highlight=False, markup=False, soft_wrap=True)
