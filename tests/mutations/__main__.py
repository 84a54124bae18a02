"""PYTHONPATH=tests python -m mutations: inject every mutation and print who saw what."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mutations.judging import judge_all


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        judged = judge_all(Path(folder))
    table = Table("where", "what is wrong", "seen by", "as", "right again")
    verdicts = [verdict for stage in judged.values() for verdict in stage.verdicts]
    for verdict in verdicts:
        seen = "; ".join(f"{check}: {', '.join(names)}" for check, names in verdict.seen.items() if names)
        style = "" if verdict.detected and verdict.right_again else "red"
        mutation = verdict.mutation
        again = "yes" if verdict.right_again else "NO"
        table.add_row(mutation.stage, mutation.name, mutation.seen_by, seen or "NOTHING", again, style=style)
    console = Console()
    console.print(table)
    left = [text for stage in judged.values() for text in stage.control]
    for text in left:
        console.print(f"refused though nothing is wrong: {text}", style="red")
    found = sum(verdict.detected for verdict in verdicts)
    again = sum(verdict.right_again for verdict in verdicts)
    console.print(f"{found} of {len(verdicts)} detected, {again} right again, {len(left)} false alarms")
    return int(bool(left) or not found == again == len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
