"""One worker: leases shards, keeps a window of captures in flight, verifies, stores, retries.

A row's failure is a value with a reason. What ends the run is an exception: no engine, no disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from eyas.capture.contract import CaptureSpec, RequestId
from eyas.config import ExtractConfig
from eyas.data.corpus import Corpus, CorpusRow
from eyas.errors import EngineError, EyasError, StoreError
from eyas.extract.engine import Captured, CaptureRequest, Engine, Failed, Retry, StatesLost
from eyas.extract.window import Window
from eyas.positions import kept_positions, kept_runs
from eyas.store.consumed import store_bytes
from eyas.store.format import RowContents
from eyas.store.plan import Shard
from eyas.store.shard_writer import Distrust, Rejected, ShardWriter
from eyas.store.source import Source, source_of
from eyas.store.writer import ShardState, StoreWriter

_MAX_SENDS = 100  # attempt numbers have two digits
# Doubling between these, a hundred sends outwait a spool that is full for more than twenty minutes.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 15.0
_STORE_THREADS = 8  # rows brought to their places at once, each with a buffer of CHUNK_BYTES (docs/throughput.md)
_FINISHERS = 2
_ROOM_S = 0.5  # between looks at a store that is at its disk budget
_REJECTED = {
    Rejected.CHECKSUM: "the states changed between the engine and the store",
    Rejected.NOT_FINITE: "NaN or Inf among the states",
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Report:
    """What changed in a shard since the last report about it.

    Attributes:
        shard: its number.
        leased: the figures are what the shard already held when it was leased, and replace what was known of it.
        rows, tokens, failed: rows stored, their tokens, and rows given up.
        retries, waits: sends that were tried again; waits are those that back-pressure caused.
        failure: row, reason and detail of a row given up.
        retried: row, attempt number, reason and detail of a send that failed and is tried again; not of waits.
        done: the shard is complete.
        note: a line for the user.
    """

    shard: int
    leased: bool = False
    rows: int = 0
    tokens: int = 0
    failed: int = 0
    retries: int = 0
    waits: int = 0
    failure: tuple[int, str, str] | None = None
    retried: tuple[int, int, str, str] | None = None
    done: bool = False
    note: str = ""


@dataclass(slots=True)
class _OpenShard:
    writer: ShardWriter
    unsettled: int  # rows that are neither stored nor failed

    @property
    def index(self) -> int:
        return self.writer.shard.index


class Worker:
    """Fills the shards it can lease.

    Args:
        corpus, store, engine: started and open; the caller closes them.
        spec: the agreement that `engine.start` proved.
        run, session: the identity of this run's requests, see RequestId.
        cfg: window, attempts and drain.
        window_bytes: bytes of states that may be in flight.
        report: called on the event loop for every change.
    """

    def __init__(
        self,
        corpus: Corpus,
        store: StoreWriter,
        engine: Engine,
        spec: CaptureSpec,
        *,
        run: str,
        session: str,
        cfg: ExtractConfig,
        window_bytes: int,
        report: Callable[[Report], None],
    ) -> None:
        self._corpus, self._store, self._engine, self._spec = corpus, store, engine, spec
        self._run_id, self._session = run, session
        self._cfg = cfg
        self._report = report
        self._window = Window(cfg.window_requests, cfg.window_tokens, window_bytes)
        self._threads = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="eyas-store")
        # Neither a row nor the next shard's lease waits for a full shard's fsync.
        self._finishers = ThreadPoolExecutor(_FINISHERS, thread_name_prefix="eyas-finish")
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: list[_OpenShard] = []
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None

    async def run(self) -> None:
        """Work until no shard can be leased, or `stop`.

        Raises:
            EngineError, StoreError: what ended the run; everything stored so far is journalled.
        """
        try:
            try:
                await self._start_rows()
            except EyasError:  # no room for the next shard, say: the rows in flight have theirs
                await self._drain()
                raise
            await self._drain()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._threads.shutdown(wait=True)
            self._finishers.shutdown(wait=True)
            for shard in self._open:
                shard.writer.close()
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """Start no further row and drain; a second call does not wait for rows in flight."""
        if self._stopping.is_set():
            for task in self._tasks:
                task.cancel()
        self._stopping.set()
        self._spawn(self._window.close)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    async def _start_rows(self) -> None:
        """Start every row of every shard that can be had. The next shard is made while this one's rows start."""
        shards = iter(self._store.plan.shards)
        ahead = asyncio.create_task(self._next_lease(shards))
        try:
            while (opened := await ahead) is not None:
                ahead = asyncio.create_task(self._next_lease(shards))
                rows, open_shard = opened
                for row in rows:
                    cost = self._cost(row)
                    if not await self._window.acquire(*cost):
                        return
                    self._spawn(self._row, open_shard, row, cost)
        finally:
            # Not cancelled: its thread would go on, and nobody would hold the lease that it brings.
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()  # raised above where it matters

    async def _next_lease(self, shards: Iterator[Shard]) -> tuple[list[CorpusRow], _OpenShard] | None:
        for shard in shards:
            if self._stopping.is_set() or self._fatal:
                return None
            if (opened := await self._lease(shard)) is not None:
                return opened
        return None

    async def _lease(self, shard: Shard) -> tuple[list[CorpusRow], _OpenShard] | None:
        state = await self._in_thread(self._store.state, shard)
        if state.done or (state is ShardState.ABSENT and not await self._room(shard)):
            return None
        rows = await self._in_thread(lambda: list(self._corpus.rows(shard.start, shard.stop)))

        def contents(_: Shard) -> list[RowContents]:
            last = self._spec.last
            return [RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, last)) for row in rows]

        writer = await self._in_thread(self._store.lease, shard, contents)
        if writer is None:
            return None
        for kind in Distrust:
            found = [finding for finding in writer.distrusted if finding.kind is kind]
            if found:  # one line a kind: a power loss may have taken thousands of rows
                more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
                self._report(Report(shard.index, note=f"{shard.name}: {found[0]}{more}; captured again"))
        pending, failed = set(writer.pending), writer.failed  # each goes over all rows: asked for once
        open_shard = _OpenShard(writer, len(pending))
        self._open.append(open_shard)
        done = [row for row in rows if row.index not in pending and row.index not in failed]
        tokens = sum(len(row.tokens) for row in done)
        self._report(Report(shard.index, leased=True, rows=len(done), tokens=tokens, failed=len(failed)))
        if not pending:
            await self._finish(open_shard)
        return [row for row in rows if row.index in pending], open_shard

    async def _room(self, shard: Shard) -> bool:
        """Wait until the shard fits in the disk budget; False when the run stops before.

        Raises:
            StoreError: it never will.
        """
        budget, size = self._cfg.disk_budget, self._store.info.layout(shard).file_bytes
        if budget is not None and size > budget:
            raise StoreError(f"a shard of {size:,} bytes is larger than extract.disk_budget", self._store.root)
        while budget is not None:
            if self._stopping.is_set() or self._fatal:
                return False
            if await self._in_thread(store_bytes, self._store.root) + size <= budget:
                break
            note = "the store has reached extract.disk_budget: waiting for training to remove what it used"
            self._report(Report(shard.index, note=note))
            await self._sleep(_ROOM_S)
        return True

    def _cost(self, row: CorpusRow) -> tuple[int, int]:
        positions = len(row.tokens) if self._spec.last == "all" else int(self._corpus.n_positions[row.index])
        return len(row.tokens), self._spec.record_bytes(len(row.tokens), positions)

    async def _row(self, shard: _OpenShard, row: CorpusRow, cost: tuple[int, int]) -> None:
        """Capture one row, with its retries; holds its place in the window until it is settled."""
        try:
            settled = await self._capture_with_retries(shard, row)
        finally:
            await self._window.release(*cost)
        if settled:
            shard.unsettled -= 1
            if shard.unsettled == 0:
                await self._finish(shard)

    async def _capture_with_retries(self, shard: _OpenShard, row: CorpusRow) -> bool:
        tokens, runs = row.tokens.tolist(), kept_runs(row.loss_mask, self._spec.last)
        attempts, delay_s = 0, _FIRST_WAIT_S
        for send in itertools.count():
            rid = RequestId(self._run_id, self._session, row.index, send)
            result = await self._engine.capture(CaptureRequest(rid, tokens, runs))
            if isinstance(result, Captured):
                result = await self._keep(shard, row, result)
                if result is None:
                    return True
            attempts += result.retry is not Retry.WAIT
            if result.retry is Retry.NEVER or attempts >= self._cfg.attempts or send + 1 >= _MAX_SENDS:
                await self._fail(shard, row.index, result)
                return True
            if self._stopping.is_set():
                return False  # stays pending: the next session tries it afresh
            if result.retry is Retry.WAIT:
                self._report(Report(shard.index, waits=1))
            else:
                retried = (row.index, send, result.reason, result.detail)
                self._report(Report(shard.index, retries=1, retried=retried))
            if result.retry is Retry.PROBE:
                self._report(Report(shard.index, note=f"{result.reason}: waiting until the server proves itself again"))
                await self._engine.reprobe()
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable: itertools.count does not end")

    async def _keep(self, shard: _OpenShard, row: CorpusRow, states: Captured) -> Failed | None:
        """Verify and store what came; None when stored. Once it is here it is kept, though its row be cancelled."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._store_states, shard.writer, row.index, states)
        try:
            await asyncio.wait([work])
        finally:
            if not work.done():
                # Cancelled. Not work.cancel(): the record would stay in the spool, and the row would be lost.
                await asyncio.wait([work])
            if work.exception() is None and work.result() is None:
                self._report(Report(shard.index, rows=1, tokens=len(row.tokens)))
        return work.result()

    def _store_states(self, writer: ShardWriter, row: int, states: Captured) -> Failed | None:
        """Bring the states to their place, verified on the way; runs in a thread. None when stored."""
        try:
            claimed = states.aux_xxh3, states.last_xxh3
            rejected = writer.put(row, _source(states.aux), _source(states.last), claimed)
        except StatesLost as lost:
            return lost.failure
        finally:
            states.release()
        return None if rejected is None else Failed(str(rejected), _REJECTED[rejected])

    async def _fail(self, shard: _OpenShard, row: int, failure: Failed) -> None:
        await self._in_thread(shard.writer.fail, row, failure.reason, failure.detail)
        self._report(Report(shard.index, failed=1, failure=(row, failure.reason, failure.detail)))
        if self._cfg.on_failure == "stop":
            raise EngineError(f"row {row} failed: {failure.reason}", failure.detail, "extract.on_failure is 'stop'")

    async def _finish(self, shard: _OpenShard) -> None:
        await asyncio.get_running_loop().run_in_executor(self._finishers, shard.writer.finish)
        self._open.remove(shard)
        self._report(Report(shard.index, done=True))

    async def _drain(self) -> None:
        """Wait for rows in flight: all of them, or for `drain_s` once stopping, or not at all once the run failed."""
        deadline_s: float | None = None
        loop = asyncio.get_running_loop()
        while self._fatal is None and (pending := {task for task in self._tasks if not task.done()}):
            if deadline_s is None and self._stopping.is_set():
                deadline_s = loop.time() + self._cfg.drain_s
            if deadline_s is not None and loop.time() >= deadline_s:
                return
            await asyncio.wait(pending, timeout=0.1)

    def _spawn(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        task = asyncio.create_task(self._guard(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """The first exception of any row ends the run; `run` raises it."""
        try:
            await work(*args)
        except Exception as error:  # noqa: BLE001  kept, and raised by run() once the others are cancelled
            self._fatal = self._fatal or error
            await self._window.close()

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or return early when the run stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _source(states: torch.Tensor | Source) -> Source:
    """A tensor's bytes, without a copy where it is contiguous."""
    if isinstance(states, torch.Tensor):
        return source_of(states.contiguous().flatten().view(torch.uint8).numpy())
    return states
