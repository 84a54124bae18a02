"""The main job against the real SGLang server on CPU: three targets, chunked prefill, 16 in flight, cache off and on.

Every stored row must equal transformers' recomputation, and every control (neighbouring layers, the pre-norm state,
rows shifted by one) must not. See docs/verification.md for the tolerances.
"""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from eyas.config import Config, ExtractConfig, load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.errors import EngineError
from eyas.extract.runner import extract
from eyas.store.documents import describe_store
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.verify import verify
from preloaded import Preloaded
from servers import Server, sglang_server
from sglang_cpu.models import tiny_deepseek_v3, tiny_llama

pytestmark = pytest.mark.sglang

CHUNK = 64
KILLED_ROWS = 300
LENGTHS = [1, 2, 3, 7, 63, 64, 65, 127, 128, 129, 200, 200, 200, 200, 200, 301, 301, 301, 450, 599, 600, 600]


@dataclass(frozen=True)
class Case:
    """One server: a target, a dtype, and whether its radix cache is on."""

    model: str
    dtype: str
    radix: bool
    last: str

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-radix-{'on' if self.radix else 'off'}-last-{self.last}"

    @property
    def stored(self) -> str:
        return {"float32": "f32", "bfloat16": "bf16"}[self.dtype]


CASES = [
    Case("smollm2", "float32", radix=False, last="all"),
    Case("smollm2", "bfloat16", radix=True, last="loss"),
    Case("llama", "float32", radix=True, last="loss"),
    Case("llama", "bfloat16", radix=False, last="all"),
    Case("deepseek_v3", "float32", radix=False, last="loss"),
    Case("deepseek_v3", "bfloat16", radix=True, last="all"),
]


@dataclass(frozen=True)
class Running:
    case: Case
    server: Server
    model: Path
    cfg: Config


@pytest.fixture(scope="module", params=CASES, ids=str)
def running(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(str(case))
    match case.model:
        case "llama":
            model = tiny_llama(folder / "model")
        case "deepseek_v3":
            model = tiny_deepseek_v3(folder / "model")
        case _:
            model = smollm2_dir
    flags = ["--chunked-prefill-size", str(CHUNK), "--context-length", "2048"]
    flags += [] if case.radix else ["--disable-radix-cache"]
    as_sglang_starts = case.model == "smollm2" and case.dtype == "float32"
    own = {"quick": False} if as_sglang_starts else {}
    with sglang_server(model, folder, dtype=case.dtype, last=case.last, flags=flags, **own) as server:
        cfg = load(
            overrides=[
                f"server.spool={server.spool}",
                f"capture.dtype={case.stored}",
                f"capture.last={case.last}",
                "extract.window_requests=16",
                "store.shard_bytes=4MB",
                "store.reserve_bytes=0",
            ]
        )
        yield Running(case, server, model, cfg)


def make_corpus(path: Path, vocab_size: int, seed: int, longest: int = LENGTHS[-1]) -> Path:
    """Prompts of 1 to `longest` tokens: many equally long, half with a shared prefix of 40, some exact duplicates."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(10, vocab_size, 40)
    meta = CorpusMeta(model="named-by-the-test", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        previous = shared
        for index, length in enumerate(length for length in LENGTHS if length <= longest):
            tokens = rng.integers(10, vocab_size, length)
            if index % 2:
                tokens[: min(40, length)] = shared[: min(40, length)]
            for copy in range(2 if index % 5 == 0 else 1):
                mask = np.zeros(length, np.uint8)
                mask[length // 3 : length - 1] = 1
                writer.add(f"{index}.{copy}", tokens, mask)
        writer.add("prefix-of-the-one-before", tokens[:300], np.ones(300, np.uint8))
        writer.add("shared-alone", previous, np.ones(40, np.uint8))
    return path


@pytest.mark.contract
def test_every_row_is_right_and_every_control_wrong(running: Running, tmp_path: Path) -> None:
    vocab_size = Target.load(str(running.model)).vocab_size
    longest = 301 if running.case.model == "smollm2" else LENGTHS[-1]  # it is the slowest by far
    corpus = make_corpus(tmp_path / "corpus.parquet", vocab_size, seed=3, longest=longest)
    rows = len(Corpus.open(corpus))
    console = Console(file=io.StringIO())
    summary = extract(
        corpus,
        tmp_path / "store",
        cfg=running.cfg,
        model=str(running.model),
        server=running.server.url,
        console=console,
    )
    assert (summary.rows_done, summary.failed) == (rows, 0), summary.first_failures
    report = verify(tmp_path / "store", corpus=corpus, against=str(running.model), sample=0, console=console)
    for name, text in report.lines():
        print(f"{running.case}  {name}  {text}")
    assert report.problems == ()
    assert report.comparison is not None
    assert report.comparison.rows == rows
    assert report.comparison.mismatches == []
    controls = set(report.comparison.nearest)
    for layer in StoreReader(tmp_path / "store").spec.layers:
        assert {f"{layer - 1} as {layer}", f"{layer + 1} as {layer}", f"shifted by one as {layer}"} <= controls
    assert {"pre-norm as last", "shifted by one as last"} <= controls
    left = [path.name for path in running.server.spool.iterdir() if path.name != "spec.json"]
    assert left == []


def test_states_quantised_by_the_server_are_right_and_take_half_the_bytes(smollm2_dir: Path, tmp_path: Path) -> None:
    """The target computes in float32, so that what is off is off by fp8 alone."""
    vocab_size = Target.load(str(smollm2_dir)).vocab_size
    corpus = make_corpus(tmp_path / "corpus.parquet", vocab_size, seed=9)
    console = Console(file=io.StringIO())
    flags = ["--chunked-prefill-size", str(CHUNK), "--context-length", "2048"]
    with sglang_server(smollm2_dir, tmp_path, flags=flags, stored="fp8_e4m3") as server:
        settings = [f"server.spool={server.spool}", "store.reserve_bytes=0", "store.shard_bytes=4MB"]
        args = {"model": str(smollm2_dir), "server": server.url, "console": console}
        with pytest.raises(EngineError, match="other settings") as caught:
            extract(corpus, tmp_path / "refused", cfg=load(overrides=settings), **args)
        assert "dtype: bf16 != fp8_e4m3" in str(caught.value.hint)
        assert not (tmp_path / "refused").exists()
        cfg = load(overrides=[*settings, "capture.dtype=fp8_e4m3"])
        summary = extract(corpus, tmp_path / "store", cfg=cfg, **args)
        assert (summary.rows_done, summary.failed) == (len(Corpus.open(corpus)), 0), summary.first_failures
    report = verify(tmp_path / "store", corpus=corpus, against=str(smollm2_dir), sample=10, console=console)
    for name, text in report.lines():
        print(f"fp8  {name}  {text}")
    report.check()
    assert report.comparison is not None
    assert report.comparison.alike.total() < report.comparison.told_apart.total() / 4
    reader = StoreReader(tmp_path / "store")
    assert reader.spec.record_bytes(1, 1) < 0.51 * 2 * 4 * reader.spec.hidden_size
    assert any("fp8_e4m3" in text for _, text in describe_store(tmp_path / "store"))


@pytest.mark.parametrize("running", [CASES[2]], ids=str, indirect=True)  # one server is enough
def test_a_second_run_on_the_same_server_resumes(running: Running, tmp_path: Path) -> None:
    vocab_size = Target.load(str(running.model)).vocab_size
    corpus = make_corpus(tmp_path / "corpus.parquet", vocab_size, seed=4)
    args = {"cfg": running.cfg, "model": str(running.model), "server": running.server.url}
    first = extract(corpus, tmp_path / "one", workers=2, console=Console(file=io.StringIO()), **args)
    again = extract(corpus, tmp_path / "one", console=Console(file=io.StringIO()), **args)
    assert (first.rows_done, again.rows_now, again.rows_done) == (first.rows, 0, first.rows)


@pytest.mark.parametrize("running", [CASES[2]], ids=str, indirect=True)  # one server is enough
def test_a_server_of_another_model_is_refused_by_name(running: Running, tmp_path: Path) -> None:
    other = tiny_deepseek_v3(tmp_path / "other")
    corpus = make_corpus(tmp_path / "corpus.parquet", Target.load(str(other)).vocab_size, seed=5)
    with pytest.raises(EngineError, match="another model"):
        extract(corpus, tmp_path / "store", cfg=running.cfg, model=str(other), server=running.server.url)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("running", [CASES[2]], ids=str, indirect=True)
def test_a_client_killed_ten_times_leaves_every_row_once_and_right(running: Running, tmp_path: Path) -> None:
    """SIGKILL somewhere in the middle of each session; requests in flight and records in the spool are left behind."""
    rng, store = np.random.default_rng(8), tmp_path / "store"
    path, vocab_size = tmp_path / "corpus.parquet", Target.load(str(running.model)).vocab_size
    meta = CorpusMeta(model=str(running.model), tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for row in range(KILLED_ROWS):
            tokens = rng.integers(10, vocab_size, int(rng.choice([60, 90, 130])))
            writer.add(str(row), tokens, np.ones(len(tokens), np.uint8))
    config = tmp_path / "run.yaml"
    config.write_text(running.cfg.model_copy(update={"extract": ExtractConfig(window_requests=4)}).model_dump_json())
    command = ["-m", "eyas", "extract", str(path), str(store), "--server", running.server.url, "--config", str(config)]
    with Preloaded(["eyas.extract.runner", "eyas.extract.sglang", "eyas.target.checkpoint"]) as python:
        for _ in range(10):
            before = journalled(store)
            process = python.start(command)
            while journalled(store) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
            assert process.wait() == -signal.SIGKILL, "ended before it could be killed"
    console = Console(file=io.StringIO())
    summary = extract(path, store, cfg=running.cfg, server=running.server.url, console=console)
    assert (summary.rows_done, summary.failed) == (KILLED_ROWS, 0)
    assert summary.rows_now < KILLED_ROWS
    report = verify(store, corpus=path, against=str(running.model), sample=100, console=console)
    report.check()
    assert [path.name for path in running.server.spool.iterdir()] == ["spec.json"]


def journalled(store: Path) -> int:
    """Bytes of all journals and sidecars: grows with every row."""
    total = 0
    for file in [*store.glob("*.journal"), *store.glob("shard-*.json")]:
        with contextlib.suppress(FileNotFoundError):  # a journal goes when its shard is done
            total += file.stat().st_size
    return total


@pytest.mark.contract
def test_a_server_without_the_plugin_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    corpus = make_corpus(tmp_path / "corpus.parquet", Target.load(str(model)).vocab_size, seed=6)
    with sglang_server(model, tmp_path, env={"EYAS_CAPTURE": ""}, quick=False) as server:
        cfg = load(overrides=[f"server.spool={server.spool}", "capture.dtype=f32"])
        began = time.monotonic()
        with pytest.raises(EngineError, match="plugin") as caught:
            extract(corpus, tmp_path / "store", cfg=cfg, model=str(model), server=server.url)
        assert caught.value.exit_code == 3
        assert time.monotonic() - began < 60
    assert not (tmp_path / "store").exists()
