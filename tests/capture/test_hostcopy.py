"""Bytes of host tensors without a copy."""

from __future__ import annotations

import gc

import pytest
import torch

from eyas.capture.hostcopy import HostCopy, host_bytes, snapshot


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


def test_a_snapshot_on_the_cpu_is_there_at_once() -> None:
    tensors = (torch.arange(3), torch.zeros(2, 2))
    shot = snapshot(tensors)
    assert shot.device_bytes == 0
    assert HostCopy().fetch(shot) is tensors
