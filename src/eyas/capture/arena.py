"""Memory through which states travel: contiguous blocks, taken in ring order, given back in any order.

Ring     the allocator alone: numbers, no memory
Segments another, which always has room for the largest block while two are taken
Arena    host memory that another process can map, in blocks that go when their last reader is done

Both may be used from any thread.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 256  # bytes; wide enough for any device copy, and no dtype is wider
DEFAULT_BYTES: Final = 4 << 30  # on a GPU: a second of states at 4 GB/s
DEFAULT_CPU_BYTES: Final = 256 << 20
_SEGMENTS: Final = 3  # one is filled while a forward is under way and the one before it is still being copied
_MOST_SEGMENT_BYTES: Final = 2 << 30


def aligned(size: int) -> int:
    """Bytes that `size` bytes take."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class Block:
    """Bytes [start, stop) of a ring.

    Attributes:
        number: names it in messages between processes.
        readers: how many have yet to give it back (an arena's).
    """

    start: int
    stop: int
    number: int
    readers: int = 1
    free: bool = False


class Ring:
    """Contiguous blocks of `capacity` bytes; one thread takes, any thread gives back.

    The oldest block that is not given back yet bounds what can be taken. While nothing is taken, everything can be.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._blocks: deque[Block] = deque()
        self._lock = threading.Lock()
        self._taken = 0

    def __len__(self) -> int:
        """Blocks not given back."""
        with self._lock:
            return sum(not block.free for block in self._blocks)

    def room(self) -> int:
        """The largest block that `take` could give now; it can only grow until the next `take`."""
        with self._lock:
            if not self._blocks:
                return self.capacity
            first, last = self._blocks[0], self._blocks[-1]
            wrapped = last.start < first.start
            return first.start - last.stop if wrapped else max(self.capacity - last.stop, first.start)

    def take(self, size: int) -> Block | None:
        """A block of at least `size` bytes, None where there is no room."""
        size = max(aligned(size), ALIGNMENT)
        with self._lock:
            start = self._place(size)
            if start is None:
                return None
            self._taken += 1
            block = Block(start, start + size, self._taken)
            self._blocks.append(block)
            return block

    def give_back(self, block: Block) -> None:
        """Raises ValueError for a block that was given back before."""
        with self._lock:
            if block.free:
                raise ValueError(f"block {block.number} was given back before")
            block.free = True
            while self._blocks and self._blocks[0].free:
                self._blocks.popleft()

    def _place(self, size: int) -> int | None:
        if not self._blocks:
            return 0 if size <= self.capacity else None
        first, last = self._blocks[0], self._blocks[-1]
        if last.start < first.start:  # wrapped
            return last.stop if last.stop + size <= first.start else None
        if last.stop + size <= self.capacity:
            return last.stop
        return 0 if size <= first.start else None


class Segments:
    """Three segments, filled in turn; a block lies within one of them, and a segment is filled again once it is empty.

    So there is room for a block as large as a segment whenever no more than the two blocks before it are still taken,
    whatever their sizes. (A ring of the same bytes cannot promise that: what is free may lie at both of its ends.)

    As with `Ring`, one thread takes, any thread gives back.
    """

    def __init__(self, segment: int) -> None:
        self.segment = aligned(segment)
        self.capacity = _SEGMENTS * self.segment
        self._taken = [0] * _SEGMENTS  # blocks not given back
        self._filled = self._current = self._number = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Blocks not given back."""
        with self._lock:
            return sum(self._taken)

    def room(self) -> int:
        """The largest block that `take` could give now; it can only grow until the next `take`."""
        with self._lock:
            here = self.segment - self._filled_now()
            return here if self._taken[self._next] else self.segment

    def take(self, size: int) -> Block | None:
        """A block of at least `size` bytes, None where there is no room."""
        size = max(aligned(size), ALIGNMENT)
        with self._lock:
            self._filled = self._filled_now()
            if self._filled + size > self.segment:
                if size > self.segment or self._taken[self._next]:
                    return None
                self._current, self._filled = self._next, 0
            start = self._current * self.segment + self._filled
            self._filled += size
            self._taken[self._current] += 1
            self._number += 1
            return Block(start, start + size, self._number)

    def give_back(self, block: Block) -> None:
        """Raises ValueError for a block that was given back before."""
        with self._lock:
            if block.free:
                raise ValueError(f"block {block.number} was given back before")
            block.free = True
            self._taken[block.start // self.segment] -= 1

    @property
    def _next(self) -> int:
        return (self._current + 1) % _SEGMENTS

    def _filled_now(self) -> int:
        return self._filled if self._taken[self._current] else 0


class Arena:
    """Host memory of a fixed size in a file without a name: `descriptor` lets a child process map it.

    Every page is there from the start, so that nobody waits for one later. It does not count against /dev/shm.
    """

    def __init__(self, size: int) -> None:
        self.ring = Ring(size)
        self.size = max(self.ring.capacity, mmap.PAGESIZE)
        self.descriptor = os.memfd_create("eyas-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.size)
            self.memory = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise
        self._held: dict[int, Block] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Block | None:
        """A block for `size` bytes with one reader, None where there is no room."""
        block = self.ring.take(size)
        if block is not None:
            with self._lock:
                self._held[block.number] = block
        return block

    def read(self, number: int) -> None:
        """One reader of a block is done; after the last one it is given back. Unknown numbers are a ValueError."""
        with self._lock:
            block = self._held.get(number)
            if block is None:
                raise ValueError(f"block {number} is nobody's")
            block.readers -= 1
            if block.readers > 0:
                return
            del self._held[number]
        self.ring.give_back(block)

    def close(self) -> None:
        """The memory goes once nobody looks at it any more."""
        os.close(self.descriptor)


def arena_size(asked: int, forward_bytes: int, quota_bytes: int, *, on_device: bool) -> int:
    """Bytes of a rank's arena.

    Args:
        asked: the setting, 0 to choose: 4 GiB where states come from a GPU, else 256 MiB.
        forward_bytes: what the largest forward brings; two of them must fit, up to 4 GiB.
        quota_bytes: the rank's share of the spool; more than may wait there need not be on its way.
        on_device: whether states come from a GPU.
    """
    wanted = asked or (DEFAULT_BYTES if on_device else DEFAULT_CPU_BYTES)
    return max(min(wanted, quota_bytes), min(2 * aligned(forward_bytes), DEFAULT_BYTES))


def segment_size(forward_bytes: int) -> int:
    """Bytes of each of the three segments of device memory for states on their way to the host: the largest forward."""
    return min(aligned(forward_bytes), _MOST_SEGMENT_BYTES)
