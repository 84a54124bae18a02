"""Disks in trouble: the spool over its quota, full, read-only, deleted; the store's slow, failing, full.

One server without a tokenizer. A file system of 3 MB under the spool is really full and
really read-only; where this user may not mount one, the plugin is told that the disk is full, and the folder's mode
stands for a read-only one.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyas.capture.contract import LAST_PARAM, SPEC_FILE, SPEC_PARAM
from eyas.errors import ConfigError, EngineError, StoreError
from faults_support import (
    SERVER_FLAGS,
    Injector,
    Neighbours,
    Run,
    held,
    hello,
    make_corpus,
    must_be_empty,
    settings,
    some_lengths,
    wait_until,
)
from servers import Server, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

QUOTA, DISK = 2_400_000, "3m"
ROWS = 60
MAY_MOUNT = os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a small disk of its own, where this user may make one."""
    disk = tmp_path_factory.mktemp("disk")
    disk.chmod(0o700)
    mounted = MAY_MOUNT and _mount("-t", "tmpfs", "-o", f"size={DISK},mode=0700", "tmpfs", str(disk))
    yield disk / "spool"
    if mounted:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="module")
def server(model: Path, injector: Injector, spool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*SERVER_FLAGS, "--skip-tokenizer-init", "--disable-radix-cache"]
    folder = tmp_path_factory.mktemp("disks")
    with sglang_server(model, folder, flags=flags, env=injector.env, spool=spool, quota_bytes=QUOTA) as running:
        yield running


@pytest.fixture(scope="module")
def disk_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slow_disk.c`, to be preloaded into a client."""
    library = tmp_path_factory.mktemp("library") / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def neighbours(server: Server) -> Neighbours:
    return Neighbours(server, health=False)  # its health check wants a detokenizer


def run_of(server: Server, model: Path, folder: Path, *overrides: str, longest: int = 200) -> Run:
    corpus = make_corpus(folder / "corpus.parquet", some_lengths(ROWS, seed=10, longest=longest), seed=10)
    return Run(corpus, folder / "store", model, server, settings(server, *overrides))


def _mount(*args: str) -> bool:
    return subprocess.run(["mount", *args], capture_output=True, check=False).returncode == 0


def test_rows_larger_than_the_quota_are_refused_before_the_run(server: Server, model: Path, tmp_path: Path) -> None:
    run = run_of(server, model, tmp_path, longest=650)
    with pytest.raises(ConfigError, match="larger than the spool's quota"):
        run.now()
    assert not run.store.exists()


def test_over_quota_rows_wait_and_cost_no_attempt(
    server: Server, model: Path, neighbours: Neighbours, tmp_path: Path
) -> None:
    """Somebody's records fill the spool in the middle of a run, and go after a while."""
    run = run_of(server, model, tmp_path, "extract.attempts=2", "extract.window_requests=4")
    sampling = {"max_new_tokens": 1, "custom_params": {SPEC_PARAM: hello(server).spec_id, LAST_PARAM: []}}
    strangers = [f"eyas.{'s' * 8}.{'t' * 8}.{row:08d}.00" for row in range(40)]

    def fill() -> bool:
        """Send records nobody fetches until one is refused."""
        for rid in strangers:
            body = {"rid": rid, "input_ids": [11] * 200, "sampling_params": sampling}
            if server.generate(**body)["meta_info"]["eyas"][0]["status"] == "refused":
                return True
        return False

    with neighbours.around(2), run.going() as going:
        with held():
            wait_until(lambda: not list(server.spool.glob("eyas.*")), "a record of ours stays in the spool")
            assert fill()
        timer = threading.Timer(2.0, lambda: [path.unlink(missing_ok=True) for path in _records(server, strangers)])
        timer.start()
        going.exception()
        timer.join()
    summary = going.result()
    for path in _records(server, strangers):
        path.unlink()
    assert summary.waits > 0
    assert summary.retries == run.retried_for("connection-lost")  # a busy server may drop an idle connection
    run.must_end_well(summary)


def _records(server: Server, rids: list[str]) -> list[Path]:
    return [path for path in server.spool.iterdir() if path.stem in rids]


@contextmanager
def full(server: Server, injector: Injector) -> Iterator[None]:
    """No room for a record in the spool's file system."""
    ballast = server.spool.parent / "ballast"
    if not server.spool.parent.is_mount():
        with injector.injecting(**{"record-write": {"rate": 1}}):
            yield
        return
    try:
        with ballast.open("wb") as file:
            free = os.statvfs(ballast)
            file.write(b"\0" * (free.f_bavail * free.f_frsize - 8192))
        yield
    finally:
        ballast.unlink()


@contextmanager
def read_only(server: Server, injector: Injector) -> Iterator[None]:
    del injector
    disk = server.spool.parent
    if disk.is_mount():
        # Refused while a record is open for writing.
        wait_until(lambda: _mount("-o", "remount,ro", str(disk)), "the disk stays busy")
    else:
        server.spool.chmod(0o500)
    try:
        yield
    finally:
        if disk.is_mount():
            assert _mount("-o", "remount,rw", str(disk))
        else:
            server.spool.chmod(0o700)


@contextmanager
def deleted(server: Server, injector: Injector) -> Iterator[None]:
    """With all that is in it; made again afterwards, as an administrator would, empty but for the server's own file."""
    del injector
    hello_text = (server.spool / SPEC_FILE).read_text()
    shutil.rmtree(server.spool, ignore_errors=True)
    try:
        yield
    finally:
        server.spool.mkdir(0o700, exist_ok=True)
        (server.spool / SPEC_FILE).write_text(hello_text)


@pytest.mark.parametrize("trouble", [full, read_only, deleted], ids=lambda trouble: trouble.__name__)
def test_a_spool_that_cannot_take_records_ends_the_run_by_name(
    trouble, server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    """The server says so and lives, its users notice nothing; once it is well again the same command finishes."""
    run = run_of(server, model, tmp_path, "extract.window_requests=2")
    with neighbours.around(2):
        with run.going() as going, trouble(server, injector):
            with pytest.raises(EngineError) as caught:
                going.result()
            assert "resumes" in caught.value.hint
            assert caught.value.exit_code == 3
            with pytest.raises(EngineError):
                run.now()
        assert 0 < run.rows_stored() < ROWS
        summary = run.now()
    run.must_end_well(summary)


def test_records_that_are_deleted_before_they_are_read(
    server: Server, model: Path, neighbours: Neighbours, tmp_path: Path
) -> None:
    """By somebody who tidies the folder: those rows are late, and are tried again."""
    run = run_of(server, model, tmp_path, "server.record_deadline_s=1", "extract.attempts=10")
    removed = 0
    with neighbours.around(2), run.going() as going, ThreadPoolExecutor(1):
        while not going.done() and removed < 5:
            for path in server.spool.glob("eyas.*.0000*.safetensors"):
                if f".{run.session()}." in path.name:
                    path.unlink(missing_ok=True)
                    removed += 1
    summary = going.result()
    wait_until(going.done, "")
    run.must_end_well(summary)
    must_be_empty(server.spool)


# --- the store's disk -------------------------------------------------------------------------------------------------


@contextmanager
def client(run: Run, disk_library: Path, control: Path) -> Iterator[subprocess.Popen[str]]:
    """`eyas extract` as a process whose writes to shards obey the control file; entered in the middle of the run."""
    config = run.store.with_suffix(".yaml")
    config.write_text(run.cfg.model_dump_json())
    command = [sys.executable, "-m", "eyas", "extract", str(run.corpus), str(run.store), "--model", str(run.model)]
    command += ["--server", run.server.url, "--config", str(config)]
    env = {**os.environ, "LD_PRELOAD": str(disk_library), "EYAS_TEST_DISK": str(control)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        wait_until(lambda: run.rows_stored() > 3 or process.poll() is not None, "no row was ever stored")
        yield process


def test_a_slow_store_disk_slows_the_run_and_loses_nothing(
    server: Server, model: Path, neighbours: Neighbours, disk_library: Path, tmp_path: Path
) -> None:
    """0.1 s a write: records pile up in the spool to the quota, and the server's other users do not wait."""
    run, control = run_of(server, model, tmp_path, "extract.window_requests=16"), tmp_path / "disk"
    control.write_text("100000 0")
    with neighbours.around(2), client(run, disk_library, control) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    run.must_end_well(run.now())


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.ENOSPC, "disk full"), (errno.EIO, "I/O error"), (errno.EROFS, "")],
    ids=errno.errorcode.get,
)
def test_a_store_disk_that_fails_ends_the_run_in_one_line(
    server: Server, model: Path, disk_library: Path, tmp_path: Path, number: int, what: str
) -> None:
    run, control = run_of(server, model, tmp_path, "extract.window_requests=4"), tmp_path / "disk"
    control.write_text("20000 0")
    with client(run, disk_library, control) as process:
        new = control.with_suffix(".new")
        new.write_text(f"0 {number}")
        new.rename(control)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == StoreError.exit_code, errors
    assert [what in line for line in errors.splitlines() if line.startswith("error")] == [True], errors
    assert "Traceback" not in errors
    assert 0 < run.rows_stored() < ROWS
    run.must_end_well(run.now())


@pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a small disk")
def test_a_store_disk_that_fills_up_while_the_run_goes_on(server: Server, model: Path, tmp_path: Path) -> None:
    """Really full: there is room for the plan at the start, and somebody else takes it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)):
        pytest.skip("mounting is not permitted here")
    try:
        run = run_of(server, model, tmp_path, "extract.window_requests=2", "store.shard_bytes=2MB")
        run.store = disk / "store"
        with run.going() as going, (disk / "ballast").open("wb", buffering=0) as ballast:
            with pytest.raises(OSError, match="No space left"):  # by writing: the run takes space meanwhile, too
                while True:
                    ballast.write(bytes(1 << 16))
            with pytest.raises(StoreError, match="disk full"):
                going.result()
        with pytest.raises(StoreError):
            run.now()
        ballast_path = disk / "ballast"
        ballast_path.unlink()
        run.must_end_well(run.now())
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
