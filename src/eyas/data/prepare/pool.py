"""Chunks of rows through worker processes, in order: what comes out never depends on how many there are.

A small input is encoded in this process, where the tokenizer has a thread for each core: a worker takes seconds to
import its libraries, which a tenth or two more speed pays back after some 100 MB.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, Self, cast

from eyas.data.prepare.encode import ChunkEncoder, EncodedChunk, EncodeSettings
from eyas.data.sources import Input, Raw
from eyas.data.template import Template
from eyas.errors import ConfigError, EyasError
from eyas.signals import heeded

#: A chunk is closed at the first of these: what one call of the tokenizer takes, and what one process holds.
CHUNK_ROWS: Final = 512
CHUNK_BYTES: Final = 1 << 20
#: So many bytes are encoded in this process before workers are started.
SMALL_BYTES: Final = 64 << 20
#: Each worker is a process of its own that holds a tokenizer; one reader and writer feeds them all.
MOST_WORKERS: Final = 16
_AHEAD: Final = 4  # chunks read and not yet passed on, for each worker


@dataclass(slots=True)
class Chunk:
    """Rows as they were read, and the number of the input that each came from."""

    raws: list[Raw] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    bytes: int = 0


def chunks_of(inputs: Iterable[Input]) -> Iterator[Chunk]:
    """All rows of all inputs, in order. Raises as `Input.rows_raw`."""
    chunk = Chunk()
    for number, one in enumerate(inputs):
        for raw in one.rows_raw():
            chunk.raws.append(raw)
            chunk.inputs.append(number)
            chunk.bytes += _size(raw.payload)
            if chunk.bytes >= CHUNK_BYTES or len(chunk.raws) >= CHUNK_ROWS:
                yield chunk
                chunk = Chunk()
    if chunk.raws:
        yield chunk


def encode_chunks(
    chunks: Iterator[Chunk], settings: EncodeSettings, template: Template, team: Team
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Each chunk with what became of its rows, in order; a bounded number of chunks is in memory.

    Args:
        chunks: read as they are needed.
        settings: for every process.
        template: for this process.
        team: works where it is worth it.

    Raises:
        EyasError: a worker died.
        ConfigError: a worker found another tokenizer or template than this process.
    """
    if not team.started:
        encoder, done = ChunkEncoder(settings, template), 0
        for chunk in chunks:
            yield chunk, encoder.encode(chunk.raws)
            done += chunk.bytes
            if team.size > 1 and done > team.small_bytes:
                break
        else:
            return
        team.start()
    for chunk, encoded in team.encode(chunks):
        if encoded.made_with != (template.tokenizer_hash, template.template_hash):
            what = "the target's tokenizer or template changed while it was read"
            raise ConfigError(what, template.model, "run it again")
        yield chunk, encoded


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Team:
    """Worker processes, once they are started; ended on exit, whatever happens.

    Args:
        settings: what they encode with.
        workers: how many; None is one a core.
        small_bytes: they are not worth starting for so many bytes.
    """

    def __init__(self, settings: EncodeSettings, workers: int | None, small_bytes: int = SMALL_BYTES) -> None:
        self.size, self.small_bytes = workers or min(cores(), MOST_WORKERS), small_bytes
        self._settings = settings
        self._members: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._members:
            worker.end()
        self._members.clear()

    @property
    def started(self) -> bool:
        return bool(self._members)

    def start_for(self, total_bytes: int) -> None:
        """Starts them ahead of time where so much input is worth it: each takes seconds to import its libraries."""
        if self.size > 1 and total_bytes > self.small_bytes:
            self.start()

    def start(self) -> None:
        """Starts them, unless they are."""
        if not self._members:
            with _interrupts_held():
                self._members += [_Worker(self._settings) for _ in range(self.size)]

    def encode(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Each chunk with its result, in order. Raises EyasError when a worker died."""
        waiting: deque[Chunk] = deque()
        results: dict[int, EncodedChunk] = {}
        given = taken = 0
        while True:
            while len(waiting) < self.size * _AHEAD and (worker := self._least_busy()) is not None:
                if (chunk := next(chunks, None)) is None:
                    break
                waiting.append(chunk)
                worker.give(given, chunk.raws)
                given += 1
            if not waiting:
                return
            if taken not in results:
                results.update(self._collect())
                continue
            yield waiting.popleft(), results.pop(taken)
            taken += 1

    def _least_busy(self) -> _Worker | None:
        """Who gets the next chunk: one to work on and one to go on with are enough."""
        least = min(self._members, key=lambda worker: len(worker.doing))
        return least if len(least.doing) < 2 else None

    def _collect(self) -> Iterator[tuple[int, EncodedChunk]]:
        """What is ready, of at least one worker."""
        busy = {worker.connection: worker for worker in self._members if worker.doing}
        for connection in wait(list(busy)):
            yield busy[cast(Connection, connection)].take()


class _Worker:
    """A process, seen from its parent. The pipe is theirs alone: either end is told when the other one dies."""

    def __init__(self, settings: EncodeSettings) -> None:
        context = multiprocessing.get_context("spawn")  # threads of tokenizers and OpenMP do not survive a fork
        self.connection, theirs = context.Pipe()
        self.doing: deque[int] = deque()
        self._process = context.Process(target=_work, args=(theirs, settings), daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()

    def give(self, number: int, raws: list[Raw]) -> None:
        """Sends it a chunk; results come in the same order."""
        self.doing.append(number)
        try:
            self.connection.send(raws)
        except OSError as error:
            raise self._died() from error

    def take(self) -> tuple[int, EncodedChunk]:
        """Its next result; waits for it."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(result, BaseException):
            raise result
        return self.doing.popleft(), result

    def end(self) -> None:
        """It holds nothing that would be lost."""
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _died(self) -> EyasError:
        self._process.join(1)
        hint = "perhaps memory ran out: try fewer with prepare.workers; a script calls it under __name__ == '__main__'"
        return EyasError("a worker process died", f"process {self._process.pid}, exit {self._process.exitcode}", hint)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits, as a process that is half started would complain; processes started within never see it at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # lifts the mask where it starts late
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in heeded()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if came:
        raise KeyboardInterrupt


# --- in a worker ------------------------------------------------------------------------------------------------------


def _work(connection: Connection, settings: EncodeSettings) -> None:
    """A worker's life: chunks in, results out, until the parent closes its end."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough
    chunks: queue.SimpleQueue[list[Raw]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, chunks), daemon=True).start()
    try:
        encoder = ChunkEncoder(settings, settings.load_template())
        while True:
            connection.send(encoder.encode(chunks.get()))
    except OSError:
        return  # the parent is gone
    except Exception as error:  # noqa: BLE001  raised in the parent
        if not isinstance(error, EyasError):
            error.add_note(traceback.format_exc())
        connection.send(error)


def _receive(connection: Connection, chunks: queue.SimpleQueue[list[Raw]]) -> None:
    """Takes chunks as they come, so that the parent never waits while this process does."""
    try:
        while True:
            chunks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent has closed its end, or died


def _size(payload: Any) -> int:
    """About how many bytes of text a row holds."""
    match payload:
        case bytes() | str():
            return len(payload)
        case dict():
            return sum(map(_size, payload.values()))
        case list() | tuple():
            return sum(map(_size, payload))
        case _:
            return 8
