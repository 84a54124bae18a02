"""Rows into spans, spans into the arena, and the bytes of host tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.arena import Arena
from eyas.capture.assembler import kept_slices
from eyas.capture.contract import DTYPES, count_of, runs_of
from eyas.capture.encoding import encode
from eyas.capture.hostcopy import CpuStage, DeviceStage, arrive, host_bytes, take_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_bytes_are_the_tensors(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    assert bytes(host_bytes(tensor)) == bytes(tensor.view(torch.uint8).flatten().tolist())


def test_bytes_outlive_a_temporary_tensor() -> None:
    views = [host_bytes(torch.full((1000,), value, dtype=torch.uint8)) for value in range(50)]
    gc.collect()
    assert all(set(view) == {value} for value, view in enumerate(views))


def test_an_empty_tensor_has_no_bytes() -> None:
    assert bytes(host_bytes(torch.empty(0, 7))) == b""


def test_strided_tensors_have_no_bytes_to_show() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        host_bytes(torch.zeros(4, 4).t())


@given(st.sets(st.integers(0, 59)), st.lists(st.integers(1, 59), max_size=5), st.sampled_from(sorted(DTYPES)))
def test_rows_of_slices_are_the_positions_in_order(kept: set[int], cuts: list[int], dtype: str) -> None:
    """Few slices are copied one by one, many gathered; neighbours of two requests' go as one."""
    positions = sorted(kept)
    runs = runs_of(positions)
    states = torch.randn(60, 4, generator=torch.Generator().manual_seed(len(kept)))
    edges = [0, *sorted(set(cuts)), 60]
    slices = [
        (start + a, start + b) for start, stop in itertools.pairwise(edges) for a, b in kept_slices(runs, start, stop)
    ]
    want = encode(states[positions], dtype)
    out = torch.zeros_like(want)
    take_rows(out, states, slices, dtype)
    assert count_of(runs) == len(want)
    assert torch.equal(out, want)


def test_on_a_cpu_a_span_is_its_block_of_the_arena() -> None:
    arena = Arena(4096)
    stage = CpuStage(arena)
    assert stage.room() == stage.capacity == 4096
    first, second = stage.begin(100), stage.begin(1000)
    second.bytes.fill_(7)
    stage.send(second)
    arrive(second)
    stage.landed(second)
    start = second.block.start
    assert bytes(arena.memory[start : start + 1000]) == bytes([7]) * 1000
    with pytest.raises(RuntimeError, match="no room"):
        stage.begin(4096)
    stage.cancel(first)
    arena.read(second.block.number)
    assert stage.room() == 4096
    arena.close()


class FakeDevice:
    """A device module whose copies are done at once, and which says in what order it was asked."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: self.said.append("our stream waits for the forward's"))

    def Event(self, blocking: bool = False) -> SimpleNamespace:
        name = "copied" if blocking else "filled"
        return SimpleNamespace(
            record=lambda: self.said.append(name), synchronize=lambda: self.said.append(f"{name} awaited")
        )

    def stream(self, stream: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return fake


def test_from_a_device_one_copy_after_the_forward_brings_a_span_to_its_block(device: FakeDevice) -> None:
    arena = Arena(4096)
    stage = DeviceStage(arena, torch.device("cpu"), 1024)
    assert (stage.capacity, stage.room()) == (1024, 1024)
    span = stage.begin(1000)
    span.bytes.fill_(7)
    stage.send(span)
    arrive(span)
    assert device.said == ["filled", "our stream waits for the forward's", "copied", "copied awaited"]
    assert bytes(arena.memory[span.block.start : span.block.start + 1000]) == bytes([7]) * 1000
    others = [stage.begin(900), stage.begin(800)]
    assert (stage.room(), stage.behind()) == (0, "copies to the host are behind")
    stage.landed(span)
    assert stage.room() == 1024
    for each in others:
        stage.landed(each)
    assert (arena.ring.room(), stage.behind()) == (1024, "writers are behind")
    for each in (span, *others):
        arena.read(each.block.number)
    assert arena.ring.room() == 4096
    arena.close()


def test_whatever_is_full_or_given_up_both_memories_come_back(device: FakeDevice) -> None:
    arena = Arena(1024)
    stage = DeviceStage(arena, torch.device("cpu"), 2048)
    first = stage.begin(1000)
    stage.send(first)
    stage.landed(first)
    assert stage.room() == 0  # the arena's
    with pytest.raises(RuntimeError, match="no room"):
        stage.begin(100)
    arena.read(first.block.number)
    assert stage.room() == 1024
    stage.cancel(stage.begin(1000))
    assert stage.room() == 1024
    assert arena.ring.room() == 1024
    arena.close()


def test_memory_that_cannot_be_pinned_is_an_error_at_the_start(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(1024)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        DeviceStage(arena, torch.device("cpu"), 1024)
    arena.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_states_reach_the_arena() -> None:
    arena = Arena(64 << 20)
    stage = DeviceStage(arena, torch.device("cuda"), 16 << 20)
    spans = []
    for value in range(8):
        assert stage.room() >= 4 << 20
        spans.append(stage.begin(4 << 20))
        spans[-1].bytes.fill_(value)
        stage.send(spans[-1])
    for value, span in enumerate(spans):
        arrive(span)
        stage.landed(span)
        block = arena.memory[span.block.start : span.block.start + (4 << 20)]
        assert block == bytes([value]) * (4 << 20)
        arena.read(span.block.number)
    assert stage.room() == stage.capacity
    arena.close()
