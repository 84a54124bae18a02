"""The verb serve."""

from __future__ import annotations

from typing import Annotated

import typer

import eyas
from eyas.cli.console import err, plain
from eyas.cli.options import ConfigFile, Overrides

#: What SGLang's own --dtype may be.
_SGLANG_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


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
        err.print(f"[bold yellow]warning[/] {plain(command.warning)}", highlight=False, soft_wrap=True)
    if run:
        command.run()
    print(command.shell())  # noqa: T201  one line to paste: rich would wrap it
