"""The `eyas` command: its verbs in the order of `eyas --help`, and its entry point.

A new verb is a function in the file of its group and a line here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated

import typer

import eyas
from eyas.cli.console import out
from eyas.cli.corpora import corpus_merge, corpus_stats, prepare, regenerate
from eyas.cli.drafters import demo, evaluate, train
from eyas.cli.reporting import EXIT_CODES, reporting
from eyas.cli.reports import report
from eyas.cli.serving import export, serve
from eyas.cli.states import extract, store_info, store_move, verify

app = typer.Typer(
    name="eyas",
    help="Turn a served language model into an EAGLE-3 draft model.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
store = typer.Typer(help="Look at a store, or move its shards between disks.", no_args_is_help=True)
app.add_typer(store, name="store")
corpus = typer.Typer(help="Look at a corpus, or join several.", no_args_is_help=True)
app.add_typer(corpus, name="corpus")

app.command()(reporting(prepare))
# Flags that it does not know are the server's.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(reporting(serve))
app.command()(reporting(extract))
app.command()(reporting(verify))
app.command()(reporting(train))
app.command()(reporting(evaluate))
app.command()(reporting(export))
app.command()(reporting(report))
app.command()(reporting(demo))
app.command()(reporting(regenerate))
corpus.command("stats")(reporting(corpus_stats))
corpus.command("merge")(reporting(corpus_merge))
store.command("info")(reporting(store_info))
store.command("move")(reporting(store_move))


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
