"""Which rows go into which batch, of which rank, in which epoch. Pure: from row lengths alone, before a state is read.

order = EpochOrder(sampling, epoch=0)
for window in windows(len(tables), sampling, epoch=0):
    order.add([tables[i] for i in window])
order.close()
rows = order.rows(step, rank)

Shards are shuffled, and so are the rows of each *window* of consecutive ones: reads stay within a few files, in which a
row is one run of bytes, while the order is close to uniform. Rows are put into batches in that order by best fit into a
few open bins, which go on from one window to the next; so a batch holds what came together, the batches are nearly
full, and where a batch ends does not depend on what comes after it. A store that is still being written is taken in the
order of its plan and gives exactly the batches it would give complete.

Batch b of the epoch is rank b % W's, its step b // W. Only whole multiples of W x accumulation batches are handed out,
so that every rank has the same number of steps, and of optimiser steps, whatever the lengths. At the end some of the
last batches are split to make up a multiple; only if they have too few rows for that, some are dropped, counted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.store.rowfile import RowTable

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rows become batches.

    Attributes:
        budget: tokens a batch can hold.
        seed: of the order.
        window_shards: consecutive shards whose rows are shuffled together.
        shuffle: False gives the plan's order of shards and rows, but for the packing.
        world_size, accumulation: the number of batches is a multiple of their product.
        held_out: share of the rows that is never trained on, chosen by a hash of the row's tokens: equal rows are on
            the same side, in every epoch, of whatever store of whatever corpus.
        longest: tokens of the longest row taken; None is `budget`.
        long: what becomes of longer ones.
        open_bins: batches that are filled at a time. More are fuller, and hold on to their rows' shards for longer.
    """

    budget: int
    seed: int = 0
    window_shards: int = 16
    shuffle: bool = True
    world_size: int = 1
    accumulation: int = 1
    held_out: float = 0.0
    longest: int | None = None
    long: Literal["cut", "skip"] = "cut"
    open_bins: int = 16

    def __post_init__(self) -> None:
        for name in ("budget", "window_shards", "world_size", "accumulation", "open_bins"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is a share, got {self.held_out}")
        if not 1 <= self.limit <= self.budget:
            raise ValueError(f"a row of {self.limit} tokens does not fit in a batch of {self.budget}")

    @property
    def limit(self) -> int:
        """Tokens of the longest row taken."""
        return self.budget if self.longest is None else self.longest

    @property
    def oldest(self) -> int:
        """A bin is closed at the latest when so many batches were closed since it was opened."""
        return 4 * self.open_bins

    @property
    def multiple(self) -> int:
        """Batches that are handed out together."""
        return self.world_size * self.accumulation


@dataclass(slots=True)
class Counts:
    """What became of an epoch's rows, so far.

    Attributes:
        rows, tokens: in batches.
        batches: all ranks'.
        cut: rows of which only the beginning is used. skipped: rows left out for their length.
        held_out: rows kept for evaluation (of an evaluation: those of the training).
        dropped: rows at the end that could not be spread over all ranks.
    """

    rows: int = 0
    tokens: int = 0
    batches: int = 0
    cut: int = 0
    skipped: int = 0
    held_out: int = 0
    dropped: int = 0


def is_held_out(hashes: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are kept for evaluation: [R] hashes of tokens -> [R]. A larger share keeps those of a smaller one."""
    return mixed(hashes) < np.uint64(min(int(share * 2**64), 2**64 - 1)) if share else np.zeros(len(hashes), np.bool_)


def mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each hash by the finaliser of splitmix64 (Steele, Lea, Flood 2014), independent of the hash's other uses."""
    with np.errstate(over="ignore"):
        x = hashes + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def windows(shards: int, sampling: Sampling, epoch: int, *, in_order: bool = False) -> Iterator[list[int]]:
    """Indices 0 .. shards - 1 in the epoch's order, a window at a time.

    Args:
        shards: how many there are.
        sampling: seed and size of a window.
        epoch: another epoch, another order.
        in_order: the shards come as they are planned, as from a store that is still being written.
    """
    order = np.arange(shards)
    if sampling.shuffle and not in_order:
        order = np.random.default_rng([sampling.seed, epoch]).permutation(shards)
    for first in range(0, shards, sampling.window_shards):
        yield order[first : first + sampling.window_shards].tolist()


class _Bin(NamedTuple):
    """An open batch; sorts by room, then age."""

    room: int
    born: int  # batches closed before it was opened
    serial: int
    rows: list[int]


class EpochOrder:
    """The batches of one epoch, as far as its windows are known. About 10 bytes a row.

    Args:
        sampling: how rows become batches.
        epoch: another epoch, another order.
        evaluation: take the rows that are held out, instead of the others.
        chosen: of those, only these corpus rows.

    Attributes:
        counts: what became of the rows so far.
        finished: no further batch will come.
        windows: taken in so far.
    """

    def __init__(
        self, sampling: Sampling, epoch: int, *, evaluation: bool = False, chosen: frozenset[int] | None = None
    ) -> None:
        self.sampling, self.epoch = sampling, epoch
        self._evaluation, self._chosen = evaluation, chosen
        self.counts, self.finished = Counts(), False
        self._rows, self._edges = array("q"), array("q", [0])  # rows of batch b: _rows[_edges[b] : _edges[b + 1]]
        self._lengths: dict[int, int] = {}  # of rows not yet handed out for good: what a split at the end goes by
        self._bins: list[_Bin] = []
        self._serial = self.windows = 0
        settings = asdict(sampling)
        for free in ("world_size", "accumulation"):  # which batch a row is in does not depend on them
            del settings[free]
        self._digest = xxhash.xxh3_64(f"{sorted(settings.items())} {epoch} {evaluation}".encode())
        self._marks: list[tuple[int, str]] = [(0, self._digest.hexdigest())]

    # --- taking rows in ---

    def add(self, tables: Sequence[RowTable]) -> None:
        """Take in the next window: what its shards hold."""
        rows = np.concatenate([table.rows for table in tables])
        lengths = np.concatenate([table.tokens for table in tables]).astype(np.int64)
        hashes = np.concatenate([table.hashes for table in tables])
        for data in (rows, lengths, hashes):
            self._digest.update(np.ascontiguousarray(data).data)
        rows, lengths = self._selected(rows, lengths, hashes)
        if self.sampling.shuffle:
            rng = np.random.default_rng([self.sampling.seed, self.epoch, self.windows])
            order = rng.permutation(len(rows))
            rows, lengths = rows[order], lengths[order]
        self.windows += 1
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self._place(row, length)
        self._marks.append((len(self._edges) - 1, self._digest.hexdigest()))
        self._forget_lengths()

    def close(self) -> None:
        """No further window will come: hand out the rest."""
        handed_out = self._whole
        for bin_ in list(self._bins):
            self._emit(bin_)
        self._bins.clear()
        self._share_the_rest(handed_out)
        self._lengths.clear()
        self._marks.append((len(self._edges) - 1, self._digest.hexdigest()))
        self.finished = True

    def _selected(self, rows: _Rows, lengths: _Rows, hashes: npt.NDArray[np.uint64]) -> tuple[_Rows, _Rows]:
        sampling, counts = self.sampling, self.counts
        out = is_held_out(hashes, sampling.held_out)
        mine = out if self._evaluation else ~out
        counts.held_out += int((~mine).sum())
        if self._chosen is not None:
            mine &= np.isin(rows, np.fromiter(self._chosen, np.int64, len(self._chosen)))
        long = mine & (lengths > sampling.limit)
        if sampling.long == "skip":
            mine &= ~long
            counts.skipped += int(long.sum())
        else:
            counts.cut += int(long.sum())
        return rows[mine], np.minimum(lengths[mine], sampling.limit)

    def _place(self, row: int, length: int) -> None:
        """Best fit: into the fullest open bin that has room."""
        bins = self._bins
        at = bisect_left(bins, (length,))
        self._lengths[row] = length
        if at < len(bins):
            bin_ = bins.pop(at)
            bin_.rows.append(row)
            bin_ = bin_._replace(room=bin_.room - length)
        else:
            if len(bins) == self.sampling.open_bins:
                self._emit(bins.pop(0))
                self._emit_old()
            self._serial += 1
            bin_ = _Bin(self.sampling.budget - length, len(self._edges), self._serial, [row])
        if bin_.room:
            insort(bins, bin_)
        else:
            self._emit(bin_)

    def _emit_old(self) -> None:
        for bin_ in [b for b in self._bins if len(self._edges) - b.born >= self.sampling.oldest]:
            self._bins.remove(bin_)
            self._emit(bin_)

    def _emit(self, bin_: _Bin) -> None:
        self._rows.extend(bin_.rows)
        self._edges.append(len(self._rows))
        self.counts.batches += 1
        self.counts.rows += len(bin_.rows)
        self.counts.tokens += self.sampling.budget - bin_.room

    # --- the end ---

    def _share_the_rest(self, handed_out: int) -> None:
        """Make a whole multiple of what is not handed out yet, by splitting batches; where rows are too few, drop."""
        left, multiple = self._take_back(handed_out), self.sampling.multiple
        short = -len(left) % multiple
        if sum(len(rows) - 1 for rows in left) < short:
            for _ in range(len(left) % multiple):
                fewest = min(left, key=len)
                left.remove(fewest)
                self.counts.dropped += len(fewest)
            short = 0
        head, tail = (
            left[:-multiple],
            left[-multiple:],
        )  # where a batch is does not change for the sake of the last ones
        while head and sum(len(rows) - 1 for rows in tail) < short:
            tail.insert(0, head.pop())
        for _ in range(short):
            largest = max(tail, key=lambda rows: (len(rows) > 1, self._tokens(rows)))
            tail.remove(largest)
            tail += self._halves(largest)
        for rows in (*head, *tail):
            self._emit(_Bin(self.sampling.budget - self._tokens(rows), 0, 0, rows))

    def _take_back(self, first: int) -> list[list[int]]:
        """The rows of the batches from `first` on, which are no batches any more."""
        taken = [self._batch(b) for b in range(first, len(self._edges) - 1)]
        del self._edges[first + 1 :]
        del self._rows[self._edges[-1] :]
        counts = self.counts
        counts.batches, counts.rows = first, len(self._rows)
        counts.tokens -= sum(self._tokens(rows) for rows in taken)
        return taken

    def _tokens(self, rows: list[int]) -> int:
        return sum(self._lengths[row] for row in rows)

    def _halves(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Two batches of about as many tokens, longest rows first; neither is empty."""
        halves: tuple[list[int], list[int]] = [], []
        sums = [0, 0]
        for row in sorted(rows, key=lambda row: (-self._lengths[row], row)):
            into = 0 if sums[0] <= sums[1] else 1
            halves[into].append(row)
            sums[into] += self._lengths[row]
        return halves

    def _forget_lengths(self) -> None:
        """Lengths are only needed of rows that may be split at the end."""
        kept = [row for bin_ in self._bins for row in bin_.rows]
        kept += self._rows[self._edges[self._whole] :]
        self._lengths = {row: self._lengths[row] for row in kept}

    # --- giving batches out ---

    @property
    def _whole(self) -> int:
        batches = len(self._edges) - 1
        return batches - batches % self.sampling.multiple

    @property
    def steps(self) -> int:
        """Batches that every rank can have by now."""
        return self._whole // self.sampling.world_size

    def rows(self, step: int, rank: int) -> list[int]:
        """Corpus rows of a rank's batch `step`. Raises IndexError for one that is not known yet."""
        if not 0 <= step < self.steps or not 0 <= rank < self.sampling.world_size:
            raise IndexError(f"batch {step} of {self.steps}, rank {rank} of {self.sampling.world_size}")
        return self._batch(step * self.sampling.world_size + rank)

    def _batch(self, number: int) -> list[int]:
        return self._rows[self._edges[number] : self._edges[number + 1]].tolist()

    def needed_from(self, step: int) -> _Rows:
        """Corpus rows, of the windows so far, that are in batch `step` of some rank or later, or not in a batch yet."""
        first = self._edges[min(step * self.sampling.world_size, len(self._edges) - 1)]
        waiting = [row for bin_ in self._bins for row in bin_.rows]
        return np.concatenate([np.array(self._rows[first:], dtype=np.int64), np.array(waiting, dtype=np.int64)])

    def fingerprint(self, step: int) -> str:
        """16 hex digits over everything that the batches before `step` were made from.

        Raises:
            IndexError: they are not all known yet.
        """
        batches = step * self.sampling.world_size
        at = bisect_left(self._marks, batches, key=lambda mark: mark[0])
        if at == len(self._marks):
            raise IndexError(f"batch {step} of {self.steps}")
        return self._marks[at][1]

    def state(self) -> dict[str, Any]:
        """For logs: the counts, by name."""
        return asdict(self.counts)


def shards_of(rows: _Rows, starts: Sequence[int]) -> set[int]:
    """Numbers of the shards that hold these corpus rows; `starts` is each shard's first row, ascending."""
    return set(np.unique(np.searchsorted(np.asarray(starts), rows, side="right") - 1).tolist())


def shard_of(row: int, starts: Sequence[int]) -> int:
    """Number of the shard that holds this corpus row."""
    return bisect_right(starts, row) - 1
