"""The command line: one function per verb, and the one place where errors become messages and exit codes.

Exit codes: 0 done, 1 a bug, 2 input or settings, 3 engine or server, 4 integrity, 5 store or disk, 6 finished but for
failed rows, 7 training cannot go on, 130 stopped.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

import eyas

app = typer.Typer(
    name="eyas",
    help="Turn a served language model into an EAGLE-3 draft model.",
    epilog="Exit codes: 0 done, 2 input or settings, 3 engine or server, 4 integrity, 5 store or disk, "
    "6 finished but for failed rows, 7 training cannot go on, 130 stopped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
store_app = typer.Typer(help="Look at a store, or move its shards between disks.", no_args_is_help=True)
app.add_typer(store_app, name="store")
corpus_app = typer.Typer(help="Look at a corpus, or join several.", no_args_is_help=True)
app.add_typer(corpus_app, name="corpus")

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

_SGLANG_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Overrides = Annotated[list[str], typer.Option("--set", help="section.key=value; may be repeated.", metavar="KEY=VALUE")]


def _reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Turn EyasError and Ctrl-C into one message and an exit code; a traceback is left for bugs."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except eyas.EyasError as error:
            err.print(f"[bold red]error[/] {_plain(error.what)}", highlight=False, soft_wrap=True)
            if error.where:
                err.print(f"  where  {_plain(error.where)}", highlight=False, soft_wrap=True)
            if error.hint:
                err.print(f"  next   {_plain(error.hint)}", highlight=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            err.print("stopped", highlight=False)
            raise typer.Exit(130) from None

    return wrapped


def _plain(text: str) -> str:
    """A text of a file or a path, which may hold markup, or bytes that are no characters."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def _lines(lines: Sequence[Text]) -> None:
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def _table(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        out.print(f"{name:<{width}}  {_plain(text)}", highlight=False, soft_wrap=True)


@app.command()
@_reporting
def prepare(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Files, folders, globs or `hf:NAME`; default: prepare.sources.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "--model", help="Whose tokenizer and template are used: folder or hub id.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the corpus and the accounts.")] = Path("corpus"),
    show: Annotated[int, typer.Option(help="Print this many samples with the trained tokens marked.", min=0)] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one a core.", min=1)] = None,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006  typer copies it
) -> None:
    """Turn chats into a tokenised corpus with a loss mask, and account for every row.

    Example: `eyas prepare chats.jsonl --target HuggingFaceTB/SmolLM2-135M-Instruct --out corpus --show 2`
    """
    flags = {"--strict": ("prepare.strict", strict or None), "--workers": ("prepare.workers", workers)}
    cfg = eyas.load_config(config, overrides, flags).prepare
    if not (target := target or cfg.target):
        raise eyas.ConfigError("no target is named", "--target", "the model whose tokenizer and template are used")
    report = eyas.prepare_corpus(inputs or cfg.sources, target, folder, cfg=cfg, show=show, console=out)
    _lines(report.lines(min(out.width, 100)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_reporting
def serve(  # noqa: PLR0913, PLR0917  flags are for people
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The target: a folder or hub id.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need an --api-key.")] = (
        "127.0.0.1"
    ),
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers whose outputs are captured, such as 2,30,57; extract's too.")
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            help="What states are stored in, extract's too; fp8_e4m3 halves the bytes. SGLang's own go to SGLang.",
            metavar="bf16|f16|f32|fp8_e4m3",
        ),
    ] = None,
    quota: Annotated[str | None, typer.Option(help="Most bytes waiting in the spool, such as 16GiB.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Start the server instead of printing the command.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Print, or with --run execute, the SGLang command that serves MODEL with capture.

    Flags that are not ours go to SGLang as they are: `eyas serve MODEL --run --tp 8 --chunked-prefill-size 8192`
    """
    # SGLang's flag of this name says what the model computes in, in other words than ours.
    computed = [name for name in dtypes or () if name in _SGLANG_DTYPES]
    stored = [name for name in dtypes or () if name not in _SGLANG_DTYPES]
    flags = {
        "--quota": ("serve.quota_bytes", quota),
        "--layers": ("capture.layers", layers),
        "--dtype": ("capture.dtype", stored[-1] if stored else None),
    }
    cfg = eyas.load_config(config, overrides, flags)
    command = eyas.serve_command(
        model,
        layers=cfg.capture.layers,
        last=cfg.capture.last,
        dtype=cfg.capture.dtype,
        spool=cfg.server.spool,
        quota_bytes=cfg.serve.quota_bytes,
        port=port,
        host=host,
        sglang_version=cfg.serve.sglang_version,
        python=cfg.serve.python,
        mode=int(cfg.serve.spool_mode, 8),
        group=cfg.serve.spool_group,
        writers=cfg.serve.writers,
        writer_threads=cfg.serve.writer_threads,
        arena_bytes=cfg.serve.arena_bytes or 0,
        extra=[*context.args, *(word for name in computed for word in ("--dtype", name))],
    )
    if command.note:
        err.print(command.note, highlight=False, markup=False, soft_wrap=True)
    if command.warning:
        err.print(f"[bold yellow]warning[/] {_plain(command.warning)}", highlight=False, soft_wrap=True)
    if run:
        command.run()
    print(command.shell())  # noqa: T201  one line to paste: rich would wrap it


@app.command()
@_reporting
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
        out.print(forecast.table(), highlight=False)
        forecast.check(store)
        return
    summary = eyas.extract_states(
        corpus, store, cfg=cfg, model=model, server=server, workers=workers, retry_failed=retry_failed, console=err
    )
    _table(summary.lines())
    for line in summary.first_failures:
        err.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if summary.failed:
        raise eyas.RowsFailed(f"{summary.failed:,} rows could not be captured", store, "--retry-failed tries again")


@app.command()
@_reporting
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
    _table(report.lines())
    report.check()


@corpus_app.command("stats")
@_reporting
def corpus_stats(
    corpora: Annotated[list[Path], typer.Argument(help="Folders of `eyas prepare`, or .parquet files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what corpora hold: lengths, trained share, sources, and how far a draft vocabulary reaches.

    Example: `eyas corpus stats corpus`
    """
    found = eyas.corpus_statistics(corpora)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))  # noqa: T201  rich would wrap it
        return
    _lines(found.lines())


@corpus_app.command("merge")
@_reporting
def corpus_merge(
    corpora: Annotated[list[Path], typer.Argument(help="Folders of `eyas prepare`, or .parquet files.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the joined corpus.")],
) -> None:
    """Join corpora of one tokenizer and template, one after another.

    Example: `eyas corpus merge first second --out both`
    """
    merged = eyas.merge_corpora(corpora, folder)
    totals = [("rows", f"{len(merged):,}"), ("tokens", f"{merged.meta.tokens:,}"), ("digest", merged.digest)]
    _table([*totals, ("next", f"eyas extract {folder} STORE --server URL")])


@store_app.command("info")
@_reporting
def store_info(store: Annotated[Path, typer.Argument(help="The store.")]) -> None:
    """Say what a store holds and how far it is."""
    _table(eyas.describe_store(store))


@store_app.command("move")
@_reporting
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


@app.command()
@_reporting
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
        _table(summary.lines())


@app.command()
@_reporting
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where it goes; a second run reuses it.")] = Path("runs/demo"),
    cache: Annotated[Path | None, typer.Option(help="Where the converted model is kept.")] = None,
) -> None:
    """The whole job on this machine's CPU: SmolLM2-135M, 96 real prompts, no server; ends with a small drafter."""
    eyas.run_demo(folder, cache, console=out)


@app.command()
@_reporting
def regenerate(
    answers: Annotated[Path, typer.Option("--out", help="JSON lines to write; what is there is gone on with.")],
    inputs: Annotated[list[str] | None, typer.Argument(help="Chat files, as for prepare.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="Base URL; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="The server's name of the target; default: the only one.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Dollars that are never passed.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Ask rows again that failed earlier.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have the target answer every assistant turn anew, on any OpenAI-compatible server; a killed run goes on.

    Example: `eyas regenerate chats.jsonl --server http://localhost:30000/v1 --out answers.jsonl`
    """
    cfg = eyas.load_config(config, overrides, {"--max-cost": ("regenerate.max_cost", max_cost)}).regenerate
    report = eyas.regenerate_answers(
        inputs or cfg.sources,
        answers,
        servers=server or (),
        model=model,
        cfg=cfg,
        retry_failed=retry_failed,
        console=err,
    )
    for line in report.lines():
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if report.over_budget:
        raise eyas.RowsFailed("max_cost would be passed", answers, "with a higher one the same command goes on")
    if failed := report.failed.total():
        raise eyas.RowsFailed(f"{failed:,} rows have no answer", answers, "--retry-failed tries again")


def version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        out.print(f"eyas {eyas.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Turn a served language model into an EAGLE-3 draft model."""


def main() -> None:
    """Entry point of the `eyas` command."""
    # Before torch is imported: its idle OpenMP threads otherwise spin, several times slower on a shared CPU.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("stamina").setLevel(logging.ERROR)  # retries are told by the run itself
    try:
        sys.exit(app())
    finally:  # the command is over: an interrupt could only break off Python's own tidying, with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
