"""Both kinds of writers, and what comes back from them whatever happens: every block, every byte of quota, a word."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eyas.capture import recorder as recorder_module
from eyas.capture import writer_process, writing
from eyas.capture.assembler import Chunk
from eyas.capture.contract import (
    LAST_PARAM,
    RECORD_METADATA,
    SPEC_PARAM,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    Refusal,
    Refused,
    RequestId,
    field_hash,
    token_hash,
)
from eyas.capture.cost import ForwardCost
from eyas.capture.encoding import encode
from eyas.capture.forward import prompt_bytes
from eyas.capture.recorder import Forward, Recorder, Resources
from eyas.capture.settings import WRITER_MODES, ServerSettings
from eyas.capture.spool import Spool
from eyas.capture.writer_process import ProcessWriters

H, LAYERS = 8, (1, 3)


class Request:
    over = False


Make = Callable[..., Recorder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Recorder] = []

    def recorder(writers: str = "threads", *, dtype: str = "f32", quota: int = 1 << 20, **changes: Any) -> Recorder:
        spec = CaptureSpec(LAYERS, "loss", dtype, H, 100, 8, "f" * 32)
        spool = Spool(ServerSettings(LAYERS, str(tmp_path / "spool"), dtype=dtype, quota_bytes=quota))
        resources = Resources(writers=writers, **{"forward_tokens": 64} | changes)
        made.append(Recorder(spec, spool, resources, is_over=lambda request: request.over))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def rid(row: int, attempt: int = 0) -> str:
    return str(RequestId("run00000", "sess0000", row, attempt))


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, len(LAYERS) * H, generator=generator),
        torch.randn(tokens, H, generator=generator),
        torch.randint(0, 100, (tokens,), generator=generator),
    )


def chunk(to: Recorder, row: int, start: int, stop: int, prompt: list[int], owner: Request, **changes: Any) -> Chunk:
    params = {SPEC_PARAM: to.spec_id, LAST_PARAM: changes.pop("runs", [0, len(prompt)])}
    return Chunk(rid(row), start, stop, prompt, params, owner, **changes)


def send(to: Recorder, row: int, tokens: int, cuts: list[int] | None = None) -> CaptureReply:
    aux, last, ids = states(tokens)
    owner, edges, word = Request(), [0, *(cuts or []), tokens], None
    for start, stop in zip(edges[:-1], edges[1:], strict=True):  # noqa: RUF007 - pairs of edges
        piece = chunk(to, row, start, stop, ids.tolist(), owner)
        word = to.capture(piece, aux[start:stop], last[start:stop], ids[start:stop])
        if word is not None and word.status == "refused":
            break
    assert word is not None
    return word


def wait_until(happened: Callable[[], Any], otherwise: str) -> None:
    deadline_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.005)


def ended(to: Recorder, row: int) -> Path:
    ends = [to.spool.folder / f"{rid(row)}{suffix}" for suffix in (".safetensors", ".failed")]
    wait_until(lambda: any(path.exists() for path in ends), "neither record nor failure")
    return next(path for path in ends if path.exists())


def must_be_empty(to: Recorder) -> None:
    """Whatever was on its way has gone: no block held, no room reserved, no file half written."""
    wait_until(lambda: len(to.arena.ring) == 0, "blocks are still held")
    assert to.arena.ring.room() == to.arena.ring.capacity
    published = sum(path.stat().st_size for path in to.spool.folder.glob("*.safetensors"))
    wait_until(lambda: to.spool.used_bytes <= published, "room is still reserved")
    wait_until(lambda: not list(to.spool.folder.glob(".*")), "files are half written")


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("writers", WRITER_MODES)
def test_records_are_right_and_leave_nothing_behind(make: Make, writers: str, dtype: str) -> None:
    to = make(writers, dtype=dtype)
    for row in range(12):
        assert send(to, row, 20 + row, [3, 9][: row % 3]).status == "accepted"
    for row in range(12):
        aux, last, ids = states(20 + row)
        with safe_open(ended(to, row), framework="pt") as file:
            got_aux, got_last = file.get_tensor("aux"), file.get_tensor("last")
            header = RecordHeader.from_json(file.metadata()[RECORD_METADATA])
        assert torch.equal(got_aux, encode(aux.view(-1, len(LAYERS), H), dtype))
        assert torch.equal(got_last, encode(last, dtype))
        assert header.tokens == token_hash(ids.tolist())
        assert int(header.aux, 16) == field_hash(got_aux.contiguous().view(torch.uint8).numpy())
    must_be_empty(to)


@pytest.mark.parametrize("writers", WRITER_MODES)
def test_other_tokens_than_the_requests_are_named(make: Make, writers: str) -> None:
    to = make(writers)
    aux, last, ids = states(6)
    word = to.capture(chunk(to, 0, 0, 6, ids.flip(0).tolist(), Request()), aux, last, ids)
    assert word is not None
    assert word.status == "accepted"
    assert json.loads(ended(to, 0).read_text())["reason"] == "tokens-differ"
    must_be_empty(to)


@pytest.mark.parametrize("writers", WRITER_MODES)
@pytest.mark.parametrize("how", ["over", "begun anew", "gap", "refused", "another", "weights"])
def test_a_record_given_up_in_its_middle_leaves_nothing(make: Make, writers: str, how: str) -> None:
    to, owner = make(writers), Request()
    aux, last, ids = states(8)
    prompt = ids.tolist()
    assert to.capture(chunk(to, 0, 0, 4, prompt, owner), aux[:4], last[:4], ids[:4]) is None
    wait_until(lambda: list(to.spool.folder.glob(".*.tmp")), "its first chunk was never written")
    match how:
        case "over":
            owner.over = True
            to.sweep()
        case "begun anew":  # and then whole: the second life's file is not the first one's
            again = chunk(to, 0, 0, 8, prompt, owner, retractions=1)
            assert to.capture(again, aux, last, ids) is not None
            with safe_open(ended(to, 0), framework="pt") as file:
                assert torch.equal(file.get_tensor("aux").flatten(1), aux)
        case "gap":
            word = to.capture(chunk(to, 0, 5, 8, prompt, owner), aux[5:], last[5:], ids[5:])
            assert word is not None
            assert word.reason == "chunk-gap"
        case "refused":
            to.refuse(rid(0), prompt, Refused(Refusal.PLUGIN_ERROR, "boom"))
        case "another":
            word = to.capture(chunk(to, 0, 4, 8, prompt, Request()), aux[4:], last[4:], ids[4:])
            assert word is not None
            assert word.reason == "prefix-cached"
        case _:
            to.end()
    must_be_empty(to)


STEPS = {
    "fill": (recorder_module, "fill"),
    "jobs": (recorder_module, "jobs_of"),
    "arrive": (recorder_module, "arrive"),
    "hash": (writing, "hash_piece"),
    "write": (writing, "write_at"),
    "finish": (writing.RecordWriter, "_finish"),
}


@pytest.mark.parametrize("cuts", [[], [3]])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_step_fails_everything_comes_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, step: str, cuts: list[int]
) -> None:
    to = make()
    owner, name = STEPS[step]
    working, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("made to fail")
        return working(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    aux, last, ids = states(6)
    forward, request, prompt = to.forward(aux, last, ids), Request(), ids.tolist()
    first = (cuts or [6])[0]
    forward.take(chunk(to, 0, 0, first, prompt, request), 0)
    if step in ("fill", "jobs"):
        with pytest.raises(OSError, match="made to fail"):
            forward.send()
        forward.abandon()
    else:
        forward.send()
        if cuts:
            to.capture(chunk(to, 0, 3, 6, prompt, request), aux[3:], last[3:], ids[3:])
        assert ended(to, 0).suffix == ".failed"
    must_be_empty(to)
    assert send(to, 1, 6, cuts).status == "accepted"
    assert ended(to, 1).suffix == ".safetensors"
    assert calls > 0


def test_one_request_of_a_forward_can_be_given_up_without_the_others(make: Make) -> None:
    to = make()
    aux, last, ids = states(10)
    prompts = ids[:4].tolist(), ids[4:].tolist()
    forward = to.forward(aux, last, ids)
    for row, (prompt, at) in enumerate(zip(prompts, (0, 4), strict=True)):
        assert forward.take(chunk(to, row, 0, len(prompt), prompt, Request()), at) is not None
    forward.abandon(rid(0))
    forward.send()
    with safe_open(ended(to, 1), framework="pt") as file:
        assert torch.equal(file.get_tensor("aux").flatten(1), aux[4:])
    must_be_empty(to)
    assert not list(to.spool.folder.glob(f"*{rid(0)}*"))


def test_a_block_is_held_for_each_of_its_requests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    to = make()
    aux, last, ids = states(10)
    flown: list[Any] = []
    monkeypatch.setattr(to, "fly", lambda span, jobs: flown.append((span, jobs)))
    forward = to.forward(aux, last, ids)
    for row, at in enumerate((0, 4, 7)):
        forward.take(chunk(to, row, 0, 3, ids[at : at + 3].tolist(), Request()), at)
    forward.send()
    ((span, jobs),) = flown
    assert span.block.readers == sum(isinstance(job, writing.Part) for job in jobs) == 3
    monkeypatch.undo()
    to.fly(span, jobs)
    must_be_empty(to)


def test_rows_between_those_of_others_are_taken_wherever_they_lie(make: Make) -> None:
    to = make()
    aux, last, ids = states(40)
    forward = to.forward(aux, last, ids)
    runs = [0, 1, 2, 3]
    for row in range(10):  # every second pair of rows, in more pieces than are copied one by one
        prompt = ids[4 * row : 4 * row + 3].tolist()
        assert forward.take(chunk(to, row, 0, 3, prompt, Request(), runs=runs), 4 * row) is not None
    forward.send()
    for row in range(10):
        with safe_open(ended(to, row), framework="pt") as file:
            assert torch.equal(file.get_tensor("aux").flatten(1), aux[4 * row : 4 * row + 3])
            assert torch.equal(file.get_tensor("last"), last[[4 * row, 4 * row + 2]])


# --- room -------------------------------------------------------------------------------------------------------------


def test_no_room_is_a_refusal_by_name_and_passes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that are behind cost the forward thread no wait; what they finish makes room again."""
    to = make(forward_tokens=16, arena_bytes=1)
    held: list[Any] = []
    monkeypatch.setattr(to, "fly", lambda span, jobs: held.append((span, jobs)))
    words = [send(to, row, 16) for row in range(3)]
    assert [word.reason for word in words] == ["", "", "spool-full"]
    assert "writers are behind" in words[2].detail
    monkeypatch.undo()
    for span, jobs in held:
        to.fly(span, jobs)
    assert {ended(to, row).suffix for row in (0, 1)} == {".safetensors"}
    must_be_empty(to)
    assert send(to, 3, 16).status == "accepted"


def test_a_chunk_that_can_never_fit_is_not_told_to_wait(make: Make) -> None:
    to = make(forward_tokens=16, arena_bytes=1)
    word = send(to, 0, 300)
    assert word.reason == "row-too-large"
    assert "serve.arena_bytes" in word.detail
    must_be_empty(to)


def test_a_row_much_larger_than_the_arena_passes_through_it(make: Make) -> None:
    """Its chunks leave the arena as they come: what bounds it is the quota."""
    to = make(forward_tokens=16, arena_bytes=1)
    aux, last, ids = states(1600)
    assert to.spec.record_bytes(1600, 1600) > 10 * to.arena.size
    owner, word = Request(), None
    for start in range(0, 1600, 16):
        rows = slice(start, start + 16)
        piece = chunk(to, 0, start, start + 16, ids.tolist(), owner)
        wait_until(lambda: len(to.arena.ring) < 2, "the arena never emptied")
        word = to.capture(piece, aux[rows], last[rows], ids[rows])
    assert word is not None
    assert word.status == "accepted"
    with safe_open(ended(to, 0), framework="pt") as file:
        assert torch.equal(file.get_tensor("aux").flatten(1), aux)
        assert torch.equal(file.get_tensor("last"), last)
    must_be_empty(to)


@pytest.mark.parametrize("room", [0, 8, 96, 10_000])
def test_a_header_takes_whatever_room_was_left_for_it(make: Make, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Cut into more chunks than its first one made likely, a record moves in its file."""
    monkeypatch.setattr(writing.RecordWriter, "_header_room", lambda writer, record: 8 + room)
    to = make()
    assert send(to, 0, 30, list(range(1, 30))).status == "accepted"
    with safe_open(ended(to, 0), framework="pt") as file:
        assert len(RecordHeader.from_json(file.metadata()[RECORD_METADATA]).chunks) == 30
        assert torch.equal(file.get_tensor("aux").flatten(1), states(30)[0])
        assert torch.equal(file.get_tensor("last"), states(30)[1])
    must_be_empty(to)


# --- the process ------------------------------------------------------------------------------------------------------


def process(to: Recorder) -> ProcessWriters:
    assert isinstance(to.writers, ProcessWriters)
    return to.writers


def stopped(to: Recorder) -> int:
    """The process, stopped in its tracks: what it is given now it has not done when it dies."""
    pid = process(to).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_process_that_dies_costs_its_records_and_nothing_else(make: Make) -> None:
    to, owner = make("process"), Request()
    aux, last, ids = states(8)
    assert send(to, 0, 8).status == "accepted"
    assert ended(to, 0).suffix == ".safetensors"
    pid = stopped(to)
    assert send(to, 1, 8).status == "accepted"
    assert to.capture(chunk(to, 2, 0, 4, ids.tolist(), owner), aux[:4], last[:4], ids[:4]) is None
    wait_until(lambda: len(process(to)._child.blocks) == 2, "it was never given the chunks")  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    note = json.loads(ended(to, 1).read_text())
    assert (note["reason"], note["detail"]) == ("write-failed", "the writer process ended")
    word = to.capture(chunk(to, 2, 4, 8, ids.tolist(), owner), aux[4:], last[4:], ids[4:])
    assert word is not None
    assert word.status == "accepted"  # the loss is told when the record would have been published
    assert json.loads(ended(to, 2).read_text())["reason"] == "write-failed"
    wait_until(lambda: len(to.arena.ring) == 0, "blocks are still held")
    assert send(to, 3, 8, [2]).status == "accepted"
    assert ended(to, 3).suffix == ".safetensors"
    assert process(to).pid not in (None, pid)
    for torn in to.spool.folder.glob(".*"):  # its half-written files age out
        torn.unlink()
    must_be_empty(to)


def test_a_process_that_keeps_dying_ends_capture_by_name(make: Make) -> None:
    to = make("process")
    for row in range(writer_process._MOST_DEATHS):
        pid = stopped(to)
        assert send(to, row, 8).status == "accepted"
        wait_until(lambda: process(to)._child is not None and process(to)._child.finished, "not given")
        os.kill(pid, signal.SIGKILL)
        assert ended(to, row).suffix == ".failed"
        if row + 1 < writer_process._MOST_DEATHS:
            wait_until(lambda: process(to).pid is None, "its end was not seen")
            to.writers.submit([])  # as the idle thread does
    word = send(to, 9, 8)
    assert (word.status, word.reason) == ("refused", "plugin-error")
    assert "3 times in a row" in word.detail
    for torn in to.spool.folder.glob(".*"):
        torn.unlink()
    must_be_empty(to)


def test_a_process_that_cannot_be_started_is_an_error_at_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        make("process")


def test_the_process_goes_with_its_server(make: Make) -> None:
    """Its end of the socket closes, however the server ended."""
    to = make("process")
    child = process(to)._child
    assert child is not None
    process(to)._closing = True
    child.channel.shutdown(2)
    wait_until(lambda: child.process.poll() is not None, "it lives on")


# --- the forward thread -----------------------------------------------------------------------------------------------


def test_cost_is_told_in_percentiles_of_the_last_thousand() -> None:
    cost = ForwardCost()
    assert (cost.p50_us, cost.p99_us) == (0.0, 0.0)
    for microseconds in range(1, 1025):
        cost.add(microseconds / 1e6)
    assert (cost.p50_us, cost.p99_us) == (524.0, 1014.0)
    for _ in range(1024):
        cost.add(7e-6)
    assert (cost.p50_us, cost.p99_us) == (7.0, 7.0)


@pytest.mark.parametrize("kind", ["list", "tuple", "q", "l", "i"])
@pytest.mark.parametrize("tokens", [[], [0], [5, 2**31 - 1, -1]])
def test_a_prompts_bytes_are_those_that_are_hashed(kind: str, tokens: list[int]) -> None:
    from array import array

    prompt: Any = {"list": list, "tuple": tuple}[kind](tokens) if len(kind) > 1 else array(kind, tokens)
    assert prompt_bytes(prompt) == array("i", tokens).tobytes()


def test_a_token_id_of_more_than_32_bits_is_not_cut_short() -> None:
    from array import array

    for prompt in ([2**31], array("q", [2**31])):
        with pytest.raises(Exception, match=r"format|range"):
            prompt_bytes(prompt)


@pytest.mark.parametrize("brought", [(None, None, None), states(5)], ids=["no states", "others' states"])
def test_nothing_is_sent_of_a_forward_without_rows_of_ours(make: Make, brought: tuple[Any, Any, Any]) -> None:
    to = make()
    forward: Forward = to.forward(*brought)
    forward.send()
    assert len(to.arena.ring) == 0, "a block was taken for it"
    assert not list(to.spool.folder.glob("*.safetensors"))
    must_be_empty(to)
