"""What a run will need, before it starts: rows, tokens, bytes by field, disk, time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from eyas.capture.contract import CaptureSpec
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, StoreError
from eyas.extract.engine import EngineInfo
from eyas.logs import read_number, read_sessions
from eyas.rates import human_bytes, human_time


@dataclass(frozen=True, slots=True)
class Forecast:
    """Sizes in bytes. `missing` is what is still to be allocated; `free` what the store's disk has now.

    `tokens_left` are those of rows that are neither stored nor in a complete shard.
    """

    rows: int
    tokens: int
    tokens_left: int
    positions: int
    shards: int
    shards_done: int
    by_field: dict[str, int]
    total: int
    missing: int
    free: int
    reserve: int
    tokens_per_s: float | None
    too_long: tuple[int, ...]
    max_row_tokens: int | None
    too_large: tuple[int, ...]
    spool_bytes: int | None

    def check(self, store: Path) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: rows longer than the engine admits, or larger than the spool's quota.
            StoreError: the disk cannot hold the run.
        """
        if self.too_long:
            raise ConfigError(
                f"{len(self.too_long)} rows are longer than the engine admits ({self.max_row_tokens} tokens)",
                f"row {self.too_long[0]}",
                f"prepare again with --set prepare.max_tokens={self.max_row_tokens}",
            )
        if self.too_large:
            raise ConfigError(
                f"{len(self.too_large)} rows are larger than the spool's quota ({human_bytes(self.spool_bytes or 0)})",
                f"row {self.too_large[0]}",
                "start the server with a larger --quota",
            )
        if self.missing and self.missing + self.reserve > self.free:
            raise StoreError(
                f"not enough disk: {human_bytes(self.missing)} to write and {human_bytes(self.reserve)} to keep free, "
                f"{human_bytes(self.free)} there",
                store,
                "free some, name a store elsewhere, or lower store.reserve_bytes",
            )

    def table(self) -> Table:
        """For people."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_row("rows", f"{self.rows:,}")
        table.add_row("tokens", f"{self.tokens:,} ({self.positions:,} with last)")
        for name, size in self.by_field.items():
            table.add_row(f"  {name}", human_bytes(size))
        table.add_row("store", f"{human_bytes(self.total)} in {self.shards:,} shards ({self.shards_done:,} done)")
        table.add_row("to allocate", human_bytes(self.missing))
        table.add_row("disk", f"{human_bytes(self.free)} free, {human_bytes(self.reserve)} kept free")
        if self.tokens_per_s:
            left = human_time(self.tokens_left / self.tokens_per_s)
            rate = f"{self.tokens_per_s:,.0f} tokens/s, as last time"
            table.add_row("time", f"{left} for {self.tokens_left:,} tokens at {rate}")
        else:
            table.add_row("time", "unknown: no earlier session of this store")
        return table


def fields_of(spec: CaptureSpec, tokens: int, positions: int, rows: int) -> dict[str, int]:
    """Bytes by what they hold."""
    return {
        f"aux ({len(spec.layers)} layers x {spec.hidden_size} {spec.dtype})": tokens * spec.aux_bytes_per_token,
        f"last ({spec.hidden_size} {spec.dtype})": positions * spec.last_bytes_per_position,
        "tokens, masks, hashes": tokens * 5 + positions * 4 + rows * 41,
    }


def forecast(
    corpus: Corpus,
    info: EngineInfo,
    positions_n: npt.NDArray[np.int32],
    *,
    total: int,
    missing: int,
    tokens_left: int,
    shards: tuple[int, int],
    root: Path,
    reserve: int,
) -> Forecast:
    """Work out a Forecast.

    Args:
        corpus: rows to capture.
        info: what the engine admits.
        positions_n: kept `last` positions of each row, [N].
        total, missing: bytes of the whole store, and those the disk has not given it yet.
        tokens_left: tokens of rows still to capture.
        shards: how many in all, and how many complete.
        root: the store's folder; need not exist.
        reserve: bytes to keep free.
    """
    spec, tokens, positions = info.spec, int(corpus.n_tokens.sum()), int(positions_n.sum())
    sizes = corpus.n_tokens.astype(np.int64) * spec.aux_bytes_per_token
    sizes += positions_n.astype(np.int64) * spec.last_bytes_per_position
    return Forecast(
        rows=len(corpus),
        tokens=tokens,
        tokens_left=tokens_left,
        positions=positions,
        shards=shards[0],
        shards_done=shards[1],
        by_field=fields_of(spec, tokens, positions, len(corpus)),
        total=total,
        missing=missing,
        free=shutil.disk_usage(_existing(root)).free,
        reserve=reserve,
        tokens_per_s=last_rate(root),
        too_long=_over(corpus.n_tokens, info.max_row_tokens),
        max_row_tokens=info.max_row_tokens,
        too_large=_over(sizes, info.spool_bytes),
        spool_bytes=info.spool_bytes,
    )


def last_rate(store: Path) -> float | None:
    """Tokens/s of the latest session that the store's logs tell of."""
    events = (event for session in read_sessions(store) for event in session.events)
    rates = [(event["t"], rate) for event in events if (rate := read_number(event, "tokens_per_s"))]
    return max(rates)[1] if rates else None


def _over(values: npt.NDArray, limit: int | None) -> tuple[int, ...]:
    return () if limit is None else tuple(np.flatnonzero(values > limit).tolist())


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
