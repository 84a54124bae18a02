"""`extract(corpus, engine, store)`: plan, check, work, report, resume.

One worker runs in this process; more are processes of their own that share nothing but the store's files: each leases
whole shards. Ctrl-C and SIGTERM drain; a killed run resumes from what its shards' journals say.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from eyas.config import Config
from eyas.data.corpus import Corpus
from eyas.errors import EngineError, EyasError, Interrupted, StoreError
from eyas.events import EventLog
from eyas.extract.build import (
    Job,
    check_corpus,
    check_dumps,
    log_path,
    make_engine,
    new_session,
    open_store,
    static_info,
)
from eyas.extract.engine import EngineInfo
from eyas.extract.forecast import Forecast, forecast
from eyas.extract.progress import RunView, Snapshot
from eyas.extract.worker import Report
from eyas.extract.workers import work_here, work_in_processes
from eyas.positions import kept_counts
from eyas.rates import human_bytes
from eyas.signals import StopSignals
from eyas.store.consumed import read_consumed, store_bytes
from eyas.store.documents import journalled_rows
from eyas.store.format import STORE_FILE
from eyas.store.plan import Shard
from eyas.store.writer import ShardState, StoreWriter

_PROGRESS_EVENT_S = 5.0
_SAY_AGAIN_S = 30.0


@dataclass(slots=True)
class Summary:
    """How a run ended.

    Attributes:
        rows, tokens: in the corpus.
        rows_done, tokens_done: stored and verified, earlier sessions included.
        failed: rows recorded as failed, with `reasons` counted by name.
        seconds, tokens_per_s: of this session, from its first shard (the first request follows at once) to the end;
            speed counts only this session's rows.
        bytes: of the complete shards.
        forecast: what was planned.
        consumed: numbers of shards that were trained on and removed; their rows count as stored.
    """

    rows: int
    tokens: int
    forecast: Forecast
    rows_done: int = 0
    tokens_done: int = 0
    rows_now: int = 0
    tokens_now: int = 0
    failed: int = 0
    retries: int = 0
    waits: int = 0
    seconds: float = 0.0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_failures: list[str] = field(default_factory=list)
    consumed: set[int] = field(default_factory=set)
    stopped: bool = False
    _shards: dict[int, tuple[int, int, int]] = field(default_factory=dict, repr=False)  # rows, tokens, failed

    @property
    def tokens_per_s(self) -> float:
        """This session's speed, end to end."""
        return self.tokens_now / self.seconds if self.seconds else 0.0

    @property
    def complete(self) -> bool:
        """Every row is stored or recorded as failed."""
        return self.rows_done + self.failed >= self.rows

    def lines(self) -> list[tuple[str, str]]:
        """The closing table, name and text."""
        lines = [
            ("rows", f"{self.rows_done:,} of {self.rows:,} stored, {self.failed:,} failed"),
            ("tokens", f"{self.tokens_done:,}"),
            ("store", human_bytes(self.bytes)),
            (
                "speed",
                f"{self.tokens_per_s:,.0f} tokens/s over {self.seconds:.1f} s"
                if self.rows_now
                else "nothing left to do",
            ),
        ]
        if self.consumed:
            what = (
                f"{len(self.consumed):,} shards were trained on and removed; to redo them remove their .consumed files"
            )
            lines.append(("consumed", what))
        return lines + [("failed", f"{count} x {reason}") for reason, count in self.reasons.most_common()]

    def add(self, report: Report) -> None:
        """Fold one worker's news in."""
        if report.leased:
            self.hold(report.shard, report.rows, report.tokens, report.failed)
            return
        rows, tokens, failed = self._shards.get(report.shard, (0, 0, 0))
        self.hold(report.shard, rows + report.rows, tokens + report.tokens, failed + report.failed)
        self.rows_now += report.rows
        self.tokens_now += report.tokens
        self.retries += report.retries
        self.waits += report.waits
        if report.failure:
            row, reason, detail = report.failure
            self.reasons[reason] += 1
            if len(self.first_failures) < 5:
                self.first_failures.append(f"row {row}: {reason}" + (f" ({detail})" if detail else ""))

    def hold(self, shard: int, rows: int, tokens: int, failed: int) -> None:
        """Replace what was known of a shard. (It may be leased again in a run, and by other processes meanwhile.)"""
        before = self._shards.get(shard, (0, 0, 0))
        self._shards[shard] = (rows, tokens, failed)
        self.rows_done += rows - before[0]
        self.tokens_done += tokens - before[1]
        self.failed += failed - before[2]


def extract(
    corpus: Path,
    store: Path,
    *,
    cfg: Config | None = None,
    model: str | None = None,
    server: str | Sequence[str] | None = None,
    workers: int = 1,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Summary:
    """Capture the hidden states of every row of a corpus into a store; resumes what is there.

    Args:
        corpus: the folder that `prepare` wrote, or the Parquet file in it.
        store: the store's folder; made when absent.
        cfg: settings.
        model: the target, a folder or hub id; default: the one the corpus was made for.
        server: URL of an SGLang server started by `eyas serve`, or several; default: `server.urls` of the settings,
            and without any, transformers in this process.
        workers: processes, each with its own window.
        retry_failed: try rows again that earlier sessions recorded as failed.
        console: where progress goes.

    Raises:
        ConfigError, EngineError, StoreError: before anything is written where possible; what was stored stays.
        Interrupted: after draining on Ctrl-C or SIGTERM.
    """
    with StopSignals() as signals:
        opened = Corpus.open(corpus)
        job = Job(corpus, store, model or opened.meta.model, _urls(server), cfg or Config(), new_session())
        check_dumps(job, workers)
        console = console or Console(stderr=True)
        job, warning = check_corpus(job, opened)
        if warning:
            console.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
        info = _proven(job, signals)
        planned = plan_of(job, opened, info, open_store(job, opened, info, dry=True))
        planned.check(store)
        if job.engine == "dumpdir" and not (store / STORE_FILE).exists():
            _proven(job, signals, started=True)  # settings that are wrong must not leave a store made for them
        writer = open_store(job, opened, info)
        if retry_failed:
            for shard in writer.plan.shards:
                writer.reopen_failed(shard)
        summary = Summary(len(opened), planned.tokens, planned)
        try:
            _run(job, info, workers, summary, writer, opened, signals, console)
        except (EngineError, StoreError) as error:
            stored = f"{summary.rows_done:,} of {summary.rows:,} rows are stored and the same command resumes"
            error.hint = f"{error.hint}; {stored}" if error.hint else stored
            raise
    if summary.complete:
        return summary
    if summary.stopped:
        raise Interrupted(
            f"stopped: {summary.rows_done:,} of {summary.rows:,} rows stored", store, "the same command resumes"
        )
    left = [shard for shard in writer.plan.shards if not writer.state(shard).done]
    rows = sum(shard.rows for shard in left)
    raise StoreError(
        f"{len(left):,} shards of {rows:,} rows are not done: another process has leased them", store, "run it again"
    )


def _run(
    job: Job,
    info: EngineInfo,
    workers: int,
    summary: Summary,
    writer: StoreWriter,
    corpus: Corpus,
    signals: StopSignals,
    console: Console,
) -> None:
    """The workers' part of a run, and its books."""
    log = EventLog(log_path(job.store, job.session))
    log.emit(
        "start",
        workers=workers,
        rows=summary.rows,
        tokens=summary.tokens,
        engine=job.engine,
        provenance=dict(info.provenance),
    )
    desk = None
    try:
        _count_complete(summary, writer, corpus)
        view = RunView(console, _snapshot(summary, info))
        desk = _Desk(summary, view, log, signals, job.cfg.extract.drain_s)
        with view:
            if summary.complete:
                pass  # no engine is started for a store that is done
            elif workers == 1:
                work_here(job, signals, desk.news, desk.tick)
            else:
                work_in_processes(job, workers, signals, desk.news, desk.tick)
    except BaseException as error:
        signals.stopped |= isinstance(error, KeyboardInterrupt)
        # A manifest that cannot be written either must not hide what ended the run; the next session writes it.
        with signals.heard_by(lambda: None), contextlib.suppress(EyasError):
            writer.write_manifest()
        raise
    else:
        with signals.heard_by(lambda: None):  # nothing is left to stop
            summary.bytes = _count_complete(summary, writer, corpus)
            writer.write_manifest()
    finally:
        summary.seconds, summary.stopped = desk.seconds if desk else 0.0, signals.stopped
        log.emit(
            "end",
            rows_done=summary.rows_done,
            failed=summary.failed,
            seconds=round(summary.seconds, 3),
            tokens_per_s=round(summary.tokens_per_s, 1),
            stopped=summary.stopped,
        )
        log.close()


def plan(
    corpus: Path,
    store: Path,
    *,
    cfg: Config | None = None,
    model: str | None = None,
    server: str | Sequence[str] | None = None,
) -> Forecast:
    """What `extract` would need; writes nothing. Raises as `extract` does when the engine or store cannot be had."""
    opened = Corpus.open(corpus)
    job = Job(corpus, store, model or opened.meta.model, _urls(server), cfg or Config(), new_session())
    job, _ = check_corpus(job, opened)
    with StopSignals() as signals:
        info = _proven(job, signals)
    return plan_of(job, opened, info, open_store(job, opened, info, dry=True))


def _urls(server: str | Sequence[str] | None) -> tuple[str, ...]:
    return (server,) if isinstance(server, str) else tuple(server or ())


def _count_complete(summary: Summary, writer: StoreWriter, corpus: Corpus) -> int:
    """Take the complete shards into the summary, whoever filled them; returns their bytes."""
    total = 0
    for shard in writer.plan.shards:
        if (sidecar := writer.sidecar(shard)) is not None:
            failed = sum(int(corpus.n_tokens[row]) for row in sidecar.failed)
            summary.hold(shard.index, sidecar.ok_rows, sidecar.tokens - failed, len(sidecar.failed))
            summary.reasons |= Counter(sidecar.failed.values())
            total += sidecar.bytes
        elif (gone := read_consumed(writer.info, shard, writer.paths(shard))) is not None:
            summary.hold(shard.index, len(gone.table.rows), int(gone.table.tokens.sum()), len(gone.failed))
            summary.consumed.add(shard.index)
    return total


def plan_of(job: Job, corpus: Corpus, info: EngineInfo, writer: StoreWriter) -> Forecast:
    """The forecast of a store as its files stand now."""
    states, room = [writer.state(shard) for shard in writer.plan.shards], job.cfg.extract.disk_budget
    if room is not None and job.store.is_dir():
        room = max(0, room - store_bytes(job.store))
    missing = [_missing(writer, shard, state) for shard, state in zip(writer.plan.shards, states, strict=True)]
    return forecast(
        corpus,
        info,
        kept_counts(corpus.n_tokens, corpus.n_positions, info.spec.last),
        total=writer.plan.total_bytes,
        missing=sum(missing) if room is None else min(sum(missing), room),
        tokens_left=sum(
            shard.tokens - sum(int(corpus.n_tokens[row]) for row in journalled_rows(writer.paths(shard)))
            for shard, state in zip(writer.plan.shards, states, strict=True)
            if not state.done
        ),
        shards=(len(states), sum(state.done for state in states)),
        root=job.store,
        reserve=job.cfg.store.reserve_bytes,
    )


def _missing(writer: StoreWriter, shard: Shard, state: ShardState) -> int:
    """Bytes that the disk has not given the shard yet: a part may be sparse, or empty where its maker was killed."""
    if state.done:
        return 0
    given = 0
    for path in (writer.paths(shard).part, writer.paths(shard).final):
        with contextlib.suppress(FileNotFoundError):
            given = path.stat().st_blocks * 512
    return max(0, writer.info.layout(shard).file_bytes - given)


def _proven(job: Job, signals: StopSignals, *, started: bool = False) -> EngineInfo:
    """The engine's word for what it will deliver, without loading a model into this process.

    `started` starts the engine even where its word is known without.

    Raises:
        KeyboardInterrupt: stopped meanwhile.
    """

    async def proving() -> EngineInfo:
        proof, loop = asyncio.ensure_future(_prove(job, started)), asyncio.get_running_loop()

        def stop() -> None:  # raised in the midst of the event loop, KeyboardInterrupt leaves tasks that complain
            loop.call_soon_threadsafe(proof.cancel)

        with signals.heard_by(stop):
            return await proof

    try:
        return asyncio.run(proving())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _prove(job: Job, started: bool) -> EngineInfo:
    if not started and (info := static_info(job)) is not None:
        return info
    engine = make_engine(job)
    try:
        return await engine.start()
    finally:
        await engine.close()


def _snapshot(summary: Summary, info: EngineInfo) -> Snapshot:
    return Snapshot(
        rows=summary.rows,
        rows_done=summary.rows_done,
        tokens=summary.tokens,
        tokens_done=summary.tokens_done,
        failed=summary.failed,
        spool_quota=info.spool_bytes and info.spool_bytes * info.servers,
    )


class _Desk:
    """Where the workers' reports become summary, view and log."""

    def __init__(self, summary: Summary, view: RunView, log: EventLog, signals: StopSignals, drain_s: float) -> None:
        self._summary, self._view, self._log = summary, view, log
        self._signals, self._drain_s = signals, drain_s
        self._said: dict[str, float] = {}
        self._began_s: float | None = None
        self._next_event_s = time.monotonic() + _PROGRESS_EVENT_S

    @property
    def seconds(self) -> float:
        """Since the first shard was leased."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def news(self, report: Report) -> None:
        """Take one report in."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        summary = self._summary
        rows, tokens = summary.rows_done, summary.tokens_done
        summary.add(report)
        if report.note:
            self.say(report.note)
        if report.failure:
            row, reason, detail = report.failure
            self._log.emit("row_failed", row=row, reason=reason, detail=detail)
        if report.retried:
            row, attempt, reason, detail = report.retried
            self._log.emit("row_retried", row=row, attempt=attempt, reason=reason, detail=detail)
        if report.done:
            self._log.emit("shard_done", shard=report.shard)
        if report.leased:
            self._view.resume(summary.rows_done - rows, summary.tokens_done - tokens)
        self._view.update(
            rows_done=summary.rows_done,
            tokens_done=summary.tokens_done,
            failed=summary.failed,
            retries=summary.retries,
            waits=summary.waits,
        )
        if time.monotonic() >= self._next_event_s:
            self._next_event_s = time.monotonic() + _PROGRESS_EVENT_S
            self._log.emit(
                "progress", rows_done=summary.rows_done, tokens_done=summary.tokens_done, rate=self._view.rate()
            )

    def say(self, text: str) -> None:
        """A line for the user and the log; not again within half a minute, however many rows meet the same."""
        now = time.monotonic()
        if now - self._said.get(text, -math.inf) > _SAY_AGAIN_S:
            self._view.say(text)
            self._log.emit("note", text=text)
        self._said[text] = now

    def tick(self, spool_bytes: int | None) -> None:
        """Redraw, with the spool's bytes in use."""
        if self._signals.stopped:
            self.say(f"stopping: rows in flight have up to {self._drain_s:.0f} s; Ctrl-C again does not wait")
        if spool_bytes is not None:
            self._view.update(spool_bytes=spool_bytes)
        else:
            self._view.refresh()
