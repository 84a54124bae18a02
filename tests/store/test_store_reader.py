from __future__ import annotations

import gc
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import SPEC, contents, fill, open_store, row_contents, row_states, write_all, write_store
from torch.utils.data import DataLoader

from costs import opened
from eyas.capture.contract import DTYPES, CaptureSpec
from eyas.capture.encoding import STORED_DTYPES, decode
from eyas.errors import IntegrityError, StoreError
from eyas.store.documents import describe_store
from eyas.store.reader import StoreDataset, StoreReader, StoreRow
from eyas.store.writer import StoreWriter

ROWS, FAILED = 40, {0, 7, 39}
GOOD = [row for row in range(ROWS) if row not in FAILED]
WIDTH = {"bf16": torch.uint16, "f16": torch.uint16, "f32": torch.uint32, "fp8_e4m3": torch.uint8}
FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "fp8_e4m3": torch.bfloat16}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StoreWriter:
    return write_store(tmp_path_factory.mktemp("store"), ROWS, FAILED)


def assert_row(row: StoreRow, spec: CaptureSpec = SPEC) -> None:
    tokens, mask, positions = row_contents(row.row, spec)
    aux, last = row_states(row.row, spec)
    assert row.tokens.tolist() == tokens.tolist()
    assert row.loss_mask.tolist() == mask.tolist()
    assert row.last_index.tolist() == positions.tolist()
    assert np.array_equal(row.aux.view(WIDTH[spec.dtype]).numpy(), aux)
    assert np.array_equal(row.last.view(WIDTH[spec.dtype]).numpy(), last)


def test_rows_are_the_good_ones_in_order(store):
    reader = StoreReader(store.root)
    assert len(reader) == len(GOOD)
    assert reader.failed == sorted(FAILED)
    assert reader.shards == len(store.plan.shards)
    assert reader.spec == SPEC
    assert [row.row for row in reader] == GOOD
    for row in reader:
        assert_row(row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_shapes_and_contiguity(tmp_path, dtype):
    spec = CaptureSpec(SPEC.layers, "loss", dtype, 16, 100, 8, "0" * 32)
    write_store(tmp_path, 6, spec=spec)
    for row, raw in zip(StoreReader(tmp_path), StoreReader(tmp_path, raw=True), strict=True):
        assert_row(raw, spec)
        assert row.aux.dtype == row.last.dtype == FLOATS[dtype]
        assert row.aux.shape == (len(row.tokens), 3, 16)
        assert row.aux.is_contiguous()
        assert (row.tokens.dtype, row.loss_mask.dtype, row.last_index.dtype) == (torch.int32, torch.uint8, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("floats", [torch.float32, torch.bfloat16])
def test_states_are_read_in_the_dtype_that_is_asked_for(tmp_path, dtype, floats):
    spec = CaptureSpec(SPEC.layers, "all", dtype, 16, 100, 8, "0" * 32)
    write_store(tmp_path, 6, failing={2}, spec=spec)
    for row, raw in zip(StoreReader(tmp_path, dtype=floats), StoreReader(tmp_path, raw=True), strict=True):
        for states, stored in ((row.aux, raw.aux), (row.last, raw.last)):
            assert stored.dtype == STORED_DTYPES[dtype]
            assert torch.equal(states, decode(stored, dtype, 16, floats))
            assert (states.dtype, states.shape) == (floats, (*stored.shape[:-1], 16))
    with pytest.raises(ValueError, match="raw"):
        StoreReader(tmp_path, dtype=floats, raw=True)


def test_rows_of_a_quantised_store_train_like_any_other(tmp_path):
    """Through workers, whose rows are sent as they are decoded."""
    write_store(tmp_path, 6, spec=CaptureSpec(SPEC.layers, "loss", "fp8_e4m3", 16, 100, 8, "0" * 32))
    here = {row.row: row for row in StoreReader(tmp_path)}
    for row in DataLoader(StoreDataset(tmp_path), batch_size=None, num_workers=1):
        assert torch.equal(row.aux, here.pop(row.row).aux)
    assert not here


@given(st.integers(-60, 60), st.integers(-60, 60), st.integers(-3, 3).filter(bool))
@settings(max_examples=40)
def test_indexing_is_a_lists(store_path, start, stop, step):
    reader = StoreReader(store_path)
    assert [row.row for row in reader[start:stop:step]] == GOOD[start:stop:step]
    try:
        expected = GOOD[start]
    except IndexError:
        with pytest.raises(IndexError):
            reader[start]
    else:
        assert reader[start].row == expected


@pytest.fixture(scope="module")
def store_path(store) -> Path:
    return store.root


def test_tensors_are_views_of_the_file(store):
    reader = StoreReader(store.root)
    row = reader[3]
    same = reader[3]
    assert row.aux.data_ptr() == same.aux.data_ptr()
    maps = Path("/proc/self/maps").read_text()
    address = row.aux.data_ptr()
    regions = [
        line
        for line in maps.splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    ]
    assert "shard-" in regions[0]


def test_writing_to_a_row_does_not_change_the_file(store):
    before = store.paths(store.plan.shards[0]).final.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = StoreReader(store.root)
        reader[0].aux.fill_(1)
    assert store.paths(store.plan.shards[0]).final.read_bytes() == before


def test_open_maps_are_bounded_and_outlive_the_reader(store):
    def open_maps() -> int:
        return sum(str(store.root) in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    before = open_maps()
    reader = StoreReader(store.root, max_mapped=2)
    kept = reader[0]
    for _ in reader:
        pass
    assert open_maps() - before <= 3  # two of the reader's and the one that `kept` holds
    del reader
    assert_row(kept)


def test_fork_and_pickle(store):
    reader = StoreReader(store.root)
    reader[5]
    copy = pickle.loads(pickle.dumps(reader))
    assert_row(copy[5])
    assert_row(pickle.loads(pickle.dumps(reader[5])))


def test_errors(tmp_path, store):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(StoreError, match="no store here"):
            StoreReader(path)
    writer = open_store(tmp_path / "young")
    with pytest.raises(StoreError, match="no complete shard yet"):
        StoreReader(writer.root)


def test_a_shard_that_goes_or_changes_after_opening(tmp_path):
    writer = write_store(tmp_path, 12)
    reader = StoreReader(tmp_path)
    a, b = (writer.paths(shard).final for shard in writer.plan.shards[:2])
    a.unlink()
    with pytest.raises(StoreError, match="cannot open shard"):
        reader[0]
    data = bytearray(b.read_bytes())
    data[writer.info.layout(writer.plan.shards[1]).tensors["tokens"].start] ^= 1
    b.write_bytes(data)
    with pytest.raises(IntegrityError, match="shard and sidecar differ"):
        reader[writer.plan.shards[1].start]
    b.write_bytes(b"short")
    with pytest.raises(IntegrityError, match="not a shard"):
        reader[writer.plan.shards[1].start]


def test_a_reader_is_not_disturbed_by_a_retry(tmp_path):
    writer = write_store(tmp_path, 12, failing={1, 5})
    reader = StoreReader(tmp_path)
    rows = list(reader)
    for shard in writer.plan.shards:
        writer.reopen_failed(shard)
    for row in reader:
        assert_row(row)
    write_all(writer)
    for row in [*rows, *reader]:
        assert_row(row)
    assert [row.row for row in StoreReader(tmp_path)] == list(range(12))


def test_only_complete_shards_are_read(tmp_path):
    writer = open_store(tmp_path)
    lease = writer.lease(writer.plan.shards[1], contents)
    fill(lease)
    lease.finish()
    shard = writer.plan.shards[1]
    assert [row.row for row in StoreReader(tmp_path)] == list(range(shard.start, shard.stop))


def test_opening_thousands_of_shards_opens_none_of_their_files(tmp_path):
    tokens = [1] * 2000
    spec = CaptureSpec((0,), "loss", "bf16", 1, 10, 2, "0" * 32)
    writer = StoreWriter.open(
        tmp_path,
        spec=spec,
        corpus={"digest": "c"},
        tokens_N=tokens,
        positions_N=[0] * 2000,
        shard_bytes=1,
        provenance={},
    )
    assert len(writer.plan.shards) == 2000
    for shard in writer.plan.shards[:1]:
        with writer.lease(shard, lambda s: [([1], [0], [])]) as lease:
            lease.put(shard.start, b"\0\0", b"")
            lease.finish()
    sidecar = writer.paths(writer.plan.shards[0]).sidecar.read_bytes()
    size = writer.paths(writer.plan.shards[0]).final.stat().st_size
    for shard in writer.plan.shards[1:]:
        writer.paths(shard).sidecar.write_bytes(sidecar)
        writer.paths(shard).final.touch()  # never opened
        os.truncate(writer.paths(shard).final, size)
    with opened() as names:
        reader = StoreReader(tmp_path)
    assert not [name for name in names if name.endswith((".safetensors", ".journal"))]
    assert len(reader) == 2000
    assert reader[0].tokens.tolist() == [1]
    assert reader[0].last.shape == (0, 1)


# --- StoreDataset ---


def consume(
    reader: StoreReader, world_size: int = 1, num_workers: int = 0, epoch: int = 0, **options: object
) -> list[list[int]]:
    """Corpus rows by rank."""
    got = []
    for rank in range(world_size):
        dataset = StoreDataset(reader, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        dataset.set_epoch(epoch)
        with warnings.catch_warnings():
            # The loader complains of more workers than the machine has cores.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
            got.append([row.row for row in loader])
        assert len(got[-1]) == len(dataset)
    return got


@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 5), st.integers(1, 9), st.booleans())
@settings(max_examples=40)
def test_every_row_once_an_epoch_over_all_ranks(store_path, world_size, seed, epoch, buffer_shards, shuffle):
    reader = StoreReader(store_path)
    got = consume(reader, world_size, 0, epoch, seed=seed, buffer_shards=buffer_shards, shuffle=shuffle)
    assert sorted(row for rank in got for row in rank) == GOOD
    assert max(map(len, got)) - min(map(len, got)) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_row_once_an_epoch_over_workers_of_ranks(store, num_workers):
    got = consume(StoreReader(store.root), 2, num_workers, 3, seed=1)
    assert sorted(row for rank in got for row in rank) == GOOD


def test_order_follows_seed_and_epoch_and_nothing_else(store):
    reader = StoreReader(store.root)
    orders = {
        (seed, epoch): tuple(consume(reader, seed=seed, epoch=epoch)[0]) for seed in range(3) for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    assert tuple(consume(StoreReader(store.root), seed=1, epoch=2)[0]) == orders[1, 2]
    assert consume(reader, shuffle=False, epoch=2)[0] == GOOD
    assert orders[0, 0] != tuple(GOOD)


def test_rows_stay_within_a_buffer_of_shards(tmp_path):
    """Shuffling reads few files at a time: rows of `buffer_shards` shards are used up before the next come."""
    store = write_store(tmp_path)
    shard_of = {row: shard.index for shard in store.plan.shards for row in range(shard.start, shard.stop)}
    order = [shard_of[row] for row in consume(StoreReader(store.root), buffer_shards=2, seed=5)[0]]
    seen: list[int] = []
    for shard in order:
        if shard not in seen:
            seen.append(shard)
    for first in range(0, len(seen), 2):
        group = set(seen[first : first + 2])
        where = [at for at, shard in enumerate(order) if shard in group]
        assert where == list(range(where[0], where[-1] + 1))


def test_persistent_workers_see_the_new_epoch(store):
    dataset = StoreDataset(store.root, seed=0)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = [row.row for row in loader]
    again = [row.row for row in loader]
    dataset.set_epoch(1)
    second = [row.row for row in loader]
    assert first == again != second
    assert sorted(second) == GOOD
    del loader
    gc.collect()


def test_rows_through_worker_processes_hold_their_states(store):
    for row in DataLoader(StoreDataset(store.root), batch_size=None, num_workers=2):
        assert_row(row)


def test_impossible_arguments(store):
    for options in ({"rank": 2, "world_size": 2}, {"rank": -1}, {"buffer_shards": 0}):
        with pytest.raises(ValueError, match=r".+"):
            StoreDataset(store.root, **options)


@pytest.mark.parametrize("damage", ["truncated", "grown", "empty"])
def test_a_shard_of_another_size_than_its_sidecar_is_never_complete(tmp_path, damage):
    """Whoever counts shards looks at their size: a copy that was cut short must not pass as done."""
    store = write_store(tmp_path).root
    shard = sorted(store.glob("*.safetensors"))[0]
    size = shard.stat().st_size
    os.truncate(shard, {"truncated": size - 1, "grown": size + 1, "empty": 0}[damage])
    for look in (StoreReader, describe_store):
        with pytest.raises(IntegrityError, match="bytes") as caught:
            look(store)
        assert "remove it and run extract again" in caught.value.hint


def test_a_moved_shard_whose_volume_is_gone_is_named(tmp_path):
    store = write_store(tmp_path / "store").root
    shard = sorted(store.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "unmounted" / shard.name)
    for look in (StoreReader, describe_store):
        with pytest.raises(StoreError, match="volume") as caught:
            look(store)
        assert "mount it" in caught.value.hint
