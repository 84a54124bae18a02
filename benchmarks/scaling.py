"""How cost grows with rows: plan, extract, kill, resume, verify and read stores of 1k, 10k and 100k rows.

    python benchmarks/scaling.py [--rows 1000 10000 100000] [--repeats 3] [--out FILE]

Rows of 4 to 40 tokens and states of 8 numbers, made by the fake engine: what is measured is what Eyas does for each
row and each shard, not the moving of bytes. Every step is a process of its own (scaling_steps.py). Processor time is
the figure to compare, since other processes share this machine; wall-clock stands beside it. Medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import scaling_steps as steps
import torch
from rich.console import Console
from rich.table import Table
from scaling_steps import Job

ROOT: Final = Path(__file__).resolve().parents[1]
ROW_BYTES: Final = 1_500  # of a shard, about; with 22 tokens a row
SHARD_EXTRA: Final = 4_200
WINDOW: Final = 32  # rows in flight: as many may be stored beyond the one that ended a session

#: Rows a shard. A large target fills 2 GiB with a dozen rows, so that 100,000 of them are thousands of shards.
LAYOUTS: Final = {"16 rows a shard": 16, "2,000 rows a shard": 2_000, "one shard": 1 << 30}
#: Figures of a step, in the order of the table.
FIGURES: Final = ("cpu_s", "wall_s", "own_mb", "rss_mb", "reads", "writes", "read_mb", "written_mb")


def life(job: Job, repeats: int) -> Iterator[tuple[str, dict[str, float]]]:
    """A store from its plan to the first row of an epoch, then once more with kills in between: steps and figures."""
    for _ in range(repeats):
        shutil.rmtree(job.store, ignore_errors=True)
        for step in (steps.plan, steps.extract, steps.again, steps.info, steps.check, steps.identity):
            yield step.__name__, _figures(step, job)
        for step in (steps.reader, steps.dataset):
            yield step.__name__, _figures(step, job)
    shutil.rmtree(job.store)
    stored = job.rows // 2
    steps.measured(steps.killed, replace(job, until=stored))
    for _ in range(repeats):
        yield "resume, half done", _figures(steps.resume, job)
        stored += WINDOW
    steps.measured(steps.killed, replace(job, until=job.rows * 99 // 100 - stored - WINDOW * repeats))
    for _ in range(repeats):
        for step in (steps.journal, steps.plan, steps.info, steps.resume):
            yield f"{step.__name__}, nearly done", _figures(step, job)
    shutil.rmtree(job.store)


def _figures(step: Callable[[Job, steps.Clock, steps.Tell], None], job: Job) -> dict[str, float]:
    found = steps.measured(step, job)
    assert found is not None
    return found


def startup_s() -> float:
    """Wall-clock seconds that an interpreter needs to come up with what `eyas extract` imports."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import eyas.cli, eyas.extract.runner"], check=True)
    return time.monotonic() - began_s


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure; the number of shards and rows is the same in all."""
    return {key: round(statistics.median(sample[key] for sample in samples), 4) for key in samples[0]}


def growth(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row by how much its processor time is that of a tenth of the rows."""
    cpu_s = {(row["layout"], row["step"], row["rows"]): row["cpu_s"] for row in rows}
    for row in rows:
        before = cpu_s.get((row["layout"], row["step"], row["rows"] // 10))
        row["cpu, of a tenth"] = round(row["cpu_s"] / before, 2) if before else None


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """All steps, the sizes of each below one another."""
    shown = Table("layout", "step", "rows", "shards", *FIGURES, "cpu, of a tenth", "ms a row")
    for row in sorted(rows, key=lambda row: (row["layout"], row["step"], row["rows"])):
        cells = [row["layout"], row["step"], f"{row['rows']:,}", f"{row['shards']:,.0f}"]
        cells += [f"{row[figure]:,.2f}" if row[figure] < 100 else f"{row[figure]:,.0f}" for figure in FIGURES]
        factor = row["cpu, of a tenth"]
        shown.add_row(*cells, f"{factor:.1f}" if factor else "", f"{1000 * row['cpu_s'] / row['rows']:.3f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where corpora and stores go; default: the temporary folder")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench" / "scaling.json")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="eyas-scaling-", dir=options.folder) as folder:
        for count in options.rows:
            job = Job(Path(folder) / f"{count}.parquet", Path(folder) / "store", count, 1)
            steps.measured(steps.corpus, job)
            for layout in options.layouts:
                samples: dict[str, list[dict[str, float]]] = {}
                shard_bytes = min(LAYOUTS[layout], 2 * count) * ROW_BYTES + SHARD_EXTRA
                for name, figures in life(replace(job, shard_bytes=shard_bytes), options.repeats):
                    samples.setdefault(name, []).append(figures)
                    print(f"{count:,} rows, {layout}: {name} {figures['cpu_s']:.3f} s CPU", flush=True)
                shards = samples["plan"][0]["shards"]
                rows += [
                    {"layout": layout, "step": name, "rows": count} | medians(found) | {"shards": shards}
                    for name, found in samples.items()
                ]
    growth(rows)
    result = {
        "title": "How cost grows with rows",
        "what": f"Stores of {', '.join(f'{count:,}' for count in options.rows)} rows of 4 to 40 tokens, made by the "
        f"fake engine. Medians of {options.repeats}; every step in a process of its own, imports not counted.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared and noisy: compare processor time",
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}",
        "command": "python benchmarks/scaling.py "
        f"--rows {' '.join(map(str, options.rows))} --repeats {options.repeats}",
        "startup_s": round(statistics.median(startup_s() for _ in range(options.repeats)), 2),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=200).print(table(rows))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
