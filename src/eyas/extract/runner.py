"""`extract(corpus, engine, store)`: plan, check, work, report, resume.

One worker runs in this process; more are processes of their own that share nothing but the store's files: each leases
whole shards. Ctrl-C and SIGTERM drain; a killed run resumes from what its shards' journals say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
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
from eyas.extract.desk import Desk, snapshot
from eyas.extract.engine import EngineInfo
from eyas.extract.forecast import Forecast, forecast
from eyas.extract.progress import ExtractView
from eyas.extract.summary import Summary
from eyas.extract.workers import work_here, work_in_processes
from eyas.positions import kept_counts
from eyas.signals import StopSignals
from eyas.store.consumed import read_consumed, store_bytes
from eyas.store.documents import journalled_rows
from eyas.store.format import STORE_FILE
from eyas.store.plan import Shard
from eyas.store.writer import ShardState, StoreWriter


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
    if not summary.complete:
        raise _unfinished(summary, writer)
    return summary


def _unfinished(summary: Summary, writer: StoreWriter) -> EyasError:
    """Why a run ended before its store was complete."""
    if summary.stopped:
        what = f"stopped: {summary.rows_done:,} of {summary.rows:,} rows stored"
        return Interrupted(what, writer.root, "the same command resumes")
    left = [shard for shard in writer.plan.shards if not writer.state(shard).done]
    rows = sum(shard.rows for shard in left)
    what = f"{len(left):,} shards of {rows:,} rows are not done: another process has leased them"
    return StoreError(what, writer.root, "run it again")


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
        view = ExtractView(console, snapshot(summary, info))
        desk = Desk(summary, view, log, signals, job.cfg.extract.drain_s)
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
