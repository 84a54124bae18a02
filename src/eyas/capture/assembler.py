"""Chunks of prefill become one record, or a refusal by name. Pure: no server, no I/O, no clock of its own.

The rules, for one request id:

- The first chunk starts at 0, every next one where the last one ended, the last one ends at the prompt's length.
- A chunk that starts at 0 again begins the record anew: what was assembled before is dropped, so a record is always one
  unbroken run of forwards over the whole prompt, whatever the scheduler did in between.
- Another request object under a known id begins anew too; two requests are never mixed in one record.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from eyas.capture.contract import (
    LAST_PARAM,
    SPEC_PARAM,
    CaptureSpec,
    Refusal,
    Refused,
    RequestId,
    check_runs,
    count_of,
)
from eyas.capture.strictjson import shown

MAX_PARTIALS: Final = 1024  # far above what a scheduler has in prefill at once; a bound, not a tuning knob


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's share of one forward.

    Attributes:
        rid: the request's id, with our prefix.
        start, stop: the positions it covers, [start, stop).
        prompt: the request's token ids.
        params: the request's custom parameters.
        owner: the server's own request object; held weakly, compared by identity.
        retractions: how often the scheduler has taken the request back.
    """

    rid: str
    start: int
    stop: int
    prompt: Sequence[int]
    params: Mapping[str, Any]
    owner: object
    retractions: int = 0


@dataclass(slots=True)
class Record:
    """A record being assembled.

    Attributes:
        rid: file stem and identity.
        prompt: T token ids.
        runs: flat runs of the L positions where `last` is kept.
        chunks: [start, stop) of each forward so far, gapless from 0.
        bytes: size of the finished record's states.
        key: no other record of this assembler has it, whatever its id.
        on_its_way: whether any of its rows have been handed to the writers.
        dropped: given up: nothing more of it is to be written.
    """

    rid: str
    prompt: Sequence[int]
    runs: list[int]
    bytes: int
    owner: weakref.ref[Any]
    key: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    touched_s: float = 0.0
    on_its_way: bool = False
    dropped: bool = False

    @property
    def tokens(self) -> int:
        return len(self.prompt)

    @property
    def positions(self) -> int:
        return count_of(self.runs)

    @property
    def complete(self) -> bool:
        return bool(self.chunks) and self.chunks[-1][1] == self.tokens

    @property
    def fresh(self) -> bool:
        return len(self.chunks) == 1


class Assembler:
    """Keeps the partial records of requests in prefill.

    Args:
        spec: the agreement every request must name.
        is_over: whether the server is done with a request object (finished or aborted).
        on_drop: told of every record that is forgotten before it was complete.
        max_partials: most records in assembly at once.
        max_age_s: partial records untouched for longer are given up.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        *,
        is_over: Callable[[Any], bool] = lambda owner: False,
        on_drop: Callable[[Record], None] = lambda record: None,
        max_partials: int = MAX_PARTIALS,
        max_age_s: float = 600.0,
    ) -> None:
        self._spec = spec
        self._spec_id = spec.spec_id
        self._is_over = is_over
        self._on_drop = on_drop
        self._keys = itertools.count(1)
        self._max_partials = max_partials
        self._max_age_s = max_age_s
        self._partials: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._partials)

    def add(self, chunk: Chunk, now_s: float = 0.0) -> Record | Refused:
        """Take the next chunk: the record it belongs to (perhaps `complete` now), or why there will be none.

        A complete record is forgotten here, and so is one that is refused or begun anew: `on_drop` hears of those.
        """
        known = self._partials.get(chunk.rid)
        if known is not None and (chunk.start == 0 or known.owner() is not chunk.owner):
            self.drop(chunk.rid)
            known = None
        if self._is_over(chunk.owner):
            self.drop(chunk.rid)
            return Refused(Refusal.ABORTED, "the server is ending this request")
        record = self._begin(chunk) if known is None else known
        if isinstance(record, Refused):
            return record
        if refused := self._misplaced(chunk, record):
            self.drop(chunk.rid)
            return refused
        self._partials.pop(chunk.rid, None)
        record.chunks.append((chunk.start, chunk.stop))
        record.touched_s = now_s
        if not record.complete:
            self._partials[chunk.rid] = record
        return record

    def drop(self, rid: str) -> None:
        """Forget a partial record, if there is one."""
        if (record := self._partials.pop(rid, None)) is not None:
            self._on_drop(record)

    def sweep(self, now_s: float) -> None:
        """Forget partial records whose request is gone, over, or has not moved for `max_age_s`."""
        gone = [
            record.rid
            for record in self._partials.values()
            if (owner := record.owner()) is None or self._is_over(owner) or now_s - record.touched_s > self._max_age_s
        ]
        for rid in gone:
            self.drop(rid)

    def clear(self) -> None:
        """Forget all of them."""
        for rid in list(self._partials):
            self.drop(rid)

    def _begin(self, chunk: Chunk) -> Record | Refused:
        if RequestId.parse(chunk.rid) is None:
            return Refused(Refusal.BAD_REQUEST, f"malformed request id {chunk.rid[:80]!r}")
        if not isinstance(chunk.params, Mapping):
            return Refused(Refusal.BAD_REQUEST, "custom_params must be an object")
        asked = chunk.params.get(SPEC_PARAM)
        if asked != self._spec_id:
            return Refused(
                Refusal.SPEC_DIFFERS, f"request asks for {shown(asked)}, this server captures {self._spec_id}"
            )
        runs = self._runs(chunk)
        if isinstance(runs, Refused):
            return runs
        if chunk.start != 0:
            if chunk.retractions:
                return Refused(Refusal.RETRACTED, f"taken back {chunk.retractions} times, resumed at {chunk.start}")
            return Refused(Refusal.PREFIX_CACHED, f"{chunk.start} of {len(chunk.prompt)} tokens came from the cache")
        if len(self._partials) >= self._max_partials:
            return Refused(Refusal.SPOOL_FULL, f"{len(self._partials)} records in assembly")
        size = self._spec.record_bytes(len(chunk.prompt), count_of(runs))
        return Record(chunk.rid, chunk.prompt, runs, size, weakref.ref(chunk.owner), next(self._keys))

    def _runs(self, chunk: Chunk) -> list[int] | Refused:
        tokens = len(chunk.prompt)
        if self._spec.last == "all":
            return [0, tokens]
        runs = chunk.params.get(LAST_PARAM)
        if not isinstance(runs, list):
            return Refused(Refusal.BAD_REQUEST, f"{LAST_PARAM} must be a list of [start, stop, ...] runs")
        try:
            check_runs(runs, tokens)
        except ValueError as error:
            return Refused(Refusal.BAD_REQUEST, str(error))
        return list(runs)

    @staticmethod
    def _misplaced(chunk: Chunk, record: Record) -> Refused | None:
        expected = record.chunks[-1][1] if record.chunks else 0
        if chunk.start != expected:
            reason = Refusal.RETRACTED if chunk.retractions else Refusal.CHUNK_GAP
            return Refused(reason, f"chunk starts at {chunk.start}, expected {expected}")
        if not chunk.start < chunk.stop <= record.tokens:
            return Refused(Refusal.CHUNK_GAP, f"chunk [{chunk.start}, {chunk.stop}) in {record.tokens} tokens")
        return None


def kept_slices(runs: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """The part of flat runs inside [start, stop), as slices relative to `start`."""
    pairs = zip(runs[0::2], runs[1::2], strict=True)
    return [(max(a, start) - start, min(b, stop) - start) for a, b in pairs if a < stop and b > start]
