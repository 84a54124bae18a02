"""Reading a store for training: rows as torch tensors, views of the mapped files wherever they are stored as floats.

reader = StoreReader(path)
row = reader[0]; row.aux            # [T, A, H], nothing copied; of an fp8 store dequantised
loader = DataLoader(StoreDataset(reader, seed=0), batch_size=None, num_workers=4)
"""

from __future__ import annotations

import json
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from eyas.capture.encoding import STORED_DTYPES, decode, is_quantised
from eyas.errors import IntegrityError, StoreError
from eyas.store.documents import read_complete, read_sidecar, read_store_info
from eyas.store.files import ShardPaths, open_regular
from eyas.store.format import Sidecar
from eyas.store.plan import Shard
from eyas.store.shardfile import read_index

# Private and writable, so that torch has a writable buffer while the file cannot change through it; without a reserve,
# since nobody writes and a shard may be larger than memory. (The mmap module of Python 3.11 does not name the flag.)
_MAP_NORESERVE: Final = 0x4000


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One corpus row with its states: T tokens, L kept positions, A layers, H hidden size.

    Attributes:
        row: corpus row number.
        tokens: [T] int32. loss_mask: [T] uint8.
        aux: [T, A, H], outputs of the spec's layers, ascending.
        last: [L, H], state after the final norm at `last_index`.
            Both in the reader's dtype; of a raw reader as stored, for `eyas.capture.encoding.decode`.
        last_index: [L] int32, ascending, relative to the row.
    """

    row: int
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    last_index: torch.Tensor


class _MappedShard:
    """One shard's tensors over a mapping that lives as long as any of them."""

    def __init__(self, path: Path, shard: Shard, sidecar: Sidecar, floats: torch.dtype | None) -> None:
        fd = open_regular(path)
        try:
            index = read_index(fd, path)
            if index.index_xxh3 != sidecar.index_xxh3 and not _retried(path, sidecar, index.index_xxh3):
                raise IntegrityError("shard and sidecar differ", path, "verify the store")
            mapping = mmap.mmap(
                fd,
                index.layout.file_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        finally:
            os.close(fd)
        states = STORED_DTYPES[index.spec.dtype]
        self._spec, self._floats = index.spec, floats
        self.start = shard.start
        self.row_offsets = index.row_offsets.tolist()
        self.last_offsets = index.last_offsets.tolist()
        self.tokens, self.loss_mask, self.last_index, self.aux, self.last = (
            _view(mapping, index.layout.tensors[name], dtype)
            for name, dtype in (
                ("tokens", torch.int32),
                ("loss_mask", torch.uint8),
                ("last_index", torch.int32),
                ("aux", states),
                ("last", states),
            )
        )

    def row(self, row: int) -> StoreRow:
        position = row - self.start
        tokens = slice(self.row_offsets[position], self.row_offsets[position + 1])
        kept = slice(self.last_offsets[position], self.last_offsets[position + 1])
        return StoreRow(
            row=row,
            tokens=self.tokens[tokens],
            loss_mask=self.loss_mask[tokens],
            aux=self._states(self.aux[tokens]),
            last=self._states(self.last[kept]),
            last_index=self.last_index[kept] - tokens.start,
        )

    def _states(self, stored: torch.Tensor) -> torch.Tensor:
        if self._floats is None:
            return stored
        return decode(stored, self._spec.dtype, self._spec.hidden_size, self._floats)


def _retried(path: Path, sidecar: Sidecar, index_xxh3: int) -> bool:
    """Whether the file is the reader's with failed rows filled in since: the rows that were good then still are."""
    now = read_sidecar(path.with_suffix(".json"))
    return now is not None and now.index_xxh3 == index_xxh3 and now.failed.keys() <= sidecar.failed.keys()


def _view(mapping: mmap.mmap, info: Any, dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for size in info.shape:
        count *= size
    if not count:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=info.start).view(info.shape)


class StoreReader:
    """The good rows of a store's complete shards, in corpus order.

    Opening reads the sidecars only; a shard is mapped when one of its rows is asked for. Shards that are finished
    later are seen by a new reader.

    Args:
        path: the store's folder.
        max_mapped: most shards kept mapped. Tensors keep their own shard mapped beyond that.
        dtype: of the rows' states; None is what they are stored in, and bfloat16 for quantised ones. Only states that
            are stored in it are views of the file.
        raw: give states as they are stored, so that quantised ones can be decoded elsewhere, on a GPU say.

    Attributes:
        spec: the agreement the rows follow.
        failed: corpus row numbers of complete shards that have no states.
        edges: [S + 1] number of good rows before each complete shard; rows of shard s are edges[s] to edges[s + 1].

    Raises:
        StoreError: not a store, or none of its shards is complete yet.
        IntegrityError: a damaged sidecar, or a shard of another size than it says.
    """

    def __init__(
        self, path: str | Path, *, max_mapped: int = 64, dtype: torch.dtype | None = None, raw: bool = False
    ) -> None:
        if raw and dtype is not None:
            raise ValueError("raw states are as they are stored, in no other dtype")
        self.path = Path(path)
        self.info = read_store_info(path)
        self.spec = self.info.spec
        # bfloat16 rounds quantised states sixteen times as finely as their codes do, and is what training computes in.
        stored = torch.bfloat16 if is_quantised(self.spec.dtype) else STORED_DTYPES[self.spec.dtype]
        self._floats = None if raw else dtype or stored
        self._max_mapped = max(1, max_mapped)
        self._mapped: OrderedDict[int, _MappedShard] = OrderedDict()
        names = set(os.listdir(self.path))  # noqa: PTH208
        self._shards: list[tuple[Shard, Sidecar]] = []
        self.failed: list[int] = []
        for shard in self.info.plan.shards:
            if shard.name in names and f"{shard.stem}.json" in names:
                sidecar = read_complete(ShardPaths(self.path, shard.stem))
                if sidecar is not None:
                    self._shards.append((shard, sidecar))
                    self.failed += sorted(sidecar.failed)
        if not self._shards:
            raise StoreError("no complete shard yet", path, "let the extraction finish at least one")
        self.edges = np.cumsum([0, *(sidecar.ok_rows for _, sidecar in self._shards)])
        self._good_rows: dict[int, np.ndarray] = {}

    @property
    def provenance(self) -> list[dict[str, str]]:
        """The distinct engines, versions and hosts that wrote rows."""
        found = {json.dumps(p, sort_keys=True): p for _, sidecar in self._shards for p in sidecar.provenance}
        return [dict(found[key]) for key in sorted(found)]

    @property
    def shards(self) -> int:
        """How many shards are complete."""
        return len(self._shards)

    def __len__(self) -> int:
        return int(self.edges[-1])

    @overload
    def __getitem__(self, index: int) -> StoreRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoreRow]: ...
    def __getitem__(self, index: int | slice) -> StoreRow | list[StoreRow]:
        """Row `index` of the good rows (not the corpus row of that number), or the rows of a slice.

        Raises:
            IndexError: out of range.
            StoreError: the shard's file is gone. IntegrityError: it is not the one its sidecar describes.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = int(np.searchsorted(self.edges, position, side="right")) - 1
        return self._row(at, position - int(self.edges[at]))

    def __iter__(self) -> Iterator[StoreRow]:
        return (self[i] for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": OrderedDict()}  # a spawned worker maps for itself

    def _row(self, at: int, position: int) -> StoreRow:
        shard, sidecar = self._shards[at]
        row = shard.start + position
        if sidecar.failed:
            if at not in self._good_rows:
                good = [r for r in range(shard.start, shard.stop) if r not in sidecar.failed]
                self._good_rows[at] = np.array(good, dtype=np.int64)
            row = int(self._good_rows[at][position])
        return self._shard(at).row(row)

    def _shard(self, at: int) -> _MappedShard:
        mapped = self._mapped.get(at)
        if mapped is None:
            shard, sidecar = self._shards[at]
            path = self.path / shard.name
            try:
                mapped = _MappedShard(path, shard, sidecar, self._floats)
            except OSError as error:
                hint = "is its volume mounted, or was it reopened to retry failed rows?"
                raise StoreError(f"cannot open shard: {error.strerror}", path, hint) from error
            self._mapped[at] = mapped
            while len(self._mapped) > self._max_mapped:
                self._mapped.popitem(last=False)  # unmapped when the last tensor over it goes
        self._mapped.move_to_end(at)
        return mapped


class StoreDataset(IterableDataset[StoreRow]):
    """A store's good rows in a shuffled order, each exactly once an epoch over all workers of all ranks.

    Shards are shuffled, then the rows of each `buffer_shards` consecutive ones together: reads stay within a few files
    while the order is close to uniform. The order depends on seed and epoch only; consumer c of C takes every C-th row,
    so that their counts differ by one at most. Rows are not of equal length: use `batch_size=None` and pack.

    Args:
        reader: the store, or its path.
        seed: of the order.
        shuffle: False gives corpus order.
        buffer_shards: shards whose rows are shuffled together.
        rank, world_size: this process among those that share an epoch.
    """

    def __init__(
        self,
        reader: StoreReader | str | Path,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_shards: int = 4,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within a world of {world_size}")
        if buffer_shards < 1:
            raise ValueError(f"buffer_shards must be positive, got {buffer_shards}")
        self.reader = reader if isinstance(reader, StoreReader) else StoreReader(reader)
        self._seed, self._shuffle, self._buffer_shards = seed, shuffle, buffer_shards
        self._rank, self._world_size = rank, world_size
        # Shared memory: workers that persist over epochs have a copy of this object, and must see the new epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the next iteration's order."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Rows this rank gets over all its workers."""
        return len(range(self._rank, len(self.reader), self._world_size))

    def __iter__(self) -> Iterator[StoreRow]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        # Ranks alternate within a worker's turn, so that a rank's count does not depend on its number of workers.
        consumer, consumers = number * self._world_size + self._rank, workers * self._world_size
        seen = 0
        for indices in self._groups():
            first = (consumer - seen) % consumers
            for index in indices[first::consumers]:
                yield self.reader[int(index)]
            seen += len(indices)

    def _groups(self) -> Iterator[np.ndarray]:
        """The epoch's order, one buffer of shards at a time."""
        starts = self.reader.edges.tolist()
        rng = np.random.default_rng([self._seed, int(self._epoch)])
        order = rng.permutation(len(starts) - 1) if self._shuffle else np.arange(len(starts) - 1)
        for first in range(0, len(order), self._buffer_shards):
            group = order[first : first + self._buffer_shards]
            indices = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in group])
            yield rng.permutation(indices) if self._shuffle else indices
