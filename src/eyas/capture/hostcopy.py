"""States from where the server computed them to the host arena, without stopping the forward.

A stage hands out spans: bytes to be filled on the forward's own stream, which then lie in a block of the arena.

    CpuStage     a span is the block itself
    DeviceStage  a span is in device memory set aside; one copy a forward brings it to the block, on a stream of its own

The forward thread never waits: `begin`, fill, `send`. Another thread waits in `arrive` and then calls `landed`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from eyas.capture.arena import Arena, Block, Segments
from eyas.capture.encoding import encode_into

_FEW_SLICES: Final = 8  # from there on, gathering by an index is less work for the forward thread


@dataclass(slots=True, eq=False)
class Span:
    """A forward's bytes on their way.

    Attributes:
        bytes: U8 tensor to fill.
        block: where they will be in the arena; one reader, until whoever takes it on says how many.
        staged: their place in device memory.
        copied: event of their copy to the host.
    """

    bytes: torch.Tensor
    block: Block
    staged: Block | None = None
    copied: Any = None


class Stage(Protocol):
    """Where spans come from; `begin`, `send` and `cancel` are the forward thread's."""

    capacity: int

    def room(self) -> int:
        """Bytes that `begin` could give now; it can only grow until then."""
        ...

    def behind(self) -> str:
        """Who keeps `room` from growing."""
        ...

    def begin(self, size: int) -> Span:
        """Raises RuntimeError where there is no room."""
        ...

    def send(self, span: Span) -> None:
        """The span is filled (or will be, on the current stream): bring it to its block."""
        ...

    def cancel(self, span: Span) -> None:
        """Nothing comes of the span."""
        ...

    def landed(self, span: Span) -> None:
        """Its bytes are in the block, or never will be: give back the device memory."""
        ...


class CpuStage:
    """States are in host memory already."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self.capacity = arena.ring.capacity

    def room(self) -> int:
        return self._arena.ring.room()

    def behind(self) -> str:
        return "writers are behind"

    def begin(self, size: int) -> Span:
        block = _taken(self._arena.take(size))
        return Span(self._memory[block.start : block.start + size], block)

    def send(self, span: Span) -> None:
        pass

    def cancel(self, span: Span) -> None:
        self._arena.read(span.block.number)

    def landed(self, span: Span) -> None:
        pass


class DeviceStage:
    """States are on an accelerator.

    Args:
        arena: pinned here, for as long as the stage lives.
        device: theirs.
        segment_bytes: a third of the device memory to set aside, and the largest forward.

    Raises:
        RuntimeError: no such memory, or the arena cannot be pinned.
    """

    def __init__(self, arena: Arena, device: torch.device, segment_bytes: int) -> None:
        self._arena = arena
        self._module = torch.get_device_module(device)
        self._device_memory = Segments(segment_bytes)
        self._staging = torch.empty(self._device_memory.capacity, dtype=torch.uint8, device=device)
        self._stream = self._module.Stream(device)
        self._host = torch.frombuffer(arena.memory, dtype=torch.uint8)
        _pin(self._host)
        weakref.finalize(self, _unpin, self._host).atexit = False  # a process that ends needs no tidying
        self.capacity = min(self._device_memory.segment, arena.ring.capacity)

    def room(self) -> int:
        return min(self._device_memory.room(), self._arena.ring.room())

    def behind(self) -> str:
        copying = self._device_memory.room() < self._arena.ring.room()
        return "copies to the host are behind" if copying else "writers are behind"

    def begin(self, size: int) -> Span:
        staged = _taken(self._device_memory.take(size))
        try:
            block = _taken(self._arena.take(size))
        except RuntimeError:
            self._device_memory.give_back(staged)
            raise
        return Span(self._staging[staged.start : staged.start + size], block, staged)

    def send(self, span: Span) -> None:
        filled = self._module.Event()
        filled.record()
        with self._module.stream(self._stream):
            self._stream.wait_event(filled)
            start = span.block.start
            self._host[start : start + span.bytes.numel()].copy_(span.bytes, non_blocking=True)
            span.copied = self._module.Event(blocking=True)  # its waiter sleeps: the cores are the server's
            span.copied.record()

    def cancel(self, span: Span) -> None:
        # Work on it may be under way; what comes next in its place is enqueued behind that, on the same streams.
        self.landed(span)
        self._arena.read(span.block.number)

    def landed(self, span: Span) -> None:
        if span.staged is not None:
            self._device_memory.give_back(span.staged)
            span.staged = None


def arrive(span: Span) -> None:
    """Wait until the span's bytes are in its block. Blocks this thread only."""
    if span.copied is not None:
        span.copied.synchronize()


def take_rows(out: torch.Tensor, rows: torch.Tensor, slices: Sequence[tuple[int, int]], dtype: str | None) -> None:
    """Write slices of rows one after another into `out`; neighbouring slices go as one.

    Args:
        out: as many rows as the slices have.
        rows: [n, ...] on the same device.
        slices: ascending [start, stop).
        dtype: as which they are stored, a key of DTYPES; None: in `out`'s own.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in slices:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    if len(joined) > _FEW_SLICES:
        index = torch.cat([torch.arange(start, stop) for start, stop in joined])
        if rows.device.type != "cpu":
            index = index.pin_memory().to(rows.device, non_blocking=True)  # from other memory it might wait
        _write(out, rows.index_select(0, index), dtype)
        return
    filled = 0
    for start, stop in joined:
        _write(out[filled : filled + stop - start], rows[start:stop], dtype)
        filled += stop - start


def _write(out: torch.Tensor, rows: torch.Tensor, dtype: str | None) -> None:
    if dtype is None:
        out.copy_(rows)
    else:
        encode_into(out, rows, dtype)


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


def _taken(block: Block | None) -> Block:
    if block is None:
        raise RuntimeError("no room: `room` was not asked")
    return block


def _pin(host: torch.Tensor) -> None:
    """Copies from the device to it then go by themselves. Raises RuntimeError."""
    code = int(_runtime().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        raise RuntimeError(f"{host.nbytes} bytes of host memory cannot be pinned ({code}): lower serve.arena_bytes")


def _unpin(host: torch.Tensor) -> None:
    _runtime().cudaHostUnregister(host.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()
