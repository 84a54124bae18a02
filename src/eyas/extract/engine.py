"""The seam: one method turns a row of token ids into its hidden states, or says by name why not.

engine = HFEngine(...) | SGLangEngine(...) | FakeEngine(...)
info = await engine.start()                 # raises EngineError; proves spec and plugin
match await engine.capture(request):
    case Captured() as states: ...          # then states.release()
    case Failed(reason): ...
await engine.close()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from eyas.capture.contract import CaptureSpec, RequestId
from eyas.store.source import Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One row to capture.

    Attributes:
        rid: the identity the states come back under.
        tokens: token ids, length T.
        last_runs: flat runs [start, stop, ...] of positions where `last` is kept; L positions in all.
    """

    rid: RequestId
    tokens: list[int]
    last_runs: list[int]


@dataclass(frozen=True, slots=True)
class Captured:
    """States of one row: in memory that nobody else writes to, or a `Source` of bytes that still lie at their origin.

    Call `release` when they are stored.

    Attributes:
        aux: [T, A, W] as stored (`CaptureSpec.aux_shape`).
        last: [L, W] likewise.
        aux_xxh3, last_xxh3: xxh3-64 claimed by the origin; the caller compares them with the bytes it read.
        release: drops the record at its origin (removes the spool file); the states cannot be read after it.
    """

    aux: torch.Tensor | Source
    last: torch.Tensor | Source
    aux_xxh3: int
    last_xxh3: int
    release: Callable[[], None] = lambda: None


class Retry(Enum):
    """What a failure means for the row."""

    ATTEMPT = "attempt"  # try again with the next attempt number, up to the limit
    WAIT = "wait"  # back-pressure: try again later, does not count
    NEVER = "never"  # would fail the same way again: record it as failed
    PROBE = "probe"  # the server may have restarted: prove plugin and spec again, then as ATTEMPT


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there are no states: `reason` is a short closed-set name, `detail` is for a person."""

    reason: str
    detail: str = ""
    retry: Retry = Retry.ATTEMPT


class StatesLost(Exception):
    """Raised by a `Source` that cannot be read to its end; `failure` is what that means for the row."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine proved at start.

    Attributes:
        spec: the agreement its records follow.
        provenance: engine, versions, host: kept per shard, never part of identity.
        max_row_tokens: longest row it admits; None when unbounded.
        spool_bytes: this client's share of a server's spool quota; None when there is no spool.
        servers: how many share the work, each with a window and a spool of its own.
    """

    spec: CaptureSpec
    provenance: Mapping[str, str] = field(default_factory=dict)
    max_row_tokens: int | None = None
    spool_bytes: int | None = None
    servers: int = 1


class Engine(Protocol):
    """Where hidden states come from. `capture` may be called concurrently."""

    async def start(self) -> EngineInfo:
        """Raises EngineError when the engine is absent, of another model or without the plugin."""
        ...

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        """Raises EngineError only when no further row can succeed."""
        ...

    async def reprobe(self) -> None:
        """Prove plugin and spec again after a `Retry.PROBE` failure; waits while a server restarts.

        Raises EngineError when it stays away or came back as another model. A no-op for engines in process.
        """
        ...

    async def close(self) -> None: ...
