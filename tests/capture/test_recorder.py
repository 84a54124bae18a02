"""Chunks of states in, record files or named failures out, through real writer threads."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eyas.capture.assembler import Chunk, Refused
from eyas.capture.contract import (
    LAST_PARAM,
    RECORD_METADATA,
    SPEC_PARAM,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    Refusal,
    RequestId,
    field_hash,
    runs_hash,
    token_hash,
)
from eyas.capture.recorder import Recorder, Resources
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Spool
from eyas.capture.tensorfile import parse_header

H, LAYERS = 8, (1, 3)


class Request:
    over = False


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def recorder(dtype: str = "f32", quota_bytes: int = 1 << 20) -> Recorder:
        spec = CaptureSpec(LAYERS, "loss", dtype, H, 100, 8, "f" * 32)
        settings = ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool"), dtype=dtype, quota_bytes=quota_bytes)
        made.append(Recorder(spec, Spool(settings), is_over=lambda request: request.over))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def rid(row: int) -> str:
    return str(RequestId("run00000", "sess0000", row, 0))


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed aux [T, A * H], last [T, H], ids [T]."""
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, len(LAYERS) * H, generator=generator),
        torch.randn(tokens, H, generator=generator),
        torch.randint(0, 100, (tokens,), generator=generator),
    )


def send(recorder: Recorder, row: int, tokens: int, cuts: list[int], runs: list[int]) -> list[CaptureReply | None]:
    aux, last, ids = states(tokens)
    owner, edges = Request(), [0, *cuts, tokens]
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: runs}
    replies = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):  # noqa: RUF007 - pairs of edges
        chunk = Chunk(rid(row), start, stop, ids.tolist(), params, owner)
        buffers = [t[start:stop].clone() for t in (aux, last, ids)]
        replies.append(recorder.capture(chunk, *buffers))
        for buffer in buffers:
            buffer.zero_()  # the server's next step overwrites its outputs
    return replies


def ended(recorder: Recorder, row: int) -> Path:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for suffix in (".safetensors", ".failed"):
            if (path := recorder.spool.folder / f"{rid(row)}{suffix}").exists():
                return path
        time.sleep(0.005)
    raise AssertionError("neither record nor failure")


def test_an_idle_writer_holds_nothing(make: Callable[..., Recorder]) -> None:
    class Prompt(list[int]):
        """A list that can be watched."""

    recorder, owner = make(), Request()
    aux, last, ids = states(6)
    prompt = Prompt(ids.tolist())
    watched = weakref.ref(prompt)
    chunk = Chunk(rid(0), 0, 6, prompt, {SPEC_PARAM: recorder.spec_id, LAST_PARAM: []}, owner)
    recorder.capture(chunk, aux, last, ids)
    del prompt, chunk
    ended(recorder, 0)
    until = time.monotonic() + 2
    while watched() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert watched() is None


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 9]])
def test_a_record_holds_every_row_and_proves_it(make: Callable[..., Recorder], dtype: str, cuts: list[int]) -> None:
    recorder, runs = make(dtype), [0, 2, 5, 11]
    *middle, final = send(recorder, 0, 12, cuts, runs)
    aux, last, ids = states(12)
    assert middle == [None] * len(cuts)
    assert final == CaptureReply("accepted", recorder.spec_id, token_hash(ids.tolist()), 12)
    path = ended(recorder, 0)
    with safe_open(path, framework="pt") as file:
        header = RecordHeader.from_json(file.metadata()[RECORD_METADATA])
        got_aux, got_last = file.get_tensor("aux"), file.get_tensor("last")
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    assert torch.equal(got_aux, aux.view(12, len(LAYERS), H).to(kind))
    assert torch.equal(got_last, last[[0, 1, *range(5, 11)]].to(kind))
    edges = [0, *cuts, 12]
    assert header == RecordHeader(
        rid=rid(0),
        spec_id=recorder.spec_id,
        tokens=token_hash(ids.tolist()),
        rows=12,
        positions=8,
        runs=f"{runs_hash(runs):016x}",
        chunks=[list(pair) for pair in zip(edges[:-1], edges[1:], strict=True)],  # noqa: RUF007
        aux=f"{field_hash(got_aux.view(torch.uint8).numpy()):016x}",
        last=f"{field_hash(got_last.view(torch.uint8).numpy()):016x}",
    )
    data = path.read_bytes()
    assert parse_header(data, len(data)).tensors["aux"].dtype == {"f32": "F32", "bf16": "BF16", "f16": "F16"}[dtype]


def test_no_kept_positions_is_an_empty_tensor(make: Callable[..., Recorder]) -> None:
    recorder = make()
    send(recorder, 0, 5, [2], [])
    with safe_open(ended(recorder, 0), framework="pt") as file:
        assert file.get_tensor("last").shape == (0, H)


def test_many_records_through_two_writers(make: Callable[..., Recorder]) -> None:
    recorder = make()
    for row in range(40):
        assert send(recorder, row, 10 + row, [3, 7], [0, 4])[-1] is not None
    for row in range(40):
        with safe_open(ended(recorder, row), framework="pt") as file:
            assert torch.equal(file.get_tensor("aux").flatten(1), states(10 + row)[0])


def test_other_tokens_than_the_requests_become_a_named_failure(make: Callable[..., Recorder]) -> None:
    recorder = make()
    aux, last, ids = states(6)
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: [0, 6]}
    recorder.capture(Chunk(rid(0), 0, 6, ids.flip(0).tolist(), params, Request()), aux, last, ids)
    assert json.loads(ended(recorder, 0).read_text())["reason"] == "tokens-differ"
    assert recorder.spool.used_bytes == 0


@pytest.mark.parametrize(
    ("missing", "how"), [(n, how) for n in range(3) for how in ("absent", "short")] + [(0, "narrow"), (1, "narrow")]
)
def test_states_of_another_shape_are_refused(make: Callable[..., Recorder], missing: int, how: str) -> None:
    recorder = make()
    brought: list[torch.Tensor | None] = list(states(6))
    whole = brought[missing]
    assert whole is not None
    brought[missing] = {"absent": None, "short": whole[:5], "narrow": whole[..., :4]}[how]
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: [0, 6]}
    reply = recorder.capture(Chunk(rid(0), 0, 6, states(6)[2].tolist(), params, Request()), *brought)
    assert reply is not None
    assert (reply.status, reply.reason) == ("refused", "no-states")
    assert recorder.spool.used_bytes == 0


def test_a_refusal_in_a_later_chunk_frees_the_reservation(make: Callable[..., Recorder]) -> None:
    recorder, owner = make(), Request()
    aux, last, ids = states(8)
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: [0, 8]}
    first = Chunk(rid(0), 0, 4, ids.tolist(), params, owner)
    assert recorder.capture(first, aux[:4], last[:4], ids[:4]) is None
    assert recorder.spool.used_bytes == recorder.spec.record_bytes(8, 8)
    gap = recorder.capture(Chunk(rid(0), 5, 8, ids.tolist(), params, owner), aux[5:], last[5:], ids[5:])
    assert gap is not None
    assert gap.reason == "chunk-gap"
    assert recorder.spool.used_bytes == 0


def test_a_sweep_frees_what_an_aborted_request_reserved(make: Callable[..., Recorder]) -> None:
    recorder, owner = make(), Request()
    aux, last, ids = states(8)
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: [0, 8]}
    recorder.capture(Chunk(rid(0), 0, 4, ids.tolist(), params, owner), aux[:4], last[:4], ids[:4])
    recorder.sweep()
    assert recorder.spool.used_bytes > 0
    owner.over = True
    recorder.sweep()
    assert recorder.spool.used_bytes == 0


def test_quota_is_taken_at_the_first_chunk(make: Callable[..., Recorder]) -> None:
    size = CaptureSpec(LAYERS, "loss", "f32", H, 100, 8, "f" * 32).record_bytes(8, 8)
    recorder = make(quota_bytes=size)
    aux, last, ids = states(8)
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: [0, 8]}
    owner = Request()
    assert recorder.capture(Chunk(rid(0), 0, 2, ids.tolist(), params, owner), aux[:2], last[:2], ids[:2]) is None
    other = send(recorder, 1, 2, [], [])[-1]
    assert other is not None
    assert other.reason == "spool-full"
    larger = send(recorder, 2, 20, [], [])[-1]
    assert larger is not None
    assert larger.reason == "row-too-large"


def test_a_folder_that_vanishes_after_acceptance_does_not_stop_the_writers(make: Callable[..., Recorder]) -> None:
    recorder = make()
    recorder.spool.folder.rename(recorder.spool.folder.with_name("gone"))
    reply = send(recorder, 0, 6, [], [])[-1]
    assert reply is not None
    assert reply.reason == "write-failed"
    recorder.spool.folder.with_name("gone").rename(recorder.spool.folder)
    aux, last, ids = states(6)
    params = {SPEC_PARAM: recorder.spec_id, LAST_PARAM: []}
    owner = Request()
    assert recorder.capture(Chunk(rid(1), 0, 3, ids.tolist(), params, owner), aux[:3], last[:3], ids[:3]) is None
    recorder.spool.folder.rename(recorder.spool.folder.with_name("gone"))
    final = recorder.capture(Chunk(rid(1), 3, 6, ids.tolist(), params, owner), aux[3:], last[3:], ids[3:])
    assert final is not None
    assert final.status == "accepted"  # the loss comes later, and there is nowhere to say it
    time.sleep(0.2)
    recorder.spool.folder.with_name("gone").rename(recorder.spool.folder)
    send(recorder, 2, 6, [], [])
    assert ended(recorder, 2).suffix == ".safetensors"


def test_giving_up_frees_and_names(make: Callable[..., Recorder]) -> None:
    recorder = make()
    reply = recorder.refuse(rid(0), [1, 2, 3], Refused(Refusal.PLUGIN_ERROR, "boom"))
    assert (reply.status, reply.reason, reply.detail, reply.rows) == ("refused", "plugin-error", "boom", 3)


def test_a_writer_that_cannot_even_say_so_goes_on_with_the_next_record(tmp_path: Path) -> None:
    """Its thread would die otherwise, and all later records of its lane would be promised and never come."""

    class Wordless(Spool):
        @contextlib.contextmanager
        def record_file(self, rid: str) -> Iterator[int]:
            if "00000000" in rid:
                raise OSError("made to fail")
            with super().record_file(rid) as descriptor:
                yield descriptor

        def fail(self, rid: str, reason: Refusal, detail: str) -> None:
            raise RuntimeError("made to fail")

    spec = CaptureSpec(LAYERS, "loss", "f32", H, 100, 8, "f" * 32)
    spool = Wordless(ServerSettings(layers=LAYERS, spool=str(tmp_path / "spool"), dtype="f32"))
    recorder = Recorder(spec, spool, Resources(threads=1))
    for row in range(2):
        (word,) = send(recorder, row, 4, [], [])
        assert word is not None
        assert word.status == "accepted"
    assert ended(recorder, 1).suffix == ".safetensors"
    recorder.close()
