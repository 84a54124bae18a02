"""Rows into spans, spans into the arena, and the bytes of host tensors."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.arena import Arena
from eyas.capture.assembler import kept_slices
from eyas.capture.contract import DTYPES, count_of, runs_of
from eyas.capture.encoding import encode
from eyas.capture.hostcopy import CpuStage, arrive, host_bytes, take_rows


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
