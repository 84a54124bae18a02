"""The run itself: rows in, requests out, many in flight; what stops it, and how it drains."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import stamina

from eyas.config import RegenerateConfig
from eyas.data.regenerate.answers import Answers, Failure, Turn
from eyas.data.regenerate.budget import ZERO, Budget, OverBudgetError, Usage
from eyas.data.regenerate.conversation import Script, as_sent, key_of, output_row, script_of
from eyas.data.regenerate.openai_client import Reply, Request
from eyas.data.regenerate.openai_faults import Fault, FaultKind
from eyas.data.regenerate.report import LIVE_EVERY_S, RegenerateReport, RunView, count_rows
from eyas.data.regenerate.server_pool import ServerPool
from eyas.data.rows import Chat, Dropped, Message, Preformatted, Row, Sampled
from eyas.data.sources import Input, read_rows
from eyas.errors import ConfigError, EngineError, EyasError, Interrupted, StoreError

_BATCH_ROWS: Final = 64
_LONGEST_WAIT_S: Final = 60.0
_HOPELESS_ROWS: Final = 50
_BUSY_TRY: Final = 0.5  # of a try is what a busy server costs, which says little about the row
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _Ask:
    """One turn that is being asked."""

    key: bytes
    request: Request
    messages: list[dict[str, Any]]
    tools: object
    tries: int = 0
    spent: float = 0.0  # of `attempts`


@dataclass(slots=True)
class Job:
    """What a run works with.

    Attributes:
        prove: called once before the first request; raises when nothing should be asked.
        fields: of every request, the model among them.
    """

    inputs: Sequence[Input]
    answers: Answers
    pool: ServerPool
    budget: Budget
    cfg: RegenerateConfig
    fields: dict[str, Any]
    longest_answer: int
    prove: Callable[[], Awaitable[None]]
    report: RegenerateReport
    view: RunView
    retry_failed: bool = False


@dataclass(slots=True)
class Run:
    """One session. `order` holds the keys of all rows read, in input order, once `work` has returned."""

    job: Job
    order: bytearray = field(default_factory=bytearray)
    _seen: dict[bytes, int] = field(default_factory=dict)  # digest -> rows read that ask the same
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _cut: set[asyncio.Task[Any]] = field(default_factory=set)  # had a request in flight when they were cancelled
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _error: BaseException | None = None
    _proven: bool = False  # servers and model are known
    _accepted: bool = False  # a request of this form has been answered
    _probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _failed_in_a_row: int = 0  # rows that servers' troubles failed, since one was answered

    async def work(self) -> None:
        """Ask what is not answered yet.

        Raises:
            Interrupted: on Ctrl-C or SIGTERM, after answers in flight had their time.
            EyasError: what ended the run.
        """
        self._accepted = len(self.job.answers) > 0
        with _signals(self._on_signal):
            ticker = asyncio.create_task(self._tick())
            feeder = asyncio.create_task(self._feed())
            stop = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({feeder, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not feeder.done():
                    feeder.cancel()
                await asyncio.wait({feeder})
                if not feeder.cancelled() and (error := feeder.exception()) is not None:
                    self._end(error)
                await self._drain()
            finally:
                for task in (ticker, stop):
                    task.cancel()
                await asyncio.gather(ticker, stop, return_exceptions=True)
        if self._error is not None:
            raise self._error
        self.job.report.complete = not self._stop.is_set()

    # --- rows ---

    async def _feed(self) -> None:
        """Every row of the inputs; returns when each has been dealt with."""
        slots = asyncio.Semaphore(self.job.cfg.in_flight)
        rows = read_rows(self.job.inputs, self.job.cfg.roles)
        while batch := await asyncio.to_thread(_next_rows, rows):
            for row in batch:
                self.job.report.read += 1
                if isinstance(row, Chat):
                    await self._take(row, slots)
                else:
                    self._skip(row)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _skip(self, row: Dropped | Preformatted | Sampled) -> None:
        if isinstance(row, Dropped):
            self.job.report.skip(row.reason, str(row))
        else:
            self.job.report.skip(type(row).__name__.lower(), f"{row.file}:{row.line}: holds no messages to answer")

    async def _take(self, chat: Chat, slots: asyncio.Semaphore) -> None:
        job = self.job
        script = script_of(chat, job.cfg.system)
        if isinstance(script, str):
            job.report.skip(script, f"{chat.file}:{chat.line}")
            return
        occurrence = self._seen.get(script.digest, 0)
        self._seen[script.digest] = occurrence + 1
        key = key_of(script.digest, occurrence)
        self.order += key
        if key in job.answers:
            job.report.reused += 1
            return
        if (before := job.answers.failed.get(key)) is not None and not job.retry_failed:
            job.report.fail(str(before.get("reason")), f"{chat.file}:{chat.line}: failed in an earlier session")
            return
        if not self._proven and script.context([turn.message for turn in job.answers.turns(key)]) is not None:
            await job.prove()
            self._proven = True
        await slots.acquire()
        task = asyncio.create_task(self._converse(chat, script, key))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, slots))

    def _done(self, task: asyncio.Task[None], slots: asyncio.Semaphore) -> None:
        slots.release()
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    async def _converse(self, chat: Chat, script: Script, key: bytes) -> None:
        """All answers of one row, in order."""
        job = self.job
        turns = job.answers.turns(key)
        while (context := script.context([turn.message for turn in turns])) is not None:
            if self._stop.is_set():
                return
            ask = self._ask(key, context, script.tools)
            try:
                turns.append(await self._turn(ask))
            except OverBudgetError:
                job.report.over_budget = True
                self._end(None)
                return
            except Fault as fault:
                if not self._stop.is_set():
                    await self._fail(chat, fault, ask, len(turns) + 1)
                return
        row = output_row(chat, script, [turn.message for turn in turns], key, job.report.model, _usage_of(turns))
        job.answers.finished(key, row)
        job.report.answered += 1
        await job.answers.synced()

    async def _fail(self, chat: Chat, fault: Fault, ask: _Ask, turn: int) -> None:
        job = self.job
        if fault.reason == "bad-request":
            async with self._probing:
                if not self._accepted:
                    await self._probe(fault)
            if self._stop.is_set():
                return
        failure = Failure(fault.reason, fault.detail, turn, ask.tries)
        job.answers.fail(ask.key, chat, failure)
        job.report.fail(fault.reason, f"{chat.file}:{chat.line}: {fault.detail}")
        await job.answers.synced()
        self._failed_in_a_row += fault.kind is FaultKind.RETRY
        if self._failed_in_a_row >= max(_HOPELESS_ROWS, 2 * job.cfg.in_flight):
            what = f"the last {self._failed_in_a_row} rows have failed, and none was answered"
            raise EngineError(what, "", f"the last: {fault.reason}, {fault.detail}; --retry-failed asks them again")

    # --- requests ---

    def _ask(self, key: bytes, context: Sequence[Message], tools: list[dict[str, Any]] | None) -> _Ask:
        messages = as_sent(context)
        fields = {**self.job.fields, "messages": messages} | ({"tools": tools} if tools else {})
        cfg = self.job.cfg
        return _Ask(key, Request(fields, cfg.timeout_s, cfg.stream), messages, tools)

    async def _turn(self, ask: _Ask) -> Turn:
        """One answer, after as many tries as it takes; durable."""
        cfg = self.job.cfg
        retrying = stamina.AsyncRetryingCaller(
            attempts=math.ceil(cfg.attempts / _BUSY_TRY),
            timeout=None,
            wait_initial=cfg.retry_wait_s,
            wait_max=max(_LONGEST_WAIT_S, cfg.retry_wait_s),
            wait_jitter=cfg.retry_wait_s,
        )
        return await retrying(lambda error: self._again(error, ask), self._attempt, ask)

    def _again(self, error: Exception, ask: _Ask) -> bool | float:
        """Whether a failed try is repeated; seconds, where the server named them."""
        if not isinstance(error, Fault) or error.kind is not FaultKind.RETRY or self._stop.is_set():
            return False
        ask.spent += _BUSY_TRY if error.busy else 1
        if ask.spent >= self.job.cfg.attempts:
            return False
        if error.retry_after_s and not self.job.pool.has_free():
            return error.retry_after_s + random.uniform(0, self.job.cfg.retry_wait_s)
        return True

    async def _attempt(self, ask: _Ask) -> Turn:
        reply, of, cost = await self._try(ask)
        usage = reply.usage and Usage(reply.usage.prompt_tokens, reply.usage.completion_tokens, cost)
        job, answers = self.job, self.job.answers
        if job.cfg.on_length == "drop" and reply.message["finish_reason"] == "length":
            answers.charged(of, usage, cost)
            raise Fault("length", f"longer than {job.longest_answer} tokens", kind=FaultKind.ROW)
        turn = Turn(reply.message, usage)
        answers.answered(ask.key, turn, of, cost)
        self._accepted, self._failed_in_a_row = True, 0
        if usage:
            job.report.prompt_tokens += usage.prompt_tokens
            job.report.completion_tokens += usage.completion_tokens
        job.report.turns += 1
        await answers.synced()
        return turn

    async def _try(self, ask: _Ask) -> tuple[Reply, str, Any]:
        """One request: its answer, the name to book it under, and what it cost."""
        job = self.job
        worst = job.budget.prices.worst(ask.messages, ask.tools, job.longest_answer)
        reserved = await job.budget.reserve(worst)
        of = ""
        try:
            of = job.answers.asked(reserved.amount)
            if job.budget.limit is not None:
                await job.answers.synced()  # a power loss must not forget what is being spent
            ask.tries += 1
            reply = await job.pool.ask(ask.request)
        except Fault as fault:
            cost = job.budget.settle(reserved, fault.usage, charged=fault.charged)
            job.answers.charged(of, fault.usage, cost)
            job.report.tries[fault.reason] += 1
            raise
        except BaseException:
            # A request that was in flight may have been answered and charged; one that waited was not.
            cost = job.budget.settle(reserved, None, charged=asyncio.current_task() in self._cut)
            with suppress(StoreError):
                job.answers.charged(of, None, cost)
            raise
        return reply, of, job.budget.settle(reserved, reply.usage, charged=True)

    async def _probe(self, fault: Fault) -> None:
        """A row was refused, and none has been accepted yet: is it the row, or would every row be?

        Raises:
            ConfigError: the server refuses the simplest question too.
        """
        ask = self._ask(b"", [{"role": "user", "content": "Hello"}], None)
        try:
            reply, of, cost = await self._try(ask)
        except Fault as met:
            if met.kind is FaultKind.ROW:
                hint = "is it one of the settings: max_tokens, temperature, extra_body?"
                raise ConfigError(f"the server refuses every request ({met.detail})", "", hint) from fault
        except OverBudgetError:
            return
        else:
            self.job.answers.charged(of, reply.usage, cost)
            self._accepted = True

    # --- the end ---

    def _end(self, error: BaseException | None) -> None:
        """Nothing new is asked from here on; the first reason counts."""
        if not self._stop.is_set():
            self._error = error
            self._stop.set()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            return
        self.job.view.say(
            f"stopping: answers in flight have up to {self.job.cfg.drain_s:g} s; Ctrl-C again does not wait"
        )
        self._end(Interrupted("stopped"))

    async def _drain(self) -> None:
        """Give requests in flight their time, then cut them."""
        patience_s = 0.0 if isinstance(self._error, StoreError) else self.job.cfg.drain_s
        for task in self._tasks - self.job.pool.asking:
            task.cancel()
        if self._tasks:
            hurry = asyncio.create_task(self._hurry.wait())
            rest = asyncio.create_task(_all_done(set(self._tasks)))
            await asyncio.wait({hurry, rest}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (hurry, rest):
                task.cancel()
            await asyncio.gather(hurry, rest, return_exceptions=True)
        self._cut = {task for task in self._tasks if task in self.job.pool.asking}
        left = set(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _tick(self) -> None:
        stop: list[bool] = []

        def count() -> None:
            with suppress(EyasError, OSError):
                self.job.view.total = count_rows(self.job.inputs, stop)

        threading.Thread(target=count, daemon=True).start()
        try:
            while True:
                self.job.view.tick()
                await asyncio.sleep(LIVE_EVERY_S)
        finally:
            stop.append(True)


def _next_rows(rows: Iterator[Row]) -> list[Row]:
    return list(islice(rows, _BATCH_ROWS))


def _usage_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Tokens and dollars of a whole row; empty when a turn does not say."""
    known = [turn.usage for turn in turns if turn.usage is not None]
    if len(known) < len(turns):
        return {}
    cost = sum((usage.cost for usage in known if usage.cost is not None), ZERO)
    tokens = {
        "prompt_tokens": sum(usage.prompt_tokens for usage in known),
        "completion_tokens": sum(usage.completion_tokens for usage in known),
    }
    return tokens | ({"cost": float(cost)} if cost else {})


async def _all_done(tasks: set[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


@contextmanager
def _signals(listener: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `listener` within; in a thread of a larger program they stay with whoever has them."""
    loop = asyncio.get_running_loop()
    ours = _STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in ours}
    for number in ours:
        loop.add_signal_handler(number, listener)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
