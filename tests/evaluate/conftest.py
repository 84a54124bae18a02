"""A tiny target whose text can be guessed: a store of its greedy answers, and a drafter trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from train import train_runs


class Tiny(NamedTuple):
    """Attributes: inputs: folder with model/, corpus.parquet and store/. run: of the training."""

    inputs: Path
    run: Path

    @property
    def draft(self) -> Path:
        return self.run / "draft"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("evaluated")
    inputs = train_runs.make_inputs(root)
    changes: dict[str, Any] = {
        "dtype": "f32",
        "epochs": 12,
        "batch_tokens": 128,
        "eval_every": 1000,
        "save_every": 1000,
    }
    train_runs.run(inputs, root / "run", **changes)
    return Tiny(inputs, root / "run")
