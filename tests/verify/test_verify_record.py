"""What a verification leaves in the store's log."""

from __future__ import annotations

import io
import json
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract.runner import extract
from eyas.verify import verify

SETTINGS = ("extract.engine=fake", "fake.hidden_size=8", "fake.num_layers=8", "store.reserve_bytes=0")


def verified(store: Path) -> list[dict[str, Any]]:
    """Verifies, and gives the events of verifications in the log."""
    verify(store, console=Console(file=io.StringIO()))
    files = sorted((store / "events").glob("verify-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with CorpusWriter(tmp_path / "corpus.parquet", CorpusMeta("made-up", "", "", vocab_size=100)) as writer:
        for row in range(4):
            writer.add(f"r{row}", np.arange(5 + row), np.ones(5 + row, np.uint8))
    extract(writer.path, tmp_path / "store", cfg=load(overrides=SETTINGS), console=Console(file=io.StringIO()))
    return tmp_path / "store"


def test_what_was_found_is_kept_beside_what_was_found_before(store: Path) -> None:
    (first,) = verified(store)
    shard = next(store.glob("shard-*.safetensors"))
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")
    _, second = verified(store)
    assert (first["event"], first["problems"], first["recomputed"], first["against"]) == ("verified", 0, 0, None)
    assert second["problems"] >= 1
    assert ["bytes", "all as they should be"] in first["lines"]
    assert ["bytes", "all as they should be"] not in second["lines"]
    assert set(first["versions"]) >= {"torch", "transformers"}


def test_the_log_is_no_part_of_the_store_and_private(store: Path) -> None:
    verified(store)
    assert verified(store)[-1]["problems"] == 0  # the line itself is no stranger in the folder
    (path, *_) = (store / "events").glob("verify-*.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_somebody_elses_store_does_not_choose_where_we_write(store: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.rmtree(store / "events")
    (store / "events").symlink_to(tmp_path / "mine")
    assert verified(store) == []
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_store_that_cannot_be_written_is_verified_all_the_same(store: Path) -> None:
    shutil.rmtree(store / "events")
    (store / "events").write_text("a file where the folder should be")
    report = verify(store, console=Console(file=io.StringIO()))
    assert report.problems == ()
