"""The runner against the shipped FakeEngine: no row lost, none doubled, the same bytes whatever happened on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from eyas.config import Config, load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.errors import ConfigError, EngineError, IntegrityError, StoreError
from eyas.extract.build import Job
from eyas.extract.runner import Summary, extract, plan
from eyas.extract.worker import Report
from eyas.extract.workers import Work
from eyas.store.check import verify_store
from eyas.store.reader import StoreReader
from preloaded import Forked, Preloaded
from tiny_models import llama

SETTINGS = ["extract.engine=fake", "store.shard_bytes=2MB", "store.reserve_bytes=0", "extract.window_requests=8"]


def make_corpus(path: Path, rows: int = 120, seed: int = 1) -> Path:
    """Rows of unequal length, many equal, some duplicates, some of one token."""
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(path, meta) as writer:
        previous = np.array([1, 2, 3])
        for row in range(rows):
            length = int(rng.choice([1, 2, 64, 64, 64, 200, int(rng.integers(1, 600))]))
            tokens = previous if row % 17 == 5 else rng.integers(0, 1000, length)
            mask = np.zeros(len(tokens), np.uint8)
            mask[len(tokens) // 3 :] = 1
            writer.add(f"r{row}", tokens, mask)
            previous = tokens
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """File digests of an uninterrupted run by one worker."""
    store = tmp_path_factory.mktemp("reference") / "store"
    run(corpus, store)
    return digests(store)


def run(corpus: Path, store: Path, *settings: str, workers: int = 1, retry_failed: bool = False) -> Summary:
    cfg = load(overrides=[*SETTINGS, *settings])
    console = Console(file=io.StringIO())
    return extract(corpus, store, cfg=cfg, workers=workers, retry_failed=retry_failed, console=console)


def digests(store: Path) -> dict[str, str]:
    """Everything in the store but the event log, by content."""
    files = sorted(path for path in store.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command(corpus: Path, store: Path, *settings: str, workers: int = 1) -> list[str]:
    sets = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return [sys.executable, "-m", "eyas", "extract", str(corpus), str(store), "--workers", str(workers), *sets]


def test_every_row_is_stored_once_and_is_its_own(corpus: Path, tmp_path: Path) -> None:
    summary = run(corpus, tmp_path / "store")
    opened = Corpus.open(corpus)
    reader = StoreReader(tmp_path / "store")
    assert (summary.rows_done, summary.failed, summary.complete) == (len(opened), 0, True)
    assert [reader[i].row for i in range(len(reader))] == list(range(len(opened)))
    for i, row in enumerate(opened.rows()):
        assert reader[i].tokens.tolist() == row.tokens.tolist()
    assert verify_store(tmp_path / "store").problems == ()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_same_bytes_whoever_wrote_them(
    corpus: Path, tmp_path: Path, reference: dict[str, str], workers: int
) -> None:
    summary = run(corpus, tmp_path / "store", workers=workers)
    assert summary.complete
    assert digests(tmp_path / "store") == reference


@pytest.mark.slow
def test_killed_ten_times_at_random_points_then_resumed(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    """Each session has one, two or three workers, and SIGKILL takes it somewhere in its middle."""
    store, rng = tmp_path / "store", random.Random(5)
    with Preloaded(["eyas.extract.runner"]) as python:
        for kill in range(10):
            words = command(corpus, store, "fake.delay_s=0.3", "extract.window_requests=3", workers=1 + kill % 3)
            process = python.start(words[1:])
            wait_for_rows(store, process)
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "finished before it could be killed"
    wait_until_unleased(corpus, store)
    assert digests(store) == reference


def wait_for_rows(store: Path, process: subprocess.Popen | Forked) -> None:
    """Until this session has journalled something, or the process ends."""
    journals = store.glob("*.journal")
    before = {path: path.stat().st_size for path in journals}
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        now = {path: size_of(path) for path in store.glob("*.journal")}
        if any(size > before.get(path, 0) + 200 for path, size in now.items()):
            return
        time.sleep(0.02)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_until_unleased(corpus: Path, store: Path) -> None:
    """Resume to the end; worker processes of the killed parent may take a moment to follow it."""
    for _ in range(50):
        try:
            assert run(corpus, store, workers=2).complete
            return
        except StoreError as error:
            assert "leased" in error.what
            time.sleep(0.2)
    raise AssertionError("shards stayed leased")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_drains_and_the_same_command_resumes(
    corpus: Path, tmp_path: Path, reference: dict[str, str], number: signal.Signals, workers: int
) -> None:
    store = tmp_path / "store"
    process = subprocess.Popen(
        command(corpus, store, "fake.delay_s=0.2", workers=workers), stderr=subprocess.PIPE, text=True
    )
    wait_for_rows(store, process)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "the same command resumes" in text
    assert "Traceback" not in text
    assert run(corpus, store).complete
    assert digests(store) == reference


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("pause_s", [0, 0.5])
def test_a_signal_to_the_whole_group_while_workers_start(
    corpus: Path, tmp_path: Path, number: signal.Signals, workers: int, pause_s: float
) -> None:
    """As a terminal, systemd or Slurm sends it: every process has it, some of them before their first own line."""
    store = tmp_path / "store"
    process = subprocess.Popen(
        command(corpus, store, "fake.delay_s=0.3", "extract.window_requests=1", workers=workers),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: [log for log in store.glob("events/*.jsonl") if log.stat().st_size])
    time.sleep(pause_s)
    os.killpg(process.pid, number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    (log,) = store.glob("events/*.jsonl")
    end = json.loads(log.read_text().splitlines()[-1])
    assert (end["event"], end["stopped"]) == ("end", True)
    assert end["rows_done"] < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_is_asked(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    with silent_server() as url:
        args = [sys.executable, "-m", "eyas", "extract", str(corpus), str(tmp_path / "store"), "--server", url[0]]
        process = subprocess.Popen(
            [*args, "--model", str(model_folder(tmp_path / "model"))], stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: url[1:])  # it has connected
        process.send_signal(number)
        _, text = process.communicate(timeout=10)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert not (tmp_path / "store").exists()


def test_a_stop_while_the_engine_starts_is_not_forgotten(corpus: Path, tmp_path: Path) -> None:
    cfg = load(overrides=SETTINGS[1:])
    with silent_server() as url:
        job = Job(corpus, tmp_path / "store", str(model_folder(tmp_path / "model")), (url[0],), cfg, "session0")
        work = Work(job, 1, lambda report: None, lambda used: None)
        thread = threading.Thread(target=work.run)
        thread.start()
        wait_for(lambda: url[1:])
        work.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_stop_before_the_start_starts_nothing(corpus: Path, tmp_path: Path) -> None:
    job = Job(corpus, tmp_path / "store", "made-up", (), load(overrides=SETTINGS), "session0")
    reports: list[Report] = []
    work = Work(job, 1, reports.append, lambda used: None)
    work.stop()
    work.run()
    assert reports == []


@contextlib.contextmanager
def silent_server() -> Iterator[list[str]]:
    """Accepts and never answers. Its URL, and an entry more for each client."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = [f"http://127.0.0.1:{server.getsockname()[1]}"]
        clients = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    clients.append(server.accept()[0])
                    told.append("client")

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield told
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


def model_folder(folder: Path) -> Path:
    """A target's config, without weights."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def worker_pids(process: subprocess.Popen) -> list[int]:
    """The worker processes of a run."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_killed_among_others_is_an_error_and_no_hang(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    process = subprocess.Popen(
        command(corpus, store, "fake.delay_s=0.1", "extract.window_requests=2", workers=3),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_rows(store, process)
    os.kill(worker_pids(process)[0], signal.SIGKILL)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 3, text
    assert "eyas-worker-0 was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert run(corpus, store).complete
    assert digests(store) == reference


def test_damage_that_worker_processes_find_is_told_by_its_name(corpus: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(corpus, store)
    first = store / "shard-00000"
    first.with_suffix(".json").unlink()
    with first.with_suffix(".safetensors").open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        file.write(b"damage")
    with pytest.raises(IntegrityError, match="finished shard is damaged") as caught:
        run(corpus, store, workers=2)
    assert caught.value.exit_code == 4
    assert "shard-00000" in caught.value.where


def test_a_shard_leased_twice_is_counted_once(corpus: Path, tmp_path: Path) -> None:
    """Its first worker failed, and a sibling that was behind took it over."""
    summary = Summary(120, 1000, plan(corpus, tmp_path / "store", cfg=load(overrides=SETTINGS)))
    for report in (
        Report(0, leased=True),
        Report(0, rows=1, tokens=10),
        Report(0, failed=1),
        Report(1, rows=1, tokens=20),
        Report(0, leased=True, rows=1, tokens=10, failed=1),
        Report(0, rows=1, tokens=30),
    ):
        summary.add(report)
    assert (summary.rows_done, summary.tokens_done, summary.failed) == (3, 60, 1)
    assert (summary.rows_now, summary.tokens_now) == (3, 60)


def test_stop_on_failure_stops_the_other_workers(corpus: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = ["fake.failing_rows=[0]", "extract.on_failure=stop", "fake.delay_s=0.2", "extract.window_requests=1"]
    with pytest.raises(EngineError, match="row 0 failed"):
        run(corpus, store, *settings, "store.shard_bytes=300kB", workers=2)
    (log,) = store.glob("events/*.jsonl")
    assert json.loads(log.read_text().splitlines()[-1])["rows_done"] < 40


def test_more_workers_than_shards(corpus: Path, tmp_path: Path) -> None:
    summary = run(corpus, tmp_path / "store", "store.shard_bytes=1GB", workers=3)
    assert (summary.rows_done, summary.complete) == (120, True)


def test_a_run_in_another_thread(corpus: Path, tmp_path: Path) -> None:
    """Signals are the main thread's, and stay with whoever has them."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, corpus, tmp_path / "store").result().complete


def test_two_runs_at_once_share_the_work_and_the_last_says_done(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    both = [
        subprocess.Popen(
            command(corpus, store, "fake.delay_s=0.1", "extract.window_requests=2"), stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    texts = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 5], [0, 0]), texts
    assert all("leased" in text for process, text in zip(both, texts, strict=True) if process.returncode)
    assert digests(store) == reference
    ends = [json.loads(log.read_text().splitlines()[-1]) for log in store.glob("events/*.jsonl")]
    assert max(ends, key=lambda event: event["t"])["rows_done"] == 120


def test_a_shard_renamed_but_without_its_sidecar_counts_as_done(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    run(corpus, store)
    (store / "shard-00000.json").unlink()
    again = run(corpus, store)
    assert (again.rows_now, again.rows_done, again.complete) == (0, 120, True)
    name = "shard-00000.safetensors"
    assert digests(store)[name] == reference[name]


def test_retry_failed_also_in_a_shard_that_is_still_open(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    process = subprocess.Popen(
        command(corpus, store, "fake.delay_s=0.1", "extract.window_requests=2", "fake.failing_rows=[0, 2]"),
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: b'"row":3' in b"".join(path.read_bytes() for path in store.glob("*.journal")))
    process.kill()
    process.wait()
    filled = run(corpus, store, retry_failed=True)
    assert (filled.rows_done, filled.failed) == (120, 0)
    assert 0 < filled.rows_now < 120
    assert digests(store) == reference


def test_a_log_that_cannot_be_opened_fails_nobody(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "events").write_text("no folder")
    assert run(corpus, tmp_path / "store").complete


def test_a_complete_store_is_reused(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "store")
    again = run(corpus, tmp_path / "store")
    assert (again.rows_now, again.rows_done) == (0, 120)


def test_a_changed_spec_is_refused_by_name_and_nothing_is_touched(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "store")
    before = digests(tmp_path / "store")
    for setting, name in [
        ("capture.layers=[2, 3]", "layers"),
        ("capture.last=all", "last"),
        ("capture.dtype=f32", "dtype"),
        ("fake.seed=1", "model"),
        ("fake.hidden_size=32", "hidden_size"),
        ("store.shard_bytes=1MB", "shard_bytes"),
    ]:
        with pytest.raises(StoreError, match=name) as caught:
            run(corpus, tmp_path / "store", setting)
        assert caught.value.exit_code == 5
    assert digests(tmp_path / "store") == before


def test_another_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "store")
    other = make_corpus(tmp_path / "other.parquet", seed=2)
    with pytest.raises(StoreError, match="digest"):
        run(other, tmp_path / "store")


def test_the_plan_says_what_it_needs_and_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    planned = plan(corpus, tmp_path / "store", cfg=load(overrides=SETTINGS))
    assert not (tmp_path / "store").exists()
    opened = Corpus.open(corpus)
    assert planned.rows == len(opened)
    assert planned.tokens == opened.n_tokens.sum()
    run(corpus, tmp_path / "store")
    shards = list((tmp_path / "store").glob("*.safetensors"))
    assert planned.missing == sum(path.stat().st_size for path in shards)
    assert planned.shards == len(shards)
    assert plan(corpus, tmp_path / "store", cfg=load(overrides=SETTINGS)).missing == 0


def test_what_cannot_fit_is_refused_before_anything_is_written(corpus: Path, tmp_path: Path) -> None:
    huge = ["fake.hidden_size=16777216", "store.shard_bytes=100GB"]
    planned = plan(corpus, tmp_path / "store", cfg=load(overrides=[*SETTINGS, *huge]))
    with pytest.raises(StoreError, match="not enough disk"):
        planned.check(tmp_path / "store")
    with pytest.raises(StoreError, match="not enough disk"):
        run(corpus, tmp_path / "store", *huge)
    assert not (tmp_path / "store").exists()


def test_what_the_disk_has_not_given_yet_is_still_to_write(corpus: Path, tmp_path: Path) -> None:
    """A part that was made and not filled: its maker was killed, or the file system cannot reserve."""
    store, cfg = tmp_path / "store", load(overrides=SETTINGS)
    run(corpus, store)
    shard = store / "shard-00000.safetensors"
    size = shard.stat().st_size
    shard.unlink()
    shard.with_name(f"{shard.name}.part").touch()
    assert plan(corpus, store, cfg=cfg).missing == size
    os.truncate(shard.with_name(f"{shard.name}.part"), size)
    assert plan(corpus, store, cfg=cfg).missing == size


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 12 MB file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        if os.environ.get("CI"):
            pytest.fail("cannot mount a small disk")
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(fd, bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_a_full_disk_stops_cleanly_and_the_run_resumes(
    corpus: Path, small_disk: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """Somebody else fills the disk after the plan was made."""
    store = small_disk / "store"
    run_cfg = load(overrides=[*SETTINGS, "store.shard_bytes=300kB"])
    full = tmp_path / "full"
    extract(corpus, full, cfg=run_cfg, console=Console(file=io.StringIO()))
    hog = small_disk / "hog"
    process = subprocess.Popen(
        command(corpus, store, "store.shard_bytes=300kB", "fake.delay_s=0.2"), stderr=subprocess.PIPE, text=True
    )
    wait_for_rows(store, process)
    fill(hog)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 5, text
    assert "disk full" in text
    assert "Traceback" not in text
    hog.unlink()
    assert extract(corpus, store, cfg=run_cfg, console=Console(file=io.StringIO())).complete
    assert digests(store) == digests(full)


def test_a_row_longer_than_the_engine_admits_is_refused_at_plan(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than the engine admits") as caught:
        run(corpus, tmp_path / "store", "fake.max_row_tokens=100")
    assert "prepare.max_tokens=100" in caught.value.hint
    assert not (tmp_path / "store").exists()  # it would be a store of the corpus that must be made anew


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_transformers_in_process_with_and_without_weights_to_fingerprint(tmp_path: Path, name: str) -> None:
    model = llama(num_hidden_layers=8, vocab_size=1000)
    model.save_pretrained(tmp_path / "model")
    if name.endswith(".bin"):
        (tmp_path / "model" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "model" / name)
    corpus, cfg = make_corpus(tmp_path / "corpus.parquet", rows=5), load(overrides=["store.reserve_bytes=0"])
    (console, folder) = Console(file=io.StringIO()), tmp_path / "store"
    lengths = Corpus.open(corpus).n_tokens
    assert lengths.max() < 512
    planned = plan(corpus, folder, cfg=cfg, model=str(tmp_path / "model"))
    assert (planned.max_row_tokens, planned.rows) == (512, 5)
    for expected in (5, 0):
        summary = extract(corpus, folder, cfg=cfg, model=str(tmp_path / "model"), console=console)
        assert (summary.rows_now, summary.rows_done, summary.failed) == (expected, 5, 0)


def test_failed_rows_are_marked_skipped_and_filled_later(
    corpus: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    summary = run(corpus, store, "fake.failing_rows=[0, 7, 119]")
    assert (summary.failed, summary.rows_done, summary.complete) == (3, 117, True)
    assert summary.reasons == {"made-to-fail": 3}
    reader = StoreReader(store)
    assert len(reader) == 117
    assert {reader[i].row for i in range(117)} == set(range(120)) - {0, 7, 119}
    assert verify_store(store).problems == ()
    again = run(corpus, store)
    assert (again.rows_now, again.failed) == (0, 3)
    filled = run(corpus, store, retry_failed=True)
    assert (filled.rows_now, filled.failed, filled.rows_done) == (3, 0, 120)
    assert digests(store) == reference


def test_stop_on_failure_is_an_option(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="row 3 failed: made-to-fail"):
        run(corpus, tmp_path / "store", "fake.failing_rows=[3]", "extract.on_failure=stop")


def test_the_event_log_tells_the_run(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "store", "fake.failing_rows=[7]")
    (log,) = (tmp_path / "store" / "events").glob("*.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert next(e for e in events if e["event"] == "row_failed")["reason"] == "made-to-fail"
    retried = [(e["row"], e["attempt"], e["reason"]) for e in events if e["event"] == "row_retried"]
    assert retried == [(7, 0, "made-to-fail"), (7, 1, "made-to-fail")]
    assert kinds.count("shard_done") == len(list((tmp_path / "store").glob("*.safetensors")))
    assert events[-1]["rows_done"] == 119


def test_default_settings_are_a_config() -> None:
    assert load().extract == Config().extract


def test_an_error_in_mid_run_says_what_is_stored_and_that_it_resumes(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        run(corpus, tmp_path / "store", "fake.failing_rows=[60]", "extract.on_failure=stop", "fake.delay_s=0.01")
    assert re.search(r"\d+ of 120 rows are stored and the same command resumes", caught.value.hint)


def test_failures_of_earlier_sessions_are_told_again(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "store", "fake.failing_rows=[60]")
    again = run(corpus, tmp_path / "store")
    assert (again.failed, again.reasons) == (1, {"made-to-fail": 1})


def test_a_stopping_run_says_so(corpus: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    process = subprocess.Popen(command(corpus, store, "fake.delay_s=1"), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(store.glob("*.part")))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "stopping: rows in flight have up to" in text


def test_a_server_for_an_engine_that_has_none_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no server"):
        extract(corpus, tmp_path / "store", cfg=load(overrides=SETTINGS), server="http://127.0.0.1:1")
