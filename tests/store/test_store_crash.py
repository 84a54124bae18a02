"""Killed anywhere, the store resumes to the bytes of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from store_samples import contents, fill, open_store, snapshot, write_store

from eyas.errors import IntegrityError
from eyas.store.check import verify_store
from eyas.store.writer import ShardState
from preloaded import Preloaded

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory where possible: these tests fsync thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="eyas-store-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def python() -> Iterator[Preloaded]:
    with Preloaded(["torch", "eyas.capture.encoding", "eyas.store.writer"], env=ENVIRONMENT) as template:
        yield template


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["finish", "resume", "reopen", "move", "move-home"])
def test_stopped_at_every_file_operation(operation, scratch):
    done = subprocess.run(
        [sys.executable, str(HERE / "crash_driver.py"), str(scratch), operation],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] > 20  # the hook saw the operation
    assert found["states"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_kill_9_at_random_points(workers, scratch, python):
    rows, failing = 800, {3, 77, 149}
    write_store(scratch / "whole", rows, failing)
    root = scratch / "killed"
    arguments = [str(HERE / "store_samples.py"), str(root), str(rows), *map(str, sorted(failing))]
    rng = random.Random(workers)
    kills, finished = 0, False
    while not finished:
        before = progress(root)
        children = [python.start(arguments) for _ in range(workers)]
        try:
            # Wait for the store to move before choosing the moment, or the start is all that is killed.
            deadline = time.monotonic() + 60
            while progress(root) == before and any(c.poll() is None for c in children):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            if kills < 10:
                time.sleep(rng.random() * 0.01)
        finally:
            for child in children:
                if kills < 10:
                    child.send_signal(signal.SIGKILL)
            codes = [child.wait(timeout=60) for child in children]
        kills += any(code == -signal.SIGKILL for code in codes)
        assert set(codes) <= {0, -signal.SIGKILL}
        finished = kills >= 10 or all(code == 0 for code in codes)
    for _ in range(2):  # the second finds nothing to do
        assert python.start(arguments).wait(60) == 0
    assert kills == 10
    assert snapshot(root) == snapshot(scratch / "whole")
    report = verify_store(root, contents)
    assert (report.problems, report.rows, report.failed) == ((), rows - len(failing), len(failing))


def progress(root: Path) -> int:
    """A number that changes when a row is journalled or a file comes or goes."""
    with suppress(FileNotFoundError):  # a file that goes while we look is a change too
        return sum(1 + (path.stat().st_size if path.suffix == ".journal" else 0) for path in root.iterdir())
    return -1


def test_lost_pages_are_captured_again(tmp_path):
    """Power loss: journal lines reached the disk, pages of the part did not."""
    write_store(tmp_path / "whole", 6)
    writer = open_store(tmp_path / "cut", 6)
    shard = writer.plan.shards[0]
    lease = writer.lease(shard, contents)
    fill(lease)
    spans = [lease._span("aux", row) for row in lease._rows]
    lease.close()
    part = writer.paths(shard).part
    data = bytearray(part.read_bytes())
    data[:200] = bytes(200)  # the header
    data[spans[1][0] : spans[1][1]] = bytes(spans[1][1] - spans[1][0])
    part.write_bytes(data)
    lease = writer.lease(shard, contents)
    assert lease.pending == [shard.start + 1]
    lease.close()
    write_store(tmp_path / "cut", 6)
    assert snapshot(tmp_path / "cut") == snapshot(tmp_path / "whole")


def test_a_finished_file_without_sidecar_that_is_damaged_is_not_published(tmp_path):
    writer = write_store(tmp_path, 6)
    shard = writer.plan.shards[0]
    paths = writer.paths(shard)
    paths.sidecar.unlink()
    data = bytearray(paths.final.read_bytes())
    data[writer.info.layout(shard).tensors["aux"].start + 3] ^= 1
    paths.final.write_bytes(data)
    assert writer.state(shard) is ShardState.OPEN
    with pytest.raises(IntegrityError, match="row-hash") as caught:
        writer.lease(shard, contents)
    assert "remove it" in caught.value.hint
