"""Run folders for the tests of the report: real corpora and stores of the FakeEngine, logs and evaluations as files."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract.runner import extract
from eyas.verify import verify
from run_logs import eval_event, start_event, train_event, write_log

#: What a corpus, a log or an evaluation from a stranger may be called.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=http://example.invalid/x onerror=alert(1)>',
    "'}{{7*7}}{%raw%}</style></title></svg>",
    "\u202eright to left\x00\x1b[31m",
    "&amp;<b>" + "long" * 200,
)
SETTINGS = (
    "extract.engine=fake",
    "fake.hidden_size=8",
    "fake.num_layers=8",
    "store.shard_bytes=6KB",
    "store.reserve_bytes=0",
)


def make_corpus(folder: Path, sources: Sequence[str] = ("chats", "code"), rows: int = 60) -> Path:
    """A corpus folder; source labels go round."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(folder / "corpus.parquet", meta) as writer:
        for row in range(rows):
            tokens = rng.integers(0, 1000, int(rng.integers(3, 60)))
            label = sources[row % len(sources)].encode("utf-8", "replace").decode()
            writer.add(f"r{row}", tokens, (np.arange(len(tokens)) > 1).astype(np.uint8), label)
    return folder


def make_store(corpus: Path, store: Path, *settings: str) -> Path:
    """A store of the FakeEngine."""
    cfg = load(overrides=[*SETTINGS, *settings])
    extract(corpus / "corpus.parquet", store, cfg=cfg, console=Console(file=io.StringIO()))
    return store


def verified(store: Path, corpus: Path) -> None:
    """Has `eyas verify` looked at it."""
    verify(store, corpus=corpus, console=Console(file=io.StringIO()))


def make_training(folder: Path, *, steps: int = 100, every: int = 5, ended: bool = True, **settings: Any) -> Path:
    """A training run's folder, as far as a report reads it."""
    (folder / "checkpoints").mkdir(parents=True)
    events = [start_event(t=1e9, **settings), eval_event(0, 1e9)]
    for step in range(every, steps + 1, every):
        events += [train_event(step, 1e9), *([eval_event(step, 1e9)] if step % (4 * every) == 0 else [])]
    if ended:
        events.append({"t": 1e9 + steps + 1, "event": "end", "step": steps})
    write_log(folder, "a", events)
    return folder


def evaluation(mode: str, engine: str, benchmark: str = "mt_bench", **changes: Any) -> dict[str, Any]:
    """An evaluation of every category at one request at a time, and of all at 4 where it is live."""
    live = mode == "live"
    rows = [
        {
            "category": category, "prompts": 10, "cycles": 99, "tokens": 200, "accept_length": 2.0, "ci95": [1.9, 2.2],
            "accept_by_position": [0.6, 0.5, 0.4], "reached": [9, 8, 7], "right": [5, 4, 3], "concurrency": at,
            "tokens_per_s": 100.0 * at if live else None, "speedup": 1.9 - at / 10 if live else None,
            "ttft_ms": 20.0 if live else None,
        }
        for category, at in [("all", 1), ("math", 1), ("writing", 1), *([("all", 4)] if live else [])]
    ]  # fmt: skip
    return {
        "format": 1, "head": "run/draft", "head_digest": "5f0c", "target": "made-up", "engine": engine, "mode": mode,
        "benchmark": benchmark, "depth": 3, "topk": 1, "draft_tokens": 3, "prompts_digest": "91d2",
        "sampling": {"temperature": 0.0, "seed": 0}, "versions": {"eyas": "0", engine: "9.9"},
        "command": f"eyas evaluate run/draft --{mode}", "date": "2026-11-30T13:00:00+00:00", "results": rows, **changes,
    }  # fmt: skip


def write_evaluation(folder: Path, name: str, document: Any) -> None:
    (folder / f"evaluation-{name}.json").write_text(json.dumps(document))


def write_check(folder: Path, tensors: str, refused: int = 0) -> None:
    """What `eyas export --check` found, as the demo keeps it."""
    lines = [["names", "passed      15 tensors"], ["states", "not proven  no target"], ["verdict", "passed"]]
    found = {"tensors": tensors, "refused": refused, "unproven": 1, "lines": lines}
    (folder / "check.json").write_text(json.dumps(found))


def make_whole(folder: Path) -> Path:
    """A run with all its parts."""
    corpus = make_corpus(folder / "corpus")
    verified(make_store(corpus, folder / "store"), corpus)
    make_training(folder / "train", store=str(folder / "store"), corpus=str(corpus))
    for mode, engine in (("offline-simulated", "store"), ("offline-decoded", "transformers"), ("live", "vllm")):
        write_evaluation(folder, f"{mode}-{engine}", evaluation(mode, engine))
    exported = folder / "exported"
    exported.mkdir()
    (exported / "model.safetensors").write_bytes(b"\0" * 64)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 8, "draft_vocab_size": 64, "vocab_size": 1000}
    record = {"tensors": "7e", "spec_id": "61ab", "target": {"name": "made-up"}}
    ours = {"aux_layers": [1, 3, 4], "target": "f" * 32, "export": record}
    write_check(folder, "7e")
    (exported / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "eyas": ours}))
    return folder


def copied(run: Path, to: Path) -> Path:
    """The same run elsewhere, to be changed."""
    return Path(shutil.copytree(run, to))
