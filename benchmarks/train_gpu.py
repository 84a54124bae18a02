"""Tokens/s of one EAGLE-3 training step, ours beside SpecForge's and speculators', on the same batch in the same run.

    python benchmarks/train_gpu.py --out train-h200.json --shapes 8b --seq-lens 2048 8192 --shares 0.6
    python benchmarks/train_gpu.py --out train-h200.json --shapes smol            (adds to what the file holds)
    python benchmarks/train_gpu.py --out tiny.json --shapes tiny --trainers eyas  (a rehearsal on a CPU)

A step is forward, backward, clipping and fused AdamW. Each is warmed up until it is steady, then timed for three
times `--steps` steps; the figure is the median. Tokens are all tokens of the batch, trained or not. `mfu` counts the
products that the trainer does, as the trainer does them, against `--peak-tflops`. Peak memory is that of the timed
steps with the batch, the weights, the optimiser's state and the target's embeddings and lm_head. Peers take part where
they are installed (benchmarks/peers/training.py names their settings).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers.standins import prepare_peers
from peers.training import build_specforge, build_speculators
from torch import Tensor
from training_batch import SHAPES, Made, make

from eyas.train.batch import pack
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.flops import step_flops
from eyas.train.loss import TeacherHead
from eyas.train.objective import Objective, ObjectiveOptions, normaliser_of
from eyas.train.optimizer import gradient_norm, make_adamw, step_clipped

TRAINERS = ("eyas", "specforge", "speculators")
STEPS = 7  # of the training-time test


@dataclass
class Trainer:
    """One trainer ready to step: `step` returns its loss; `flops` of products a step."""

    step: Callable[[], Tensor | float]
    flops: float
    notes: str = ""


def build_eyas(made: Made, config: Eagle3Config, args: argparse.Namespace) -> Trainer:
    device = args.device
    on_gpu = device == "cuda"
    draft = Eagle3Draft(config, made.embeddings, torch.Generator().manual_seed(0))
    head = TeacherHead(made.head[made.draft_ids])
    if args.oov == "drop":
        outside = torch.ones(config.vocab_size, dtype=torch.bool)
        outside[made.draft_ids] = False
        head = TeacherHead(head.weight, outside=made.head[outside])
    options = ObjectiveOptions(
        oov=args.oov,
        attention=args.attention or ("flex" if on_gpu else "sdpa"),
        dtype=torch.bfloat16,
        compile=on_gpu and not args.eager,
        checkpoint=args.checkpoint,
    )
    objective = Objective(draft, head, made.draft_ids, options).to(device)
    optimizer = make_adamw(objective, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    on_cpu = pack(made.samples(), steps=STEPS, budget=made.tokens.numel())
    flops = step_flops(config, on_cpu, drop=args.oov == "drop")
    batch, normaliser = on_cpu.to(device), normaliser_of([on_cpu])

    def step() -> Tensor:
        loss = objective(batch, normaliser).loss
        loss.backward()
        step_clipped(optimizer, gradient_norm(parameters), 0.5)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    parts = ", ".join(f"{name} {value / made.tokens.numel() / 1e9:.3g}" for name, value in flops.items())
    return Trainer(step, flops["total"], f"GFLOP a token: {parts}; rows by step {on_cpu.counts}")


def measure(trainer: Trainer, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up until steady, then three times `args.steps` steps."""
    sync = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    warm: list[float] = []
    losses: list[Tensor | float] = []
    while len(warm) < 3 or (len(warm) < 10 and warm[-1] > 1.3 * min(warm)):
        began = time.perf_counter()
        losses.append(trainer.step())
        sync()
        warm.append(time.perf_counter() - began)
    gc.collect()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        losses += [trainer.step() for _ in range(args.steps)]
        sync()
        rates.append(args.steps * tokens / (time.perf_counter() - began))
    rate = statistics.median(rates)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
    return {
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_all": [round(r, 1) for r in rates],
        "peak_gib": peak and round(peak, 2),
        "mfu": round(trainer.flops * rate / tokens / (args.peak_tflops * 1e12), 4),
        "gflop_per_token": round(trainer.flops / tokens / 1e9, 3),
        "loss": round(float(losses[0]), 4),
        "loss_after": round(float(losses[-1]), 4),
        "warm_up_s": [round(w, 2) for w in warm],
        "notes": trainer.notes,
    }


def build(name: str, made: Made, config: Eagle3Config, args: argparse.Namespace) -> Trainer:
    match name:
        case "eyas":
            return build_eyas(made, config, args)
        case "specforge":
            return Trainer(*build_specforge(made, config, STEPS, args.device))
        case _:
            return Trainer(*build_speculators(made, config, STEPS, args.device))


def run_case(name: str, shape: str, seq_len: int, vocab: int, share: float, args: argparse.Namespace) -> dict[str, Any]:
    """One trainer on one batch: an entry of the results."""
    config = SHAPES[shape].with_vocab(vocab)
    batch = SHAPES[shape].batch
    entry: dict[str, Any] = {
        "trainer": name,
        "shape": shape,
        "seq_len": seq_len,
        "batch": batch,
        "draft_vocab": vocab,
        "trained_share": share,
        "documents": "one" if args.one_document else "real",
        "attention": (args.attention or ("flex" if args.device == "cuda" else "sdpa")) if name == "eyas" else "flex",
    }
    if args.device == "cuda":
        torch.cuda.empty_cache()
    try:
        made = make(config, batch, seq_len, share, one=args.one_document, device=args.device)
        entry["documents_n"] = sum(map(len, made.lengths))
        entry["trained"] = round(made.trained.float().mean().item(), 4)
        trainer = build(name, made, config, args)
        entry |= measure(trainer, batch * seq_len, args)
        if args.profile and args.device == "cuda":
            profile(trainer, f"{name} {shape} {seq_len} {vocab} {share}")
    except ImportError as error:
        entry["error"] = f"not installed: {error}"
    except Exception as error:  # noqa: BLE001 (a peer's failure is a result; the others go on)
        entry["error"] = f"{type(error).__name__}: {error}"[:500]
        traceback.print_exc()
    return entry | {
        "versions": versions(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def profile(trainer: Trainer, title: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.step()
        torch.cuda.synchronize()
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        table = profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)
        print(f"--- {title}, by {key}\n{table}", flush=True)


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "triton", "transformers", "specforge", "speculators"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {"cpu": "rehearsal"})


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str, int, float]]:
    """(shape, draft vocabulary, trainer, sequence length, share of tokens trained) of each run, in order."""
    for shape in args.shapes:
        vocabs, lengths = args.draft_vocabs or SHAPES[shape].draft_vocabs, args.seq_lens or SHAPES[shape].seq_lens
        for vocab, name in itertools.product(vocabs, args.trainers):
            for seq_len, share in itertools.product(lengths, args.shares):
                yield shape, vocab, name, seq_len, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["8b", "smol"], choices=list(SHAPES))
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=TRAINERS)
    parser.add_argument("--seq-lens", nargs="+", type=int, help="instead of the shape's own")
    parser.add_argument("--draft-vocabs", nargs="+", type=int, help="instead of the shape's own")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 1.0], help="of tokens that are trained")
    parser.add_argument("--steps", type=int, default=10, help="timed at once, three times")
    parser.add_argument("--attention", choices=["flex", "sdpa"], help="ours")
    parser.add_argument("--oov", choices=["keep", "drop"], default="keep", help="ours")
    parser.add_argument("--eager", action="store_true", help="ours, not compiled")
    parser.add_argument("--checkpoint", action="store_true", help="ours, steps recomputed in the backward pass")
    parser.add_argument("--one-document", action="store_true", help="each row one document instead of real lengths")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="bf16, dense, as measured: H200")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no case after so many seconds")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    prepare_peers(args.device)
    began = time.monotonic()
    results = json.loads(args.out.read_text()) if args.out.exists() else []
    known = None
    for shape, vocab, name, seq_len, share in cases(args):
        if time.monotonic() - began > args.budget_s:
            print(f"left out, out of time: {name} {shape} {vocab} {seq_len} {share}")
            continue
        # Peers are compiled apart for each size, as their users' are for the one they train at; ours once for all.
        mine = (shape, vocab, name)
        if mine != known or name != "eyas":
            torch._dynamo.reset()
        known = mine
        entry = run_case(name, shape, seq_len, vocab, share, args)
        gc.collect()
        results.append(entry)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        shown = entry.get("error") or (
            f"{entry['tokens_per_s']:,.0f} tokens/s, {entry['peak_gib']} GiB, mfu {entry['mfu']}, "
            f"loss {entry['loss']} -> {entry['loss_after']}, warm-up {entry['warm_up_s']}"
        )
        print(f"{name} {shape} Vd {vocab} T {seq_len} share {share}: {shown}", flush=True)


if __name__ == "__main__":
    main()
