"""Verbs that bring a drafter to servers, and servers up: export, serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import eyas
from eyas.cli.console import err, plain, say_table
from eyas.cli.options import ConfigFile, Overrides
from eyas.export.launch import Drafting

#: What SGLang's own --dtype may be.
_SGLANG_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def export(
    source: Annotated[
        str | None, typer.Argument(help="A run's folder, or a draft's: folder or hub id.", metavar="RUN|DRAFT")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The folder to make.")] = None,
    check: Annotated[
        str | None, typer.Option("--check", help="Only check this draft: folder or hub id.", metavar="DRAFT")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--target", "--model", help="Default: the one that the drafter was trained for.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="A question.jsonl, to try the drafter on the target's own answers.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a draft that is there.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Make the folder that SGLang and vLLM load, or --check one before a server does.

    Example: `eyas export runs/first --out draft`, then `eyas export --check draft --target MODEL`

    A head of SpecForge, speculators or EAGLE: `eyas export HEAD --target MODEL --questions question.jsonl --out draft`
    """
    flags = {"--target": ("export.target", model), "--questions": ("export.questions", questions)}
    cfg = eyas.load_config(config, overrides, flags).export
    if check is not None:
        if source is not None or folder is not None or force:
            raise eyas.ConfigError("--check makes nothing", check, "give it --target and --questions alone")
        report = eyas.check_draft(check, cfg, say=_say)
        say_table(report.lines())
        report.check()
        return
    if source is None or folder is None:
        what = "nothing to export is named" if source is None else "no folder is named"
        raise eyas.ConfigError(what, "", "eyas export RUN --out DIR, or eyas export --check DIR")
    say_table(eyas.export_draft(source, folder, cfg, force=force, say=_say).lines())


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def serve(  # noqa: PLR0913, PLR0917  flags are for people
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The target: a folder or hub id.")],
    draft: Annotated[
        str | None, typer.Option(help="An exported drafter, to serve with instead of capturing: folder or hub id.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="With --draft: whose command; default: sglang.", metavar="sglang|vllm")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 30000, vLLM's 8000.")] = None,
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
    """Print, or with --run execute, the command that serves MODEL: by SGLang with capture, or with a --draft.

    Flags that are not ours go to the server as they are: `eyas serve MODEL --run --tp 8 --chunked-prefill-size 8192`

    A drafter, checked first: `eyas serve MODEL --draft draft --engine vllm`
    """
    # SGLang's flag of this name says what the model computes in, in other words than ours.
    computed = [name for name in dtypes or () if name in _SGLANG_DTYPES]
    stored = [name for name in dtypes or () if name not in _SGLANG_DTYPES]
    flags = {
        "--quota": ("serve.quota_bytes", quota),
        "--layers": ("capture.layers", layers),
        "--dtype": ("capture.dtype", stored[-1] if stored else None),
        "--engine": ("serve.engine", engine),
    }
    cfg = eyas.load_config(config, overrides, flags)
    extra = [*context.args, *(word for name in computed for word in ("--dtype", name))]
    if draft is not None:
        if layers or stored or quota:
            raise eyas.ConfigError(
                "--draft serves, and captures nothing", draft, "leave --layers, --dtype, --quota out"
            )
        command = _drafting(model, draft, cfg, port, host, extra)
    elif engine is not None:
        raise eyas.ConfigError("--engine without a --draft", engine, "captured is by SGLang")
    else:
        command = _capturing(model, cfg, port, host, extra)
    _finish(command, run=run)


def _capturing(model: str, cfg: Any, port: int | None, host: str, extra: list[str]) -> Any:
    """The command with the capture plugin."""
    return eyas.serve_command(
        model,
        layers=cfg.capture.layers,
        last=cfg.capture.last,
        dtype=cfg.capture.dtype,
        spool=cfg.server.spool,
        quota_bytes=cfg.serve.quota_bytes,
        port=30000 if port is None else port,
        host=host,
        sglang_version=cfg.serve.sglang_version,
        python=cfg.serve.python,
        mode=int(cfg.serve.spool_mode, 8),
        group=cfg.serve.spool_group,
        writers=cfg.serve.writers,
        writer_threads=cfg.serve.writer_threads,
        arena_bytes=cfg.serve.arena_bytes or 0,
        extra=extra,
    )


def _drafting(model: str, draft: str, cfg: Any, port: int | None, host: str, extra: list[str]) -> Any:
    """The command with a drafter, once that was looked at."""
    said = cfg.serve
    looked_at = {"target": model, "engines": (said.engine,), "run_target": False, "questions": None}
    report = eyas.check_draft(draft, cfg.export.model_copy(update=looked_at))
    for finding in report.unproven:
        _say(f"not proven: {finding.name}: {finding.text}")
    report.check()
    return eyas.draft_command(
        model,
        draft,
        engine=said.engine,
        drafting=Drafting(said.draft_steps, said.draft_topk, said.draft_tokens),
        port=port,
        host=host,
        python=said.python,
        extra=extra,
    )


def _finish(command: Any, *, run: bool) -> None:
    """Print a command with what there is to say of it, or become it."""
    if command.note:
        err.print(command.note, highlight=False, markup=False, soft_wrap=True)
    if command.warning:
        err.print(f"[bold yellow]warning[/] {plain(command.warning)}", highlight=False, soft_wrap=True)
    if run:
        command.run()
    print(command.shell())  # noqa: T201  one line to paste: rich would wrap it
