"""Is the capture right on a GPU, with a real SGLang server?

    python benchmarks/contract_gpu.py --out results.json [--python SGLANG_PYTHON] [--pythonpath DIRS] [--flags ...]

Models written by transformers from a seed are served in bf16 with chunked prefill, 32 requests in flight, radix cache
on, one server for each case below at the same time. Every row of each store is recomputed by transformers in float32,
with controls, and compared with the server's own log-probabilities. Speed is `extract_gpu.py`'s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fleet import Options, Running, Wanted, started
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from eyas.config import load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.runner import extract
from eyas.verify import verify

LENGTHS = [1, 2, 3, 63, 64, 65, 511, 512, 513, 1024, 1500, 1500, 1500, 2000] + [200] * 24 + list(range(100, 800, 16))


class Case(NamedTuple):
    """A model, how its states are stored, and how the server writes them."""

    model: str
    dtype: str
    writers: str

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-{self.writers}"


CASES = (Case("llama", "bf16", "threads"), Case("qwen3", "bf16", "process"), Case("llama", "fp8_e4m3", "process"))


def write_corpus(path: Path, lengths: list[int], vocab_size: int, seed: int) -> Corpus:
    """Random token ids; half of the rows share a prefix of 40, every seventh is a duplicate of the one before."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(10, vocab_size, 40)
    meta = CorpusMeta(model="seeded", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        tokens = shared
        for index, length in enumerate(lengths):
            if index % 7 != 6:
                tokens = rng.integers(10, vocab_size, length)
                if index % 2:
                    tokens[:40] = shared[: min(40, length)]
            mask = np.zeros(len(tokens), np.uint8)
            mask[len(tokens) // 3 :] = 1
            writer.add(str(index), tokens, mask)
    return Corpus.open(path)


def seeded_models(folder: Path) -> dict[str, Path]:
    """Small models whose layers differ clearly, written by transformers."""
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
    }
    made = {}
    for name, config in {"llama": LlamaConfig(**shape), "qwen3": Qwen3Config(**shape)}.items():
        torch.manual_seed(len(made))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "norm" in key:
                    weight.copy_(1 + 0.2 * torch.randn_like(weight))
        made[name] = folder / name
        model.bfloat16().save_pretrained(made[name])
    return made


def check_right(server: Running, work: Path, case: Case, note: str) -> dict[str, Any]:
    """Every row against transformers and against the server's own log-probabilities."""
    corpus, store = write_corpus(work / f"{server.name}.parquet", LENGTHS, 32000, seed=1), work / f"store-{server.name}"
    named = [f"server.spool={server.spool}", f"capture.dtype={case.dtype}"]  # as the server has it, or it refuses
    cfg = load(overrides=[*named, "store.reserve_bytes=0", "store.shard_bytes=64MB"])
    console = Console(width=160)
    run = extract(corpus.path, store, cfg=cfg, model=server.model, server=server.url, console=console)
    report = verify(
        store, corpus=corpus.path, against=server.model, logits=server.url, sample=0, cfg=cfg, console=console
    )
    assert report.comparison is not None
    assert report.audit is not None
    for line in report.lines():
        print(f"{server.name}: {line[0]}  {line[1]}", flush=True)
    return {
        "test": f"{case.model}, bf16, states in {case.dtype}, writers {case.writers}{note}",
        "rows": run.rows_done,
        "failed": run.failed,
        "mismatches": len(report.problems) + len(report.comparison.mismatches) + len(report.audit.problems),
        "worst median error": max(d.median for d in report.comparison.worst.values()),
        "nearest control": min(d.median for d in report.comparison.nearest.values()),
        "worst median nats": report.audit.median,
        "nearest control nats": min(report.audit.nearest.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="added to the names of the cases")
    Options.add_to(parser)
    args = parser.parse_args()
    flags = ("--chunked-prefill-size", "512", "--max-total-tokens", "100000")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        work = Path(folder)
        models = seeded_models(work)
        cases = {str(case): case for case in CASES}
        wanted = [
            Wanted(name, models[case.model], flags, settings={"dtype": case.dtype, "writers": case.writers})
            for name, case in cases.items()
        ]
        with started(Options.of(args), wanted, work) as servers:
            rows = [check_right(servers[name], work, case, args.note) for name, case in cases.items()]
    words = shlex.join("PATH" if "/" in arg else arg for arg in sys.argv[1:])
    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    result = {
        "title": f"Capture is right on {gpu}",
        "what": "Rows of seeded models against transformers in float32 and against the server's log-probabilities; "
        "chunks of 512 tokens, 32 in flight, radix cache on.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{gpu}, {os.cpu_count()} CPU cores",
        "versions": f"sglang {Options.of(args).release}, torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/contract_gpu.py {words}",
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
