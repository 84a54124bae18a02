"""`eyas train` itself, whole runs on one and on several GPUs of this host: tokens/s, waiting for data, and one curve.

    python benchmarks/train_run_gpu.py --work /dev/shm/run --shape 8b --tokens 200000 --ranks 1 2 --json run.json
    python benchmarks/train_run_gpu.py --work /tmp/run --shape tiny --tokens 20000 --ranks 1 2    (rehearses on a CPU)

The store is of made-up states for a corpus of real row lengths; the target's embeddings and lm_head are random. Every
run takes the same batches: those of one rank accumulate what those of several share (`--ranks 1 2`: two batches a step
each). A figure is the median of the log's entries (ten steps each) behind the first; `loss` is the largest relative
difference of an entry's loss from that of the first run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from train_reader import states
from training_batch import REAL_ROWS, SHAPES
from transformers import LlamaConfig

from eyas.capture.contract import CaptureSpec
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.positions import kept_positions
from eyas.store.writer import StoreWriter
from eyas.target.checkpoint import Target
from eyas.train.draft import Eagle3Config
from eyas.train.log import TrainLog, read_train_log

LAYERS = 32  # of the target


def write_target(folder: Path, draft: Eagle3Config) -> None:
    """A config, and the two matrices that training reads."""
    folder.mkdir(parents=True)
    LlamaConfig(
        hidden_size=draft.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=draft.num_heads,
        num_key_value_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        vocab_size=draft.vocab_size,
        max_position_embeddings=draft.rope.max_positions,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    size = draft.vocab_size, draft.hidden_size
    names = ("model.embed_tokens.weight", "lm_head.weight")
    matrices = {name: torch.randn(size, generator=generator).mul_(0.02).bfloat16() for name in names}
    save_file(matrices, folder / "model.safetensors")


def write_corpus(path: Path, target: Path, vocab_size: int, tokens: int) -> None:
    rng, written = np.random.default_rng(0), 0
    meta = CorpusMeta(model=str(target), tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for row, (length, _) in enumerate(itertools.cycle(REAL_ROWS)):
            if written >= tokens:
                return
            # Zipf's law: a draft vocabulary that is smaller than the target's has something to leave out.
            ids = np.minimum(rng.zipf(1.2, length) + 10, vocab_size - 1)
            writer.add(str(row), ids, (np.arange(length) >= length * 2 // 5).astype(np.uint8))
            written += length


def prepare(work: Path, draft: Eagle3Config, tokens: int) -> None:
    """Target, corpus and store, unless they are there."""
    if (work / "store" / "manifest.json").exists():
        return
    write_target(work / "target", draft)
    write_corpus(work / "corpus.parquet", work / "target", draft.vocab_size, tokens)
    fingerprint = Target.load(str(work / "target")).fingerprint()
    assert fingerprint is not None
    spec = CaptureSpec(draft.aux_layers, "loss", "bf16", draft.hidden_size, draft.vocab_size, LAYERS, fingerprint)
    corpus = Corpus.open(work / "corpus.parquet")
    rows = [(row.tokens, row.loss_mask, kept_positions(row.loss_mask, spec.last)) for row in corpus.rows()]
    writer = StoreWriter.open(
        work / "store",
        spec=spec,
        corpus={"digest": corpus.digest},
        tokens_N=[len(row[0]) for row in rows],
        positions_N=[len(row[2]) for row in rows],
        shard_bytes=1 << 30,
        provenance={"engine": "benchmark"},
    )
    for shard in writer.plan.shards:
        lease = writer.lease(shard, lambda shard: iter(rows[shard.start : shard.stop]))
        assert lease is not None
        with lease:
            for row in lease.pending:
                length, kept = len(rows[row][0]), len(rows[row][2])
                aux, last = length * spec.aux_bytes_per_token, kept * spec.last_bytes_per_position
                lease.put(row, states(row, 0, aux), states(row, 1, last))
            lease.finish()
    writer.write_manifest()


def train(work: Path, ranks: int, args: argparse.Namespace) -> TrainLog:
    """One run in processes of its own: its log."""
    out = work / f"run-{ranks}"
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "vocab_size": SHAPES[args.shape].draft.draft_vocab_size,
        "batch_tokens": args.batch_tokens,
        "accumulate": max(args.ranks) // ranks,
        "max_steps": args.steps,
        "epochs": 1000,
        "eval_share": 0,
        "save_every": args.steps,
        "log_every": 10,
        "parallel": args.parallel,
    }
    words = ["-m", "eyas", "train", "--store", work / "store", "--corpus", work / "corpus.parquet", "--out", out]
    words += [word for key, value in settings.items() for word in ("--set", f"train.{key}={value}")]
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    subprocess.run([sys.executable, *map(str, (*starter, *words))], check=True)
    return read_train_log(out)


def entry(log: TrainLog, first: TrainLog, ranks: int) -> dict[str, Any]:
    steps, ((_, began),) = log.steps, log.starts
    steady = steps[1:] or steps
    off = max(abs(mine.loss - its.loss) / abs(its.loss) for mine, its in zip(steps, first.steps, strict=True))
    return {
        "ranks": ranks,
        "tokens_per_s": statistics.median(each.tokens_per_s for each in steady),
        "wait_share": max(each.wait_share for each in steady),
        "first_steps_s": round(steps[0].t - began, 1),
        "loss": off if math.isfinite(off) else None,
        "last_loss": steps[-1].loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of target, store and runs; used again")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the corpus")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prepare(args.work, SHAPES[args.shape].draft, args.tokens)
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU: a rehearsal"
    rows: list[dict[str, Any]] = []
    first: TrainLog | None = None
    for ranks in args.ranks:
        log = train(args.work, ranks, args)
        first = first or log
        rows.append({"shape": args.shape, "parallel": args.parallel if ranks > 1 else ""} | entry(log, first, ranks))
        rows[-1]["scaling"] = round(rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"], 3)
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        document = {
            "title": f"Whole training runs on {on}",
            "what": "`eyas train` on a store of made-up states, the same batches whatever the ranks; benchmarks/"
            "train_run_gpu.py says what is what.",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hardware": f"{torch.cuda.device_count()} x {on}",
            "versions": f"torch {torch.__version__}",
            "command": shlex.join(
                ["python", "benchmarks/train_run_gpu.py", *("PATH" if "/" in word else word for word in sys.argv[1:])]
            ),
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(Corpus.open(args.work / 'corpus.parquet')):,} rows")


if __name__ == "__main__":
    main()
