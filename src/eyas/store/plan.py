"""Which corpus rows go into which shard. Pure: token counts are known before extraction, so the layout is too.

plan = make_plan(tokens_N, positions_N, spec, shard_bytes)
for shard in plan.shards: print(shard.name, shard.start, shard.stop)
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from eyas.capture.contract import CaptureSpec

PLAN_VERSION: Final = 1
MAX_SHARD_TOKENS: Final = 2**31 - 1  # `last_index` is int32

# What a shard holds beside the states: see docs/store-format.md.
HEADER_BYTES: Final = 4096  # reserved for the safetensors header; the real one is shorter
SHARD_EXTRA_BYTES: Final = HEADER_BYTES + 8  # row_offsets has R + 1 entries
ROW_EXTRA_BYTES: Final = 8 + 4 * 8 + 1  # row_offsets, row_xxh3 of four fields, row_status
TOKEN_EXTRA_BYTES: Final = 4 + 1  # tokens, loss_mask
POSITION_EXTRA_BYTES: Final = 4  # last_index


@dataclass(frozen=True, slots=True)
class Shard:
    """Corpus rows [start, stop) in one file: `tokens` tokens, `last` kept at `positions` of them."""

    index: int
    start: int
    stop: int
    tokens: int
    positions: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def stem(self) -> str:
        return f"shard-{self.index:05d}"

    @property
    def name(self) -> str:
        return f"{self.stem}.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """Every corpus row in exactly one shard, in order.

    Attributes:
        shards: in order of their rows.
        digest: 32 hex digits over everything that determines the layout.
        total_bytes: disk space all shards need, each header counted as HEADER_BYTES (an upper bound within 0.01 %
            for shards of 64 MiB).
    """

    shards: tuple[Shard, ...]
    digest: str
    total_bytes: int


def make_plan(tokens_N: npt.ArrayLike, positions_N: npt.ArrayLike, spec: CaptureSpec, shard_bytes: int) -> Plan:
    """Pack rows in order into shards of at most `shard_bytes`; a larger row gets a shard of its own.

    Args:
        tokens_N: [N] tokens of each corpus row, at least 1.
        positions_N: [N] positions at which the row's `last` is kept, at most its tokens.
        spec: decides the bytes of a token and of a position.
        shard_bytes: largest file, header included.

    Raises:
        ValueError: counts out of range, or `shard_bytes` not positive.
    """
    tokens, positions = np.asarray(tokens_N, dtype=np.int64), np.asarray(positions_N, dtype=np.int64)
    if tokens.ndim != 1 or tokens.shape != positions.shape:
        raise ValueError(f"tokens and positions must be equally long vectors, got {tokens.shape} and {positions.shape}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
    if len(tokens) and (tokens.min() < 1 or tokens.max() > MAX_SHARD_TOKENS):
        raise ValueError(f"row {int(np.argmax((tokens < 1) | (tokens > MAX_SHARD_TOKENS)))} has no or too many tokens")
    if np.any((positions < 0) | (positions > tokens)):
        raise ValueError(
            f"row {int(np.argmax((positions < 0) | (positions > tokens)))} keeps more positions than tokens"
        )

    row_bytes = tokens * token_bytes(spec) + positions * position_bytes(spec) + ROW_EXTRA_BYTES
    byte_ends, token_ends, position_ends = (np.concatenate([[0], np.cumsum(x)]) for x in (row_bytes, tokens, positions))
    edges = _edges(byte_ends.tolist(), token_ends.tolist(), max(shard_bytes - SHARD_EXTRA_BYTES, 0))
    shards = tuple(
        Shard(index, start, stop, shard_tokens, shard_positions)
        for index, (start, stop, shard_tokens, shard_positions) in enumerate(
            zip(
                edges[:-1],
                edges[1:],
                np.diff(token_ends[edges]).tolist(),
                np.diff(position_ends[edges]).tolist(),
                strict=True,
            )
        )
    )
    return Plan(shards, _digest(tokens, positions, spec, shard_bytes), planned_bytes(shards, spec))


def planned_bytes(shards: Sequence[Shard], spec: CaptureSpec) -> int:
    """`Plan.total_bytes` of these shards."""
    return sum(
        shard.tokens * token_bytes(spec)
        + shard.positions * position_bytes(spec)
        + shard.rows * ROW_EXTRA_BYTES
        + SHARD_EXTRA_BYTES
        for shard in shards
    )


def token_bytes(spec: CaptureSpec) -> int:
    """Bytes of one token in a shard: its states, its id, its mask."""
    return spec.aux_bytes_per_token + TOKEN_EXTRA_BYTES


def position_bytes(spec: CaptureSpec) -> int:
    """Bytes of one kept position in a shard."""
    return spec.last_bytes_per_position + POSITION_EXTRA_BYTES


def _edges(byte_ends: list[int], token_ends: list[int], room: int) -> list[int]:
    """Row numbers at which shards begin, and N: each shard as full as `room` and MAX_SHARD_TOKENS allow."""
    edges = [0]
    last = len(byte_ends) - 1
    while (start := edges[-1]) < last:
        by_bytes = bisect_right(byte_ends, byte_ends[start] + room, start) - 1
        by_tokens = bisect_right(token_ends, token_ends[start] + MAX_SHARD_TOKENS, start) - 1
        edges.append(max(min(by_bytes, by_tokens), start + 1))
    return edges


def _digest(
    tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], spec: CaptureSpec, shard_bytes: int
) -> str:
    shape = {
        "plan": PLAN_VERSION,
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "dtype": spec.dtype,
        "shard_bytes": shard_bytes,
        "rows": len(tokens),
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, separators=(",", ":")).encode())
    digest.update(tokens.astype("<i4").tobytes())
    digest.update(positions.astype("<i4").tobytes())
    return digest.hexdigest()[:32]
