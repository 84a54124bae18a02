"""What the security tests share: a spool with a real recorder, a small corpus, a run with made-up states."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from eyas.capture.assembler import Chunk
from eyas.capture.contract import LAST_PARAM, SPEC_PARAM, CaptureReply, CaptureSpec, RequestId, ServerHello
from eyas.capture.recorder import Recorder
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Spool
from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.extract.runner import Summary, extract

SPEC = CaptureSpec((1, 3), "loss", "f32", 8, 100, 8, "f" * 32)
HELLO = ServerHello(SPEC.to_dict(), SPEC.spec_id, {"engine": "sglang", "host": "here"}, 1000, 1 << 20)
STRANGER = 12345  # a user id that nobody has

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away; the rule itself is tested too")


class Owner:
    """A server's request object."""


def rid(row: int, attempt: int = 0) -> str:
    return str(RequestId("run00000", "sess0000", row, attempt))


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(root: Path) -> dict[str, str]:
    """Permission bits of a folder and everything in it, by relative name."""
    return {str(path.relative_to(root)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in (root, *root.rglob("*"))}


def settings(folder: Path, **changes: Any) -> ServerSettings:
    return ServerSettings(layers=SPEC.layers, spool=str(folder), dtype="f32", **{"quota_bytes": 1 << 20, **changes})


@contextlib.contextmanager
def recorder(folder: Path, **changes: Any) -> Iterator[Recorder]:
    made = Recorder(SPEC, Spool(settings(folder, **changes)))
    try:
        yield made
    finally:
        made.close()


def send(
    to: Recorder, name: Any = "", *, tokens: int = 5, params: Any = None, fed: torch.Tensor | None = None
) -> CaptureReply | None:
    """One prompt in one forward."""
    ids = torch.arange(tokens) % SPEC.vocab_size
    width = SPEC.hidden_size
    asked = {SPEC_PARAM: SPEC.spec_id, LAST_PARAM: [0, 2]} if params is None else params
    chunk = Chunk(name, 0, tokens, ids.tolist(), asked, Owner())
    return to.capture(chunk, torch.ones(tokens, 2 * width), torch.ones(tokens, width), ids if fed is None else fed)


def wait_for(path: Path, patience_s: float = 20.0) -> Path:
    deadline = time.monotonic() + patience_s
    while not os.path.lexists(path):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)
    return path


def make_corpus(path: Path, rows: int = 30) -> Path:
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=100)
    rng = np.random.default_rng(3)
    with CorpusWriter(path, meta) as writer:
        for row in range(rows):
            tokens = rng.integers(0, 100, 1 + row % 7)
            writer.add(f"r{row}", tokens, np.ones(len(tokens), np.uint8))
    return path


def extract_fake(corpus: Path, store: Path, *overrides: str, **options: Any) -> Summary:
    """A whole run with made-up states, over several shards, one row of which fails."""
    fixed = ["extract.engine=fake", "store.shard_bytes=20kB", "store.reserve_bytes=0", "fake.failing_rows=[4]"]
    return extract(
        corpus, store, cfg=load(overrides=[*fixed, *overrides]), console=Console(file=io.StringIO()), **options
    )
