"""Eyas turns a served language model into an EAGLE-3 draft model.

    import eyas
    eyas.prepare_corpus(["chats.jsonl"], "HuggingFaceTB/SmolLM2-135M-Instruct", Path("corpus"))
    eyas.extract_states(Path("corpus"), Path("store"), server="http://localhost:30000")
    row = eyas.StoreReader("store")[0]        # row.tokens, row.aux [T, A, H], row.last [L, H], ...
    eyas.train_drafter(eyas.load_config(Path("run.yaml")).train)

The names below are the public ones; each is imported when first used, so `import eyas` is quick and torch-free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.capture.contract import CaptureSpec
    from eyas.config import Config
    from eyas.config import load as load_config
    from eyas.data.corpus import Corpus
    from eyas.data.merge import merge as merge_corpora
    from eyas.data.prepare import prepare as prepare_corpus
    from eyas.data.regenerate import regenerate as regenerate_answers
    from eyas.data.statistics import statistics as corpus_statistics
    from eyas.demo import run_demo
    from eyas.errors import (
        ConfigError,
        EngineError,
        EyasError,
        IntegrityError,
        Interrupted,
        RowsFailed,
        StoreError,
        TrainError,
    )
    from eyas.evaluate.live import evaluate_live as evaluate_served
    from eyas.evaluate.run import evaluate as evaluate_draft
    from eyas.export.check import check_draft
    from eyas.export.run import export_draft
    from eyas.extract.runner import extract as extract_states
    from eyas.extract.runner import plan as plan_extraction
    from eyas.report import write_report
    from eyas.serve import draft_command, serve_command
    from eyas.store.documents import describe_store
    from eyas.store.move import move_shards
    from eyas.store.reader import StoreDataset, StoreReader
    from eyas.store.writer import StoreWriter
    from eyas.train.run import train as train_drafter
    from eyas.verify import verify as verify_store

__version__ = "0.1.0"

_HOME = {
    "CaptureSpec": "capture.contract",
    "Config": "config",
    "ConfigError": "errors",
    "Corpus": "data.corpus",
    "EngineError": "errors",
    "EyasError": "errors",
    "IntegrityError": "errors",
    "Interrupted": "errors",
    "RowsFailed": "errors",
    "StoreDataset": "store.reader",
    "StoreError": "errors",
    "StoreReader": "store.reader",
    "StoreWriter": "store.writer",
    "TrainError": "errors",
    "check_draft": "export.check",
    "corpus_statistics": "data.statistics:statistics",
    "describe_store": "store.documents",
    "draft_command": "serve",
    "evaluate_draft": "evaluate.run:evaluate",
    "evaluate_served": "evaluate.live:evaluate_live",
    "export_draft": "export.run",
    "extract_states": "extract.runner:extract",
    "load_config": "config:load",
    "merge_corpora": "data.merge:merge",
    "move_shards": "store.move",
    "plan_extraction": "extract.runner:plan",
    "prepare_corpus": "data.prepare:prepare",
    "regenerate_answers": "data.regenerate:regenerate",
    "run_demo": "demo",
    "serve_command": "serve",
    "train_drafter": "train.run:train",
    "verify_store": "verify:verify",
    "write_report": "report:write_report",
}

__all__ = [
    "CaptureSpec",
    "Config",
    "ConfigError",
    "Corpus",
    "EngineError",
    "EyasError",
    "IntegrityError",
    "Interrupted",
    "RowsFailed",
    "StoreDataset",
    "StoreError",
    "StoreReader",
    "StoreWriter",
    "TrainError",
    "check_draft",
    "corpus_statistics",
    "describe_store",
    "draft_command",
    "evaluate_draft",
    "evaluate_served",
    "export_draft",
    "extract_states",
    "load_config",
    "merge_corpora",
    "move_shards",
    "plan_extraction",
    "prepare_corpus",
    "regenerate_answers",
    "run_demo",
    "serve_command",
    "train_drafter",
    "verify_store",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(import_module(f"eyas.{module}"), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
