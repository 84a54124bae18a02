"""The command line. `program.py` lists the verbs, one file a group has them; `reporting.py` is the one place where
errors become messages and exit codes."""

from eyas.cli.program import app, main

__all__ = ["app", "main"]
