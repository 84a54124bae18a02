"""Several ranks on CPU: two that share a request's tensors, and two schedulers, each with requests of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults_support import EDGES, SERVER_FLAGS, Neighbours, Run, hello, make_corpus, settings, some_lengths
from servers import Server, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}


def test_two_tensor_parallel_ranks_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    flags = [*SERVER_FLAGS, "--tp-size", "2", "--skip-tokenizer-init", "--disable-radix-cache"]
    with sglang_server(model, tmp_path / "server", flags=flags, env=ENV) as server:
        corpus = make_corpus(tmp_path / "corpus.parquet", some_lengths(30, seed=10, longest=200), seed=10)
        run = Run(corpus, tmp_path / "store", model, server, settings(server))
        with Neighbours(server, health=False).around(2):  # its health check wants a detokenizer
            summary = run.now()
        run.must_end_well(summary)
        assert hello(server).provenance["tp_size"] == "2"
        log = server.log.read_text(errors="replace")
        assert log.count("eyas: capturing") == 1, "more than one rank writes"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*SERVER_FLAGS, "--dp-size", "2", "--enable-mixed-chunk"]
    with sglang_server(model, tmp_path_factory.mktemp("ranks"), flags=flags, env=ENV, quick=False) as running:
        yield running


def test_two_data_parallel_ranks_share_the_work_and_the_spool(server: Server, model: Path, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.parquet", [*EDGES, *some_lengths(60, seed=11)], seed=11)
    run = Run(corpus, tmp_path / "store", model, server, settings(server, "extract.window_requests=16"))
    with Neighbours(server).around(4):
        summary = run.now(workers=2)
    assert hello(server).provenance["dp_size"] == "2"
    log = server.log.read_text(errors="replace")
    assert log.count("eyas: capturing") == 2, "each rank captures"
    for rank in ("DP0", "DP1"):
        assert any(rank in line and "Prefill batch" in line for line in log.splitlines()), f"{rank} had no work"
    run.must_end_well(summary)
