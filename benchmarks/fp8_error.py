"""What fp8 costs in precision: SmolLM2's states of real prompts, as bf16 stores hold them and as fp8 stores give them.

    python benchmarks/fp8_error.py CHATS... --out benchmarks/results/fp8-error.json

CHATS are files of `eyas prepare`; the first rows of each are taken. The target runs in bf16, as it is served. For every
captured layer and `last`: relative error and cosine of each token's state. For the teacher's distribution, softmax of
`last` times lm_head: KL(bf16 || fp8) and whether the likeliest token is the same, beside what bf16 itself has lost
against the same target run in float32.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import eyas
from eyas.capture.encoding import decode, encode
from eyas.config import SourceConfig
from eyas.data.corpus import Corpus
from eyas.extract.hf import hidden_states, load_model
from eyas.smollm2 import smollm2_dir
from eyas.target.checkpoint import Target
from eyas.target.head import Head

FP8 = "fp8_e4m3"
READ_AS = torch.bfloat16  # what a StoreReader gives
BLOCK = 256  # positions whose logits are held at once


def quantised(states: torch.Tensor) -> torch.Tensor:
    """[.., H] -> [.., H], by way of an fp8 store."""
    return decode(encode(states, FP8), FP8, states.shape[-1], READ_AS)


def states_of(target: Target, rows: list[list[int]], dtype: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """aux [T, A, H] and last [T, H] of each row, of the target run in `dtype`."""
    spec, model = target.spec(), load_model(target, "cpu", dtype)
    for tokens in rows:
        layers, last = hidden_states(model, tokens, spec.layers)
        yield torch.stack([layers[layer] for layer in spec.layers], dim=1), last


def apart(stored: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative error and cosine of each state: [N, H] twice -> [N] twice."""
    mine, theirs = stored.double(), reference.double()
    error = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return error, torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)


def divergence(head: Head, stored: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(reference || stored) in nats, and whether both have the same likeliest token: [N, H] twice -> [N] twice."""
    weight = head.weight.float()
    kl, same = [], []
    for mine, theirs in zip(stored.float().split(BLOCK), reference.float().split(BLOCK), strict=True):
        q, p = (torch.log_softmax(states @ weight.T, dim=-1) for states in (mine, theirs))
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(kl), torch.cat(same)


def figures(name: str, stored: torch.Tensor, reference: torch.Tensor, head: Head | None = None) -> dict[str, Any]:
    """One row of the table; with a head also of the teacher's distribution."""
    error, cosine = apart(stored, reference)
    kl, same = divergence(head, stored, reference) if head else (None, None)
    return {
        "states": name,
        "relative error, mean": error.mean().item(),
        "error, p99": error.quantile(0.99).item(),
        "error, largest": error.max().item(),
        "cosine, mean": cosine.mean().item(),
        "cosine, lowest": cosine.min().item(),
        "KL, mean (nats)": None if kl is None else kl.mean().item(),
        "KL, p99": None if kl is None else kl.quantile(0.99).item(),
        "KL, largest": None if kl is None else kl.max().item(),
        "same top token": None if same is None else same.double().mean().item(),
    }


def measure(chats: list[str], rows: int, most_tokens: int) -> dict[str, Any]:
    """All figures."""
    model = smollm2_dir()
    target = Target.load(str(model))
    spec, head = target.spec(), Head.load(target, "cpu")
    with tempfile.TemporaryDirectory(prefix="fp8-error-") as folder:
        cfg = eyas.load_config(overrides=[f"prepare.max_tokens={most_tokens}"]).prepare
        sources = [SourceConfig(path=path, max_rows=rows) for path in chats]
        eyas.prepare_corpus(sources, str(model), Path(folder), cfg=cfg)
        corpus = Corpus.open(Path(folder))
        tokens = [row.tokens.tolist() for row in corpus.rows(0, len(corpus))]
    aux, last = (torch.cat(part) for part in zip(*states_of(target, tokens, "bf16"), strict=True))
    exact = torch.cat([states for _, states in states_of(target, tokens, "f32")])
    read_aux, read_last = quantised(aux), quantised(last)
    half = target.spec(dtype=FP8)
    return {
        "prompts": len(tokens),
        "tokens": sum(map(len, tokens)),
        "sources": [Path(path).name for path in chats],
        "bytes_per_token": {"bf16": spec.record_bytes(1, 1), FP8: half.record_bytes(1, 1)},
        "share": half.record_bytes(1, 1) / spec.record_bytes(1, 1),
        "rows": [
            *(figures(f"layer {n}, fp8 of bf16", read_aux[:, i], aux[:, i]) for i, n in enumerate(spec.layers)),
            figures("last, fp8 of bf16", read_last, last, head),
            figures("last, bf16 run of float32 run", last, exact, head),
            figures("last, fp8 of float32 run", read_last, exact, head),
        ],
        "notes": [
            f"{half.record_bytes(1, 1)} bytes of states a token, of bf16 {spec.record_bytes(1, 1)} (3 layers, last)",
            "fp8 of bf16 is what quantising costs; bf16 run of float32 run is what running in bf16 has cost before it",
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", nargs="+", help="files that `eyas prepare` reads")
    parser.add_argument("--rows", type=int, default=12, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a row")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    result = {
        "title": "fp8_e4m3 against bf16",
        "what": "Error of states as an fp8 store gives them, against the bf16 states they were quantised from: "
        "SmolLM2-135M-Instruct run in bf16, prompts and answers of real chats.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": shlex.join(["python", *sys.argv]),
    } | measure(arguments.chats, arguments.rows, arguments.max_tokens)
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
