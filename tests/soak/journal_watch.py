"""Watches a store's journals while they grow: no row may be written twice, and none may change.

A journal is gone once its shard is complete, so that a row written twice would leave no trace there.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from eyas.store.documents import journalled_rows, read_sidecar, read_store_info
from eyas.store.files import ShardPaths


class JournalWatch:
    """Looks at a store's journals when told to.

    Attributes:
        doubled: rows with two lines of success in one journal, or whose bytes changed from one look to the next.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._hashes: dict[int, tuple[str, str]] = {}
        self.doubled: set[int] = set()

    def look(self) -> None:
        """Take in every journal as it is now."""
        for journal in self._store.glob("*.journal"):
            with contextlib.suppress(FileNotFoundError):  # its shard has just been finished
                self._read(journal.read_bytes())

    def stored(self) -> set[int]:
        """Rows that the store's files say are stored."""
        if not (self._store / "store.json").exists():
            return set()
        rows: set[int] = set()
        for shard in read_store_info(self._store).plan.shards:
            paths = ShardPaths(self._store, shard.stem)
            if (sidecar := read_sidecar(paths.sidecar)) is not None and paths.final.exists():
                rows |= set(range(shard.start, shard.stop)) - sidecar.failed.keys()
            else:
                rows.update(journalled_rows(paths))
        return rows

    def _read(self, data: bytes) -> None:
        once: set[int] = set()
        for line in data.split(b"\n")[:-1]:
            entry = json.loads(line.partition(b" ")[2])
            if "row" not in entry:
                continue
            row = entry["row"]
            if "failed" in entry:
                once.discard(row)
                continue
            hashes = (entry["aux"], entry["last"])
            if row in once or self._hashes.get(row, hashes) != hashes:
                self.doubled.add(row)
            once.add(row)
            self._hashes[row] = hashes
