from __future__ import annotations

import asyncio
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sglang_double import in_memory, record_bytes

from eyas.capture.contract import CaptureSpec, RecordHeader, Refusal, RequestId, count_of, runs_hash, token_hash
from eyas.capture.tensorfile import parse_header
from eyas.extract.engine import Captured, CaptureRequest, Failed, Retry, StatesLost
from eyas.extract.fake import FakeEngine
from eyas.extract.record import RETRY, open_record, read_record, refused

SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)
REQUEST = CaptureRequest(RequestId("run00000", "ses00000", 5, 1), [4, 5, 6, 7, 8], [1, 2, 3, 5])


def states(request: CaptureRequest = REQUEST, spec: CaptureSpec = SPEC) -> Captured:
    made = asyncio.run(FakeEngine(spec).capture(request))
    assert isinstance(made, Captured)
    return made


def header(request: CaptureRequest = REQUEST, spec: CaptureSpec = SPEC, **changes: Any) -> RecordHeader:
    made, rows = states(request, spec), len(request.tokens)
    right = RecordHeader(
        str(request.rid),
        spec.spec_id,
        token_hash(request.tokens),
        rows,
        count_of(request.last_runs),
        f"{runs_hash(request.last_runs):016x}",
        [[0, 1], [1, rows]] if rows > 1 else [[0, 1]],
        f"{made.aux_xxh3:016x}",
        f"{made.last_xxh3:016x}",
    )
    return replace(right, **changes)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "record.safetensors"
    path.write_bytes(data)
    return path


def right_bytes() -> bytes:
    made = states()
    return record_bytes(header(), made.aux, made.last, SPEC.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    ("tokens", "runs"), [([1], []), ([1], [0, 1]), ([1, 2, 3], [0, 1, 2, 3]), (list(range(300)), [])]
)
def test_right_record_is_opened(dtype: str, tokens: list[int], runs: list[int], tmp_path: Path) -> None:
    spec = replace(SPEC, dtype=dtype)
    request = CaptureRequest(REQUEST.rid, tokens, runs)
    made = states(request, spec)
    path = write(tmp_path, record_bytes(header(request, spec), made.aux, made.last, dtype))
    got = open_record(path, request, spec)
    assert isinstance(got, Captured)
    assert (got.aux_xxh3, got.last_xxh3) == (made.aux_xxh3, made.last_xxh3)
    for read in (in_memory(got), in_memory(got)):  # reading leaves nothing behind
        assert torch.equal(read.aux, made.aux)
        assert torch.equal(read.last, made.last)
    got.release()
    with safe_open(path, "pt") as file:  # what others see in the file
        assert torch.equal(file.get_tensor("aux"), made.aux)


def test_states_in_memory_are_a_copy_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, right_bytes())
    got = read_record(path, REQUEST, SPEC)
    assert not isinstance(got, Failed)
    got[0].zero_()
    assert path.read_bytes() == right_bytes()
    path.unlink()
    assert torch.equal(got[1], states().last)


def test_states_are_those_of_the_file_whose_claims_were_checked(tmp_path: Path) -> None:
    """Another file under the same name, or none any more, is nothing to the one that is open."""
    path = write(tmp_path, right_bytes())
    got = open_record(path, REQUEST, SPEC)
    assert isinstance(got, Captured)
    path.unlink()
    path.write_bytes(b"x" * len(right_bytes()))
    assert torch.equal(in_memory(got).aux, states().aux)


def pieces(source: Any, size: int) -> list[bytes]:
    return [bytes(piece) for piece in source.pieces(size)]


@given(st.data())
@settings(max_examples=40)
def test_pieces_of_any_size_are_the_bytes_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.getbasetemp(), right_bytes())
    got = open_record(path, REQUEST, SPEC)
    assert isinstance(got, Captured)
    made = in_memory(got)
    for source, right in ((got.aux, made.aux), (got.last, made.last)):
        whole = right.contiguous().view(torch.uint8).numpy().tobytes()
        size = data.draw(st.integers(1, len(whole) + 3))
        assert source.nbytes == len(whole)
        assert pieces(source, size) == [whole[at : at + size] for at in range(0, len(whole), size)]


@given(st.data())
@settings(max_examples=40)
def test_a_file_cut_while_it_is_read_fails_by_name(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """At any byte, before any piece. (A mapping would end the process at the first page that is gone.)"""
    whole = right_bytes()
    path = write(tmp_path_factory.getbasetemp(), whole)
    got = open_record(path, REQUEST, SPEC)
    assert isinstance(got, Captured)
    stop = len(whole) - len(b"".join(pieces(got.last, 64)))  # where aux ends
    size = data.draw(st.integers(1, 400))
    reading = got.aux.pieces(size)
    seen = b"".join(bytes(next(reading)) for _ in range(data.draw(st.integers(0, (got.aux.nbytes - 1) // size))))
    start = stop - got.aux.nbytes
    os.truncate(path, data.draw(st.integers(0, stop - 1)))
    with pytest.raises(StatesLost) as lost:
        for piece in reading:
            seen += bytes(piece)
    assert lost.value.failure.reason == "record-damaged"
    assert lost.value.failure.retry is Retry.ATTEMPT
    assert seen == whole[start : start + len(seen)]


def test_a_disk_that_cannot_be_read_fails_by_name(tmp_path: Path) -> None:
    got = open_record(write(tmp_path, right_bytes()), REQUEST, SPEC)
    assert isinstance(got, Captured)
    got.release()  # the descriptor is gone: any error of the system call
    with pytest.raises(StatesLost) as lost:
        pieces(got.aux, 64)
    assert lost.value.failure.reason == "record-unreadable"


def test_each_thread_has_one_buffer_and_keeps_it(tmp_path: Path) -> None:
    got = open_record(write(tmp_path, right_bytes()), REQUEST, SPEC)
    assert isinstance(got, Captured)

    def address() -> set[int]:
        return {np.frombuffer(piece, "u1").ctypes.data for _ in range(3) for piece in got.aux.pieces(64)}

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        mine, theirs = one.submit(address).result(), other.submit(address).result()
        assert len(mine) == len(theirs) == 1
        assert mine != theirs
        assert one.submit(address).result() == mine


def test_a_file_that_is_larger_than_the_row_can_be_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, right_bytes())
    os.truncate(path, 1 << 40)  # a hole: takes no space, but would take all memory
    failed = open_record(path, REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-damaged"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_plain_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "record.safetensors"
    match kind:
        case "link":
            (tmp_path / "elsewhere").write_bytes(right_bytes())
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path)  # opening it would wait for a writer, and every other row with it
        case "folder":
            path.mkdir()
    failed = open_record(path, REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-unreadable"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rid": str(REQUEST.rid._replace(row=6))}, "rid-differs"),
        ({"rid": str(REQUEST.rid._replace(attempt=0))}, "rid-differs"),
        ({"rid": str(REQUEST.rid._replace(session="ses00001"))}, "rid-differs"),
        ({"spec_id": "0" * 32}, "spec-differs"),
        ({"tokens": token_hash([4, 5, 6, 7, 9])}, "tokens-differ"),  # another row of the same length
        ({"rows": 4}, "rows-differ"),
        ({"positions": 2}, "positions-differ"),
        ({"runs": f"{runs_hash([0, 1, 3, 5]):016x}"}, "positions-differ"),  # as many, elsewhere
        ({"chunks": []}, "chunks-gap"),
        ({"chunks": [[0, 2], [3, 5]]}, "chunks-gap"),
        ({"chunks": [[0, 3], [2, 5]]}, "chunks-gap"),
        ({"chunks": [[1, 5]]}, "chunks-gap"),
        ({"chunks": [[0, 4]]}, "chunks-gap"),
        ({"chunks": [[0, 6]]}, "chunks-gap"),
        ({"chunks": [[2, 5], [0, 2]]}, "chunks-gap"),
        ({"chunks": [[0, 5], [5, 5]]}, "chunks-gap"),
        ({"chunks": [[0, "5"]]}, "chunks-gap"),
        ({"chunks": [0, 5]}, "chunks-gap"),
        ({"chunks": {}}, "chunks-gap"),
        ({"aux": "not hex"}, "record-damaged"),
        ({"last": 7}, "record-damaged"),
    ],
)
def test_every_wrong_claim_has_its_name(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = states()
    path = write(tmp_path, record_bytes(header(**changes), made.aux, made.last, SPEC.dtype))
    failed = open_record(path, REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == reason
    assert failed.retry is (Retry.PROBE if reason == "spec-differs" else Retry.ATTEMPT)


@pytest.mark.parametrize(
    "change",
    [
        lambda aux, last: (aux[:-1], last),
        lambda aux, last: (aux[:, :-1], last),
        lambda aux, last: (aux[..., :-1], last),
        lambda aux, last: (aux.flatten(1), last),
        lambda aux, last: (aux, last[:-1]),
        lambda aux, last: (aux, last[:, :-2]),
        lambda aux, last: (last, aux),
    ],
)
def test_tensors_of_another_shape(change: Any, tmp_path: Path) -> None:
    made = states()
    path = write(tmp_path, record_bytes(header(), *change(made.aux, made.last), SPEC.dtype))
    failed = open_record(path, REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "shape-differs"


def test_tensors_of_another_dtype(tmp_path: Path) -> None:
    made = states()
    failed = open_record(write(tmp_path, record_bytes(header(), made.aux, made.last, "f16")), REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "shape-differs"


@given(st.integers(0, len(right_bytes()) - 1))
@settings(deadline=None, max_examples=60)
def test_a_cut_record_is_damaged_wherever_it_was_cut(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = write(tmp_path_factory.mktemp("cut"), right_bytes()[:size])
    failed = open_record(path, REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-damaged"


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_flipped_header_byte_never_passes_for_another_row(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(right_bytes())
    size = len(parse_header(bytes(whole), len(whole)).header)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    whole[at] ^= 1 << bit
    got = read_record(write(tmp_path_factory.mktemp("flip"), bytes(whole)), REQUEST, SPEC)
    if not isinstance(got, Failed):
        assert torch.equal(got[0], states().aux)
        assert torch.equal(got[1], states().last)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 7, struct.pack("<Q", 1 << 60) + b"x" * 50, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_files_that_are_no_record(data: bytes, tmp_path: Path) -> None:
    failed = open_record(write(tmp_path, data), REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-damaged"


def test_missing_file_is_unreadable(tmp_path: Path) -> None:
    failed = open_record(tmp_path / "gone", REQUEST, SPEC)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-unreadable"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    path = write(tmp_path, right_bytes())
    before = len(list(Path("/proc/self/fd").iterdir()))
    damaged = write(tmp_path / "damaged", right_bytes()[:-1])
    kept = [open_record(path, REQUEST, SPEC) for _ in range(20)]
    for got in kept[:10]:
        assert isinstance(got, Captured)
        got.release()
        got.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 10
    del got, kept  # nobody wants them any more
    for answer in (open_record(damaged, REQUEST, SPEC), open_record(tmp_path, REQUEST, SPEC)):
        assert isinstance(answer, Failed)
    assert not isinstance(read_record(path, REQUEST, SPEC), Failed)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_every_refusal_has_a_meaning() -> None:
    assert set(RETRY) == set(Refusal)
    for refusal in Refusal:
        assert refused(str(refusal), "why") == Failed(str(refusal), "why", RETRY[refusal])
    assert RETRY[Refusal.SPOOL_FULL] is Retry.WAIT


def test_refusal_of_a_newer_contract_is_tried_again() -> None:
    assert refused("new-thing", "why") == Failed("unknown-refusal", "new-thing: why", Retry.ATTEMPT)
