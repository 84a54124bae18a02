"""`eyas verify --logits` against real SGLang servers on CPU: a capturing one in float32, a plain one in bfloat16."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_samples import captured, damaged, make_corpus, stored, write_store
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import ServerConfig, load
from eyas.extract.engine import Failed, Retry
from eyas.extract.hf import hidden_states
from eyas.extract.runner import extract
from eyas.extract.sglang_client import OTHER_VOCABULARY, SGLangClient, vocabulary_guard
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.verify import AuditKind, VerifyReport, verify
from servers import Server, sglang_server
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CHUNK = 64
LENGTHS = [40, 150, 150, 65, 200, 3, 90]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def corpus(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    return make_corpus(path, model, Target.load(str(model)).vocab_size, LENGTHS, seed=3)


def audited(store: Path, corpus: Path, server: Server) -> VerifyReport:
    console = Console(file=io.StringIO())
    report = verify(store, corpus=corpus, logits=server.url, sample=0, console=console)
    for name, text in report.lines():
        print(f"{name}  {text}")
    return report


def kinds(report: VerifyReport) -> dict[int, AuditKind]:
    assert report.problems == (), "the bytes and the identity are as they should be"
    assert report.audit is not None
    return {problem.row: problem.kind for problem in report.audit.problems}


@pytest.fixture(scope="module")
def capturing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Chunked prefill, the radix cache on."""
    flags = ["--chunked-prefill-size", str(CHUNK), "--context-length", "2048"]
    with sglang_server(model, tmp_path_factory.mktemp("capturing"), flags=flags) as server:
        yield server


def test_a_server_of_a_smaller_vocabulary_refuses_and_lives(capturing: Server, tmp_path: Path) -> None:
    """It does not look whether token ids are in its vocabulary, and would die of one that is not."""
    client = SGLangClient(capturing.url, ServerConfig())

    async def asked(vocab_size: int, token: int) -> dict[str, Any] | Failed:
        parameters = {"max_new_tokens": 1, "temperature": 0} | vocabulary_guard(vocab_size)
        return await client.post({"input_ids": [5, token], "sampling_params": parameters})

    async def scenario() -> None:
        try:
            refused = await asked(VOCAB_SIZE + 1, VOCAB_SIZE)
            assert isinstance(refused, Failed)
            assert (refused.reason, refused.retry) == (OTHER_VOCABULARY, Retry.NEVER)
            assert not isinstance(await asked(VOCAB_SIZE, VOCAB_SIZE - 1), Failed)
        finally:
            await client.close()

    asyncio.run(scenario())


def test_what_a_capturing_server_wrote_passes_and_each_fault_is_caught_by_name(
    capturing: Server, model: Path, corpus: Path, tmp_path: Path
) -> None:
    cfg = load(overrides=[f"server.spool={capturing.spool}", "capture.dtype=f32", "store.reserve_bytes=0"])
    store = tmp_path / "store"
    console = Console(file=io.StringIO())
    assert extract(corpus, store, cfg=cfg, server=capturing.url, console=console).failed == 0
    for _ in range(2):  # the second time its prompts are in the radix cache
        report = audited(store, corpus, capturing)
        assert kinds(report) == {}
        assert report.audit is not None
        assert report.audit.rows == [0, 1, 2, 3, 4, 6]
        assert report.audit.dtype == "f32"
        assert {"the position before", "the position after", "another row", "normed twice"} == set(report.audit.nearest)
    reader = StoreReader(store)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def pre_norm(row: int) -> torch.Tensor:
        states, _ = hidden_states(network, reader[row].tokens.tolist(), [reader.spec.num_layers - 1])
        return states[reader.spec.num_layers - 1][reader[row].last_index.long()]

    for change, expected in {
        "swapped": {1: AuditKind.ANOTHER_ROW, 2: AuditKind.ANOTHER_ROW},
        "shifted late": {3: AuditKind.SHIFTED},
        "shifted early": {3: AuditKind.SHIFTED},
        "last chunk doubled": {4: AuditKind.LOGITS_DIFFER},
        "pre-norm": dict.fromkeys([0, 1, 2, 3, 4, 6], AuditKind.PRE_NORM),
    }.items():
        wrong = write_store(tmp_path / change, corpus, reader.spec, damaged(stored(reader), change, pre_norm))
        assert kinds(audited(wrong, corpus, capturing)) == expected, change
    result = CliRunner().invoke(
        app, ["verify", str(tmp_path / "swapped"), "--target", str(model), "--logits", capturing.url]
    )
    assert result.exit_code == 4
    assert "another-row" in result.output


def test_a_plain_server_without_tokenizer_audits_in_bf16(model: Path, corpus: Path, tmp_path: Path) -> None:
    flags = ["--chunked-prefill-size", str(CHUNK), "--context-length", "192", "--skip-tokenizer-init"]
    with sglang_server(model, tmp_path, dtype="bfloat16", flags=flags, capture=False) as server:
        spec = Target.load(str(model)).spec((1, 3, 4), "all", "bf16")
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        states = captured(network, corpus, spec, torch.bfloat16)
        report = audited(write_store(tmp_path / "right", corpus, spec, states), corpus, server)
        assert kinds(report) == {}
        assert report.audit is not None
        assert report.audit.rows == [0, 1, 2, 3, 5, 6]
        assert list(report.audit.refused) == [4]
        assert report.audit.dtype == "bf16"
        for change, expected in {
            "swapped": {1: AuditKind.ANOTHER_ROW, 2: AuditKind.ANOTHER_ROW},
            "shifted late": {3: AuditKind.SHIFTED},
        }.items():
            wrong = write_store(tmp_path / change, corpus, spec, damaged(states, change))
            assert kinds(audited(wrong, corpus, server)) == expected, change
