"""Device to host without stopping the forward.

On the forward thread `snapshot` does one copy on the device, on the current stream: the server's outputs may live in
buffers that its next step overwrites. A writer's `HostCopy` then waits for the snapshot's event and brings it to host
memory on a stream of its own, through one pinned buffer that it keeps.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of one chunk, safe from the server's next step.

    Attributes:
        tensors: on the device they came from.
        event: recorded after the copy; None on CPU.
    """

    tensors: tuple[torch.Tensor, ...]
    event: Any

    @property
    def device_bytes(self) -> int:
        """Bytes held on an accelerator."""
        return sum(t.nbytes for t in self.tensors if t.device.type != "cpu")


def snapshot(tensors: tuple[torch.Tensor, ...]) -> Snapshot:
    """Mark freshly copied device tensors: the event says when they are filled. Call on the forward thread."""
    device = tensors[0].device
    if device.type == "cpu":
        return Snapshot(tensors, None)
    event = torch.get_device_module(device).Event()
    event.record()
    return Snapshot(tensors, event)


class HostCopy:
    """Brings snapshots to host memory; one per writer thread."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pinned: torch.Tensor | None = None

    def fetch(self, shot: Snapshot) -> tuple[torch.Tensor, ...]:
        """The snapshot's tensors in host memory. Blocks this thread only."""
        if shot.event is None:
            return shot.tensors
        module = torch.get_device_module(shot.tensors[0].device)
        if self._stream is None:
            self._stream = module.Stream(shot.tensors[0].device)
        with module.stream(self._stream):
            self._stream.wait_event(shot.event)
            return tuple(self._through_pinned(tensor) for tensor in shot.tensors)

    def _through_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes == 0:
            return host
        if self._pinned is None or self._pinned.nbytes < tensor.nbytes:
            self._pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = self._pinned[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host.copy_(staged)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's bytes without a copy. The view keeps the tensor's memory alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only contiguous host tensors have bytes to show")
    if tensor.nbytes == 0:
        return memoryview(b"")
    window = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # The address alone would not keep a temporary tensor from being freed.
    window.owner = tensor  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(window).cast("B")
