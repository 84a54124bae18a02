"""What the reader knows of a store: which shards are there, what rows they hold; waiting for those still to come.

Of a store that is still being written only *complete* shards are taken, never the journalled rows of an open one:
which shards are complete decides nothing about the order (a window waits for its own), so that every rank, and a run
that is resumed, gets the same batches; a journalled row may be found damaged when its writer resumes, and is then
captured again, but a complete shard's rows are final. It costs the time of one window at the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from eyas.errors import StoreError
from eyas.rates import human_time
from eyas.store.consumed import read_consumed
from eyas.store.documents import read_complete
from eyas.store.files import ShardPaths
from eyas.store.format import Sidecar, StoreInfo
from eyas.store.plan import Shard
from eyas.store.rowfile import RowTable, read_table

_OPENERS: Final = 16  # indices read at once: a network's answers overlap
_FIRST_WORD_S: Final = 2.0
_SAY_AGAIN_S: Final = 30.0

Say = Callable[[str], None]


class Supply:
    """The shards of a store that can be read.

    Attributes:
        starts: first corpus row of every planned shard.
        tables: the rows of each shard known to be complete, or consumed, by shard number.
        sidecars: of those that are there.
    """

    def __init__(self, root: Path, info: StoreInfo) -> None:
        self.root, self.info = root, info
        self.starts = [shard.start for shard in info.plan.shards]
        self.tables: dict[int, RowTable] = {}
        self.sidecars: dict[int, Sidecar] = {}
        self.consumed: set[int] = set()

    def look(self) -> None:
        """Take in whatever is complete by now.

        Raises:
            StoreError, IntegrityError: a shard cannot be read, or is damaged.
        """
        names = set(os.listdir(self.root))  # noqa: PTH208
        there = [s for s in self.info.plan.shards if s.index not in self.tables and self._named(s, names)]
        if not there:
            return
        with ThreadPoolExecutor(min(_OPENERS, len(there)), thread_name_prefix="eyas-index") as pool:
            for _ in pool.map(self._take, there):
                pass

    @staticmethod
    def _named(shard: Shard, names: set[str]) -> bool:
        return f"{shard.stem}.consumed" in names or {shard.name, f"{shard.stem}.json"} <= names

    def _take(self, shard: Shard) -> None:
        paths = ShardPaths(self.root, shard.stem)
        if (gone := read_consumed(self.info, shard, paths)) is not None:
            self.consumed.add(shard.index)
            self.tables[shard.index] = gone.table
        elif (sidecar := read_complete(paths)) is not None:
            table = read_table(self.info, shard, paths, sidecar)
            self.sidecars[shard.index] = sidecar
            self.tables[shard.index] = table  # last: who finds it finds the sidecar, too

    def wait(
        self,
        shards: Iterable[int],
        sleep: Callable[[float], bool],
        say: Say,
        *,
        poll_s: float,
        patience_s: float,
    ) -> Sequence[RowTable] | None:
        """The tables of these shards, once all of them are there.

        Args:
            shards: their numbers.
            sleep: waits so many seconds; True says to give up.
            say: is told what is waited for: after two seconds, then every half minute.
            poll_s: seconds between looks.
            patience_s: longest time without anything new.

        Returns:
            None where `sleep` said to give up.

        Raises:
            StoreError: nothing new came for too long. Also as `look`.
        """
        wanted = list(shards)
        seen, news = self._progress(), time.monotonic()
        began, said = news, news + _FIRST_WORD_S - _SAY_AGAIN_S
        while True:
            self.look()
            if not (missing := [number for number in wanted if number not in self.tables]):
                return [self.tables[number] for number in wanted]
            now = time.monotonic()
            if (progress := self._progress()) != seen:
                seen, news = progress, now
            if now - news > patience_s:
                what = f"no new row for {human_time(now - news)}; {self._waited(missing)}"
                raise StoreError(what, self.root, "is eyas extract running? start it again, then resume this run")
            if now - said >= _SAY_AGAIN_S:
                said = now
                quiet = f"; nothing new for {human_time(now - news)}: is eyas extract running?"
                doubt = quiet if now - news > _SAY_AGAIN_S else ""
                say(f"{self._waited(missing)}, for {human_time(now - began)} so far{doubt}")
            if sleep(poll_s):
                return None

    def _waited(self, missing: list[int]) -> str:
        first = self.info.plan.shards[missing[0]].stem
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"waiting for {first}{more}: {len(self.tables):,} of {len(self.starts):,} shards are complete"

    def _progress(self) -> tuple[int, int, int]:
        """Changes whenever extraction stores a row."""
        size = count = 0
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.endswith(".journal"):
                    try:
                        size += entry.stat().st_size
                        count += 1
                    except FileNotFoundError:  # finished meanwhile
                        continue
        return len(self.tables), count, size

    @property
    def complete(self) -> bool:
        """Whether no shard is still to come."""
        return len(self.tables) == len(self.starts)
