"""A head by SpecForge's or speculators' own trainer, on the rows of an Eyas store.

    python benchmarks/peers/train_on_store.py specforge --store STORE --corpus CORPUS --target MODEL --out RUN \
        --lr 1e-4 --epochs 2 --seed 0 --draft-vocab 16384 --batch-tokens 8192 --steps 7

The store is laid out in the peer's files first (`--layout`, by default RUN/layout; used again where it is complete).
RUN/head is the head in the peer's own format, for `eyas export RUN/head --target MODEL`; RUN/result.json says what it
took. `train_specforge.py` and `train_speculators.py` say what of a peer is used and what differs from its defaults.

result.json: `train_tokens` are the tokens of all rows seen, each time they are seen, padding not counted, and
`trained_tokens` those of them with loss; `gpu_seconds` the time from when the data is laid out and the peer is imported
until the head is saved, so with reading, compiling and warming up; `step_s` the middle one of the steps,
`first_step_at_s` when the first had ended, `slow_steps_s` what later steps took beyond `step_s` where they took three
times as long: compiling anew, or waiting for data.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from layout import cores, lay_out, read_numbers
from standins import prepare_peers

_VERSIONS = ("torch", "triton", "transformers", "specforge", "speculators")

if __name__ == "__mp_main__":
    prepare_peers("cuda")  # a loader's process, which imports the peer before it calls anything here


def main() -> None:
    args = _arguments()
    peer = importlib.import_module(f"train_{args.trainer}")
    began = time.perf_counter()
    folder = args.layout or args.out / "layout"
    layout = lay_out(args.store, args.corpus, read_numbers(args.rows), folder, peer.write_row, args.processes)
    laid_out_s = time.perf_counter() - began
    tokens = f"{sum(layout.tokens):,} tokens, {sum(layout.trained):,} with loss"
    print(f"laid out {len(layout.tokens):,} rows, {tokens}, in {laid_out_s:.1f} s: {folder}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    prepare_peers(args.device)
    peer.import_peer()
    record = peer.train(args, layout, args.out)
    result: dict[str, Any] = {
        "trainer": args.trainer,
        "lr": args.lr,
        "seed": args.seed,
        "epochs": args.epochs,
        "rows": len(layout.tokens),
        **record.as_dict(),
        "layout_s": round(laid_out_s, 2),
        "versions": _versions(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "loss"}), flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {"cpu": "rehearsal"})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["specforge", "speculators"])
    parser.add_argument("--store", type=Path, required=True, help="with capture.last=all")
    parser.add_argument("--corpus", type=Path, required=True, help="that the store was made of")
    parser.add_argument("--target", required=True, help="the target's folder")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=7, help="of the training-time test")
    parser.add_argument("--max-steps", type=int, help="optimiser steps at most; the schedule ends there")
    parser.add_argument("--rows", type=Path, help="corpus rows to train on, one number a line; default: all")
    parser.add_argument("--layout", type=Path, help="folder of the peer's files, for this and later runs")
    parser.add_argument("--processes", type=int, default=cores(), help="that write them")
    parser.add_argument("--norms", choices=["3.1", "plain", "own"], default="3.1", help="of speculators' draft")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], help="of speculators; default: its own")
    parser.add_argument("--workers", type=int, help="of speculators' loader; default: its own")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
