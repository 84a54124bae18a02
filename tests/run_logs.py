"""Logs of training runs as files, for tests of all that reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_log(folder: Path, name: str, events: Sequence[dict[str, Any]], tail: bytes = b"") -> None:
    """A session's log."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events" / f"{name}.jsonl").write_bytes(text.encode() + tail)


def train_event(step: int, t: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {
        "t": t + step, "event": "train", "step": step, "loss": 10 - step / 100, "norm": 1.0, "lr": 1e-4, "tokens": 512,
        "tokens_per_s": 500.0, "wait_share": 0.01, "rows": [9, 8, 7], "accuracy": [0.5, 0.4, 0.3], **changes,
    }  # fmt: skip


def eval_event(step: int, t: float = 0.0, **changes: Any) -> dict[str, Any]:
    length = 1 + step / (step + 100)
    return {
        "t": t + step, "event": "eval", "step": step, "eval_rows": 17, "loss": 9.0, "accuracy": [0.5, 0.4, 0.3],
        "accept_length": length, "accept_length_low": length - 0.05, "accept_length_high": length + 0.05,
        "acceptance": [0.4, 0.3, 0.2], "chains": 99, **changes,
    }  # fmt: skip


def start_event(step: int = 0, t: float = 0.0, **settings: Any) -> dict[str, Any]:
    return {
        "t": t, "event": "start", "step": step, "total": 100, "ranks": 1, "device": "cpu", "parameters": 1000,
        "draft_vocab": 64, "settings": {"lr": 1e-4, "steps": 3, **settings}, "versions": {"eyas": "0", "torch": "2"},
    }  # fmt: skip
