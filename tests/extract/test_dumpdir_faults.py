"""Servers that dump states without identity: every known fault at once, and the two methods that failed beside ours.

The law: every row is stored right or refused by name. What is right is recomputed by transformers, for every row.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from dump_emulator import DumpServer, Faults, by_clearing, by_counter
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from eyas.config import Config, load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.errors import EngineError
from eyas.extract.runner import Summary, extract
from eyas.extract.sglang_client import ServerAway
from eyas.store.reader import StoreReader
from eyas.verify import verify
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

LAYERS = (0, 1, 2)
EVERYTHING = Faults(
    warmups=3,
    probes=0.3,
    foreign=0.5,
    twin=0.25,
    retried=0.2,
    dropped=0.08,
    late=0.5,
    late_s=0.15,
    done_early=0.15,
    decode=1,
    restarts=(9, 24),
    reordered=0.15,
)
NAMES = {"ambiguous-dump", "content-differs", "dump-late", "dump-unfinished", "dump-marked-early", "connection-lost"}
NAMES |= {"late-dump-possible"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama", layers=4, hidden_size=64)


def make_corpus(path: Path, lengths: Sequence[int], seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with CorpusWriter(path, CorpusMeta(model="", tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)) as writer:
        for index, length in enumerate(lengths):
            mask = np.ones(length, np.uint8)
            mask[: length // 3] = 0
            writer.add(str(index), rng.integers(6, VOCAB_SIZE, length), mask)
    return path


def settings_for(dumps: Path, *more: str) -> Config:
    return load(
        overrides=[
            f"dumpdir.folder={dumps}",
            "dumpdir.last=post-norm",
            "capture.layers=[0, 1, 2]",
            "capture.dtype=f32",
            "server.record_deadline_s=1.0",
            "server.restart_timeout_s=10",
            "store.reserve_bytes=0",
            *more,
        ]
    )


def run(corpus: Path, store: Path, server: DumpServer, cfg: Config) -> Summary:
    console = Console(file=io.StringIO())
    return extract(corpus, store, cfg=cfg, model=str(server.model), server=server.url, console=console)


def run_again_and_again(corpus: Path, store: Path, server: DumpServer, cfg: Config) -> Summary | None:
    """`run`, resumed as a user would where its start met a fault; None when it never came through."""
    for _ in range(4):
        try:
            return run(corpus, store, server, cfg)
        except EngineError as error:
            print(f"stopped: {error}")
            known = isinstance(error, ServerAway) or "probe" in str(error) or str(server.dumps) in str(error)
            assert known, error
    return None


def check_store(store: Path, corpus: Path, server: DumpServer) -> int:
    """Every stored row is right, by the verifier and by the emulator's own truth; returns how many there are."""
    report = verify(store, corpus=corpus, against=str(server.model), sample=0, console=Console(file=io.StringIO()))
    report.check()
    reader = StoreReader(store)
    for index in range(len(reader)):
        row = reader[index]
        aux, last = server.truth(row.tokens.tolist())
        torch.testing.assert_close(row.aux, aux, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row.last, last[row.last_index.long()], rtol=1e-5, atol=1e-5)
    return len(reader)


def wrong_rows(server: DumpServer, rows: Sequence[Sequence[int]], results: Sequence[Any]) -> int:
    """Results that are states, but not the row's."""
    wrong = 0
    for tokens, result in zip(rows, results, strict=True):
        if result is not None:
            aux, _ = server.truth(tokens)
            wrong += result[0].shape != aux.shape or not torch.allclose(result[0], aux, atol=1e-4)
    return wrong


def test_every_fault_at_once_and_the_methods_that_failed(model: Path, tmp_path: Path) -> None:
    lengths = [*[24] * 6, *[40] * 5, *range(5, 17), 1, 1, 2]
    corpus = make_corpus(tmp_path / "corpus.parquet", lengths)
    rng = random.Random(1)
    rows = [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    wrong = {}
    for name, method in {"counter prediction": by_counter, "clear before send": by_clearing}.items():
        with DumpServer(model, tmp_path / name, LAYERS, faults=EVERYTHING, seed=3) as server:
            server.faults.restarts, restarts = (), server.faults.restarts
            ask = lambda tokens, url=server.url: httpx.post(f"{url}/generate", json={"input_ids": tokens})  # noqa: E731
            wrong[name] = wrong_rows(server, rows, method(server, ask, rows))
            server.faults.restarts = restarts
    print(f"wrong rows of {len(rows)}: {wrong}")
    assert min(wrong.values()) > 0

    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=EVERYTHING, seed=3) as server:
        server.leave(12, [24, 40, 7])
        cfg = settings_for(server.dumps, "extract.attempts=8")
        summary = run_again_and_again(corpus, tmp_path / "store", server, cfg)
        assert summary is not None
        told = f"{summary.rows_done} right, {summary.failed} refused {dict(summary.reasons)}, {summary.retries} retries"
        print(f"ours: {told}")
        assert summary.rows_done + summary.failed == len(lengths)
        assert set(summary.reasons) <= NAMES
        assert summary.rows_done >= len(lengths) * 0.8
        assert check_store(tmp_path / "store", corpus, server) == summary.rows_done


FAULTS = st.builds(
    Faults,
    warmups=st.integers(0, 4),
    probes=st.sampled_from([0.0, 0.3, 1.0]),
    foreign=st.sampled_from([0.0, 0.5, 1.0]),
    twin=st.sampled_from([0.0, 0.4, 1.0]),
    retried=st.sampled_from([0.0, 0.4, 1.0]),
    dropped=st.sampled_from([0.0, 0.1]),
    late=st.sampled_from([0.0, 0.5]),
    late_s=st.sampled_from([0.02, 0.15]),
    done_early=st.sampled_from([0.0, 0.2]),
    decode=st.integers(0, 2),
    restarts=st.sampled_from([(), (3,), (2, 9)]),
    down_s=st.just(0.1),
    reordered=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=4, deadline=None, database=None, phases=[Phase.generate])  # shrinking would take minutes
@given(faults=FAULTS, seed=st.integers(0, 10_000), chunk=st.sampled_from([0, 8]))
def test_no_mix_of_faults_gives_a_wrong_row(
    model: Path, tmp_path_factory: pytest.TempPathFactory, faults: Faults, seed: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    lengths = [12, 12, 20, 12, 9, 1, 20, 33]
    corpus = make_corpus(folder / "corpus.parquet", lengths, seed)
    chunks = ("dumpdir.aux_file=aux_*.pt", "dumpdir.last_file=last_*.pt") if chunk else ()
    with DumpServer(model, folder / "dumps", LAYERS, faults=faults, seed=seed, chunk=chunk) as server:
        server.leave(4, [12, 20])
        more = ("server.record_deadline_s=0.6", "extract.window_requests=4", *chunks)
        summary = run_again_and_again(corpus, folder / "store", server, settings_for(server.dumps, *more))
        if summary is None:
            return  # where not even a probe comes through, nothing is stored that could be wrong
        assert summary.rows_done + summary.failed == len(lengths)
        assert set(summary.reasons) <= NAMES
        if summary.rows_done:
            assert check_store(folder / "store", corpus, server) == summary.rows_done
