"""A row's way into its shard, piece by piece: whatever goes wrong on it, no wrong byte is anybody's row."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import SPEC, contents, fill, open_store, row_states, snapshot, write_store

from eyas.capture.contract import CaptureSpec, field_hash
from eyas.store.check import finite_check, verify_store
from eyas.store.files import start_write_back
from eyas.store.reader import StoreReader
from eyas.store.shard_writer import Rejected, ShardWriter
from eyas.store.source import flat, source_of
from eyas.store.writer import StoreWriter

ROWS = 8


class Lost(Exception):
    """What a source ends with that cannot go on."""


class Pieces:
    """A source of made-up piece sizes (of whole numbers), that may stop, or kill the process, before byte `stop`."""

    def __init__(self, data: bytes, sizes: list[int], stop: int | None = None, kill: bool = False) -> None:
        self._data, self._sizes, self._stop, self._kill = data, sizes, stop, kill

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def pieces(self, size: int) -> Iterator[memoryview]:
        assert size > 0
        buffer, at, turn = bytearray(len(self._data)), 0, 0  # one buffer for all, as a record file's is
        while at < len(self._data):
            step = min(self._sizes[turn % len(self._sizes)], len(self._data) - at)
            if self._stop is not None and at + step > self._stop:
                if self._kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Lost
            buffer[:step] = self._data[at : at + step]
            yield memoryview(buffer)[:step]
            at, turn = at + step, turn + 1


def row_bytes(row: int, spec: CaptureSpec = SPEC) -> list[bytes]:
    return [states.tobytes() for states in row_states(row, spec)]


def digests(parts: list[bytes]) -> tuple[int, int]:
    return field_hash(parts[0]), field_hash(parts[1])


def leased(writer: StoreWriter, shard: int = 0) -> ShardWriter:
    lease = writer.lease(writer.plan.shards[shard], contents)
    assert lease is not None
    return lease


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of a store that nothing happened to (`right`), and of one whose row 3 failed cleanly (`failed`)."""
    root = tmp_path_factory.mktemp("whole")
    write_store(root / "right", ROWS, shard_bytes=1 << 20)
    write_store(root / "failed", ROWS, {3}, shard_bytes=1 << 20)
    for name in ("right", "failed"):
        (root / name / "shard-00000.safetensors").rename(root / f"{name}.safetensors")
    return root


@st.composite
def faults(draw: st.DrawFn) -> tuple[str, int, int]:
    """What goes wrong, in which field, and at which place of it (folded to its length later)."""
    kind = draw(st.sampled_from(["bit", "digest", "not-finite", "lost"]))
    return kind, draw(st.integers(0, 1)), draw(st.integers(0, 1 << 20))


def strike(lease: ShardWriter, row: int, fault: tuple[str, int, int], sizes: list[int]) -> None:
    """Put a row that goes wrong, and check that it was named."""
    kind, field, place = fault
    parts = row_bytes(row)
    field = field if parts[field] else 1 - field
    place %= len(parts[field])
    claimed = list(digests(parts))
    stop: int | None = None
    match kind:
        case "bit":
            broken = bytearray(parts[field])
            broken[place] ^= 1 << place % 8
            parts[field] = bytes(broken)
        case "digest":
            claimed[field] ^= 1 << place % 64
        case "not-finite":
            values = np.frombuffer(parts[field], "<u2").copy()
            values[place // 2] = (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)[place % 4]
            parts[field] = values.tobytes()
            claimed[field] = field_hash(parts[field])
        case _:
            stop = place
    sources = [Pieces(part, sizes, stop if index == field else None) for index, part in enumerate(parts)]
    if kind == "lost":
        with pytest.raises(Lost):
            lease.put(row, *sources, tuple(claimed))
    else:
        expected = Rejected.NOT_FINITE if kind == "not-finite" else Rejected.CHECKSUM
        assert lease.put(row, *sources, tuple(claimed)) is expected
    assert row in lease.pending


@given(
    st.lists(faults(), min_size=1, max_size=3),
    st.lists(st.integers(1, 350).map(lambda items: 2 * items), min_size=1, max_size=4),
    st.data(),
)
def test_what_went_wrong_leaves_no_trace(
    whole: Path, found: list[tuple[str, int, int]], sizes: list[int], data: st.DataObject
) -> None:
    """Whether the row comes right in the end or is given up, in this session or after a crash."""
    with tempfile.TemporaryDirectory(prefix="eyas-put-", dir="/dev/shm") as folder:
        writer = open_store(Path(folder), ROWS, shard_bytes=1 << 20)
        lease = leased(writer)
        for fault in found:
            strike(lease, 3, fault, sizes)
            if data.draw(st.booleans()):  # killed: what is in the files is all there is
                lease.close()
                writer = open_store(Path(folder), ROWS, shard_bytes=1 << 20)
                lease = leased(writer)
                assert lease.distrusted == []
                assert 3 in lease.pending
        gives_up = data.draw(st.booleans())
        if gives_up:
            lease.fail(3, "retracted", "synthetic")
        for row in lease.pending:
            parts = row_bytes(row)
            assert lease.put(row, *(Pieces(part, sizes) for part in parts), digests(parts)) is None
        lease.finish()
        stored = (Path(folder) / "shard-00000.safetensors").read_bytes()
        assert stored == (whole / f"{'failed' if gives_up else 'right'}.safetensors").read_bytes()


@given(st.integers(1, 3000), st.integers(0, 4000))
def test_pieces_of_a_buffer_are_its_bytes_and_no_copies(size: int, length: int) -> None:
    data = bytearray(os.urandom(length))
    source = source_of(np.frombuffer(data, "u1"))
    pieces = list(source.pieces(size))
    assert source.nbytes == length
    assert b"".join(pieces) == data
    assert all(len(piece) == size for piece in pieces[:-1])
    if length:
        data[-1] ^= 1
        assert pieces[-1][-1] == data[-1]
    assert source_of(source) is source


def test_buffers_without_a_number_are_empty_sources() -> None:
    assert len(flat(np.zeros((0, 3, 4), np.uint16))) == 0
    with pytest.raises(TypeError):
        source_of(7)


def test_a_source_that_gives_less_than_it_promised_is_not_stored(tmp_path: Path) -> None:
    class Short(Pieces):
        def pieces(self, size: int) -> Iterator[memoryview]:
            yield memoryview(self._data[:-2])

    with leased(open_store(tmp_path, ROWS)) as lease:
        parts = row_bytes(0)
        with pytest.raises(ValueError, match="gave"):
            lease.put(0, Short(parts[0], [2]), parts[1])
        assert 0 in lease.pending


@pytest.mark.parametrize("sizes", [[1 << 20], [6, 100], [2]])
def test_killed_in_the_middle_of_a_put(tmp_path: Path, whole: Path, sizes: list[int]) -> None:
    """Not one row of the others is lost, and the row's half is not believed."""
    root, shard_bytes = tmp_path / "store", 1 << 20
    child = os.fork()
    if child == 0:
        try:
            lease = leased(open_store(root, ROWS, shard_bytes=shard_bytes))
            for row in (0, 1, 2):
                lease.put(row, *row_states(row))
            parts = row_bytes(3)
            lease.put(
                3, Pieces(parts[0], sizes), Pieces(parts[1], sizes, len(parts[1]) // 2, kill=True), digests(parts)
            )
        finally:
            os._exit(1)  # never reached
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with leased(open_store(root, ROWS, shard_bytes=shard_bytes)) as lease:
        assert lease.pending == list(range(3, ROWS))
        assert lease.distrusted == []
        fill(lease)
        lease.finish()
    assert (root / "shard-00000.safetensors").read_bytes() == (whole / "right.safetensors").read_bytes()


def test_a_row_that_was_wrong_and_given_up_is_retried_to_the_right_bytes(tmp_path: Path, whole: Path) -> None:
    writer = open_store(tmp_path, ROWS, shard_bytes=1 << 20)
    with leased(writer) as lease:
        strike(lease, 3, ("bit", 0, 5), [64])
        lease.fail(3, "checksum-differs")
        fill(lease)
        lease.finish()
    writer.write_manifest()
    assert verify_store(tmp_path).ok
    assert [row.row for row in StoreReader(tmp_path)] == [row for row in range(ROWS) if row != 3]
    assert writer.reopen_failed(writer.plan.shards[0])
    with leased(writer) as lease:
        strike(lease, 3, ("lost", 0, 60), [16])
        assert lease.pending == [3]
        fill(lease)
        lease.finish()
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == (whole / "right.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "fp8_e4m3"])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: str) -> None:
    """In any place, of any sign, in pieces of any length; and no finite number is taken for one."""
    spec = replace(SPEC, dtype=dtype)
    rng = np.random.default_rng(0)
    right = row_bytes(5, spec)[0]
    assert finite_check(spec)(memoryview(right))
    if dtype == "fp8_e4m3":  # its scales have tests of their own
        return
    width, bits = (4, "<u4") if dtype == "f32" else (2, "<u2")
    infinity = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}[dtype]
    sign = 1 << (8 * width - 1)
    for _ in range(300):
        values = np.frombuffer(right, bits).copy()
        mantissa = int(rng.integers(0, sign - infinity))
        value = infinity + mantissa | (sign if rng.integers(2) else 0)
        at, largest = int(rng.integers(len(values))), infinity - 1
        for number, fine in ((largest, True), (largest | sign, True), (sign, True), (value, False)):
            values[at] = number
            check, size = finite_check(spec), width * int(rng.integers(1, len(values) + 1))
            pieces = source_of(values).pieces(size)
            assert all(map(check, pieces)) is fine, (hex(number), at)


def test_write_back_is_a_hint(tmp_path: Path) -> None:
    start_write_back(-1)  # nobody hears it
    write_store(tmp_path / "one", ROWS)
    with (tmp_path / "one" / "shard-00000.safetensors").open("rb") as file:
        start_write_back(file.fileno())
    write_store(tmp_path / "other", ROWS)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "other")
