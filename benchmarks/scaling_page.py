"""docs/scaling.md from the newest `benchmarks/results/scaling-cpu-*.json`, on standard output; `make docs` calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).resolve().parent / "results"

#: What each step of scaling_steps.py is to a user, in the order of a store's life.
STEPS: Final = {
    "plan": "`extract --plan`, nothing there yet",
    "extract": "`extract`, the whole run",
    "again": "`extract` of a complete store",
    "info": "`store info`, complete",
    "check": "`verify`: structure, checksums, finiteness",
    "identity": "`verify --corpus`: identity too",
    "reader": "open a `StoreReader`, first row",
    "dataset": "first row of a `StoreDataset`'s epoch",
    "resume, half done": "killed half-way, `extract` until its first new row is stored",
    "journal, nearly done": "killed at 99 %: replay of the open shards' journals",
    "plan, nearly done": "`extract --plan` there",
    "info, nearly done": "`store info` there",
    "resume, nearly done": "`extract` there, until its first new row is stored",
}

HEAD: Final = """\
# How cost grows

Made by `make docs` from the newest `benchmarks/results/scaling-cpu-*.json`; no figure is typed in by hand.

Every step is run for a thousand, ten thousand and a hundred thousand rows, with rows so short and states so small
that the bytes do not matter: what is left is what Eyas does for each row and each shard. Three layouts: a large target
fills a shard of 2 GiB with a dozen rows or two, so its store has thousands of shards; a smaller one's has dozens; and
one open shard with every row in it is the worst that a resume can meet, since it hashes every journalled row of an
*open* shard again. (Of rows of usual size that is at most `store.shard_bytes` to read for each open shard.)

The same command measures any machine: `python benchmarks/scaling.py`, which writes `runs/bench/scaling.json`.
"""

TAIL: Final = """
## How to read it

- Compare processor time: other processes share the machine, and wall-clock holds their turns and their disk traffic.
- *growth* is the processor time at the most rows over that at a tenth of them. Ten is linear; less means that a part
  does not depend on rows at all (imports, starting the event loop, opening the corpus). The replay of a journal grows
  by more between ten and a hundred thousand lines: the garbage collector's first full passes fall there. Without them
  every line costs the same, and so it does with them from there on.
- *MB more* is what the process's resident set grew by at its peak, for each size. A planned row is a few numbers. In
  memory are one row group of the corpus (at most 65,536 rows and a million tokens), the rows of the shards being
  written and what their journals say; a finished shard is a sidecar.
- *reads* and *writes* are system calls at the most rows. Extraction writes a row's states in two pieces and its journal
  line in one; `verify` reads each row's two fields once. A resume opens a finished shard's sidecar once and the shard
  never.

`tests/extract/test_growth.py` guards this without a clock: it counts the lines of our code that run and the bytes that
go over files, for n, 2n and 4n rows, and fails where the second step costs more than twice the first.
"""


def page() -> str:
    """The whole page."""
    result: dict[str, Any] = json.loads(max(RESULTS.glob("scaling-cpu-*.json")).read_text())
    lines = [HEAD, f"{result['what']}", ""]
    lines += [f"- {key}: {result[key]}" for key in ("date", "hardware", "versions", "command")]
    lines += [f"- start of an interpreter with what `eyas extract` imports, not counted below: {result['startup_s']} s"]
    lines += ["", *_resumes(result["rows"])]
    for layout in dict.fromkeys(row["layout"] for row in result["rows"]):
        lines += ["", f"## {layout[0].upper()}{layout[1:]}", "", *_layout(result["rows"], layout)]
    return "\n".join(lines) + "\n" + TAIL


def _resumes(rows: list[dict[str, Any]]) -> list[str]:
    """How long a resume of the largest store takes, in every layout."""
    most = max(row["rows"] for row in rows)
    found = [row for row in rows if row["rows"] == most and row["step"].startswith("resume")]
    return [
        f"Resume of {most:,} rows, {row['layout']}, {row['step'].split(', ')[1]}: {row['cpu_s']:.2f} s of processor "
        f"time, {row['wall_s']:.2f} s wall-clock until the first new row was stored.\n"
        for row in found
    ]


def _layout(rows: list[dict[str, Any]], layout: str) -> list[str]:
    table = {(row["step"], row["rows"]): row for row in rows if row["layout"] == layout}
    counts = sorted({count for _, count in table})
    shards = ", ".join(f"{table['plan', count]['shards']:,.0f}" for count in counts)
    heads = [f"CPU s, {count:,}" for count in counts]
    columns = ["step", *heads, "growth", f"wall s, {counts[-1]:,}", "MB more", "reads", "writes"]
    lines = [f"Shards: {shards}.", "", "| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for step, meaning in STEPS.items():
        last = table[step, counts[-1]]
        factor = last["cpu, of a tenth"]
        cells = [meaning, *(f"{table[step, count]['cpu_s']:,.3f}" for count in counts)]
        cells += [f"{factor:.1f}" if factor else ""]
        cells += [f"{last['wall_s']:,.2f}", " / ".join(f"{table[step, count]['own_mb']:,.0f}" for count in counts)]
        cells += [f"{last[name]:,.0f}" for name in ("reads", "writes")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print(page(), end="")
