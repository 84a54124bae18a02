"""`python -m soak`: the chaos run. See docs/soak.md."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from servers import PYTHON
from soak.campaign import Settings, Soak, failures
from soak.decisions import RESTART_LIMIT


def main() -> int:
    """Exit code 0 for a good run, 1 for one that found something or was not finished, 2 without SGLang, 130 stopped."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="own requests that must reach the server")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--minutes", type=float, default=45.0, help="no round begins after so many")
    parser.add_argument("--restarts", type=int, default=RESTART_LIMIT, help="most restarts of the server")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder for summary.json")
    asked = parser.parse_args()
    if asked.requests < 1 or not asked.minutes > 0 or asked.restarts < 0:
        parser.error("--requests and --minutes must be more than 0, and --restarts not less")
    if not PYTHON.exists():
        print(f"no SGLang: {PYTHON} is missing", file=sys.stderr)
        return 2
    seed = secrets.randbelow(1 << 31) if asked.seed is None else asked.seed
    console = Console(emoji=False)
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended
    try:
        summary = Soak(Settings(asked.requests, seed, asked.minutes, asked.out, asked.restarts), console).run()
    except KeyboardInterrupt:
        console.print(f"stopped; what there is, is in {asked.out / 'summary.json'}", highlight=False)
        return 130
    for key, value in summary.items():
        if key != "details":
            console.print(f"{key:<22}{value}", highlight=False)
    for text in (found := failures(summary)):
        console.print(f"bad: {text}", highlight=False, markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
