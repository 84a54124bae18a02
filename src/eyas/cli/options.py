"""Options that most verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Overrides = Annotated[list[str], typer.Option("--set", help="section.key=value; may be repeated.", metavar="KEY=VALUE")]
