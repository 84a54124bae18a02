"""The verb that shows a run: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eyas
from eyas.cli.console import say_table
from eyas.cli.options import ConfigFile, Overrides


def report(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a whole run, of a corpus, a store or a training run; or a YAML file that names them."
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option("--out", help="Default: report.html in the run's folder.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Draw a run as one self-contained HTML page: corpus, extraction, training, evaluation, and what is missing.

    Example: `eyas report runs/demo`, or `eyas report run --set report.store=/data/store`
    """
    if run is not None and run.suffix in (".yaml", ".yml") and not run.is_dir():
        if config is not None:
            raise eyas.ConfigError("two files of settings", f"{run} and --config {config}", "name one")
        run, config = None, run
    cfg = eyas.load_config(config, overrides, {"--out": ("report.out", page)})
    say_table(eyas.write_report(run, cfg=cfg).lines())
