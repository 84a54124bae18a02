"""Training from a store that does not fit on its disk: shards that were used make room for those still to be written.

At most four windows' shards are there at a time, and those of the batches that are being filled: the evaluated rows',
those being used, those used but not yet saved in a checkpoint, and those being written. `fitted` makes the windows
small enough for that, so that extraction, which waits while the store is at its budget (`store.budget_bytes`), and
training, which waits for a window, never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from eyas.errors import ConfigError
from eyas.rates import human_bytes
from eyas.store.consumed import remove_consumed, store_bytes
from eyas.store.plan import planned_bytes, position_bytes, token_bytes
from eyas.train.sampler import Sampling
from eyas.train.supply import Supply

_WINDOWS: Final = 4


class DiskBudget:
    """What may be removed, and when.

    Args:
        supply: the store's shards.
        nbytes: the budget.
    """

    def __init__(self, supply: Supply, nbytes: int) -> None:
        self._supply, self._nbytes = supply, nbytes
        info = supply.info
        self._largest = max(planned_bytes([shard], info.spec) for shard in info.plan.shards)
        self._window = 1  # shards

    def fitted(self, sampling: Sampling) -> Sampling:
        """The sampling with windows that the budget has room for.

        Raises:
            ConfigError: not even for windows of one shard.
        """
        spec = self._supply.info.spec
        opened = sampling.oldest * sampling.budget * (token_bytes(spec) + position_bytes(spec))
        shards = (self._nbytes - opened - self._largest) // (_WINDOWS * self._largest)
        if shards < 1:
            least = opened + (_WINDOWS + 1) * self._largest
            what = f"a disk budget of {human_bytes(self._nbytes)} is too small: at least {human_bytes(least)}"
            raise ConfigError(what, "train.disk_budget", "or make the store with a smaller store.shard_bytes")
        self._window = min(sampling.window_shards, shards)
        return replace(sampling, window_shards=self._window)

    def due(self, used: Sequence[int]) -> bool:
        """Whether shards that were used take half a window: so many wait for a checkpoint."""
        held = sum(self._supply.sidecars[number].bytes for number in used)
        return not self._supply.complete and 2 * held >= self._window * self._largest

    def make_room(self, used: Sequence[int]) -> int:
        """Remove used shards in order, until the store leaves room for the next window. Returns the bytes freed.

        Raises:
            StoreError: the disk.
        """
        supply, freed = self._supply, 0
        room = 0 if supply.complete else (self._window + 1) * self._largest
        for number in used:
            if store_bytes(supply.root) <= self._nbytes - room:
                break
            shard = (supply.info.plan.shards[number], supply.sidecars[number], supply.tables[number])
            if size := remove_consumed(supply.root, supply.info, shard):
                del supply.sidecars[number]
                supply.consumed.add(number)
                freed += size
        return freed
