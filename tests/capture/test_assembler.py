"""Chunks in, records or named refusals out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.assembler import Assembler, Chunk, Record, Refused
from eyas.capture.contract import LAST_PARAM, SPEC_PARAM, CaptureSpec, Refusal, RequestId

SPEC = CaptureSpec((1, 3), "loss", "bf16", 8, 100, 8, "f" * 32)
RID = str(RequestId("run00000", "sess0000", 3, 0))


class Request:
    """Stands for the server's request object."""

    def __init__(self) -> None:
        self.over = False


def chunk(start: int, stop: int, owner: Request, *, tokens: int = 10, rid: str = RID, **changes: Any) -> Chunk:
    params = changes.pop("params", {SPEC_PARAM: SPEC.spec_id, LAST_PARAM: [2, 5]})
    return Chunk(rid, start, stop, list(range(tokens)), params, owner, **changes)


def assembler(**changes: Any) -> Assembler:
    return Assembler(SPEC, is_over=lambda request: request.over, **changes)


def reason(step: Record | Refused) -> Refusal:
    assert isinstance(step, Refused)
    assert step.detail
    return step.reason


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_cut_of_the_prompt_becomes_one_gapless_record(sizes: list[int]) -> None:
    owner, start, tokens = Request(), 0, sum(sizes)
    parts = assembler()
    record: Record | Refused | None = None
    for size in sizes:
        params = {SPEC_PARAM: SPEC.spec_id, LAST_PARAM: [0, tokens]}
        record = parts.add(chunk(start, start + size, owner, tokens=tokens, params=params))
        start += size
        assert isinstance(record, Record)
        assert record.complete == (start == tokens)
        assert len(parts) == (0 if record.complete else 1)
    assert isinstance(record, Record)
    assert [edge for edge, _ in record.chunks] == [0, *(edge for _, edge in record.chunks[:-1])]
    assert record.chunks[-1][1] == record.tokens == record.positions == tokens
    assert record.bytes == SPEC.record_bytes(tokens, tokens)


def test_a_cached_prefix_is_not_a_shorter_record() -> None:
    assert reason(assembler().add(chunk(4, 10, Request()))) is Refusal.PREFIX_CACHED


@pytest.mark.parametrize(("start", "stop"), [(5, 10), (3, 10), (4, 11), (4, 4)])
def test_a_chunk_that_does_not_continue_is_refused(start: int, stop: int) -> None:
    parts, owner = assembler(), Request()
    parts.add(chunk(0, 4, owner))
    assert reason(parts.add(chunk(start, stop, owner))) is Refusal.CHUNK_GAP
    assert len(parts) == 0


def test_a_restart_at_zero_begins_the_record_anew() -> None:
    parts, owner = assembler(), Request()
    first = parts.add(chunk(0, 4, owner))
    again = parts.add(chunk(0, 6, owner, retractions=1))
    assert isinstance(again, Record)
    assert again is not first
    assert again.chunks == [(0, 6)]
    whole = parts.add(chunk(6, 10, owner, retractions=1))
    assert whole is again
    assert whole.complete


@pytest.mark.parametrize("known", [True, False])
def test_a_retracted_request_that_resumes_elsewhere_is_refused_as_retracted(known: bool) -> None:
    parts, owner = assembler(), Request()
    if known:
        parts.add(chunk(0, 4, owner))
    assert reason(parts.add(chunk(2, 10, owner, retractions=1))) is Refusal.RETRACTED


def test_two_requests_under_one_id_are_never_mixed() -> None:
    parts, first, second = assembler(), Request(), Request()
    parts.add(chunk(0, 4, first))
    assert reason(parts.add(chunk(4, 10, second))) is Refusal.PREFIX_CACHED


@pytest.mark.parametrize("spec", ["0" * 32, None, 7])
def test_another_spec_is_refused(spec: object) -> None:
    params = {SPEC_PARAM: spec, LAST_PARAM: []}
    assert reason(assembler().add(chunk(0, 10, Request(), params=params))) is Refusal.SPEC_DIFFERS


@pytest.mark.parametrize("rid", ["eyas.", RID + "0", RID.upper(), "eyas.run00000.sess0000.00000003.0a", "eyas./../x"])
def test_a_malformed_id_is_refused(rid: str) -> None:
    assert reason(assembler().add(chunk(0, 10, Request(), rid=rid))) is Refusal.BAD_REQUEST


@pytest.mark.parametrize(
    "runs", [None, "0-5", (0, 5), [0], [5, 3], [0, 11], [-1, 2], [3, 5, 4, 6], [0.0, 2.0], [[0, 1]]]
)
def test_positions_that_are_not_runs_are_refused(runs: object) -> None:
    params = {SPEC_PARAM: SPEC.spec_id, LAST_PARAM: runs}
    assert reason(assembler().add(chunk(0, 10, Request(), params=params))) is Refusal.BAD_REQUEST


def test_last_all_keeps_everything_whatever_the_request_says() -> None:
    spec = CaptureSpec((1, 3), "all", "bf16", 8, 100, 8, "f" * 32)
    record = Assembler(spec).add(chunk(0, 10, Request(), params={SPEC_PARAM: spec.spec_id, LAST_PARAM: [1, 2]}))
    assert isinstance(record, Record)
    assert record.runs == [0, 10]


def test_a_request_that_is_over_is_aborted() -> None:
    parts, owner = assembler(), Request()
    parts.add(chunk(0, 4, owner))
    owner.over = True
    assert reason(parts.add(chunk(4, 10, owner))) is Refusal.ABORTED
    assert len(parts) == 0


def test_partial_records_are_given_up_when_their_request_goes() -> None:
    gone: list[str] = []
    parts = assembler(max_age_s=60, on_drop=lambda record: gone.append(record.rid))
    rids = [str(RequestId("run00000", "sess0000", row, 0)) for row in range(4)]
    owners = [Request() for _ in rids]
    for rid, owner in zip(rids, owners, strict=True):
        assert isinstance(parts.add(chunk(0, 4, owner, rid=rid), now_s=100.0 if rid != rids[3] else 0.0), Record)
    owners[0].over = True
    parts.sweep(50.0)
    assert gone == [rids[0]]
    owners[1] = Request()  # the first object under this id dies
    del owner
    gc.collect()
    parts.sweep(50.0)
    assert gone == [rids[0], rids[1]]
    parts.sweep(61.0)
    assert gone == [rids[0], rids[1], rids[3]]
    assert len(parts) == 1


@pytest.mark.parametrize(
    "next_",
    [
        lambda parts, owner: parts.add(chunk(0, 4, owner)),  # begun anew
        lambda parts, owner: parts.add(chunk(0, 10, Request())),  # another request under the id
        lambda parts, owner: parts.add(chunk(5, 10, owner)),  # a gap
        lambda parts, owner: parts.drop(RID),
        lambda parts, owner: parts.clear(),
    ],
)
def test_whoever_holds_its_rows_hears_of_a_record_that_is_forgotten(next_: Callable[[Assembler, Request], Any]) -> None:
    gone: list[Record] = []
    parts, owner = assembler(on_drop=gone.append), Request()
    first = parts.add(chunk(0, 4, owner))
    assert gone == []
    next_(parts, owner)
    assert gone == [first]


def test_no_two_records_have_one_key() -> None:
    parts, owner = assembler(), Request()
    records = [parts.add(chunk(0, 4, owner)) for _ in range(3)]
    assert len({record.key for record in records if isinstance(record, Record)}) == 3


def test_records_in_assembly_are_bounded() -> None:
    parts, owners = assembler(max_partials=2), [Request() for _ in range(3)]
    rids = [str(RequestId("run00000", "sess0000", row, 0)) for row in range(3)]
    steps = [parts.add(chunk(0, 4, owner, rid=rid)) for rid, owner in zip(rids, owners, strict=True)]
    assert reason(steps[2]) is Refusal.SPOOL_FULL
    assert isinstance(parts.add(chunk(4, 10, owners[0], rid=rids[0])), Record)
