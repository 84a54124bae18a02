"""From a store to batches: the rows of an order (`eyas.train.sampler`), read ahead by threads, packed, in turn.

with TrainReader(store, Sampling(budget=8192), functools.partial(pack, steps=7, budget=8192)) as reader:
    for epoch in range(epochs):
        with reader.epoch(epoch) as batches:
            for batch in batches: ...

What comes is a function of the store, the sampling, the epoch, the batch's number and the rank: neither the number of
threads nor the time they take changes it, and a run resumes at any batch without reading the ones before.

Memory: `prefetch` batches, and for each thread what it reads into: `last` of one batch, and `aux` if it is converted.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from eyas.errors import ConfigError, StoreError
from eyas.store.consumed import own_store, share_store, sweep_consumed
from eyas.store.documents import read_store_info
from eyas.store.rowfile import RowReader, RowTable, Scratch
from eyas.train.batch import Batch, Sample
from eyas.train.budget import DiskBudget
from eyas.train.feed import EpochBatches, Plan, Reading, ReadStats
from eyas.train.sampler import Counts, EpochOrder, Sampling, is_held_out, mixed, shard_of, shards_of, windows
from eyas.train.supply import Say, Supply

Pack = Callable[[Sequence[Sample]], Batch]


class TrainReader:
    """The batches of one rank.

    Args:
        store: the store's folder.
        sampling: how rows become batches.
        pack: makes a batch of rows.
        rank: of this process, within `sampling.world_size`.
        reading: threads, memory, and whether the store is still being written.
        say: is told what is waited for.

    Attributes:
        info: what the store is for.
        sampling: as given. A store that is followed has smaller windows in epoch 0, the smaller for a disk budget.

    Raises:
        StoreError: no store, none of its shards is complete (unless followed), or it is being read by others while
            this reader is to remove shards, or the other way round.
        ConfigError: settings that exclude each other, or a disk budget that is too small.
    """

    def __init__(
        self,
        store: str | Path,
        sampling: Sampling,
        pack: Pack,
        *,
        rank: int = 0,
        reading: Reading | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self._root, self._pack, self._rank, self._say = Path(store), pack, rank, say
        self._reading = reading or Reading()
        if not 0 <= rank < sampling.world_size:
            raise ValueError(f"rank {rank} is not within a world of {sampling.world_size}")
        self.info = read_store_info(store)
        self.sampling, self._following, self._budget = sampling, self._cautious(sampling), None
        self._pin = torch.cuda.is_available() if self._reading.pin is None else self._reading.pin
        self._supply = Supply(self._root, self.info)
        if self._reading.disk_budget is not None:
            if not self._reading.follow:
                what = "a disk budget is for a store that is followed"
                raise ConfigError(what, "train.disk_budget", "set train.follow, too")
            self._budget = DiskBudget(self._supply, self._reading.disk_budget)
            self._following = self._budget.fitted(self._following)
        self._rows = RowReader(self._root, self.info, floats=self._reading.floats, verify=self._reading.verify)
        self._scratch = threading.local()
        self._orders: dict[int, EpochOrder] = {}
        self._lock = threading.RLock()  # of the orders: one thread takes windows in while others ask
        self._lock_fd = self._locked()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _cautious(self, sampling: Sampling) -> Sampling:
        """For a store that is followed: training starts, at the latest, with an eighth of it."""
        return replace(sampling, window_shards=max(1, min(sampling.window_shards, len(self.info.plan.shards) // 8)))

    def _locked(self) -> int | None:
        if self._reading.disk_budget is None:
            return share_store(self._root)
        return own_store(self._root) if self._rank == 0 else None

    def _open(self) -> None:
        if self._reading.disk_budget is not None and self._rank == 0:
            sweep_consumed(self._root, self.info)
        self._supply.look()
        if self._supply.consumed and self._reading.disk_budget is None:
            what = f"{len(self._supply.consumed):,} shards were trained on and removed under a disk budget"
            raise StoreError(what, self._root, "resume that run with its train.disk_budget, or extract them again")
        if not self._supply.tables and not self._reading.follow:
            raise StoreError("no complete shard yet", self._root, "let eyas extract finish one, or set train.follow")
        if not (self.complete or self._reading.follow):
            done, planned = len(self._supply.tables), len(self._supply.starts)
            self._say(f"{done:,} of {planned:,} shards are complete, and only they are read: train.follow would wait")

    # --- order ---

    @property
    def complete(self) -> bool:
        """Whether every shard that is planned is there, as last seen."""
        return self._supply.complete

    def batches(self, epoch: int) -> int | None:
        """Batches of this rank in an epoch; None while the store that is followed lacks a shard.

        Raises:
            ConfigError: there is not a row for each rank.
        """
        order = self._order(epoch)
        return order.steps if order.finished else None

    def expected_batches(self) -> int:
        """About how many batches of this rank an epoch has, by what is planned; exact once the store is complete."""
        if (known := self.batches(0)) is not None:
            return known
        tokens = sum(shard.tokens for shard in self.info.plan.shards) * (1 - self.sampling.held_out)
        multiple = self.sampling.multiple
        return max(1, round(tokens / self.sampling.budget / multiple)) * self.sampling.accumulation

    def counts(self, epoch: int) -> Counts:
        """What became of the epoch's rows, as far as they are known: cut, skipped, held out, dropped."""
        return self._order(epoch).counts

    def _followed(self, epoch: int) -> bool:
        return self._reading.follow and epoch == 0

    def _order(self, epoch: int) -> EpochOrder:
        """The epoch's order; all of it where nothing is waited for."""
        if self._budget is not None and epoch > 0:
            raise ConfigError("shards that were used are removed: there is one epoch only", "train.disk_budget")
        with self._lock:
            if (order := self._orders.get(epoch)) is None:
                order = EpochOrder(self._following if self._followed(epoch) else self.sampling, epoch)
                if not self._followed(epoch) or self.complete:
                    self._take_in(order)
                self._orders = {epoch: order}
        return order

    def _take_in(self, order: EpochOrder, batch: int | None = None) -> None:
        """Take in the windows that are there: all, or those that tell the batches before `batch`."""
        for window in itertools.islice(self._windows(order.epoch), order.windows, None):
            if batch is not None and order.steps >= batch:
                return
            if any(number not in self._supply.tables for number in window):
                return
            order.add([self._supply.tables[number] for number in window])
        self._finish(order)

    def _finish(self, order: EpochOrder) -> None:
        order.close()
        if not order.steps:
            what = f"{order.counts.dropped:,} rows are too few for {self.sampling.multiple} batches a step"
            raise ConfigError(what, self._root, "fewer ranks, or less train.accumulate")

    def _windows(self, epoch: int) -> Iterator[list[int]]:
        """Shard numbers, a window at a time."""
        if self._followed(epoch):
            yield from windows(len(self._supply.starts), self._following, epoch, in_order=True)
            return
        known = sorted(self._supply.tables)
        for window in windows(len(known), self.sampling, epoch):
            yield [known[at] for at in window]

    # --- where a run is ---

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """For a checkpoint: the next batch, and what the ones before were made from."""
        return {"epoch": epoch, "batch": batch, "fingerprint": self._order(epoch).fingerprint(batch)}

    def check(self, state: dict[str, Any]) -> None:
        """Refuse to go on from a state of another store or order. A followed store may first have to be waited for.

        Raises:
            StoreError: the batches before are not the ones that were trained on.
        """
        epoch, batch = int(state["epoch"]), int(state["batch"])
        with self._lock:
            order = self._order(epoch)
            if not order.finished:
                self._take_in(order, batch)
            try:
                same = order.fingerprint(batch) == state["fingerprint"]
            except IndexError:
                same = False
        if not same:
            what = f"not the rows that the first {batch:,} batches of epoch {epoch} were made from"
            hint = "the store, the corpus, the seed, the batch size or the share held out changed; start a new run"
            raise StoreError(what, self._root, hint)

    # --- batches ---

    def epoch(self, epoch: int, start: int = 0) -> EpochBatches:
        """The batches of an epoch from number `start` on; close it, or leave its `with` block.

        Raises:
            ConfigError, StoreError: as the constructor, and where fewer batches than `start` can come.
        """
        order = self._order(epoch)
        if order.finished and start > order.steps:
            raise StoreError(f"no batch {start:,}", self._root, f"epoch {epoch} has {order.steps:,}")

        def feed(batches: EpochBatches) -> None:
            self._follow(order, batches)

        return EpochBatches(self._plan(order), self._make, start, self._reading, None if order.finished else feed)

    def _plan(self, order: EpochOrder) -> Plan:
        """What `EpochBatches` may know of an order that grows."""

        def rows(number: int) -> list[int]:
            with self._lock:
                return order.rows(number, self._rank)

        return Plan(rows, lambda: (order.steps, order.finished))

    def evaluation(self) -> EpochBatches:
        """The rows held out, at most `eval_rows` of them, always the same in the same order.

        Of a store that is followed, those of the first window: the curve then has one meaning from start to end.
        """
        tables = self._evaluated_tables()
        sampling = replace(self.sampling, shuffle=False, accumulation=1)
        order = EpochOrder(sampling, 0, evaluation=True, chosen=self._chosen(tables))
        order.add(tables)
        order.close()
        return EpochBatches(self._plan(order), self._make, 0, self._reading, None)

    def _evaluated_tables(self) -> list[RowTable]:
        if not self._reading.follow:
            return [self._supply.tables[number] for number in sorted(self._supply.tables)]
        first = next(self._windows(0))
        wait = self._reading
        found = self._supply.wait(first, _sleep, self._say, poll_s=wait.poll_s, patience_s=wait.patience_s)
        return list(found or [])

    def _chosen(self, tables: Sequence[RowTable]) -> frozenset[int]:
        """The rows that are evaluated: of those held out the first by hash, whatever their shards."""
        rows = np.concatenate([table.rows for table in tables])
        hashes = np.concatenate([table.hashes for table in tables])
        out = is_held_out(hashes, self.sampling.held_out)
        rows, ranked = rows[out], mixed(hashes[out])
        return frozenset(rows[np.lexsort((rows, ranked))[: self._reading.eval_rows]].tolist())

    def _follow(self, order: EpochOrder, batches: EpochBatches) -> None:
        """Take in window after window as they become complete; runs in a thread."""
        wait = self._reading
        for number, window in enumerate(self._windows(order.epoch)):
            if number < order.windows:
                continue
            tables = self._supply.wait(window, batches.sleep, self._say, poll_s=wait.poll_s, patience_s=wait.patience_s)
            if tables is None:
                return
            with self._lock:
                order.add(tables)
            batches.grown()
        with self._lock:
            self._finish(order)
        batches.grown()

    def _make(self, rows: Sequence[int]) -> tuple[Batch, ReadStats]:
        """Read and pack one batch; runs in a thread."""
        scratch = getattr(self._scratch, "own", None)
        if scratch is None:
            scratch = self._scratch.own = Scratch()
        lengths = [min(self._length(row), self.sampling.limit) for row in rows]
        spec = self.info.spec
        scratch.reset(sum(lengths) * (spec.aux_bytes_per_token + spec.last_bytes_per_position) + 256 * len(rows))
        # Each row's `aux` is read to its place in the batch, which `pack` then takes as it is.
        wide = len(spec.layers) * spec.hidden_size
        aux = torch.empty((self.sampling.budget, wide), dtype=self._rows.floats, pin_memory=self._pin)
        samples, start, read = [], 0, 0
        for row, length in zip(rows, lengths, strict=True):
            samples.append(self._sample(row, scratch, aux[start : start + length]))
            start += length
            kept = len(samples[-1].last_index)
            read += length * spec.aux_bytes_per_token + kept * spec.last_bytes_per_position
        batch = self._pack(samples)
        return (batch.pin_memory() if self._pin else batch), ReadStats(1, len(rows), start, read)

    def _length(self, row: int) -> int:
        table = self._supply.tables[shard_of(row, self._supply.starts)]
        return int(table.tokens[np.searchsorted(table.rows, row)])

    def _sample(self, row: int, scratch: Scratch, aux: torch.Tensor) -> Sample:
        number = shard_of(row, self._supply.starts)
        if (sidecar := self._supply.sidecars.get(number)) is None:
            hint = "resume from the checkpoint that was saved last, or start a new run with a new store"
            raise StoreError(f"row {row} was trained on and removed", self._root, hint)
        shard = self.info.plan.shards[number]
        found = self._rows.row(shard, sidecar, row, scratch, longest=self.sampling.limit, aux_into=aux)
        return Sample(
            row=row,
            tokens=found.tokens.to(torch.int64),
            loss_mask=found.loss_mask.to(torch.bool),
            aux=found.aux.flatten(1),
            last=found.last,
            last_index=found.last_index.to(torch.int64),
        )

    # --- under a disk budget ---

    def due(self, batch: int) -> bool:
        """Whether a checkpoint before this batch of epoch 0, and `release`, should make room now.

        Ask before every batch: extraction may be waiting for the room, and the next batch for extraction.
        """
        return self._budget is not None and self._budget.due(self._used(batch))

    def release(self, batch: int) -> int:
        """Every rank has saved a checkpoint from which it goes on with `batch` of epoch 0: what only earlier batches
        used may go. Every rank calls this; rank 0 removes, oldest first, what the disk budget asks for.

        Returns:
            Bytes freed. Nothing is ever removed without a disk budget.

        Raises:
            StoreError: the disk.
        """
        if self._budget is None:
            return 0
        used = self._used(batch)
        self._rows.forget(used)
        return self._budget.make_room(used) if self._rank == 0 else 0

    def _used(self, batch: int) -> list[int]:
        """Shards that are still there and that no batch from `batch` on, and no evaluation, reads; ascending."""
        with self._lock:
            order, windows_0 = self._order(0), list(self._windows(0))
            seen = {number for window in windows_0[: order.windows] for number in window}
            needed = shards_of(order.needed_from(batch), self._supply.starts)
        if seen:
            first = [self._supply.tables[number] for number in windows_0[0]]
            pinned = np.array(sorted(self._chosen(first)), dtype=np.int64)
            needed |= shards_of(pinned, self._supply.starts)
        return sorted(number for number in seen - needed if number in self._supply.sidecars)

    # --- the end ---

    def close(self) -> None:
        """Let the store go. The batches of an epoch are closed by themselves."""
        self._rows.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
