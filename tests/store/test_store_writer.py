from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    CORPUS,
    SPEC,
    contents,
    fill,
    open_store,
    row_contents,
    row_states,
    snapshot,
    write_all,
    write_store,
)

from eyas.capture.contract import DTYPES, CaptureSpec, field_hash
from eyas.errors import IntegrityError, StoreError
from eyas.store.check import verify_store
from eyas.store.format import Sidecar
from eyas.store.journal import decode_journal
from eyas.store.writer import ShardState, StoreWriter, read_store_info, write_manifest


def first(writer: StoreWriter):
    return writer.plan.shards[0]


# --- opening ---


def test_bytes_do_not_depend_on_order_attempts_or_sessions(tmp_path):
    write_store(tmp_path / "a", failing={5})
    for shard in reversed((writer := open_store(tmp_path / "b")).plan.shards):
        while (lease := writer.lease(shard, contents)) is not None:
            with lease:
                for row in lease.pending[::-1][:2]:
                    if row == 5:
                        lease.fail(row, "aborted", "first")
                        lease.fail(row, "retracted", "second")
                    else:
                        lease.fail(row, "aborted")
                        lease.put(row, *row_states(row))
                if not lease.pending:
                    lease.finish()
    writer.write_manifest()
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert verify_store(tmp_path / "a", contents).ok


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": CaptureSpec((1, 2, 4), "all", "bf16", 16, 100, 8, "0" * 32)}, "spec last: loss != all"),
        ({"spec": CaptureSpec((1, 2, 4), "loss", "bf16", 16, 100, 8, "1" * 32)}, "spec model: 0+ != 1+"),
        ({"corpus": CORPUS | {"digest": "d"}}, "corpus digest: c+ != d"),
        ({"corpus": CORPUS | {"template": "x"}}, "corpus template: None != x"),
        ({"shard_bytes": 13_000}, "shard_bytes: 12000 != 13000"),
        ({"rows": 39}, "plan: [0-9a-f]{32} != [0-9a-f]{32}"),
    ],
)
def test_resuming_with_something_else_is_refused_by_name(tmp_path, changes, message):
    open_store(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match=message) as caught:
        open_store(tmp_path, **changes)
    assert "new store folder" in caught.value.hint
    assert snapshot(tmp_path) == before


def test_other_provenance_is_no_difference_and_is_recorded_once_per_engine(tmp_path):
    engines = [{"engine": "b"}, {"engine": "a"}, {"engine": "b"}, {"engine": "idle"}]
    for engine in engines:
        writer = open_store(tmp_path, 4, provenance=engine, shard_bytes=1 << 20)
        with writer.lease(first(writer), contents) as lease:
            if engine != {"engine": "idle"}:
                row = lease.pending[0]
                lease.put(row, *row_states(row))
    writer = open_store(tmp_path, 4, provenance={"engine": "b"}, shard_bytes=1 << 20)
    write_all(writer)
    assert writer.sidecar(first(writer)).provenance == [{"engine": "a"}, {"engine": "b"}]
    assert json.loads((tmp_path / "manifest.json").read_text())["provenance"] == [{"engine": "a"}, {"engine": "b"}]


def test_a_folder_with_other_things_is_not_made_a_store(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="not empty and not a store") as caught:
        open_store(tmp_path)
    assert "thesis.tex" in caught.value.hint
    assert list(snapshot(tmp_path)) == ["thesis.tex"]


def test_a_run_log_may_be_there_first(tmp_path):
    (tmp_path / "events").mkdir()
    write_all(open_store(tmp_path))
    assert verify_store(tmp_path, contents).ok


def test_a_dry_opening_changes_nothing_and_refuses_the_same(tmp_path):
    plan = open_store(tmp_path / "new", dry=True).plan
    assert not (tmp_path / "new").exists()
    writer = write_store(tmp_path / "old", 6)
    writer.paths(first(writer)).journal.touch()
    before = snapshot(tmp_path / "old")
    assert open_store(tmp_path / "old", 6, dry=True).plan == writer.plan
    assert snapshot(tmp_path / "old") == before
    with pytest.raises(StoreError, match="made for something else"):
        open_store(tmp_path / "old", dry=True)
    assert open_store(tmp_path / "new").plan == plan


def test_a_store_of_another_version_and_no_store(tmp_path):
    open_store(tmp_path)
    text = (tmp_path / "store.json").read_text()
    (tmp_path / "store.json").write_text(text.replace('"version": 1', '"version": 99'))
    with pytest.raises(StoreError, match="version 99"):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text(text[:50])
    with pytest.raises(StoreError, match="not a store this version can read"):
        read_store_info(tmp_path)
    with pytest.raises(StoreError, match="no store here"):
        read_store_info(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a store folder"):
        read_store_info(tmp_path / "store.json")


def test_no_rows_is_a_callers_error(tmp_path):
    with pytest.raises(ValueError, match="at least one row"):
        open_store(tmp_path, 0)


def test_many_processes_creating_at_once_agree(tmp_path):
    script = Path(__file__).with_name("store_samples.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([sys.executable, script, tmp_path / "b", "40"], env=environment) for _ in range(4)]
    assert [worker.wait(timeout=120) for worker in workers] == [0] * 4
    write_manifest(tmp_path / "b")
    write_store(tmp_path / "a")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_threads_creating_at_once_agree(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        writers = list(pool.map(lambda _: open_store(tmp_path / "s"), range(16)))
    assert {w.plan.digest for w in writers} == {writers[0].plan.digest}
    assert list(snapshot(tmp_path / "s")) == ["store.json"]


# --- leases ---


def test_one_writer_per_shard_and_none_once_complete(tmp_path):
    writer, second = open_store(tmp_path), open_store(tmp_path)
    shard = first(writer)
    assert writer.state(shard) is ShardState.ABSENT
    lease = writer.lease(shard, contents)
    assert (writer.state(shard), second.lease(shard, contents)) == (ShardState.OPEN, None)
    lease.close()
    lease = second.lease(shard, contents)
    fill(lease)
    lease.finish()
    assert second.state(shard) is ShardState.COMPLETE
    assert (writer.lease(shard, contents), second.lease(shard, contents)) == (None, None)


def test_a_part_made_just_after_another_process_finished_is_taken_back(tmp_path):
    """Between our look and our lock the holder renamed its part: what we then create must not live."""
    writer = write_store(tmp_path, 6)
    paths = writer.paths(first(writer))
    paths.part.touch()
    assert writer.lease(first(writer), contents) is None
    open_store(tmp_path, 6)
    assert not paths.part.exists()
    assert verify_store(tmp_path, contents).ok


def test_the_sidecar_of_a_living_finisher_is_left_to_it(tmp_path):
    writer = write_store(tmp_path, 6)
    paths = writer.paths(first(writer))
    paths.sidecar.unlink()
    with paths.final.open("rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert writer.lease(first(writer), contents) is None
        assert not paths.sidecar.exists()
    assert writer.lease(first(writer), contents) is None
    assert paths.sidecar.exists()


def test_a_shard_whose_file_was_removed_is_captured_again(tmp_path):
    writer = write_store(tmp_path, 6)
    before = snapshot(tmp_path)
    paths = writer.paths(first(writer))
    paths.final.unlink()
    assert writer.state(first(writer)) is ShardState.ABSENT
    with writer.lease(first(writer), contents) as lease:
        assert not paths.sidecar.exists()
        assert len(lease.pending) == first(writer).rows
    write_all(writer)
    assert snapshot(tmp_path) == before


def test_a_corpus_that_changed_under_its_digest_is_an_integrity_error_and_leaves_no_part(tmp_path):
    writer = open_store(tmp_path)
    with pytest.raises(IntegrityError, match="corpus does not fit the plan"):
        writer.lease(first(writer), lambda shard: list(contents(shard))[1:])
    assert writer.state(first(writer)) is ShardState.ABSENT


# --- rows ---


def test_put_takes_any_contiguous_buffer_and_hashes_given_or_not(tmp_path):
    import torch

    writer = open_store(tmp_path, 4, shard_bytes=1 << 20)
    with writer.lease(first(writer), contents) as lease:
        for row, wrap in enumerate((bytes, bytearray, memoryview, torch.from_numpy)):
            aux, last = (wrap(x if wrap in (memoryview, torch.from_numpy) else x.tobytes()) for x in row_states(row))
            if wrap is torch.from_numpy:
                aux, last = (t.view(torch.uint8).numpy() for t in (aux, last))
            hashes = tuple(field_hash(x.tobytes()) for x in row_states(row)) if row % 2 else None
            lease.put(row, aux, last, hashes)
        lease.finish()
    writer.write_manifest()
    assert verify_store(tmp_path, contents).ok


def test_put_refuses_wrong_lengths_foreign_rows_repeats_and_strides(tmp_path):
    writer = open_store(tmp_path)
    shard = first(writer)
    with writer.lease(shard, contents) as lease:
        aux, last = row_states(0)
        with pytest.raises(IntegrityError, match=r"aux has \d+ bytes, the plan says \d+: row 0"):
            lease.put(0, aux[:-1], last)
        with pytest.raises(IntegrityError, match="last has"):
            lease.put(0, aux, np.zeros(len(last) * 16 + 1, np.uint16))
        with pytest.raises(TypeError):
            lease.put(0, aux[:, ::2], last)
        with pytest.raises(ValueError, match="is not of"):
            lease.put(shard.stop, aux, last)
        assert lease.pending == list(range(shard.start, shard.stop))
        lease.put(0, aux, last)
        with pytest.raises(ValueError, match="already written"):
            lease.put(0, aux, last)
        with pytest.raises(ValueError, match="already written"):
            lease.fail(0, "aborted")
        with pytest.raises(ValueError, match=r"still has \d+ pending rows, first 1"):
            lease.finish()
    with pytest.raises(ValueError, match="is closed"):
        lease.put(1, *row_states(1))


def test_put_from_many_threads(tmp_path):
    writer = open_store(tmp_path, 200, shard_bytes=1 << 20)
    with writer.lease(first(writer), contents) as lease, ThreadPoolExecutor(16) as pool:
        rows = lease.pending
        assert len(rows) > 100
        list(pool.map(lambda row: lease.put(row, *row_states(row)), rows))
        lease.finish()
    write_all(writer)
    write_store(tmp_path / "calm", 200, shard_bytes=1 << 20)
    assert snapshot(tmp_path / "calm") == snapshot_files(tmp_path)


def snapshot_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def test_close_waits_for_rows_in_flight(tmp_path):
    writer = open_store(tmp_path, 4, shard_bytes=1 << 20)
    lease = writer.lease(first(writer), contents)
    barrier = threading.Barrier(5)

    def put(row: int) -> bool:
        barrier.wait()
        try:
            lease.put(row, *row_states(row))
        except ValueError as error:
            assert "is closed" in str(error)
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        outcomes = [pool.submit(put, row) for row in range(4)]
        barrier.wait()
        lease.close()
        lease.close()
    written = [row for row, outcome in enumerate(outcomes) if outcome.result()]
    with writer.lease(first(writer), contents) as lease:
        assert lease.pending == [row for row in range(4) if row not in written]


def test_the_same_row_from_two_threads_is_written_once(tmp_path):
    writer = open_store(tmp_path)
    with writer.lease(first(writer), contents) as lease:
        barrier, outcomes = threading.Barrier(8), []

        def race() -> None:
            barrier.wait()
            try:
                lease.put(0, *row_states(0))
                outcomes.append("put")
            except ValueError:
                outcomes.append("refused")

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes) == ["put"] + ["refused"] * 7


def test_a_torn_journal_line_is_forgotten_and_does_not_damage_the_next(tmp_path):
    writer = open_store(tmp_path, 6, shard_bytes=1 << 20)
    shard, journal = first(writer), writer.paths(first(writer)).journal
    with writer.lease(shard, contents) as lease:
        fill(lease)
    journal.write_bytes(journal.read_bytes()[:-5])
    with writer.lease(shard, contents) as lease:
        assert lease.pending == [5]
        lease.put(5, *row_states(5))
    assert decode_journal(journal.read_bytes()).damage == ""
    with writer.lease(shard, contents) as lease:
        assert lease.pending == []


def test_rows_after_a_corrupt_line_are_captured_again(tmp_path):
    writer = open_store(tmp_path, 6, shard_bytes=1 << 20)
    shard, journal = first(writer), writer.paths(first(writer)).journal
    with writer.lease(shard, contents) as lease:
        fill(lease)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"aux", b"aax")
    journal.write_bytes(b"".join(lines))
    with writer.lease(shard, contents) as lease:
        assert lease.pending == [2, 3, 4, 5]


def test_a_journal_of_another_plan_is_not_believed(tmp_path):
    writer = open_store(tmp_path / "a", 6, shard_bytes=1 << 20)
    other = open_store(tmp_path / "b", 7, shard_bytes=1 << 20)
    for w in (writer, other):
        with w.lease(first(w), contents) as lease:
            fill(lease)
    other.paths(first(other)).journal.replace(writer.paths(first(writer)).journal)
    with writer.lease(first(writer), contents) as lease:
        assert lease.pending == [0, 1, 2, 3, 4, 5]


def test_a_failed_rows_half_written_bytes_do_not_stay(tmp_path):
    writer = open_store(tmp_path / "a", 6, shard_bytes=1 << 20)
    shard = first(writer)
    with writer.lease(shard, contents) as lease:
        os.pwrite(lease._fd, b"\1" * 50, lease._span("aux", 2)[0])  # a put that was cut off before its journal line
    write_all(writer, failing={2})
    write_store(tmp_path / "b", 6, failing={2}, shard_bytes=1 << 20)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


# --- failed rows, again ---


def test_failed_rows_are_not_pending_on_resume_until_reopened(tmp_path):
    writer = open_store(tmp_path, 6, shard_bytes=1 << 20)
    shard = first(writer)
    with writer.lease(shard, contents) as lease:
        lease.fail(2, "aborted")
        lease.put(0, *row_states(0))
        assert not writer.reopen_failed(shard)  # under lease
    with writer.lease(shard, contents) as lease:
        assert (lease.pending, lease.failed) == ([1, 3, 4, 5], {2: "aborted"})
    assert writer.reopen_failed(shard)
    assert not writer.reopen_failed(shard)
    with writer.lease(shard, contents) as lease:
        assert (lease.pending, lease.failed) == ([1, 2, 3, 4, 5], {})


@pytest.mark.parametrize(
    "text", ["\ud800", "half a pair \udfff here", "a\nb\0\x1b[31m", "\U0001f600" * 2000, "x" * 10_000]
)
def test_whatever_a_reason_says_the_journal_gives_it_back(tmp_path, text):
    """A server's error may hold anything that JSON can say; the rows after it must not be lost for it."""
    writer = open_store(tmp_path)
    shard = first(writer)
    with writer.lease(shard, contents) as lease:
        failed, *others = lease.pending
        lease.fail(failed, "aborted", text)
        for row in others:
            lease.put(row, *row_states(row))
    with open_store(tmp_path).lease(shard, contents) as lease:
        assert (lease.distrusted, lease.pending) == ([], [])
        lease.finish()
    write_manifest(tmp_path)
    assert verify_store(tmp_path).failed == 1


def test_retried_rows_give_the_bytes_of_a_run_without_failures(tmp_path):
    writer = write_store(tmp_path / "a", failing={0, 7, 8, 39})
    retried = [shard.index for shard in writer.plan.shards if writer.reopen_failed(shard)]
    assert retried == [s.index for s in writer.plan.shards if {0, 7, 8, 39} & set(range(s.start, s.stop))]
    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert (lease is not None) == (shard.index in retried)
        if lease is not None:
            assert set(lease.pending) == {0, 7, 8, 39} & set(range(shard.start, shard.stop))
            lease.close()
    write_all(writer)
    write_store(tmp_path / "b")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert not any(writer.reopen_failed(shard) for shard in writer.plan.shards)


def test_failing_again_keeps_the_new_reason(tmp_path):
    writer = write_store(tmp_path, 6, failing={2}, shard_bytes=1 << 20)
    writer.reopen_failed(first(writer))
    with writer.lease(first(writer), contents) as lease:
        lease.fail(2, "chunk-gap")
        lease.finish()
    assert writer.sidecar(first(writer)).failed == {2: "chunk-gap"}
    writer.write_manifest()
    assert verify_store(tmp_path, contents).ok


def test_reopening_while_another_process_holds_the_shard_does_nothing(tmp_path):
    writer = write_store(tmp_path, 6, failing={2}, shard_bytes=1 << 20)
    before = snapshot(tmp_path)
    with writer.paths(first(writer)).final.open("rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert not writer.reopen_failed(first(writer))
    paths = writer.paths(first(writer))
    with paths.part.open("wb") as holder:  # somebody who is about to see that the shard is complete
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert not writer.reopen_failed(first(writer))
    paths.part.unlink()
    assert snapshot(tmp_path) == before


# --- the manifest and the sidecar ---


def test_manifest_counts_complete_shards_only(tmp_path):
    writer = open_store(tmp_path)
    lease = writer.lease(first(writer), contents)
    fill(lease, {1})
    lease.finish()
    writer.write_manifest()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    tokens = sum(len(row_contents(row)[0]) for row in range(first(writer).stop))
    assert (manifest["planned_shards"], manifest["complete_shards"]) == (len(writer.plan.shards), 1)
    assert (manifest["rows"], manifest["failed"], manifest["tokens"]) == (first(writer).rows, 1, tokens)
    assert manifest["shards"][0]["name"] == first(writer).name


def test_a_damaged_sidecar_says_what_to_do_and_can_be_rebuilt(tmp_path):
    writer = write_store(tmp_path, 6)
    paths = writer.paths(first(writer))
    good = paths.sidecar.read_bytes()
    paths.sidecar.write_bytes(good[:40])
    with pytest.raises(IntegrityError, match="remove it and run again"):
        writer.write_manifest()
    paths.sidecar.unlink()
    assert writer.lease(first(writer), contents) is None
    # Its journal is long gone, and with it who wrote the rows.
    assert Sidecar.from_json(paths.sidecar.read_bytes()) == replace(Sidecar.from_json(good), provenance=[])


# --- disks ---

FULL = """
import sys
from store_samples import *
from eyas.errors import StoreError
root = Path(sys.argv[1])
"""


def on_small_disk(size_kib: int, script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script on a file system of `size_kib`, mounted in a namespace of its own."""
    mount = f'mount -t tmpfs -o size={size_kib}k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        mount,
        "sh",
        str(tmp_path),
        sys.executable,
        FULL + script,
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    return done


def test_a_full_disk_at_creation_leaves_nothing_and_a_resume_works(tmp_path):
    done = on_small_disk(
        200,
        """
writer = open_store(root, shard_bytes=64_000)
ballast = root.parent / root.name / "store.json.ballast"
ballast.write_bytes(bytes(140_000))
shard = writer.plan.shards[0]
try:
    writer.lease(shard, contents)
except StoreError as error:
    assert "disk full" in str(error) and "free space" in str(error), error
else:
    raise SystemExit("no error")
assert sorted(p.name for p in root.iterdir()) == ["store.json", "store.json.ballast"], list(root.iterdir())
ballast.unlink()
lease = writer.lease(shard, contents)
fill(lease); lease.finish()
print("resumed")
""",
        tmp_path,
    )
    assert done.stdout == "resumed\n", done.stderr


def test_a_disk_that_fills_between_rows_stops_cleanly_and_resumes(tmp_path):
    done = on_small_disk(
        2_000,
        """
writer = open_store(root, 2_000, shard_bytes=1_000_000)
shard = writer.plan.shards[0]
lease = writer.lease(shard, contents)
ballast = root / "store.json.ballast"
with ballast.open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)) == 4096: pass
    except OSError: pass
done = failed = 0
for row in lease.pending:
    try:
        lease.put(row, *row_states(row)); done += 1
    except StoreError as error:
        assert "disk full" in str(error), error
        failed += 1
        if failed > 3: break
assert done and failed, (done, failed)
pending = lease.pending
lease.close()
ballast.unlink()
writer = open_store(root, 2_000, shard_bytes=1_000_000)
lease = writer.lease(shard, contents)
assert lease.pending == pending, (lease.pending[:5], pending[:5])
fill(lease)
with ballast.open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)) == 4096: pass
    except OSError: pass
try:
    lease.finish()
except StoreError as error:
    assert "disk full" in str(error), error
else:
    raise SystemExit("the sidecar found room")
ballast.unlink()
lease.finish()
print(writer.state(shard), len(writer.sidecar(shard).failed))
""",
        tmp_path,
    )
    assert done.stdout == "complete 0\n", done.stderr


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path):
    script = (
        FULL
        + """
import resource
writer = open_store(root)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
try:
    writer.lease(writer.plan.shards[0], contents)
except StoreError as error:
    print(error.what, sorted(p.name for p in root.iterdir()))
"""
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "disk full ['store.json']\n", done.stderr


def test_a_shard_on_a_volume_that_is_gone_is_not_captured_again(tmp_path):
    writer = write_store(tmp_path / "s", 6)
    paths = writer.paths(first(writer))
    paths.final.unlink()
    paths.final.symlink_to(tmp_path / "unmounted" / paths.final.name)
    assert writer.state(first(writer)) is ShardState.COMPLETE
    assert writer.lease(first(writer), contents) is None
    paths.sidecar.unlink()
    with pytest.raises(StoreError, match="volume that is not there"):
        writer.lease(first(writer), contents)
    paths.final.rename(paths.part)
    with pytest.raises(StoreError, match="volume that is not there"):
        writer.lease(first(writer), contents)


def test_spec_widths(tmp_path):
    for dtype in DTYPES:
        for last in ("loss", "all"):
            spec = CaptureSpec(SPEC.layers, last, dtype, 16, 100, 8, "0" * 32)
            root = tmp_path / f"{dtype}-{last}"
            write_store(root, 12, failing={3}, spec=spec)
            assert verify_store(root, lambda shard, spec=spec: contents(shard, spec)).ok
