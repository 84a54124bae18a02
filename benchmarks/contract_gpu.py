"""Is the capture right and how fast is it, on a GPU, with a real SGLang server?

    python benchmarks/contract_gpu.py --out results.json [--python SGLANG_PYTHON] [--pythonpath DIRS] [--flags ...]

1. right: models written by transformers from a seed are served in bf16 with chunked prefill, 32 requests in flight,
   radix cache on; every row of the store is recomputed by transformers in float32, with controls, and compared with
   the server's own log-probabilities.
2. fast: the shape of Llama-3.1-8B with dummy weights; plain prefill (other users' requests, the plugin loaded) and
   capture into a store on RAM disk, in turns on one server. The figure is end to end: first request to last shard
   complete. `--skip-speed` leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefill import plain
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eyas.config import load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.runner import extract
from eyas.serve import installed_sglang, serve_command
from eyas.verify import verify

PORT = 30123
WINDOW = 32
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}


@contextmanager
def server(args: argparse.Namespace, model: Path, work: Path, *flags: str) -> Iterator[str]:
    """A running SGLang server; its URL."""
    command = serve_command(
        str(model),
        port=PORT,
        spool=work / "spool",
        quota_bytes=32 << 30,
        sglang_version=args.sglang,
        python=args.python,
        extra=["--skip-tokenizer-init", *args.flags.split(), *flags],
    )
    env = {**os.environ, **command.env, "HF_HUB_OFFLINE": "1"}
    if args.pythonpath:
        env["PYTHONPATH"] = args.pythonpath
    log = work / "server.log"
    print("server:", command.shell(), flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command.argv, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        began = time.monotonic()
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() - began > args.start_timeout:
                    print(log.read_text(errors="replace")[-6000:])
                    raise SystemExit("the server did not start") from None
                time.sleep(1)
        print(f"server: up after {time.monotonic() - began:.0f} s", flush=True)
        yield f"http://127.0.0.1:{PORT}"
    except BaseException:
        print(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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


def settings(work: Path, *more: str) -> Any:
    return load(overrides=[f"server.spool={work / 'spool'}", "store.reserve_bytes=0", *more])


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
    for name, config, cls in (
        ("llama", LlamaConfig(**shape), LlamaForCausalLM),
        ("qwen3", Qwen3Config(**shape), Qwen3ForCausalLM),
    ):
        torch.manual_seed(len(made))
        model = cls(config)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "norm" in key:
                    weight.copy_(1 + 0.2 * torch.randn_like(weight))
        made[name] = folder / name
        model.to(torch.bfloat16).save_pretrained(made[name])
    return made


def check_right(args: argparse.Namespace, name: str, model: Path, work: Path) -> dict[str, Any]:
    """Every row against transformers."""
    lengths = (
        [1, 2, 3, 63, 64, 65, 511, 512, 513, 1024, 1500, 1500, 1500, 2000] + [200] * 24 + list(range(100, 800, 16))
    )
    corpus = write_corpus(work / "corpus.parquet", lengths, 32000, seed=1)
    with server(args, model, work, "--chunked-prefill-size", "512") as url:
        cfg = settings(work, "store.shard_bytes=64MB")
        run = extract(corpus.path, work / "store", cfg=cfg, model=str(model), server=url, console=Console(width=160))
        report = verify(
            work / "store",
            corpus=corpus.path,
            against=str(model),
            logits=url,
            sample=0,
            cfg=cfg,
            console=Console(width=160),
        )
    assert report.comparison is not None
    assert report.audit is not None
    for line in report.lines():
        print(f"{name}: {line[0]}  {line[1]}", flush=True)
    return {
        "test": f"right: {name}, bf16, chunks of 512, 32 in flight, radix cache on{args.note}",
        "rows": run.rows_done,
        "failed": run.failed,
        "mismatches": len(report.problems) + len(report.comparison.mismatches) + len(report.audit.problems),
        "tokens/s": run.tokens_per_s,
        "of plain": None,
        "GB/s": None,
        "worst median error": max(d.median for d in report.comparison.worst.values()),
        "nearest control": min(d.median for d in report.comparison.nearest.values()),
        "worst median nats": report.audit.median,
        "nearest control nats": min(report.audit.nearest.values()),
    }


def measure_speed(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Plain and captured prefill in turns."""
    model = work / "llama-8b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    corpora = [
        write_corpus(work / f"{seed}.parquet", [2048] * args.rows, 128000, seed) for seed in range(args.rounds + 1)
    ]
    figures: dict[str, list[float]] = {"plain": [], "captured": [], "GB/s": []}
    flags = ["--load-format", "dummy", "--chunked-prefill-size", "8192", "--disable-radix-cache"]
    with server(args, model, work, *flags) as url:
        asyncio.run(plain(url, corpora[-1], WINDOW))  # compiles kernels
        for number, corpus in enumerate(corpora[:-1]):
            store = work / "store-8b"
            figures["plain"].append(asyncio.run(plain(url, corpus, WINDOW)))
            cfg = settings(work, "capture.last=loss")
            run = extract(corpus.path, store, cfg=cfg, model=str(model), server=url, console=Console(width=160))
            assert run.rows_done == len(corpus), run.first_failures
            figures["captured"].append(run.tokens_per_s)
            figures["GB/s"].append(run.bytes / run.seconds / 1e9)
            print(f"round {number}: plain {figures['plain'][-1]:,.0f}, captured {run.tokens_per_s:,.0f}", flush=True)
            print(f"  retries {run.retries}, waits {run.waits}", flush=True)
            shutil.rmtree(store)
    middle = {key: statistics.median(values) for key, values in figures.items()}
    shape = "Llama-3.1-8B shape, dummy weights, 2048-token prompts, last at 2/3 of positions"
    return [
        {
            "test": f"fast: {shape}, {kind}",
            "rows": args.rows,
            "failed": 0,
            "mismatches": None,
            "tokens/s": middle[kind],
            "of plain": middle[kind] / middle["plain"],
            "GB/s": middle["GB/s"] if kind == "captured" else None,
            "worst median error": None,
            "nearest control": None,
            "worst median nats": None,
            "nearest control nats": None,
        }
        for kind in ("plain", "captured")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
    parser.add_argument("--pythonpath", default="", help="PYTHONPATH of the server")
    parser.add_argument("--sglang", default=None, help="release, where it is not installed as a package")
    parser.add_argument("--flags", default="", help="further SGLang flags")
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--rows", type=int, default=400, help="prompts a round of the speed test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--note", default="", help="added to the names of the tests of correctness")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base = Path(folder)
        for name, model in seeded_models(base).items():
            work = base / f"work-{name}"
            work.mkdir()
            rows.append(check_right(args, name, model, work))
        if not args.skip_speed:
            work = base / "work-speed"
            work.mkdir()
            rows += measure_speed(args, work)
    words = shlex.join("PATH" if "/" in arg else arg for arg in sys.argv[1:])
    sglang = f"sglang {args.sglang or installed_sglang()}"
    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    result = {
        "title": f"Capture on {gpu}",
        "what": "Correctness against transformers in float32, and speed: plain is other users' requests on the server "
        "with capture flags, captured is end to end into a store on RAM disk.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{gpu}, {os.cpu_count()} CPU cores",
        "versions": f"{sglang}, torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/contract_gpu.py {words}",
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
