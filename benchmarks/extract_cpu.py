"""What capture costs on CPU: SGLang prefill with the plugin off, on without own requests, on with capture into a store.

    make bench

SmolLM2-135M in bf16 on the real SGLang 0.5.23 server. Two servers run side by side, one with the plugin and one as
SGLang comes, without any capture flag. The three modes take turns; figures are ratios to plain prefill of the same
round. All keep 16 requests in flight. Capture is end to end: from the first request to the last shard complete.
"""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the CPU server's harness lives with the tests

from prefill import plain  # noqa: E402

from eyas.config import load  # noqa: E402
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter  # noqa: E402
from eyas.extract.runner import extract  # noqa: E402
from eyas.smollm2 import smollm2_dir  # noqa: E402
from eyas.target.checkpoint import Target  # noqa: E402
from servers import sglang_server  # noqa: E402

ROUNDS = 5
ROWS = 64
WINDOW = 16
FLAGS = ("--disable-radix-cache", "--chunked-prefill-size", "2048", "--context-length", "4096")


def write_corpus(path: Path, vocab_size: int, seed: int) -> Corpus:
    """Random token ids, 64 rows of 200 to 800 tokens; the last two thirds of each are trained."""
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="seeded", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for row in range(ROWS):
            length = int(rng.integers(200, 800))
            mask = np.zeros(length, np.uint8)
            mask[length // 3 :] = 1
            writer.add(str(row), rng.integers(10, vocab_size, length), mask)
    return Corpus.open(path)


def captured(url: str, spool: Path, corpus: Corpus, store: Path, model: Path) -> float:
    """Tokens/s of capture, from the first request to the last shard complete."""
    settings = [f"server.spool={spool}", f"extract.window_requests={WINDOW}", "store.reserve_bytes=0"]
    console = Console(file=io.StringIO())
    run = extract(corpus.path, store, cfg=load(overrides=settings), model=str(model), server=url, console=console)
    assert run.rows_done == len(corpus), run.first_failures
    shutil.rmtree(store)
    return run.tokens_per_s


def main() -> None:
    model = smollm2_dir()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base = Path(folder)
        vocab_size = Target.load(str(model)).vocab_size
        with (
            sglang_server(model, base / "off", dtype="bfloat16", flags=FLAGS, capture=False) as off,
            sglang_server(model, base / "on", dtype="bfloat16", flags=FLAGS) as on,
        ):
            for number in range(ROUNDS + 1):
                corpus = write_corpus(base / f"{number}.parquet", vocab_size, number)
                speed = {
                    "plugin off": asyncio.run(plain(off.url, corpus, WINDOW)),
                    "plugin on, others' requests": asyncio.run(plain(on.url, corpus, WINDOW)),
                    "plugin on, captured into a store": captured(on.url, on.spool, corpus, base / "store", model),
                }
                print(f"round {number}: {', '.join(f'{k} {v:,.0f}' for k, v in speed.items())} tokens/s", flush=True)
                if number:  # the first round warms up
                    rounds.append(speed)
    rows = [
        {
            "mode": mode,
            "of plugin off, median": statistics.median(r[mode] / r["plugin off"] for r in rounds),
            "lowest": min(r[mode] / r["plugin off"] for r in rounds),
            "highest": max(r[mode] / r["plugin off"] for r in rounds),
        }
        for mode in rounds[0]
    ]
    result: dict[str, Any] = {
        "title": "Capture on CPU",
        "what": "Prefill of SmolLM2-135M in bf16 by the real SGLang server: ratios of tokens/s in one run of "
        f"{ROUNDS} rounds, {ROWS} rows of 200 to 800 tokens a round, {WINDOW} in flight.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared and noisy",
        "versions": f"sglang 0.5.23, torch {torch.__version__}, Python {platform.python_version()}",
        "command": "make bench",
        "rows": rows,
    }
    path = ROOT / "benchmarks" / "results" / f"capture-cpu-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)
    print(f"written to {path.relative_to(ROOT)}; make docs puts it into docs/benchmarks.md")


if __name__ == "__main__":
    main()
