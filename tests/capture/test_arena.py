"""Blocks of a ring never overlap, all come back, and an empty ring is a whole one."""

from __future__ import annotations

import itertools
import mmap
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.arena import ALIGNMENT, Arena, Block, Ring, Segments, aligned, arena_size, segment_size

UNIT = ALIGNMENT


@given(
    st.integers(1, 12),
    st.lists(st.one_of(st.integers(1, 5 * UNIT), st.floats(0, 1, exclude_max=True)), max_size=60),
)
def test_blocks_never_overlap_and_what_has_room_fits(units: int, steps: list[int | float]) -> None:
    """A number of bytes is taken; a fraction says which of the blocks held comes back."""
    largest = units * UNIT
    for ring in (Ring(largest + 17), Segments(largest)):
        held = list[Block]()
        for step in steps:
            if isinstance(step, int):
                room, block = ring.room(), ring.take(step)
                assert (block is not None) == (aligned(step) <= room)
                held += [block] if block is not None else []
                assert block is None or block.stop - block.start >= step
            elif held:
                ring.give_back(held.pop(int(step * len(held))))
            bounds = sorted((block.start, block.stop) for block in held)
            assert all(0 <= start < stop <= ring.capacity and start % ALIGNMENT == 0 for start, stop in bounds)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))
            assert len(ring) == len(held)
            assert held or ring.room() == largest
        random.Random(len(steps)).shuffle(held)
        for block in held:
            ring.give_back(block)
        assert ring.take(largest) is not None


@given(st.lists(st.tuples(st.integers(1, 5 * UNIT), st.integers(0, 2)), max_size=60))
def test_there_is_room_for_the_largest_forward_while_two_of_any_size_are_under_way(
    forwards: list[tuple[int, int]],
) -> None:
    """Each forward's bytes, and how many are under way when it begins."""
    segments, held = Segments(5 * UNIT), list[Block]()
    for size, under_way in forwards:
        while len(held) > under_way:
            segments.give_back(held.pop(0))
        assert segments.room() == segments.segment or size <= segments.room()
        block = segments.take(size)
        assert block is not None
        held.append(block)


def test_two_of_the_largest_blocks_alternate_for_ever() -> None:
    ring = Ring(2 * 5 * UNIT)
    held = [ring.take(5 * UNIT), ring.take(5 * UNIT)]
    for _ in range(10):
        assert ring.take(1) is None
        oldest = held.pop(0)
        assert oldest is not None
        ring.give_back(oldest)
        held.append(ring.take(5 * UNIT))
        assert held[-1] is not None


@pytest.mark.parametrize("ring", [Ring(UNIT), Segments(UNIT)])
def test_a_block_comes_back_once(ring: Ring | Segments) -> None:
    block = ring.take(1)
    assert block is not None
    ring.give_back(block)
    with pytest.raises(ValueError, match="before"):
        ring.give_back(block)


def test_the_last_reader_gives_a_block_back() -> None:
    arena = Arena(4 * UNIT)
    block = arena.take(3 * UNIT)
    assert block is not None
    block.readers = 3
    for _ in range(2):
        arena.read(block.number)
        assert arena.ring.room() == UNIT
    arena.read(block.number)
    assert arena.ring.room() == 4 * UNIT
    with pytest.raises(ValueError, match="nobody"):
        arena.read(block.number)
    arena.close()


def test_another_mapping_of_the_descriptor_sees_the_same_bytes_and_no_name_is_left() -> None:
    arena = Arena(1 << 20)
    arena.memory[5:8] = b"abc"
    with mmap.mmap(arena.descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ) as other:
        assert other[5:8] == b"abc"
    assert os.fstat(arena.descriptor).st_nlink == 0
    assert not os.get_inheritable(arena.descriptor)
    arena.close()


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("asked", "forward", "quota", "on_device", "size"),
    [
        (0, 450 * MIB, 8 * GIB, True, 4 * GIB),
        (0, 450 * MIB, 2 * GIB, True, 2 * GIB),  # more than may wait in the spool need not be on its way
        (0, 450 * MIB, MIB, True, 900 * MIB),  # but two forwards must fit
        (0, 10 * MIB, 8 * GIB, False, 256 * MIB),
        (64 * MIB, 10 * MIB, 8 * GIB, False, 64 * MIB),
        (
            64 * MIB,
            100 * GIB,
            8 * GIB,
            True,
            4 * GIB,
        ),  # such a forward is refused
    ],
)
def test_sizes(asked: int, forward: int, quota: int, on_device: bool, size: int) -> None:
    assert arena_size(asked, forward, quota, on_device=on_device) == size
    assert segment_size(forward) <= size
