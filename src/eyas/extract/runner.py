"""`extract(corpus, engine, store)`: plan, check, work, report, resume.

One worker runs in this process; more are processes of their own that share nothing but the store's files: each leases
whole shards. Ctrl-C and SIGTERM drain; a killed run resumes from what its shards' journals say.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from eyas.config import Config
from eyas.data.corpus import Corpus
from eyas.errors import EngineError, EyasError, Interrupted, StoreError
from eyas.events import EventLog, is_open
from eyas.extract.build import Job, make_engine, new_session, static_info
from eyas.extract.engine import Engine, EngineInfo
from eyas.extract.forecast import Forecast, forecast
from eyas.extract.progress import RunView, Snapshot, human_bytes
from eyas.extract.worker import Report, Worker
from eyas.positions import kept_counts
from eyas.store.format import EVENTS_DIR, Sidecar
from eyas.store.writer import ShardState, StoreWriter

_REFRESH_S = 0.25
_PROGRESS_EVENT_S = 5.0


@dataclass(slots=True)
class Summary:
    """How a run ended.

    Attributes:
        rows, tokens: in the corpus.
        rows_done, tokens_done: stored and verified, earlier sessions included.
        failed: rows recorded as failed, with `reasons` counted by name.
        seconds, tokens_per_s: of this session; speed counts only this session's rows.
        bytes: of the complete shards.
        forecast: what was planned.
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
    stopped: bool = False

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
        return lines + [("failed", f"{count} x {reason}") for reason, count in self.reasons.most_common()]

    def add(self, report: Report) -> None:
        """Fold one worker's news in."""
        self.rows_now += report.rows
        self.tokens_now += report.tokens
        self.rows_done += report.rows + report.resumed_rows
        self.tokens_done += report.tokens + report.resumed_tokens
        self.failed += report.failed
        self.retries += report.retries
        self.waits += report.waits
        if report.failure:
            row, reason, detail = report.failure
            self.reasons[reason] += 1
            if len(self.first_failures) < 5:
                self.first_failures.append(f"row {row}: {reason}" + (f" ({detail})" if detail else ""))


def extract(
    corpus: Path,
    store: Path,
    *,
    cfg: Config | None = None,
    model: str | None = None,
    server: str | None = None,
    workers: int = 1,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Summary:
    """Capture the hidden states of every row of a corpus into a store; resumes what is there.

    Args:
        corpus: the Parquet file that `prepare` wrote.
        store: the store's folder; made when absent.
        cfg: settings.
        model: the target, a folder or hub id; default: the one the corpus was made for.
        server: URL of an SGLang server started by `eyas serve`; default: transformers in this process.
        workers: processes, each with its own window.
        retry_failed: try rows again that earlier sessions recorded as failed.
        console: where progress goes.

    Raises:
        ConfigError, EngineError, StoreError: before anything is written where possible; what was stored stays.
        Interrupted: after draining on Ctrl-C or SIGTERM.
    """
    console = console or Console(stderr=True)
    opened = Corpus.open(corpus)
    job = Job(corpus, store, model or opened.meta.model, server, cfg or Config(), new_session())
    info = asyncio.run(_prove(job))
    writer = open_store(job, opened, info)
    if retry_failed:
        for shard in writer.plan.shards:
            writer.reopen_failed(shard)
    planned = plan_of(job, opened, info, writer)
    planned.check(store)
    summary = Summary(len(opened), planned.tokens, planned)
    log = EventLog(_log_path(store, job.session))
    log.emit(
        "start", workers=workers, rows=summary.rows, tokens=summary.tokens, **{"engine": job.engine, **info.provenance}
    )
    for sidecar in complete_shards(writer):
        summary.add(_earlier(sidecar, opened))
    view = RunView(console, _snapshot(summary, info))
    began_s = time.monotonic()
    session = _Session(job, info, workers, summary, view, log)
    try:
        with view:
            session.run()
    finally:
        summary.seconds = time.monotonic() - began_s
        writer.write_manifest()
        summary.bytes = sum(sidecar.bytes for sidecar in complete_shards(writer))
        log.emit(
            "end",
            rows_done=summary.rows_done,
            failed=summary.failed,
            seconds=round(summary.seconds, 3),
            tokens_per_s=round(summary.tokens_per_s, 1),
            stopped=summary.stopped,
        )
        log.close()
    if summary.stopped:
        raise Interrupted(
            f"stopped: {summary.rows_done:,} of {summary.rows:,} rows stored", store, "the same command resumes"
        )
    if not summary.complete:
        left = summary.rows - summary.rows_done - summary.failed
        raise StoreError(f"{left:,} rows are not done: another process has leased their shards", store, "run it again")
    return summary


def plan(
    corpus: Path, store: Path, *, cfg: Config | None = None, model: str | None = None, server: str | None = None
) -> Forecast:
    """What `extract` would need; writes nothing. Raises as `extract` does when the engine or store cannot be had."""
    opened = Corpus.open(corpus)
    job = Job(corpus, store, model or opened.meta.model, server, cfg or Config(), new_session())
    info = asyncio.run(_prove(job))
    return plan_of(job, opened, info, open_store(job, opened, info, dry=True))


def complete_shards(writer: StoreWriter) -> list[Sidecar]:
    """What the finished shards hold."""
    return [sidecar for shard in writer.plan.shards if (sidecar := writer.sidecar(shard)) is not None]


def _earlier(sidecar: Sidecar, corpus: Corpus) -> Report:
    """A complete shard, as progress of earlier sessions."""
    failed = sum(int(corpus.n_tokens[row]) for row in sidecar.failed)
    return Report(resumed_rows=sidecar.ok_rows, resumed_tokens=sidecar.tokens - failed, failed=len(sidecar.failed))


def open_store(job: Job, corpus: Corpus, info: EngineInfo, *, dry: bool = False) -> StoreWriter:
    """The store of this corpus and spec, made or resumed; `dry` writes nothing.

    Raises:
        StoreError: the folder holds something else, or a store for something else.
    """
    return StoreWriter.open(
        job.store,
        spec=info.spec,
        corpus={
            "digest": corpus.digest,
            "tokenizer": corpus.meta.tokenizer_hash,
            "template": corpus.meta.template_hash,
            "rows": len(corpus),
            "tokens": int(corpus.n_tokens.sum()),
        },
        tokens_N=corpus.n_tokens,
        positions_N=kept_counts(corpus.n_tokens, corpus.n_positions, info.spec.last),
        shard_bytes=job.cfg.store.shard_bytes,
        provenance=dict(info.provenance),
        dry=dry,
    )


def plan_of(job: Job, corpus: Corpus, info: EngineInfo, writer: StoreWriter) -> Forecast:
    """The forecast of a store as its files stand now."""
    states = [writer.state(shard) for shard in writer.plan.shards]
    absent = [shard for shard, state in zip(writer.plan.shards, states, strict=True) if state is ShardState.ABSENT]
    return forecast(
        corpus,
        info,
        kept_counts(corpus.n_tokens, corpus.n_positions, info.spec.last),
        total=writer.plan.total_bytes,
        missing=sum(writer.info.layout(shard).file_bytes for shard in absent),
        shards=(len(states), states.count(ShardState.COMPLETE)),
        root=job.store,
        reserve=job.cfg.store.reserve_bytes,
    )


async def _prove(job: Job) -> EngineInfo:
    """The engine's word for what it will deliver, without loading a model into this process."""
    if (info := static_info(job)) is not None:
        return info
    engine = make_engine(job)
    try:
        return await engine.start()
    finally:
        await engine.close()


def _log_path(store: Path, session: str) -> Path:
    return store / EVENTS_DIR / f"{session}.jsonl"


def _snapshot(summary: Summary, info: EngineInfo) -> Snapshot:
    return Snapshot(
        rows=summary.rows,
        rows_done=summary.rows_done,
        tokens=summary.tokens,
        tokens_done=summary.tokens_done,
        failed=summary.failed,
        spool_quota=info.spool_bytes,
    )


class _Session:
    """This process's part of a run: the worker in it, or the worker processes it started."""

    def __init__(
        self, job: Job, info: EngineInfo, workers: int, summary: Summary, view: RunView, log: EventLog
    ) -> None:
        self._job, self._info, self._workers = job, info, workers
        self._summary, self._view, self._log = summary, view, log
        self._next_event_s = time.monotonic() + _PROGRESS_EVENT_S

    def run(self) -> None:
        if self._workers == 1:
            asyncio.run(self._run_here())
        else:
            self._run_processes()

    def news(self, report: Report) -> None:
        """Take one report into summary, view and log."""
        summary = self._summary
        summary.add(report)
        if report.failure:
            row, reason, detail = report.failure
            self._log.emit("row_failed", row=row, reason=reason, detail=detail)
        if report.shard_done is not None:
            self._log.emit("shard_done", shard=report.shard_done)
        if report.resumed_rows:
            self._view.resume(report.resumed_rows, report.resumed_tokens)
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

    def spool(self, used: int | None) -> None:
        """Redraw, with the spool's bytes in use."""
        if used is not None:
            self._view.update(spool_bytes=used)
        else:
            self._view.refresh()

    async def _run_here(self) -> None:
        await _work(self._job, 1, self.news, self.spool, self._on_stop, (signal.SIGINT, signal.SIGTERM))

    def _on_stop(self) -> None:
        self._summary.stopped = True

    def _run_processes(self) -> None:
        context = multiprocessing.get_context("spawn")
        messages: Any = context.Queue()
        processes = [
            context.Process(target=_worker_main, args=(self._job, self._workers, messages), name=f"eyas-worker-{index}")
            for index in range(self._workers)
        ]
        errors: list[EyasError] = []
        with _forwarded_signals(processes, self._on_stop):
            for process in processes:
                process.start()
            while any(process.is_alive() for process in processes):
                self._take(messages, errors, _REFRESH_S)
            self._take(messages, errors, 0.0)
        if errors:
            raise errors[0]
        if dead := [process for process in processes if process.exitcode]:
            raise EngineError(
                f"{dead[0].name} died with exit code {dead[0].exitcode}", self._job.store, "the same command resumes"
            )

    def _take(self, messages: Any, errors: list[EyasError], wait_s: float) -> None:
        """Take the news that arrives within `wait_s`; an error of one worker stops none of the others."""
        try:
            while True:
                message = messages.get(timeout=wait_s) if wait_s else messages.get_nowait()
                match message:
                    case Report():
                        self.news(message)
                    case EyasError():
                        errors.append(message)
                    case ("spool", used):
                        self.spool(used)
                wait_s = min(wait_s, 0.01)
        except queue.Empty:
            self._view.refresh()


async def _work(
    job: Job,
    workers: int,
    report: Callable[[Report], None],
    spool: Callable[[int | None], None],
    on_stop: Callable[[], None],
    signals: tuple[signal.Signals, ...],
) -> None:
    """One worker from start to close."""
    corpus = Corpus.open(job.corpus)
    engine = make_engine(job, share=workers)
    worker: Worker | None = None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        on_stop()
        if worker is not None:
            worker.stop()

    for number in signals:
        loop.add_signal_handler(number, stop)
    ticker: asyncio.Task[None] | None = None
    try:
        info = await engine.start()
        if clean_stale := getattr(engine, "clean_stale", None):
            await asyncio.to_thread(clean_stale, job.run, lambda session: is_open(_log_path(job.store, session)))
        worker = Worker(
            corpus,
            open_store(job, corpus, info),
            engine,
            info.spec,
            run=job.run,
            session=job.session,
            cfg=job.cfg.extract,
            window_bytes=min(job.cfg.extract.window_bytes, info.spool_bytes or job.cfg.extract.window_bytes),
            report=report,
        )
        ticker = asyncio.create_task(_tick(engine, spool))
        await worker.run()
    finally:
        if ticker is not None:
            ticker.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
        await engine.close()


async def _tick(engine: Engine, spool: Callable[[int | None], None]) -> None:
    usage = getattr(engine, "spool_usage", None)
    while True:
        spool(await asyncio.to_thread(usage) if usage else None)
        await asyncio.sleep(_REFRESH_S)


def _worker_main(job: Job, workers: int, messages: Any) -> None:
    """A worker process: its parent forwards SIGTERM, and it does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        asyncio.run(
            _work(
                job, workers, messages.put, lambda used: messages.put(("spool", used)), lambda: None, (signal.SIGTERM,)
            )
        )
    except EyasError as error:
        messages.put(error)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _forwarded_signals(processes: Sequence[BaseProcess], on_stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM of this process become SIGTERM of each worker."""

    def forward(*_: object) -> None:
        on_stop()
        for process in processes:
            if process.pid and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
