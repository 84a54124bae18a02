"""`eyas verify` must find what is wrong: each corruption is one that checksums alone cannot see."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.errors import ConfigError, IntegrityError
from eyas.extract.runner import extract
from eyas.positions import kept_positions
from eyas.store.format import RowContents
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from eyas.verify import VerifyReport, sample_rows, verify
from sglang_cpu.models import tiny_llama

LENGTHS = [5, 40, 40, 40, 90]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet", seed=0)


def make_corpus(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="tiny", tokenizer_hash="", template_hash="", vocab_size=1024)
    with CorpusWriter(path, meta) as writer:
        for index, length in enumerate(LENGTHS):
            mask = np.ones(length, np.uint8)
            mask[:2] = 0
            writer.add(str(index), rng.integers(0, 1000, length), mask)
    return path


@pytest.fixture(scope="module")
def store(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "store"
    cfg = load(overrides=["capture.dtype=f32", "store.reserve_bytes=0"])
    extract(corpus, folder, cfg=cfg, model=str(model), console=quiet())
    return folder


def quiet() -> Console:
    return Console(file=io.StringIO())


def check(store: Path, corpus: Path, model: Path) -> VerifyReport:
    return verify(store, corpus=corpus, against=str(model), sample=0, console=quiet())


def test_a_right_store_passes_and_says_what_it_checked(store: Path, corpus: Path, model: Path) -> None:
    report = check(store, corpus, model)
    report.check()
    assert report.comparison is not None
    assert report.comparison.rows == len(LENGTHS)
    text = "\n".join(f"{name} {line}" for name, line in report.lines())
    assert "5 good" in text
    assert "0 mismatches" in text


def rewritten(store: Path, corpus: Path, out: Path, change: str) -> Path:
    """The same store with valid checksums everywhere, but wrong states."""
    reader, opened = StoreReader(store), Corpus.open(corpus)
    rows = [reader[i] for i in range(len(reader))]
    aux, last = [row.aux.clone() for row in rows], [row.last.clone() for row in rows]
    match change:
        case "two rows of equal length swapped":
            aux[1], aux[2], last[1], last[2] = aux[2], aux[1], last[2], last[1]
        case "rows shifted by one":
            aux[3], last[3] = aux[3].roll(1, 0), last[3].roll(1, 0)
        case "layers permuted":
            aux[4] = aux[4].flip(1)
        case "last chunk doubled":
            aux[4][-10:] = aux[4][-20:-10]
        case "one token of another row":
            aux[4][30] = aux[1][30]
        case "pre-norm last":
            last[0] = last[0] * 1.5
        case "bf16 instead of f32":
            aux[2] = aux[2].to(torch.bfloat16).float()
    writer = StoreWriter.open(
        out,
        spec=reader.spec,
        corpus=reader.info.corpus,
        tokens_N=opened.n_tokens,
        positions_N=opened.n_positions,
        shard_bytes=reader.info.shard_bytes,
        provenance={"engine": "test"},
    )

    def contents(shard: Shard) -> list[RowContents]:
        return [
            RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, reader.spec.last))
            for row in opened.rows(shard.start, shard.stop)
        ]

    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert lease is not None
        with lease:
            for row in lease.pending:
                lease.put(row, aux[row].view(torch.uint8).numpy(), last[row].view(torch.uint8).numpy())
            lease.finish()
    writer.write_manifest()
    return out


@pytest.mark.parametrize(
    "change",
    [
        "two rows of equal length swapped",
        "rows shifted by one",
        "layers permuted",
        "last chunk doubled",
        "one token of another row",
        "pre-norm last",
        "bf16 instead of f32",
    ],
)
def test_wrong_states_behind_right_checksums_are_found(
    store: Path, corpus: Path, model: Path, tmp_path: Path, change: str
) -> None:
    wrong = rewritten(store, corpus, tmp_path / "wrong", change)
    assert verify(wrong, corpus=corpus, console=quiet()).problems == ()
    report = check(wrong, corpus, model)
    assert report.comparison is not None
    assert report.comparison.mismatches
    with pytest.raises(IntegrityError):
        report.check()


def test_the_unchanged_rewrite_passes(store: Path, corpus: Path, model: Path, tmp_path: Path) -> None:
    assert check(rewritten(store, corpus, tmp_path / "same", "nothing"), corpus, model).comparison.mismatches == []


def test_another_corpus_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another corpus"):
        verify(store, corpus=make_corpus(tmp_path / "other.parquet", seed=9), console=quiet())


def test_another_model_is_refused(store: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", layers=9)
    with pytest.raises(ConfigError, match="another model"):
        verify(store, against=str(other), console=quiet())


def test_another_model_with_the_same_fingerprint_is_found_by_its_values(store: Path, tmp_path: Path) -> None:
    """A merged LoRA leaves every norm alone; here only the other weights differ."""
    other = tiny_llama(tmp_path / "other", seed=5)
    report = verify(store, against=str(other), console=quiet())
    assert report.comparison is not None
    assert report.comparison.mismatches


def test_the_command_says_what_is_wrong_and_exits_with_4(store: Path, corpus: Path, tmp_path: Path) -> None:
    copy = rewritten(store, corpus, tmp_path / "copy", "nothing")
    shard = next(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    result = CliRunner().invoke(app, ["verify", str(copy)])
    assert result.exit_code == 4
    assert "row-hash" in result.output


@pytest.mark.parametrize(("rows", "sample", "expected"), [(5, 0, 5), (5, 2, 2), (5, 9, 5), (1000, 16, 16), (1, 1, 1)])
def test_samples_are_spread_over_the_store(rows: int, sample: int, expected: int) -> None:
    chosen = sample_rows(rows, sample)
    assert len(chosen) == len(set(chosen)) == expected
    assert chosen[0] == 0
    assert chosen[-1] == rows - 1
