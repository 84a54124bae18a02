"""The reader: the right rows with the right states, in an order that threads do not change, and errors that arrive."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_stores import fill, make_corpus

from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.store.files import ShardPaths
from eyas.store.reader import StoreReader
from eyas.store.rowfile import Scratch
from eyas.store.shardfile import read_index
from eyas.train.batch import Batch, Sample, pack
from eyas.train.prefetch import Prefetcher
from eyas.train.reader import Reading, TrainReader
from eyas.train.sampler import Sampling

BUDGET = 120
PACK = functools.partial(pack, steps=3, budget=BUDGET)
SAMPLING = Sampling(BUDGET, seed=5, window_shards=8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def store(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store") / "store"
    fill(corpus, root, "fake.failing_rows=3,40,41")
    return root


def rows_of(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    return [batch.samples for batch in batches]


def read(
    store: Path, sampling: Sampling = SAMPLING, epoch: int = 0, start: int = 0, rank: int = 0, **how: object
) -> list[Batch]:
    reading = Reading(**how)  # type: ignore[arg-type]
    with (
        TrainReader(store, sampling, PACK, rank=rank, reading=reading) as reader,
        reader.epoch(epoch, start) as batches,
    ):
        return list(batches)


# --- what comes ---


@pytest.mark.parametrize("dtype", ["bf16", "f32", "fp8_e4m3"])
@pytest.mark.parametrize("last", ["loss", "all"])
def test_samples_are_the_stores_rows(corpus: Path, tmp_path: Path, dtype: str, last: str) -> None:
    """Every tensor of every row, beside the store's own reader (fp8 is given back as bfloat16 by both)."""
    root = tmp_path / "store"
    fill(corpus, root, f"capture.dtype={dtype}", f"capture.last={last}", "store.shard_bytes=20KB")
    expected = {row.row: row for row in StoreReader(root)}
    seen: dict[int, Sample] = {}

    def keep(samples: Sequence[Sample]) -> Batch:
        for sample in samples:
            seen[sample.row] = Sample(sample.row, *(tensor.clone() for tensor in sample[1:]))
        return pack(samples, steps=3, budget=BUDGET)

    with TrainReader(root, SAMPLING, keep) as reader, reader.epoch(0) as batches:
        packed = list(batches)
    assert seen.keys() == expected.keys()
    for row, sample in seen.items():
        stored = expected[row]
        assert sample.tokens.dtype is torch.int64 and sample.tokens.equal(stored.tokens.long())
        assert sample.loss_mask.dtype is torch.bool and sample.loss_mask.equal(stored.loss_mask.bool())
        assert sample.aux.dtype is stored.aux.dtype and sample.aux.equal(stored.aux.flatten(1))
        assert sample.last.equal(stored.last) and sample.last_index.equal(stored.last_index.long())
    for batch in packed:  # the scratch that they were read into was used again since
        whole = torch.cat([seen[row].aux for row in batch.samples])
        assert batch.aux[: len(whole)].equal(whole)


def test_states_are_given_in_the_dtype_asked_for(store: Path) -> None:
    assert {batch.aux.dtype for batch in read(store, floats=torch.float64)} == {torch.float64}


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
@pytest.mark.parametrize("prefetch", [1, 5])
def test_the_order_does_not_depend_on_the_threads(store: Path, threads: int, prefetch: int) -> None:
    expected = read(store, threads=0)
    found = read(store, threads=threads, prefetch=prefetch)
    assert rows_of(found) == rows_of(expected) and len(found) > 8
    assert all(a.aux.equal(b.aux) and a.last.equal(b.last) for a, b in zip(found, expected, strict=True))


def test_slow_batches_do_not_change_the_order(store: Path) -> None:
    turn = threading.Lock()
    count = [0]

    def slow(samples: Sequence[Sample]) -> Batch:
        with turn:
            count[0] += 1
            late = count[0] % 3 == 1
        time.sleep(0.02 if late else 0)
        return PACK(samples)

    with (
        TrainReader(store, SAMPLING, slow, reading=Reading(threads=4, prefetch=8)) as reader,
        reader.epoch(0) as batches,
    ):
        assert rows_of(list(batches)) == rows_of(read(store))


def test_an_epoch_holds_every_good_row_once(corpus: Path, store: Path) -> None:
    for epoch in (0, 1):
        rows = [row for batch in read(store, epoch=epoch) for row in batch.samples]
        assert sorted(rows) == sorted(set(range(len(Corpus.open(corpus)))) - {3, 40, 41})
    assert rows_of(read(store)) != rows_of(read(store, epoch=1))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_an_epoch_in_equal_steps(store: Path, world: int) -> None:
    sampling = replace(SAMPLING, world_size=world, accumulation=2)
    ranks = [read(store, sampling, rank=rank) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1 and len(ranks[0]) % 2 == 0
    rows = [row for batches in ranks for batch in batches for row in batch.samples]
    assert len(rows) == len(set(rows)) == 87
    with TrainReader(store, sampling, PACK) as reader:
        assert reader.batches(0) == reader.expected_batches() == len(ranks[0])


def test_a_run_goes_on_at_any_batch_without_reading_those_before(store: Path, tmp_path: Path) -> None:
    whole = read(store)
    for start in (0, 1, len(whole) - 1, len(whole)):
        assert rows_of(read(store, start=start)) == rows_of(whole)[start:]
    with TrainReader(store, SAMPLING, PACK, reading=Reading(threads=1, prefetch=1)) as reader:
        with reader.epoch(0, len(whole) - 1) as batches:
            last = next(batches)
            assert batches.stats.rows == len(last.samples) and batches.number == len(whole)
        with pytest.raises(StoreError, match="no batch"):
            reader.epoch(0, len(whole) + 1)


def test_long_rows_are_cut_to_their_beginning_or_skipped(store: Path) -> None:
    expected = {row.row: row for row in StoreReader(store)}
    sampling = replace(SAMPLING, longest=20)
    for batch in read(store, sampling):
        for number, row in enumerate(batch.samples):
            here = batch.document == number
            kept = min(20, len(expected[row].tokens))
            assert batch.tokens[here].equal(expected[row].tokens[:kept].long())
            assert batch.aux[here].equal(expected[row].aux[:kept].flatten(1))
    long = {row for row, stored in expected.items() if len(stored.tokens) > 20}
    cut: dict[int, Sample] = {}

    def keep(samples: Sequence[Sample]) -> Batch:
        cut.update({s.row: s._replace(last=s.last.clone()) for s in samples})
        return PACK(samples)

    with TrainReader(store, sampling, keep) as reader:
        list(reader.epoch(0))
        for row, stored in expected.items():
            kept = stored.last_index < 20
            assert cut[row].last_index.equal(stored.last_index[kept].long())
            assert cut[row].last.equal(stored.last[kept])
        assert reader.counts(0).cut == len(long) and reader.counts(0).rows == len(expected)
    with TrainReader(store, replace(sampling, long="skip"), PACK) as reader, reader.epoch(0) as batches:
        assert {row for batch in batches for row in batch.samples} == set(expected) - long
        assert reader.counts(0).skipped == len(long)


def test_rows_held_out_are_evaluated_always_the_same_and_never_trained(store: Path) -> None:
    sampling = replace(SAMPLING, held_out=0.3)
    with TrainReader(store, sampling, PACK, reading=Reading(eval_rows=7)) as reader:
        evaluations = [rows_of(list(reader.evaluation())) for _ in range(2)]
        trained = {row for epoch in (0, 1) for batch in reader.epoch(epoch) for row in batch.samples}
        held_out = reader.counts(0).held_out
    evaluated = [row for batch in evaluations[0] for row in batch]
    assert evaluations[0] == evaluations[1] and len(evaluated) == len(set(evaluated)) == 7
    assert trained.isdisjoint(evaluated) and len(trained) == 87 - held_out and held_out > 7
    other = replace(sampling, seed=9, window_shards=2)  # a run with another order has the same evaluation
    with TrainReader(store, other, PACK, reading=Reading(eval_rows=7)) as reader:
        assert {row for batch in reader.evaluation() for row in batch.samples} == set(evaluated)


def test_batches_are_pinned_where_there_is_a_gpu(store: Path) -> None:
    if not torch.cuda.is_available():
        assert not read(store)[0].aux.is_pinned()
    else:
        assert read(store)[0].aux.is_pinned()


# --- where a run is ---


def test_a_state_is_accepted_by_the_same_run_only(store: Path, corpus: Path, tmp_path: Path) -> None:
    with TrainReader(store, SAMPLING, PACK) as reader:
        state = reader.state(1, 4)
        reader.check(state)
    for other in (replace(SAMPLING, seed=6), replace(SAMPLING, budget=BUDGET + 1), replace(SAMPLING, held_out=0.1)):
        with TrainReader(store, other, PACK) as reader, pytest.raises(StoreError, match="not the rows"):
            reader.check(state)
    fill(corpus, tmp_path / "whole")  # rows 3, 40 and 41 did not fail here
    with TrainReader(tmp_path / "whole", SAMPLING, PACK) as reader, pytest.raises(StoreError, match="not the rows"):
        reader.check(state)
    with TrainReader(store, replace(SAMPLING, world_size=2), PACK) as reader:
        reader.check(reader.state(1, 2))  # as many batches into the same order
        assert reader.state(1, 2)["fingerprint"] == state["fingerprint"]


# --- what goes wrong ---


def damaged(store: Path, tmp_path: Path, field: str, row: int) -> Path:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    shard = next(s for s in StoreReader(root).info.plan.shards if s.start <= row < s.stop)
    path = ShardPaths(root, shard.stem).final
    with path.open("r+b") as file:
        start, stop = read_index(file.fileno(), path).span(field, row - shard.start)
        file.seek((start + stop) // 2)
        byte = file.read(1)
        file.seek((start + stop) // 2)
        file.write(bytes([byte[0] ^ 1]))
    return root


@pytest.mark.parametrize("field", ["aux", "last"])
@pytest.mark.parametrize("threads", [0, 3])
def test_one_flipped_bit_ends_the_run_at_its_batch(store: Path, tmp_path: Path, field: str, threads: int) -> None:
    root = damaged(store, tmp_path, field, 50)
    whole = rows_of(read(store))
    at = next(number for number, rows in enumerate(whole) if 50 in rows)
    with TrainReader(root, SAMPLING, PACK, reading=Reading(threads=threads)) as reader, reader.epoch(0) as batches:
        assert rows_of([next(batches) for _ in range(at)]) == whole[:at]
        with pytest.raises(IntegrityError, match=f"row 50's {field} is not what was written"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert len(read(root, verify=False)) == len(whole)


def test_a_shard_that_vanishes_ends_the_run_by_name(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    with TrainReader(root, SAMPLING, PACK) as reader:
        for path in root.glob("shard-0000*.safetensors"):
            path.unlink()
        with pytest.raises(StoreError, match="cannot open shard"), reader.epoch(0) as batches:
            list(batches)


def test_a_shard_that_ends_early_is_an_error_and_no_signal(store: Path, tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    root = tmp_path / "store"
    shutil.copytree(store, root)
    with TrainReader(root, SAMPLING, PACK) as reader, reader.epoch(0) as batches:
        first = next(batches)
        for path in root.glob("*.safetensors"):
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 3)
        with pytest.raises((IntegrityError, StoreError)):
            list(batches)
    assert first.samples


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_what_a_thread_raises_reaches_the_consumer_in_turn(store: Path, threads: int) -> None:
    whole = rows_of(read(store))

    def fails(samples: Sequence[Sample]) -> Batch:
        if samples[0].row == whole[5][0]:
            raise ZeroDivisionError("made to fail")
        return PACK(samples)

    before = set(threading.enumerate())
    with TrainReader(store, SAMPLING, fails, reading=Reading(threads=threads)) as reader:
        batches = reader.epoch(0)
        assert rows_of([next(batches) for _ in range(5)]) == whole[:5]
        with pytest.raises(ZeroDivisionError, match="made to fail"):
            next(batches)
        assert set(threading.enumerate()) == before  # it is closed, without being asked


def test_an_epoch_that_is_left_early_leaves_no_thread(store: Path) -> None:
    before = set(threading.enumerate())
    with TrainReader(store, SAMPLING, PACK, reading=Reading(threads=5, prefetch=6)) as reader:
        with reader.epoch(0) as batches:
            next(batches)
            assert len(set(threading.enumerate()) - before) == 5
        assert set(threading.enumerate()) == before
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)


def test_no_more_is_read_ahead_than_was_asked_for(store: Path) -> None:
    alive, most, lock = [0], [0], threading.Lock()

    def counting(samples: Sequence[Sample]) -> Batch:
        with lock:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
        return PACK(samples)

    with (
        TrainReader(store, SAMPLING, counting, reading=Reading(threads=4, prefetch=3)) as reader,
        reader.epoch(0) as batches,
    ):
        for _ in batches:
            time.sleep(0.005)  # readers that could run ahead would
            with lock:
                alive[0] -= 1
    assert 1 <= most[0] <= 4  # three ahead, and the one that was given


def test_waiting_is_counted(store: Path) -> None:
    def slow(samples: Sequence[Sample]) -> Batch:
        time.sleep(0.03)
        return PACK(samples)

    with (
        TrainReader(store, SAMPLING, slow, reading=Reading(threads=1, prefetch=1)) as reader,
        reader.epoch(0) as batches,
    ):
        count = len(list(batches))
        starved = batches.stats
    assert starved.batches == count and starved.wait_s > 0.02 * count and starved.wait_share > 0.5
    with (
        TrainReader(store, SAMPLING, PACK, reading=Reading(threads=2, prefetch=8)) as reader,
        reader.epoch(0) as batches,
    ):
        next(batches)
        time.sleep(0.5)
        next(batches)
        fed = batches.stats
    assert fed.wait_share < starved.wait_share and fed.wall_s > 0.5
    assert fed.batches == 2


def test_shards_that_are_not_complete_are_left_out_and_this_is_said(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    kept = [shard for shard in StoreReader(root).info.plan.shards if shard.index % 2]
    for path in root.glob("shard-*.json"):
        if int(path.stem[6:]) % 2 == 0:
            path.unlink()
    said: list[str] = []
    with TrainReader(root, SAMPLING, PACK, say=said.append) as reader, reader.epoch(0) as batches:
        rows = {row for batch in batches for row in batch.samples}
    assert rows == {row for shard in kept for row in range(shard.start, shard.stop)} - {3, 40, 41}
    assert len(said) == 1 and said[0].startswith(f"{len(kept)} of ")


def test_settings_that_cannot_work_are_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store here"):
        TrainReader(tmp_path, SAMPLING, PACK)
    with pytest.raises(ValueError, match="rank 1 is not within"):
        TrainReader(store, SAMPLING, PACK, rank=1)
    with (
        TrainReader(store, replace(SAMPLING, world_size=200), PACK) as reader,
        pytest.raises(ConfigError, match="87 rows are too few for 200 batches"),
    ):
        reader.batches(0)
    with pytest.raises(ConfigError, match="for a store that is followed"):
        TrainReader(store, SAMPLING, PACK, reading=Reading(disk_budget=10**6))


# --- parts ---


def test_what_is_read_to_its_place_is_packed_without_a_copy(store: Path) -> None:
    """And what is not, or only seems so, is copied to the same batch."""
    rows = [row for row in StoreReader(store) if len(row.tokens) > 4][:3]
    lengths = [len(row.tokens) for row in rows]
    placed = torch.full((BUDGET, 3 * 8), torch.nan, dtype=rows[0].aux.dtype)
    elsewhere = torch.empty(sum(lengths), 3 * 8, dtype=placed.dtype)  # too short to be a batch of the budget
    kinds: dict[str, list[torch.Tensor]] = {"apart": [row.aux.flatten(1).clone() for row in rows]}
    for name, into in (("placed", placed), ("short", elsewhere)):
        kinds[name] = list(into[: sum(lengths)].split(lengths))
        for part, row in zip(kinds[name], rows, strict=True):
            part.copy_(row.aux.flatten(1))
    kinds["swapped"] = [kinds["placed"][0], kinds["placed"][2], kinds["placed"][1]]
    order = {name: [0, 2, 1] if name == "swapped" else [0, 1, 2] for name in kinds}

    def packed(name: str) -> Batch:
        samples = [
            Sample(r.row, r.tokens.long(), r.loss_mask.bool(), aux, r.last, r.last_index.long())
            for r, aux in zip((rows[at] for at in order[name]), kinds[name], strict=True)
        ]
        return PACK(samples)

    swapped = packed("swapped")  # before `placed` is taken over
    batches = {name: packed(name) for name in ("apart", "short", "placed")}
    assert batches["placed"].aux.data_ptr() == placed.data_ptr()
    assert all(batches[name].aux.data_ptr() != kinds[name][0].data_ptr() for name in ("apart", "short"))
    for batch in batches.values():
        assert batch.aux.shape == (BUDGET, 24) and batch.aux.equal(batches["apart"].aux)
        assert batch.last.equal(batches["apart"].last)
    in_order = torch.cat([rows[at].aux.flatten(1) for at in order["swapped"]])
    assert swapped.aux[: sum(lengths)].equal(in_order) and not swapped.aux[sum(lengths) :].any()


def test_a_readers_batches_are_the_memory_that_was_read_into(store: Path) -> None:
    """Nothing but the kernel copies `aux`."""
    places: list[tuple[int, int]] = []

    def noting(samples: Sequence[Sample]) -> Batch:
        batch = PACK(samples)
        places.append((samples[0].aux.data_ptr(), batch.aux.data_ptr()))
        return batch

    with TrainReader(store, SAMPLING, noting) as reader, reader.epoch(0) as batches:
        assert len(list(batches)) == len(places)
    assert all(read == packed for read, packed in places)


def test_scratch_is_used_again_and_grows() -> None:
    scratch = Scratch()
    scratch.reset(256)
    first, second = scratch.take(100), scratch.take(100)
    first.fill_(1)
    second.fill_(2)
    assert second.data_ptr() % 64 == 0 and second.data_ptr() >= first.data_ptr() + 100
    assert scratch.take(1000).numel() == 1000  # more than was announced comes from elsewhere
    scratch.reset(10)
    assert scratch.take(10).data_ptr() == first.data_ptr()
    assert int(second[0]) == 2


def test_a_prefetcher_ends_where_it_is_told() -> None:
    items: Prefetcher[int] = Prefetcher(lambda number: number * number, first=3, threads=2, ahead=2)
    with items:
        items.extend(5)
        assert [next(items), next(items)] == [9, 16]
        items.extend(6)
        items.finish()
        assert list(items) == [25] and items.given == 3


def test_a_prefetcher_says_why_no_more_comes_after_what_can() -> None:
    for threads in (0, 2):
        items: Prefetcher[int] = Prefetcher(lambda number: number, threads=threads)
        items.extend(2)
        items.fail(RuntimeError("no more"))
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(RuntimeError, match="no more"):
            next(items)
        items.close()


def test_rows_are_read_from_many_shards_with_few_open(store: Path) -> None:
    with TrainReader(store, SAMPLING, PACK) as reader:
        reader._rows._max_open = 2
        with reader.epoch(0) as batches:
            assert rows_of(list(batches)) == rows_of(read(store))
        assert len(reader._rows._open) == 2
