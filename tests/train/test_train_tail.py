"""Training while extraction writes: the batches of the complete store, whoever is killed when; and a disk too small."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from train_stores import command, fill, make_corpus

from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.store.check import ProblemKind, verify_store
from eyas.store.consumed import own_store, remove_consumed, share_store, store_bytes, sweep_consumed
from eyas.store.documents import describe_store, read_store_info, write_manifest
from eyas.store.files import ShardPaths
from eyas.store.plan import planned_bytes, position_bytes, token_bytes
from eyas.store.reader import StoreReader
from eyas.train.batch import pack
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling

BUDGET = 120
PACK = functools.partial(pack, steps=3, budget=BUDGET)
SAMPLING = Sampling(BUDGET, seed=5, window_shards=4, open_bins=2)
FOLLOW = Reading(follow=True, poll_s=0.02, threads=2, patience_s=20.0)
SHARDS = "store.shard_bytes=8KB"
ROWS = 90


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet", ROWS)


@pytest.fixture(scope="module")
def complete(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("complete") / "store"
    fill(corpus, root, SHARDS)
    return root


@pytest.fixture(scope="module")
def expected(complete: Path) -> list[tuple[int, ...]]:
    """What following a store gives once it is complete."""
    return followed(complete)


def followed(root: Path, sampling: Sampling = SAMPLING, rank: int = 0) -> list[tuple[int, ...]]:
    with TrainReader(root, sampling, PACK, rank=rank, reading=FOLLOW) as reader, reader.epoch(0) as batches:
        return [batch.samples for batch in batches]


def empty_store(complete: Path, root: Path) -> Path:
    """The store as extraction makes it, before its first row."""
    root.mkdir()
    (root / "store.json").write_bytes((complete / "store.json").read_bytes())
    return root


def bring(complete: Path, root: Path, *numbers: int) -> None:
    """Finish shards: first the file, then what says that it is complete."""
    for number in numbers:
        for name in (f"shard-{number:05d}.safetensors", f"shard-{number:05d}.json"):
            (root / f"{name}.tmp").write_bytes((complete / name).read_bytes())
            (root / f"{name}.tmp").rename(root / name)


def shards_in(root: Path) -> int:
    return len(read_store_info(root).plan.shards)


# --- following ---


def test_a_window_is_used_once_all_of_it_is_there_whatever_came_first(
    complete: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    assert count > 12
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader:
        assert reader.batches(0) is None and not reader.complete
        assert abs(reader.expected_batches() - len(expected)) <= 0.2 * len(expected)
        with reader.epoch(0) as batches:
            bring(complete, root, *range(count - 1, 3, -1), 0, 1, 2)  # all but one of the first window
            got: list[tuple[int, ...]] = []
            taking = threading.Thread(target=lambda: got.extend(batch.samples for batch in batches))
            taking.start()
            time.sleep(0.3)
            assert got == []
            bring(complete, root, 3)
            taking.join(30)
        assert got == expected
        assert reader.batches(0) == len(expected) and reader.complete
    assert sorted(row for rows in expected for row in rows) == list(range(ROWS))


def test_every_batch_that_can_be_had_is_had_before_more_is_waited_for(
    complete: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    root = empty_store(complete, tmp_path / "store")
    bring(complete, root, *range(shards_in(complete) - 5))
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader, reader.epoch(0) as batches:
        got = [next(batches).samples for _ in range(9)]
    assert got == expected[:9] and len(expected) > 12


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_that_look_at_different_times_agree(complete: Path, tmp_path: Path, world: int) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    sampling = replace(SAMPLING, world_size=world)
    got: dict[int, list[tuple[int, ...]]] = {}

    def take(rank: int) -> None:
        got[rank] = followed(root, sampling, rank)

    ranks = [threading.Thread(target=take, args=(rank,)) for rank in range(world)]
    for thread in ranks:
        thread.start()
        time.sleep(0.05)
    for number in random.Random(3).sample(range(count), count):
        bring(complete, root, number)
        time.sleep(0.01)
    for thread in ranks:
        thread.join(30)
    assert got == {rank: followed(complete, sampling, rank) for rank in range(world)}
    assert len({len(batches) for batches in got.values()}) == 1
    assert sorted(row for batches in got.values() for rows in batches for row in rows) == list(range(ROWS))


def test_training_starts_with_an_eighth_of_the_store_at_the_latest(complete: Path, tmp_path: Path) -> None:
    """However large the windows are that a complete store is shuffled in."""
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count // 8))
    wide = Sampling(40, window_shards=50, open_bins=1)
    packed = functools.partial(pack, steps=3, budget=40)
    with TrainReader(root, wide, packed, reading=FOLLOW) as reader, reader.epoch(0) as batches:
        next(batches)
    with TrainReader(complete, wide, packed, reading=FOLLOW) as reader:
        first, second = ([row for batch in reader.epoch(epoch) for row in batch.samples] for epoch in (0, 1))
    assert max(first[:8]) < ROWS // 3 < max(second[:8])


def test_epochs_after_the_first_are_shuffled_as_ever(complete: Path) -> None:
    with TrainReader(complete, SAMPLING, PACK, reading=FOLLOW) as reader:
        first, second = ([batch.samples for batch in reader.epoch(epoch)] for epoch in (0, 1))
    with TrainReader(complete, SAMPLING, PACK) as reader:
        assert second == [batch.samples for batch in reader.epoch(1)] != first
    assert first == followed(complete)


def test_beside_an_extraction_that_is_killed_again_and_again(
    corpus: Path, complete: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """The reader is never told: each row comes once, from complete shards, in the order of a run without any kill."""
    root = empty_store(complete, tmp_path / "store")
    slow = [*command(corpus, root, SHARDS, "fake.delay_s=0.02", "extract.window_requests=2")]
    got: list[tuple[int, ...]] = []
    taking = threading.Thread(target=lambda: got.extend(followed(root)))
    taking.start()
    rng = random.Random(1)
    for _ in range(2):
        writer = subprocess.Popen(slow, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before, more = len(list(root.glob("*.json"))), rng.randint(3, 7)
        while len(list(root.glob("*.json"))) < before + more and writer.poll() is None:
            time.sleep(0.005)
        os.kill(writer.pid, signal.SIGKILL)
        _, said = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, said  # in the midst of it
    assert taking.is_alive()
    fill(corpus, root, SHARDS)
    taking.join(30)
    assert got == expected
    assert verify_store(root).ok


def test_what_is_waited_for_is_said_and_not_for_ever(complete: Path, tmp_path: Path) -> None:
    root = empty_store(complete, tmp_path / "store")
    bring(complete, root, 0, 1, 2, 3)
    said: list[str] = []
    patient = replace(FOLLOW, patience_s=2.5)
    with (
        TrainReader(root, SAMPLING, PACK, reading=patient, say=said.append) as reader,
        reader.epoch(0) as batches,
        pytest.raises(StoreError, match=r"no new row for .*is eyas extract running") as caught,
    ):
        had = [batch.samples for batch in batches]
        pytest.fail(f"ended after {len(had)} batches")
    assert "4 of" in str(caught.value) and str(root) in str(caught.value)
    assert len(said) == 1 and said[0].startswith("waiting for shard-00004 and 3 more: 4 of")


def test_a_row_that_is_journalled_is_progress(complete: Path, tmp_path: Path) -> None:
    """However long a shard takes: only an extraction that stores nothing is given up."""
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    got: list[tuple[int, ...]] = []
    with (
        TrainReader(root, SAMPLING, PACK, reading=replace(FOLLOW, patience_s=1.5)) as reader,
        reader.epoch(0) as batches,
    ):
        taking = threading.Thread(target=lambda: got.extend(batch.samples for batch in batches))
        taking.start()
        for _ in range(20):
            with (root / "shard-00000.journal").open("ab") as journal:
                journal.write(b"one more row\n")
            time.sleep(0.1)
        (root / "shard-00000.journal").unlink()
        bring(complete, root, *range(count))
        taking.join(30)
    assert got == followed(complete)


def test_a_reader_that_is_closed_while_it_waits_ends_at_once(complete: Path, tmp_path: Path) -> None:
    root = empty_store(complete, tmp_path / "store")
    before = set(threading.enumerate())
    with TrainReader(root, SAMPLING, PACK, reading=replace(FOLLOW, poll_s=60.0)) as reader:
        began = time.monotonic()
        with reader.epoch(0):
            pass
        assert time.monotonic() - began < 10
    assert set(threading.enumerate()) == before


def test_a_damaged_shard_ends_the_run(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count))
    (root / "shard-00005.json").write_text("{")
    with pytest.raises(IntegrityError, match="damaged sidecar"):
        TrainReader(root, SAMPLING, PACK, reading=FOLLOW)
    (root / "shard-00005.json").unlink()
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader, reader.epoch(0) as batches:
        (root / "shard-00005.json").write_text("{")
        with pytest.raises(IntegrityError, match="damaged sidecar"):
            list(batches)


def test_a_run_is_resumed_while_the_store_still_grows(
    complete: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(32))
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader, reader.epoch(0) as batches:
        got = [next(batches).samples for _ in range(7)]
        state = json.loads(json.dumps(reader.state(0, batches.number)))
    assert state["batch"] == 7
    bring(complete, root, *range(32, count - 1))
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader:
        reader.check(state)
        with reader.epoch(0, state["batch"]) as batches:
            bring(complete, root, count - 1)
            got += [batch.samples for batch in batches]
    assert got == expected
    with (
        TrainReader(root, replace(SAMPLING, seed=1), PACK, reading=FOLLOW) as reader,
        pytest.raises(StoreError, match="not the rows"),
    ):
        reader.check(state)


def test_the_evaluation_is_of_the_first_window_from_start_to_end(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    sampling = replace(SAMPLING, held_out=0.3)
    bring(complete, root, *range(4))
    with TrainReader(root, sampling, PACK, reading=FOLLOW) as reader:
        early = [batch.samples for batch in reader.evaluation()]
        bring(complete, root, *range(4, count))
        trained = {row for batch in reader.epoch(0) for row in batch.samples}
        late = [batch.samples for batch in reader.evaluation()]
    evaluated = {row for rows in early for row in rows}
    assert early == late and evaluated and trained.isdisjoint(evaluated)
    assert max(evaluated) < reader.info.plan.shards[4].start


# --- a disk too small ---

BUDGET_SAMPLING = Sampling(60, seed=5, window_shards=2, open_bins=1)
SMALL = functools.partial(pack, steps=3, budget=60)


def budget_for(complete: Path, shards: float) -> int:
    """Room for so many shards, and for the batches that are being filled."""
    info = read_store_info(complete)
    largest = max(planned_bytes([shard], info.spec) for shard in info.plan.shards)
    opened = BUDGET_SAMPLING.oldest * BUDGET_SAMPLING.budget * (token_bytes(info.spec) + position_bytes(info.spec))
    return int(opened + shards * largest)


def test_a_budget_too_small_for_any_window_is_refused_before_anything_is_read(complete: Path) -> None:
    with pytest.raises(ConfigError, match="too small: at least"):
        TrainReader(complete, BUDGET_SAMPLING, SMALL, reading=replace(FOLLOW, disk_budget=40_000))
    with (
        TrainReader(complete, BUDGET_SAMPLING, SMALL, reading=replace(FOLLOW, disk_budget=10**9)) as reader,
        pytest.raises(ConfigError, match="one epoch only"),
    ):
        reader.epoch(1)
    wide = replace(BUDGET_SAMPLING, window_shards=50)
    with TrainReader(complete, wide, SMALL, reading=replace(FOLLOW, disk_budget=budget_for(complete, 14))) as reader:
        assert reader._following.window_shards == 3  # four windows, and the shard that is being begun


def test_nothing_is_removed_without_a_budget_nor_before_it_is_released(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count))
    with TrainReader(root, BUDGET_SAMPLING, SMALL, reading=FOLLOW) as reader:
        used = len(list(reader.epoch(0)))
        assert reader.release(used) == 0 and not reader.due(used)
    roomy = replace(FOLLOW, disk_budget=10**9)
    with TrainReader(root, BUDGET_SAMPLING, SMALL, reading=roomy) as reader:
        used = len(list(reader.epoch(0)))
        assert reader.release(used) == 0  # all of it fits
    assert len(list(root.glob("*.safetensors"))) == count and not list(root.glob("*.consumed"))


def test_what_later_batches_and_the_evaluation_read_stays(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count))
    sampling = replace(BUDGET_SAMPLING, held_out=0.5)
    tight = replace(FOLLOW, disk_budget=budget_for(complete, 9.2), eval_rows=2)
    with TrainReader(root, sampling, SMALL, reading=tight) as reader:
        evaluated = [batch.samples for batch in reader.evaluation()]
        order = [batch.samples for batch in reader.epoch(0)]
        starts = [shard.start for shard in reader.info.plan.shards]
        for step in range(0, len(order) + 1, 5):
            reader.release(step)
            there = {int(path.name[6:11]) for path in root.glob("*.safetensors")}
            needed = {row for rows in [*order[step:], *evaluated] for row in rows}
            assert {sum(start <= row for start in starts) - 1 for row in needed} <= there
            assert [batch.samples for batch in reader.epoch(0, step)] == order[step:]
            assert [batch.samples for batch in reader.evaluation()] == evaluated
        pinned = {sum(start <= row for start in starts) - 1 for rows in evaluated for row in rows}
        assert pinned and there.issuperset(pinned) and min(there) == min(pinned)
        assert store_bytes(root) <= reader._reading.disk_budget  # type: ignore[operator]
        gone = len(list(root.glob("*.consumed")))
        assert 0 < gone < count


def test_train_and_extract_beside_each_other_within_the_budget(corpus: Path, complete: Path, tmp_path: Path) -> None:
    """Both wait for the other, neither for ever; killed half way, the run goes on with what is left."""
    root = empty_store(complete, tmp_path / "store")
    budget = budget_for(complete, 9.2)
    assert budget < 0.7 * store_bytes(complete)
    reading = replace(FOLLOW, disk_budget=budget, patience_s=60)
    writer = subprocess.Popen(
        command(corpus, root, SHARDS, f"extract.disk_budget={budget}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    got: list[tuple[int, ...]] = []
    state, most = {"epoch": 0, "batch": 0, "fingerprint": ""}, 0

    def train(until: int | None) -> None:
        nonlocal most, state
        with TrainReader(root, BUDGET_SAMPLING, SMALL, reading=reading) as reader:
            if state["fingerprint"]:
                reader.check(state)
            with reader.epoch(0, int(state["batch"])) as batches:
                del got[int(state["batch"]) :]  # what was trained since the checkpoint is trained again
                for batch in batches:
                    got.append(batch.samples)
                    most = max(most, store_bytes(root))
                    if reader.due(batches.number):
                        state = json.loads(json.dumps(reader.state(0, batches.number)))
                        reader.release(batches.number)
                    if until is not None and len(got) >= until and int(state["batch"]) > 0:
                        return

    train(until=14)
    assert int(state["batch"]) > 0 and writer.poll() is None  # it waits for room
    train(until=None)
    _, said = writer.communicate(timeout=60)
    assert writer.returncode == 0, said
    assert most <= budget + 4096  # a block of the file system
    with TrainReader(complete, BUDGET_SAMPLING, SMALL, reading=FOLLOW) as reader:
        assert got == [batch.samples for batch in reader.epoch(0)]
    consumed = sorted(path.name for path in root.glob("*.consumed"))
    assert consumed and len(consumed) + len(list(root.glob("*.safetensors"))) == shards_in(complete)
    # What extraction and verification say of it, and how to have the rows back.
    again = fill(corpus, root, SHARDS)
    assert again.complete and again.rows_now == 0 and again.rows_done == ROWS
    assert dict(again.lines())["consumed"].startswith(f"{len(consumed)} shards were trained on and removed")
    found = verify_store(root)
    assert [problem.kind for problem in found.problems] == [ProblemKind.CONSUMED] * len(consumed)
    assert f"remove {consumed[0]} and run eyas extract" in str(found.problems[0])
    assert f"{len(consumed)} trained on and removed" in dict(describe_store(root))["shards"]
    with pytest.raises(StoreError, match="were trained on and removed"):
        TrainReader(root, BUDGET_SAMPLING, SMALL)
    for name in consumed:
        (root / name).unlink()
    assert fill(corpus, root, SHARDS).rows_now > 0
    assert verify_store(root).ok
    names = {path.name for path in root.glob("shard-*")}
    assert all((root / name).read_bytes() == (complete / name).read_bytes() for name in names)


def test_other_readers_keep_a_store_from_being_consumed(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count))
    consuming = replace(FOLLOW, disk_budget=10**9)
    with (
        TrainReader(root, BUDGET_SAMPLING, SMALL),
        TrainReader(root, BUDGET_SAMPLING, SMALL, reading=FOLLOW),
        pytest.raises(StoreError, match="another training run is reading"),
    ):
        TrainReader(root, BUDGET_SAMPLING, SMALL, reading=consuming)
    two = replace(BUDGET_SAMPLING, world_size=2)
    with TrainReader(root, two, SMALL, reading=consuming), TrainReader(root, two, SMALL, rank=1, reading=consuming):
        with pytest.raises(StoreError, match="removes shards is reading this store"):
            TrainReader(root, BUDGET_SAMPLING, SMALL)
        with pytest.raises(StoreError, match="another training run is reading"):
            TrainReader(root, BUDGET_SAMPLING, SMALL, reading=consuming)
    TrainReader(root, BUDGET_SAMPLING, SMALL).close()


#: Removes the first shard in a child for each of its file operations, and ends the child in the midst of that one.
KILLED_REMOVALS = """
import os, shutil, sys
from pathlib import Path
from eyas.store.consumed import remove_consumed
from eyas.store.documents import read_store_info
from eyas.train.supply import Supply

STEPS = {"open", "os.rename", "os.remove", "fcntl.flock"}

def remove(root, left):
    supply = Supply(root, read_store_info(root))
    supply.look()
    def step(event, args):
        nonlocal left
        if event in STEPS:
            if not left:
                os._exit(9)
            left -= 1
    sys.addaudithook(step)
    remove_consumed(root, supply.info, (supply.info.plan.shards[0], supply.sidecars[0], supply.tables[0]))

source, step, status = Path(sys.argv[1]), 0, 9
while status:
    root = source.with_name(f"step-{step}")
    shutil.copytree(source, root)
    if not (child := os.fork()):
        remove(root, step)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    step += 1
"""


def test_a_removal_that_is_killed_at_any_step_is_finished_later(complete: Path, tmp_path: Path) -> None:
    source = empty_store(complete, tmp_path / "store")
    bring(complete, source, 0, 1)
    write_manifest(source)
    subprocess.run([sys.executable, "-c", KILLED_REMOVALS, str(source)], check=True)
    info = read_store_info(source)
    shard, seen = info.plan.shards[0], set()
    for root in sorted(tmp_path.glob("step-*")):
        paths = ShardPaths(root, shard.stem)
        there = paths.consumed.exists(), paths.sidecar.exists(), paths.final.exists()
        seen.add(there)
        if not there[0]:
            assert there == (False, True, True) and _problems(root) <= {ProblemKind.STRAY}  # a name not given yet
            continue
        os.close(own_store(root))
        sweep_consumed(root, info)
        assert not paths.final.exists() and not paths.sidecar.exists()
        assert _problems(root) == {ProblemKind.CONSUMED}
        assert len(StoreReader(root)) == info.plan.shards[1].rows
    # Killed before it began, between every two of its steps, and not at all.
    assert seen == {(False, True, True), (True, True, True), (True, False, True), (True, False, False)}


def _problems(root: Path) -> set[ProblemKind]:
    """Of the shards that were there."""
    return {problem.kind for problem in verify_store(root).problems} - {ProblemKind.MISSING}


def test_a_shard_on_another_volume_is_never_removed(complete: Path, tmp_path: Path) -> None:
    root = empty_store(complete, tmp_path / "store")
    bring(complete, root, 0, 1)
    elsewhere = tmp_path / "elsewhere.safetensors"
    paths = ShardPaths(root, "shard-00000")
    paths.final.rename(elsewhere)
    paths.final.symlink_to(elsewhere)
    before = store_bytes(root)
    assert before == (root / "shard-00001.safetensors").stat().st_blocks * 512
    assert remove_first(root) == 0 and elsewhere.exists() and not paths.consumed.exists()


def remove_first(root: Path) -> int:
    with TrainReader(root, SAMPLING, PACK, reading=FOLLOW) as reader:
        supply = reader._supply
        return remove_consumed(root, reader.info, (reader.info.plan.shards[0], supply.sidecars[0], supply.tables[0]))


@pytest.mark.parametrize("change", ["{", "{}", "other", "rows", "hash"])
def test_a_consumed_shards_file_is_believed_only_if_it_is_ours(complete: Path, tmp_path: Path, change: str) -> None:
    root = empty_store(complete, tmp_path / "store")
    bring(complete, root, 0, 1)
    assert remove_first(root) > 0
    path = root / "shard-00000.consumed"
    data = json.loads(path.read_text())
    match change:
        case "other":
            data["plan"] = "0" * 32
        case "rows":
            del data["rows"][0]
        case "hash":
            data["rows"][0][2] = "xyz"
    path.write_text(change if change in ("{", "{}") else json.dumps(data))
    with pytest.raises(IntegrityError, match="damaged file of a consumed shard"):
        TrainReader(root, SAMPLING, PACK, reading=replace(FOLLOW, disk_budget=10**9))


def test_the_stores_size_is_told_while_shards_get_their_names(tmp_path: Path) -> None:
    names = [tmp_path / f"shard-{number:05d}.safetensors" for number in range(20)]
    for path in names:
        path.write_bytes(bytes(4096))
    told: list[int] = []
    ended = threading.Event()

    def rename() -> None:
        while not ended.is_set():
            for path in names:
                path.rename(f"{path}.part")
                Path(f"{path}.part").rename(path)

    renaming = threading.Thread(target=rename)
    renaming.start()
    try:
        told = [store_bytes(tmp_path) for _ in range(300)]
    finally:
        ended.set()
        renaming.join()
    assert min(told) > 0 and store_bytes(tmp_path) == 20 * 4096
    with pytest.raises(StoreError):
        store_bytes(tmp_path / "nowhere")


def test_an_extraction_that_goes_on_leaves_consumed_shards_alone(corpus: Path, complete: Path, tmp_path: Path) -> None:
    """Also where it retries rows that failed."""
    root, info = empty_store(complete, tmp_path / "store"), read_store_info(complete)
    bring(complete, root, 0, 1)
    assert remove_first(root) > 0
    summary = fill(corpus, root, SHARDS, retry_failed=True)
    assert summary.complete and summary.rows_now == ROWS - info.plan.shards[2].start
    assert not list(root.glob("shard-00000.safetensors*")) and not (root / "shard-00000.journal").exists()
    assert _problems(root) == {ProblemKind.CONSUMED}


def test_a_consumed_shard_whose_file_is_still_there_is_not_reopened(corpus: Path, tmp_path: Path) -> None:
    """The removal was killed after it said so; its failed rows are not tried again, and the next run removes it."""
    root = tmp_path / "store"
    fill(corpus, root, SHARDS, "fake.failing_rows=1")
    before = (root / "shard-00000.json").read_bytes(), (root / "shard-00000.safetensors").read_bytes()
    assert remove_first(root) > 0
    for name, data in zip(("shard-00000.json", "shard-00000.safetensors"), before, strict=True):
        (root / name).write_bytes(data)
    assert fill(corpus, root, SHARDS, retry_failed=True).rows_now == 0
    assert (root / "shard-00000.safetensors").read_bytes() == before[1]
    TrainReader(root, SAMPLING, PACK, reading=replace(FOLLOW, disk_budget=10**9)).close()
    assert not (root / "shard-00000.safetensors").exists() and verify_store(root).failed == 0


def test_locks_are_let_go_with_their_process(complete: Path) -> None:
    fds: Sequence[int | None] = (share_store(complete), share_store(complete))
    for fd in fds:
        assert fd is not None
        os.close(fd)
    os.close(own_store(complete))


def test_extraction_refuses_a_budget_that_no_shard_fits(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"larger than extract\.disk_budget"):
        fill(corpus, tmp_path / "store", SHARDS, "extract.disk_budget=1000")


def test_removed_rows_are_never_read_as_anything_else(complete: Path, tmp_path: Path) -> None:
    root, count = empty_store(complete, tmp_path / "store"), shards_in(complete)
    bring(complete, root, *range(count))
    remove_first(root)
    with (
        TrainReader(root, SAMPLING, PACK, reading=replace(FOLLOW, disk_budget=10**9)) as reader,
        pytest.raises(StoreError, match=r"row \d+ was trained on and removed"),
    ):
        list(reader.epoch(0))
