"""A run's workers: one in this process, or several in processes of their own.

Worker processes share nothing but the store's files. Each has a pipe to its parent: reports up, the word to stop down.
A pipe of its own, because one that dies in the middle of a message must not take the others' way to speak with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from eyas.data.corpus import Corpus
from eyas.errors import EngineError, EyasError
from eyas.events import is_open
from eyas.extract.build import Job, log_path, make_engine, open_store
from eyas.extract.engine import Engine
from eyas.extract.worker import Report, Worker
from eyas.signals import StopSignals, held

REFRESH_S = 0.25
_NO_SHARD = -1  # of a report that is only a note

#: Takes what changed.
News = Callable[[Report], None]
#: Called every REFRESH_S, with the bytes in the spool where there is one.
Tick = Callable[[int | None], None]


def work_here(job: Job, signals: StopSignals, news: News, tick: Tick) -> None:
    """One worker, in this process.

    Raises:
        EngineError, StoreError, IntegrityError: what ended it.
    """
    work = Work(job, 1, news, tick)
    with signals.heard_by(work.stop):
        work.run()


class Work:
    """One worker from the engine's start to its close.

    Args:
        job: what to do.
        share: how many workers share each server's spool.
        news, tick: called on the worker's event loop.
    """

    def __init__(self, job: Job, share: int, news: News, tick: Tick) -> None:
        self._job, self._share, self._news, self._tick = job, share, news, tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._stopped = False

    def run(self) -> None:
        """Work until no shard can be leased, or `stop`. Raises as `work_here`."""
        asyncio.run(self._main())

    def stop(self) -> None:
        """Drain and end; a second call does not wait for rows in flight. For signal handlers and other threads."""
        self._stopped = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to stop
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        elif self._starting is not None:
            self._starting.cancel()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        engine = make_engine(self._job, share=self._share, say=lambda text: self._news(Report(_NO_SHARD, note=text)))
        ticker: asyncio.Task[None] | None = None
        try:
            self._starting = asyncio.create_task(self._start(engine))
            if self._stopped:
                self._starting.cancel()
            await asyncio.wait([self._starting])
            if self._starting.cancelled():
                return
            self._starting.result()
            assert self._worker is not None
            ticker = asyncio.create_task(_tick(engine, self._tick))
            await self._worker.run()
        finally:
            if ticker is not None:
                ticker.cancel()
            await engine.close()

    async def _start(self, engine: Engine) -> None:
        job = self._job
        info = await engine.start()
        if clean_stale := getattr(engine, "clean_stale", None):
            await asyncio.to_thread(clean_stale, job.run, lambda session: is_open(log_path(job.store, session)))
        corpus, cfg = Corpus.open(job.corpus), job.cfg.extract
        more = {
            "window_requests": cfg.window_requests * info.servers,
            "window_tokens": cfg.window_tokens * info.servers,
        }
        self._worker = Worker(
            corpus,
            open_store(job, corpus, info),
            engine,
            info.spec,
            run=job.run,
            session=job.session,
            cfg=cfg.model_copy(update=more),
            window_bytes=min(cfg.window_bytes, info.spool_bytes or cfg.window_bytes) * info.servers,
            report=self._news,
        )


async def _tick(engine: Engine, tick: Tick) -> None:
    usage = getattr(engine, "spool_usage", None)
    while True:
        tick(await asyncio.to_thread(usage) if usage else None)
        await asyncio.sleep(REFRESH_S)


def work_in_processes(job: Job, workers: int, signals: StopSignals, news: News, tick: Tick) -> None:
    """Several workers, each in a process. An error of one stops the others only where the settings say so.

    Raises:
        EyasError: the first that a worker ended with.
        EngineError: a worker process died.
    """
    crew = _Crew(job, news, tick)
    with signals.heard_by(crew.stop):
        try:
            crew.start(workers)
            crew.listen()
        finally:
            crew.close()
    crew.check()


class _Crew:
    """The worker processes, as their parent sees them."""

    def __init__(self, job: Job, news: News, tick: Tick) -> None:
        self._job, self._news, self._tick = job, news, tick
        self._processes: list[BaseProcess] = []
        self._links: list[Connection] = []
        self._errors: list[EyasError] = []
        self._stops = self._told = 0

    def start(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # its own start would let go of the signals that are held here
        with held():
            for index in range(workers):
                mine, theirs = context.Pipe()
                self._links.append(mine)
                process = context.Process(
                    target=_worker_main, args=(self._job, workers, theirs), name=f"eyas-worker-{index}"
                )
                process.start()
                theirs.close()  # so that the end of the process is the end of its messages
                self._processes.append(process)

    def stop(self) -> None:
        """For signal handlers: `listen` passes it on, so that a worker that is just being started hears it too."""
        self._stops += 1

    def listen(self) -> None:
        """Take messages until every process has ended."""
        while self._links:
            while self._told < self._stops:
                self._told += 1
                for link in self._links:
                    with contextlib.suppress(OSError):  # that one has just ended
                        link.send(None)
            for link in connection.wait(self._links, REFRESH_S):
                assert isinstance(link, Connection)
                try:
                    message = link.recv()
                except (EOFError, OSError):  # it ended; perhaps in the middle of a message
                    self._links.remove(link)
                    link.close()
                    continue
                self._take(message)
            self._tick(None)

    def _take(self, message: object) -> None:
        match message:
            case Report():
                self._news(message)
            case EyasError():
                self._errors.append(message)
                if self._job.cfg.extract.on_failure == "stop" and len(self._errors) == 1:
                    self.stop()
            case int():
                self._tick(message)

    def close(self) -> None:
        """Workers that still live end at once: their parent is gone for them."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join()

    def check(self) -> None:
        """Raise what a worker raised, or that one died."""
        if self._errors:
            raise self._errors[0]
        for process in self._processes:
            if process.exitcode:
                code = process.exitcode
                if code > 0:
                    raise EngineError(f"{process.name} ended with exit code {code}", self._job.store, "see above")
                hint = "out of memory? The same command resumes"
                raise EngineError(f"{process.name} was killed by {_name(-code)}", self._job.store, hint)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _worker_main(job: Job, workers: int, link: Connection) -> None:
    """A worker process. It takes no signals (see `held`): its parent tells it to stop, and it does not outlive it."""

    def tick(used: int | None) -> None:
        if used is not None:
            link.send(used)

    logging.getLogger("stamina").setLevel(logging.ERROR)  # as in the parent: the run itself tells of retries
    work = Work(job, workers, link.send, tick)
    threading.Thread(target=_obey, args=(link, work), daemon=True).start()
    try:
        work.run()
    except EyasError as error:
        link.send(error)


def _obey(link: Connection, work: Work) -> None:
    try:
        while True:
            link.recv()
            work.stop()
    except (EOFError, OSError):
        os._exit(1)
