"""Any one byte, anywhere: what ends in a store is what was captured, or it is refused by name."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extract.sglang_double import record_bytes
from eyas.capture.contract import CaptureSpec, RecordHeader, RequestId, count_of, field_hash, runs_hash, token_hash
from eyas.errors import EyasError, IntegrityError
from eyas.extract.engine import CaptureRequest, Failed
from eyas.extract.record import read_record
from eyas.store.check import verify_store
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from mutations.bench import Bench, Target0, bench, store_bytes
from mutations.mutation import Check, Held, Mutation, Stage, bytes_of
from store.store_samples import contents, fill, open_store, row_states, write_store

ROWS = 9
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)
REQUEST = CaptureRequest(RequestId("run00000", "ses00000", 5, 1), list(range(40)), [3, 20, 22, 39])


def _record(hidden_size: int = 24) -> tuple[CaptureSpec, bytes, torch.Tensor, torch.Tensor]:
    spec = CaptureSpec(SPEC.layers, "loss", "bf16", hidden_size, 1000, 10, "f" * 32)
    generator = torch.Generator().manual_seed(1)
    positions = count_of(REQUEST.last_runs)
    aux, last = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((40, 3, hidden_size), (positions, hidden_size))
    )
    header = RecordHeader(
        str(REQUEST.rid),
        spec.spec_id,
        token_hash(REQUEST.tokens),
        40,
        positions,
        f"{runs_hash(REQUEST.last_runs):016x}",
        [[0, 16], [16, 40]],
        f"{field_hash(bytes_of(aux)):016x}",
        f"{field_hash(bytes_of(last)):016x}",
    )
    return spec, record_bytes(header, aux, last, "bf16"), aux, last


def _accepted(got: tuple[torch.Tensor, torch.Tensor] | Failed) -> bool:
    """Whether a worker would store it."""
    if isinstance(got, Failed):
        assert got.reason
    return not isinstance(got, Failed)


@given(st.data())
@settings(QUIET, max_examples=300)
def test_a_record_with_one_byte_changed_is_refused_or_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    spec, whole, aux, last = _record()
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(whole)
    changed[at] ^= mask
    path = tmp_path_factory.getbasetemp() / "byte.safetensors"
    path.write_bytes(changed)
    got = read_record(path, REQUEST, spec)
    if _accepted(got):  # white space of another kind in the header's JSON
        assert tuple(map(bytes_of, got)) == (bytes_of(aux), bytes_of(last))
        assert at < len(whole) - len(bytes_of(aux)) - len(bytes_of(last))


def test_a_record_that_changes_and_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """Neither ends the process nor lets other bytes in; a mapping would do both."""
    spec, whole, aux, _ = _record(hidden_size=16_384)
    path, stop = tmp_path / "record.safetensors", threading.Event()
    path.write_bytes(whole)

    def meddle() -> None:
        rng = random.Random(3)
        with path.open("r+b") as file:
            while not stop.is_set():
                file.seek(rng.randrange(len(whole)))
                file.write(b"\xff" * 64)
                file.flush()
                os.ftruncate(file.fileno(), rng.randrange(len(whole)))
                os.pwrite(file.fileno(), whole, 0)

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        results = [read_record(path, REQUEST, spec) for _ in range(60)]
    finally:
        stop.set()
        thread.join()
    kept = [got for got in results if _accepted(got)]
    assert all(bytes_of(got[0]) == bytes_of(aux) for got in kept)
    assert len(kept) < len(results)
    assert {got.reason for got in results if isinstance(got, Failed)} <= {
        "record-damaged",
        "rid-differs",
        "checksum-differs",
    }


# --- a real job, every row of it struck -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bytes")
    with bench(folder / "job", Target0(folder), [24] * 60, 1 << 20) as made:
        yield made
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_job_whose_every_record_lost_a_byte_to_chance_stores_nothing_wrong(job: Bench) -> None:
    rng = random.Random(11)
    struck: list[int] = []

    def inject(held: Held) -> bytes:
        # The header is a small part of the file: half of the time it is the one.
        at = rng.randrange(held.header_bytes if rng.random() < 0.5 else len(held.data))
        struck.append(at)
        return held.flipped(at, 1 << rng.randrange(8))

    job.extract(job.folder / "right", "extract.attempts=3")
    right = {row.row: row for row in StoreReader(job.folder / "right")}
    job.server.armed |= dict.fromkeys(range(60), Mutation("any bit", Stage.RECORD, inject, Check.EXTRACT, ""))
    summary = job.extract(store := job.folder / "store")
    job.server.armed.clear()
    assert not job.server.errors
    assert len(struck) == 60
    assert summary.failed >= 55  # but for white space in headers
    assert set(summary.reasons) <= {
        *("record-damaged", "rid-differs", "spec-differs", "tokens-differ", "rows-differ", "positions-differ"),
        *("chunks-gap", "shape-differs", "checksum-differs"),
    }
    if summary.rows_done:
        for row in StoreReader(store):
            assert row.aux.equal(right[row.row].aux)
            assert row.last.equal(right[row.row].last)
    assert job.extract(store, "extract.attempts=3", retry_failed=True).failed == 0
    assert store_bytes(store) == store_bytes(job.folder / "right")


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished") / "store"
    write_store(root, ROWS)
    return root


@given(st.data())
@settings(QUIET, max_examples=250)
def test_a_store_with_one_byte_changed_anywhere_does_not_pass(finished: Path, data: st.DataObject) -> None:
    """Shards, sidecars, manifest and store.json; what a reader gives out meanwhile has the right tokens."""
    files = sorted(path for path in finished.iterdir() if path.is_file())
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(whole)
    changed[at] ^= mask
    try:
        path.write_bytes(changed)
        try:
            passes = verify_store(finished, contents).ok
        except EyasError:
            passes = False
        if passes:
            _means_the_same(path, whole, bytes(changed))
    finally:
        path.write_bytes(whole)


def _means_the_same(path: Path, whole: bytes, changed: bytes) -> None:
    """White space, a text for people, or the size that resume compares: nothing that a row depends on."""
    assert path.suffix == ".json", path
    before, after = json.loads(whole), json.loads(changed)
    differ = {key for key in before | after if before.get(key) != after.get(key)}
    assert differ <= {"shard_bytes"}, differ


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every shard open, its last row pending."""
    root = tmp_path_factory.mktemp("interrupted") / "store"
    writer = open_store(root, ROWS)
    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert lease is not None
        with lease:
            for row in lease.pending[:-1]:
                lease.put(row, *row_states(row))
    return root


@given(st.data())
@settings(QUIET, max_examples=25)
def test_an_open_shard_with_one_byte_changed_is_resumed_to_the_right_one(
    finished: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "resumed"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(interrupted, root)
    path = data.draw(st.sampled_from(sorted(path for path in root.iterdir() if path.suffix in (".part", ".journal"))))
    whole = bytearray(path.read_bytes())
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    whole[at] ^= mask
    path.write_bytes(whole)
    writer: StoreWriter = open_store(root, ROWS)
    for shard in writer.plan.shards:
        lease = writer.lease(shard, contents)
        assert lease is not None
        with lease:
            fill(lease)
            lease.finish()
    writer.write_manifest()
    assert store_bytes(root) == store_bytes(finished)


@given(st.data())
@settings(QUIET, max_examples=100)
def test_a_reader_gives_no_other_tokens_or_positions(finished: Path, data: st.DataObject) -> None:
    """It passes over states (that is `eyas verify`'s), but everything else in a shard is compared with the sidecar."""
    path = data.draw(st.sampled_from(sorted(finished.glob("*.safetensors"))))
    info = StoreReader(finished).info
    layout = info.layout(info.plan.shards[int(path.stem[-5:])])
    whole = path.read_bytes()
    spans = [t for name, t in layout.tensors.items() if name not in ("aux", "last")]
    span = data.draw(
        st.sampled_from([(0, len(layout.header)), *((t.start, t.stop) for t in spans if t.stop > t.start)])
    )
    changed = bytearray(whole)
    changed[data.draw(st.integers(span[0], span[1] - 1))] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        with pytest.raises(IntegrityError):
            list(StoreReader(finished))
    finally:
        path.write_bytes(whole)
