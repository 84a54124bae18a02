"""The one place where errors become messages and exit codes.

Exit codes: 0 done, 1 a bug, 2 input or settings, 3 engine or server, 4 integrity, 5 store or disk, 6 finished but for
failed rows, 7 training cannot go on, 130 stopped. Each error of `eyas.errors` has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

import eyas
from eyas.cli.console import err, plain

EXIT_CODES = (
    "Exit codes: 0 done, 2 input or settings, 3 engine or server, 4 integrity, 5 store or disk, "
    "6 finished but for failed rows, 7 training cannot go on, 130 stopped."
)


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Turn EyasError and Ctrl-C into one message and an exit code; a traceback is left for bugs."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except eyas.EyasError as error:
            err.print(f"[bold red]error[/] {plain(error.what)}", highlight=False, soft_wrap=True)
            if error.where:
                err.print(f"  where  {plain(error.where)}", highlight=False, soft_wrap=True)
            if error.hint:
                err.print(f"  next   {plain(error.hint)}", highlight=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            err.print("stopped", highlight=False)
            raise typer.Exit(130) from None

    return wrapped
