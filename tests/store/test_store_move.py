from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_samples import contents, fill, open_store, snapshot, write_all, write_store
from test_store_reader import assert_row
from test_store_writer import on_small_disk

from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.store.check import verify_store
from eyas.store.move import Move, MoveState, move_shards
from eyas.store.reader import StoreReader
from eyas.store.writer import ShardState, StoreWriter

ROWS, FAILED = 12, {2}


@pytest.fixture
def store(tmp_path: Path) -> StoreWriter:
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
    return write_store(tmp_path / "a", ROWS, FAILED)


def folders(store: StoreWriter) -> tuple[Path, Path, Path]:
    return store.root, store.root.with_name("b"), store.root.with_name("c")


def names(store: StoreWriter) -> list[str]:
    return [shard.name for shard in store.plan.shards]


def test_there_on_and_back_again(store):
    a, b, c = folders(store)
    before = snapshot(a)
    reader, rows = StoreReader(a), list(StoreReader(a))
    for target, homes in ((b, [b]), (c, [c]), (a, [])):
        moves = move_shards(a, None, target)
        assert [(m.name, m.state) for m in moves] == [(name, MoveState.MOVED) for name in names(store)]
        assert all(m.bytes == (target / m.name).stat().st_size for m in moves)
        assert snapshot(a) == before  # through the links
        assert {f for f in (b, c) if any(f.iterdir())} == set(homes)
        assert all((a / name).is_symlink() == (target != a) for name in names(store))
        assert verify_store(a, contents).ok
        assert move_shards(a, None, target) == [Move(name, MoveState.THERE) for name in names(store)]
        for row in [*reader, *rows, *StoreReader(a)]:
            assert_row(row)


def test_only_the_named_ones(store):
    a, b, _ = folders(store)
    move_shards(a, names(store)[1:2], b)
    assert [path.name for path in b.iterdir()] == names(store)[1:2]
    assert verify_store(a, contents).ok


def test_open_and_busy_shards_are_left_alone(tmp_path):
    writer = open_store(tmp_path / "a", ROWS)
    (tmp_path / "b").mkdir()
    first, second, third, *_ = writer.plan.shards
    for shard in (first, second):
        lease = writer.lease(shard, contents)
        fill(lease)
        lease.finish()
    lease = writer.lease(third, contents)
    with writer.paths(second).final.open("rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        states = [move.state for move in move_shards(writer.root, None, tmp_path / "b")]
    assert states[:3] == [MoveState.MOVED, MoveState.BUSY, MoveState.UNFINISHED]
    assert set(states[3:]) == {MoveState.UNFINISHED}
    # The run goes on, into a store of which a part has moved.
    fill(lease)
    lease.finish()
    write_all(writer)
    assert snapshot(writer.root) == snapshot(write_store(tmp_path / "whole", ROWS).root)


def test_moving_while_three_processes_write(tmp_path):
    (tmp_path / "b").mkdir()
    script = Path(__file__).with_name("store_samples.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "a"), "300", "5"]
    workers = [subprocess.Popen(command, env=environment) for _ in range(3)]
    try:
        moved = 0
        while any(worker.poll() is None for worker in workers):
            if (tmp_path / "a" / "store.json").exists():
                moved += sum(m.state is MoveState.MOVED for m in move_shards(tmp_path / "a", None, tmp_path / "b"))
    finally:
        codes = [worker.wait(timeout=60) for worker in workers]
    assert codes == [0, 0, 0]
    assert moved > 0
    writer = open_store(tmp_path / "a", 300)
    writer.write_manifest()
    assert snapshot(tmp_path / "a") == snapshot(write_store(tmp_path / "whole", 300, {5}).root)


def test_a_moved_shard_is_retried_where_it_lies(store, tmp_path):
    a, b, _ = folders(store)
    move_shards(a, None, b)
    shard = next(s for s in store.plan.shards if s.start <= 2 < s.stop)
    reader = StoreReader(a)
    assert store.reopen_failed(shard)
    assert store.state(shard) is ShardState.OPEN
    assert store.paths(shard).part.is_symlink()
    assert move_shards(a, [shard.name], a) == [Move(shard.name, MoveState.UNFINISHED)]
    assert open_store(a, ROWS).state(shard) is ShardState.OPEN
    write_all(store)
    assert store.paths(shard).final.resolve() == b / shard.name
    assert snapshot(a) == snapshot(write_store(tmp_path / "whole", ROWS).root)
    for row in [*reader, *StoreReader(a)]:
        assert_row(row)
    move_shards(a, None, a)
    assert not list(b.iterdir())
    assert snapshot(a) == snapshot(tmp_path / "whole")


def test_a_killed_retry_of_a_moved_shard_resumes(store, tmp_path):
    a, b, _ = folders(store)
    move_shards(a, None, b)
    shard = next(s for s in store.plan.shards if s.start <= 2 < s.stop)
    paths = store.paths(shard)
    store.reopen_failed(shard)
    with store.lease(shard, contents) as lease:
        fill(lease)
        lease._write_index()
    paths.part.rename(paths.final)  # as finish does, killed before the sidecar
    write_all(open_store(a, ROWS))
    assert snapshot(a) == snapshot(write_store(tmp_path / "whole", ROWS).root)


def test_damage_is_not_carried_over(store):
    a, b, _ = folders(store)
    shard = store.plan.shards[0]
    data = bytearray((a / shard.name).read_bytes())
    data[store.info.layout(shard).tensors["aux"].start] ^= 1
    (a / shard.name).write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        move_shards(a, [shard.name], b)
    (a / shard.name).write_bytes(data[:-1])
    with pytest.raises(IntegrityError, match="shorter"):
        move_shards(a, [shard.name], b)
    assert not (a / shard.name).is_symlink()
    assert not list(b.iterdir())


def test_a_file_of_another_store_is_not_replaced(store, tmp_path):
    a, b, _ = folders(store)
    other = write_store(tmp_path / "other", ROWS + 1)
    move_shards(other.root, None, b)
    before = snapshot(b)
    with pytest.raises(StoreError, match="another file of this name") as caught:
        move_shards(a, None, b)
    assert "a folder of its own" in caught.value.hint
    assert snapshot(b) == before
    assert verify_store(a, contents).ok


def test_wrong_arguments(store, tmp_path):
    with pytest.raises(ConfigError, match="not a shard of this store: shard-99999"):
        move_shards(store.root, ["shard-99999.safetensors"], tmp_path / "b")
    with pytest.raises(ConfigError, match="no such folder"):
        move_shards(store.root, None, tmp_path / "nowhere")
    with pytest.raises(StoreError, match="no store here"):
        move_shards(tmp_path / "b", None, tmp_path / "c")


def test_a_damaged_note_of_an_interrupted_move(store):
    a, b, _ = folders(store)
    (a / "shard-00000.move").write_text("{")
    with pytest.raises(IntegrityError, match="damaged note"):
        move_shards(a, None, b)


def test_a_full_destination_leaves_the_original(store):
    a, b, _ = folders(store)
    before = snapshot(a)
    done = on_small_disk(
        16,
        f"""
from eyas.store.move import move_shards
try:
    for name in [None, None]: print(len(move_shards({str(a)!r}, name, root)))
except StoreError as error:
    print(error.what, sorted(p.suffix for p in root.iterdir() if p.suffix == ".tmp"))
""",
        b,
    )
    assert done.stdout == "disk full []\n", done.stderr
    # What had been moved by then is gone with that file system: the rest is as it was.
    kept = {name: data for name, data in before.items() if not (a / name).is_symlink()}
    assert {name: (a / name).read_bytes() for name in kept} == kept
    assert len([name for name in kept if name.endswith(".safetensors")]) > 1
