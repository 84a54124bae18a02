"""The batches of one epoch, one after another, while threads read ahead of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import torch

from eyas.train.batch import Batch
from eyas.train.prefetch import Prefetcher


@dataclass(slots=True)
class ReadStats:
    """What was handed over, and how long it was waited for.

    Attributes:
        batches, rows, tokens: this rank's. bytes: of states, as stored.
        wait_s: seconds the consumer waited. wall_s: seconds from when it first asked until it last got a batch.
    """

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    wall_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that the consumer waited for data."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0


class Plan(NamedTuple):
    """Batches by number. `known` gives how many there are so far, and whether that is all."""

    rows: Callable[[int], list[int]]
    known: Callable[[], tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read. None of it changes the batches.

    Attributes:
        threads: that read and pack; 0 reads when a batch is asked for.
        prefetch: batches that exist at a time before they are handed over.
        floats: dtype of the states; None is as stored, bfloat16 for quantised ones.
        pin: batches in page-locked memory; None: where there is a GPU.
        verify: compare whole rows with their checksums.
        follow: the store may still be written: epoch 0 takes its shards in the plan's order and waits for them.
        disk_budget: with `follow`, remove shards that were used, to leave room in so many bytes. One epoch only.
        eval_rows: at most so many of the rows held out are evaluated.
        poll_s, patience_s: seconds between looks at a store that is being written, and longest without anything new.
    """

    threads: int = 4
    prefetch: int = 8
    floats: torch.dtype | None = None
    pin: bool | None = None
    verify: bool = True
    follow: bool = False
    disk_budget: int | None = None
    eval_rows: int = 512
    poll_s: float = 1.0
    patience_s: float = 3600.0


class EpochBatches:
    """An iterator over batches. Close it, or leave its `with` block: its threads end then.

    Args:
        plan: which rows a batch has.
        make: reads and packs the rows of a batch.
        start: number of the first batch.
        depth: threads and batches ahead.
        feed: waits for more to be known, calls `grown`, and returns when all is; runs in a thread.

    Attributes:
        stats: what was handed over so far.
    """

    def __init__(
        self,
        plan: Plan,
        make: Callable[[list[int]], tuple[Batch, ReadStats]],
        start: int,
        depth: Reading,
        feed: Callable[[EpochBatches], None] | None,
    ) -> None:
        self._plan, self._next = plan, start
        self.stats = ReadStats()
        self._began: float | None = None
        self._items: Prefetcher[tuple[Batch, ReadStats]] = Prefetcher(
            lambda number: make(plan.rows(number)), first=start, threads=depth.threads, ahead=depth.prefetch
        )
        self._feeder: threading.Thread | None = None
        self.grown()
        if feed is not None:
            self._feeder = threading.Thread(target=self._feed, args=(feed,), name="eyas-follow", daemon=True)
            self._feeder.start()

    @property
    def number(self) -> int:
        """Number of the batch that comes next: what to go on with after a checkpoint."""
        return self._next

    def grown(self) -> None:
        """More batches are known."""
        known, all_ = self._plan.known()
        self._items.extend(known)
        if all_:
            self._items.finish()

    def sleep(self, seconds: float) -> bool:
        """Wait, or less when this is closed; whether it is."""
        return self._items.sleep(seconds)

    def _feed(self, feed: Callable[[EpochBatches], None]) -> None:
        try:
            feed(self)
        except BaseException as error:  # noqa: BLE001  raised to the consumer, once it has what can be had
            self._items.fail(error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        now = time.perf_counter()
        self._began = self._began or now
        batch, made = next(self._items)
        stats = self.stats
        stats.batches += made.batches
        stats.rows += made.rows
        stats.tokens += made.tokens
        stats.bytes += made.bytes
        stats.wait_s, stats.wall_s = self._items.wait_s, time.perf_counter() - self._began
        self._next += 1
        return batch

    def close(self) -> None:
        """End the threads; what they are reading is read to its end. Later calls do nothing."""
        self._items.close()
        if self._feeder is not None:
            self._feeder.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
