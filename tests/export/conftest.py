"""One target, one run and its export, for all tests of exports."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_heads import make_corpus, make_run, make_store, make_target

from eyas.config import ExportConfig
from eyas.export.run import export_draft


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="session")
def target(place: Path) -> Path:
    return make_target(place / "target")


@pytest.fixture(scope="session")
def corpus(place: Path, target: Path) -> Path:
    return make_corpus(place, target)


@pytest.fixture(scope="session")
def store(place: Path, corpus: Path, target: Path) -> Path:
    return make_store(corpus, place / "store", target)


@pytest.fixture(scope="session")
def run(place: Path, store: Path, corpus: Path, target: Path) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of so small a model they only wait for each other
    made = make_run(place / "run", store, corpus, target)
    torch.set_num_threads(threads)
    return made


@pytest.fixture(scope="session")
def exported(place: Path, run: Path) -> Path:
    return export_draft(run, place / "exported", ExportConfig(dtype="f32")).folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies of the export, to spoil."""

    def made() -> Path:
        return shutil.copytree(exported, tmp_path / f"draft-{len(list(tmp_path.iterdir()))}")

    return made


@pytest.fixture(scope="session")
def questions(place: Path) -> Path:
    """In letters that the target was trained to hear."""
    draw = random.Random(0)
    letters = [chr(code) for code in range(ord("("), ord("Y")) if chr(code) not in "<>{}|%"]
    lines = [{"question_id": i, "turns": ["".join(draw.choices(letters, k=6))]} for i in range(24)]
    (place / "question.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place / "question.jsonl"
