"""Write the generated pages: docs/cli.md (from the commands), docs/config.md (from the settings), docs/benchmarks.md
(from benchmarks/results/*.json), docs/mutations.md (from the catalogue of tests/mutations), docs/releases.md (from
benchmarks/releases.py), docs/scaling.md (from benchmarks/scaling_page.py). `--check` fails when one is out of date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eyas.config import Config

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"


_PEAK_TFLOPS = 790.0  # `--peak-tflops` of benchmarks/train_gpu.py: bf16, dense, as measured
#: Key of a training step's entry -> title of its column.
_TRAINING = {
    "shape": "shape",
    "draft_vocab": "draft vocabulary",
    "batch": "batch",
    "seq_len": "T",
    "trained_share": "trained",
    "trainer": "trainer",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_all": "each",
    "peak_gib": "peak GiB",
    "gflop_per_token": "GFLOP a token",
    "mfu": "MFU",
}

#: Key of a drafter's entry -> title of its column, where it was measured, and where training told.
_ACCEPTANCE = {
    "benchmark": "benchmark",
    "mode": "mode",
    "concurrency": "at a time",
    "trainer": "trainer",
    "head": "head",
    "train_tokens": "tokens trained on",
    "gpu_seconds": "GPU s",
    "accept_length": "accepted",
    "ci95": "95 %",
    "accept_by_position": "by position",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
}
_RUNS = {
    "head": "run",
    "lr": "lr",
    "seed": "seed",
    "settings": "sets",
    "steps": "steps",
    "train_tokens": "tokens trained on",
    "gpu_seconds": "GPU s",
    "at_once": "runs on the GPU",
    "last_loss": "last loss",
    "accept_length": "accepted",
    "ci95": "95 %",
    "accept_by_position": "by position",
}


def cli_page() -> str:
    """The command reference, by typer's own generator."""
    command = [sys.executable, "-m", "typer", "eyas.cli", "utils", "docs", "--name", "eyas"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


#: Columns of a capture speed table, by key of its entries.
_SPEED = {
    "shape": "shape",
    "mode": "mode",
    "prompts": "prompts",
    "prompt_tokens": "tokens",
    "plain_tokens_per_s": "plain tokens/s",
    "eyas_tokens_per_s": "captured tokens/s",
    "ratio": "ratio",
    "others_ratio": "others",
    "bytes_per_token": "bytes a token",
    "gb_per_s": "GB/s",
    "rows_verified": "rows verified",
    "waits": "waits",
    "retries": "retries",
    "forward_us_p50": "forward thread, us p50",
    "forward_us_p99": "p99",
    "disk_gb_per_s": "the disk alone, GB/s",
}


def config_page() -> str:
    """Every setting with its default."""
    lines = [
        "# Settings",
        "",
        "`--config run.yaml` reads them from a file, `--set section.key=value` sets one. Sizes understand `2GiB`.",
        "A key that does not exist is refused, and the nearest one is named.",
    ]
    for name, field in Config.model_fields.items():
        section: type[BaseModel] = field.annotation  # pyright: ignore[reportAssignmentType]
        lines += ["", f"## {name}", "", _first_line(section), "", "| key | default | meaning |", "|---|---|---|"]
        for key, value in section.model_fields.items():
            meaning = " ".join((value.description or "").split())
            lines.append(f"| `{key}` | `{value.default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def benchmarks_page() -> str:
    """One table a result file: what ran where, and its rows as they were measured."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make docs` from `benchmarks/results/*.json`; nothing here is typed in by hand.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        if path.name.startswith(("releases-", "scaling-", "spool-to-store-")):
            continue  # these have pages of their own
        result = _titled(json.loads(path.read_text()))
        lines += ["", f"## {result['title']}", "", result["what"], ""]
        lines += [f"- {key}: {result[key]}" for key in ("date", "hardware", "versions", "command") if key in result]
        rows: list[dict[str, Any]] = result["rows"]
        columns = list(rows[0])
        lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
        if notes := [f"- {note}" for note in result.get("notes", ())]:
            lines += ["", *notes]
    return "\n".join(lines) + "\n"


def _titled(result: Any) -> dict[str, Any]:
    """A result file as a table: those of capture speed are lists of entries, where each says where it was measured."""
    if isinstance(result, dict):
        return result
    if "head" in result[0]:
        return _drafters(result)
    return _training(result) if "trainer" in result[0] else _capture(result)


def _drafters(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Drafters by what they are worth: in servers and offline, or by the rows that their training held out."""
    measured = "benchmark" in result[0]
    columns = _ACCEPTANCE if measured else _RUNS
    return {
        "title": "What drafters are worth" if measured else "Training runs by their held-out rows",
        "what": "Drafters for SmolLM2-135M-Instruct, trained on the same answers; `benchmarks/quality_gpu.py` "
        "says what is what. Shares by position are conditional."
        + ("" if measured else " Acceptance is simulated on chains from every row, as training evaluates on its way."),
        "date": ", ".join(sorted({entry["date"][:10] for entry in result})),
        "versions": ", ".join(sorted({f"{k} {v}" for entry in result for k, v in entry["versions"].items()})),
        "command": "bash benchmarks/quality_h200.sh STEP, see [quality](quality.md)",
        "rows": [{title: entry.get(key) for key, title in columns.items()} for entry in result],
    }


def _training(result: list[dict[str, Any]]) -> dict[str, Any]:
    gpus = ", ".join(sorted({entry["versions"]["gpu"] for entry in result}))
    versions = {pair for entry in result for pair in entry["versions"].items() if pair[0] not in ("gpu", "cpu")}
    return {
        "title": f"Training steps beside the peers', {gpus}",
        "what": "Forward, backward, clipping and AdamW on one batch, 7 steps of the training-time test; median of "
        "three times ten steps. Tokens are all of the batch. MFU counts the products that each trainer does, against "
        f"{_PEAK_TFLOPS:g} TFLOP/s. Entries of one command ran in one process, one after another.",
        "date": ", ".join(sorted({entry["date"] for entry in result})),
        "hardware": gpus,
        "versions": ", ".join(sorted(f"{name} {version}" for name, version in versions)),
        "command": "; ".join(sorted({entry["command"] for entry in result})),
        "rows": [{title: entry[key] for key, title in _TRAINING.items()} for entry in result],
    }


def _capture(result: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": f"Capture beside plain prefill, {result[0]['gpu']}",
        "what": "End to end: from the first request to the last shard complete, every row verified. The ratio is the "
        "median of pairs measured one after the other; `others` is the prefill of requests that are not captured, on "
        "the capturing server; both over a server as SGLang comes.",
        "date": ", ".join(sorted({entry["date"] for entry in result})),
        "hardware": ", ".join(sorted({f"{entry['gpu']}, {entry['cpus']} CPU cores" for entry in result})),
        "versions": ", ".join(sorted({f"sglang {entry['sglang']}, torch {entry['torch']}" for entry in result})),
        "command": "; ".join(sorted({entry["command"] for entry in result})),
        "rows": [
            {title: (entry | entry.get("forward", {})).get(key) for key, title in _SPEED.items()} for entry in result
        ],
        "notes": [
            f"{entry['shape']}, {entry['mode']}, the same prompts through {peer['version']}: "
            f"{peer['tokens_per_s']:,.0f} tokens/s with its own extraction, {peer['plain_tokens_per_s']:,.0f} plain, "
            f"ratio {peer['ratio']:.3f}, {peer['bytes_per_token']:,.0f} bytes a token, nothing verified"
            for entry in result
            for peer in entry.get("peers", {}).values()
        ],
    }


def mutations_page() -> str:
    """Every corruption that the tests inject, and who sees it; written by the catalogue itself."""
    command = [sys.executable, "-c", "from mutations.catalogue import page; print(page(), end='')"]
    path = os.pathsep.join(filter(None, (str(DOCS.parent / "tests"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    ).stdout


def releases_page() -> str:
    """Supported SGLang releases; written by the script that runs the contract suite against them."""
    command = [sys.executable, str(DOCS.parent / "benchmarks" / "releases.py"), "--page"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def scaling_page() -> str:
    """How cost grows with rows; written by a script beside the one that measures it."""
    command = [sys.executable, str(DOCS.parent / "benchmarks" / "scaling_page.py")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def pages() -> Iterator[tuple[Path, str]]:
    yield DOCS / "cli.md", cli_page()
    yield DOCS / "config.md", config_page()
    yield DOCS / "benchmarks.md", benchmarks_page()
    yield DOCS / "mutations.md", mutations_page()
    yield DOCS / "releases.md", releases_page()
    yield DOCS / "scaling.md", scaling_page()


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"


def main() -> int:
    stale = []
    for path, text in pages():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run make docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
