"""What becomes of states in the arena: jobs in, record files out. Standard library and xxhash only.

A record is written while it is still being assembled, chunk by chunk at its own offsets, so that states leave the arena
at once however long the prompt is. Jobs of one record are done in order, by one thread. Every `Part` is answered by
`freed`, every `Finish` by `done`, whatever happens.

    Open -> Part, Part, ... -> Finish      or at any time `Drop`; `Lost` stands for a part that never arrived
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import xxhash

from eyas.capture.contract import RECORD_METADATA, CaptureSpec, RecordHeader, Refusal, Refused
from eyas.capture.spool_files import NewFile, SpoolFiles, write_at
from eyas.capture.tensorfile import layout, padded

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20  # hashed and written while it is in the cache; far apart enough to leave others the GIL
_MOST_HEADER_ROOM: Final = 256 << 10
_CHUNK_TEXT: Final = 24  # characters of one chunk in a header


class Open(NamedTuple):
    """A record begins."""

    key: int
    rid: str
    tokens: int
    positions: int
    runs: str  # their hash
    kind: str = "open"


class Part(NamedTuple):
    """A chunk [start, stop) of a record is in the arena: [offset, bytes) of each field, and the block they are in."""

    key: int
    start: int
    stop: int
    block: int
    aux: Sequence[int]
    last: Sequence[int]
    ids: Sequence[int]
    kind: str = "part"


class Lost(NamedTuple):
    """A chunk of a record never arrived."""

    key: int
    detail: str
    kind: str = "lost"


class Finish(NamedTuple):
    """The record is complete; `asked` is the hash of the request's token ids."""

    key: int
    asked: str
    kind: str = "finish"


class Drop(NamedTuple):
    """The record was given up."""

    key: int
    kind: str = "drop"


Job = Open | Part | Lost | Finish | Drop
JOBS: Final[dict[str, type[Any]]] = {"open": Open, "part": Part, "lost": Lost, "finish": Finish, "drop": Drop}

Freed = Callable[[int], None]  # a block has one reader fewer
Done = Callable[[int, str, Refused | None], None]  # key and id of a record that is published, or why it is not


class Writers(Protocol):
    """Whoever does the jobs."""

    @property
    def failure(self) -> str:
        """Why no job will be done any more; empty while they are."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Never raises; called by one thread."""
        ...

    def close(self) -> None:
        """Do what was submitted, and end."""
        ...


class RecordWriter:
    """Does the jobs of some records, in order. For one thread.

    Args:
        memory: the arena's bytes.
        spec: the agreement.
        files: the spool folder.
        freed, done: the answers.
    """

    def __init__(self, memory: memoryview, spec: CaptureSpec, files: SpoolFiles, freed: Freed, done: Done) -> None:
        self._memory = memory
        self._spec = spec
        self._files = files
        self._freed = freed
        self._done = done
        self._records: dict[int, _Writing] = {}

    def do(self, job: Job) -> None:
        """One job. Never raises: a record's fault becomes its refusal."""
        match job:
            case Open():
                self._records[job.key] = _Writing(job)
            case Part():
                try:
                    self._guarded(job.key, lambda record: self._add(record, job))
                finally:
                    self._freed(job.block)
            case Lost():
                self._guarded(job.key, lambda record: record.fail(Refused(Refusal.PLUGIN_ERROR, job.detail)))
            case Finish():
                self._guarded(job.key, lambda record: self._finish(record, job.asked))
                record = self._records.pop(job.key)
                self._done(job.key, record.opened.rid, record.refused)
            case Drop():
                if (record := self._records.pop(job.key, None)) is not None:
                    record.discard()

    def discard(self) -> None:
        """Give up what is unfinished."""
        for record in self._records.values():
            record.discard()
        self._records.clear()

    def _guarded(self, key: int, act: Callable[[_Writing], None]) -> None:
        record = self._records[key]
        if record.refused is not None:
            return
        try:
            act(record)
        except OSError as error:
            logger.warning("eyas: record %s not written: %s", record.opened.rid, error)
            record.fail(Refused(Refusal.WRITE_FAILED, str(error)))
        except Exception as error:  # one record's fault must not stop the others
            logger.exception("eyas: record %s not written", record.opened.rid)
            record.fail(Refused(Refusal.PLUGIN_ERROR, repr(error)))

    def _add(self, record: _Writing, part: Part) -> None:
        record.chunks.append([part.start, part.stop])
        if record.file is None:
            record.base = self._header_room(record)
            record.file = self._files.record(record.opened.rid)
        aux_at = record.base + part.start * self._spec.aux_bytes_per_token
        last_at = record.base + record.opened.tokens * self._spec.aux_bytes_per_token + record.last_bytes
        write_part(record.file.descriptor, self._bytes(part.aux), aux_at, record.aux)
        write_part(record.file.descriptor, self._bytes(part.last), last_at, record.last)
        record.last_bytes += part.last[1]
        record.fed.update(self._bytes(part.ids))

    def _finish(self, record: _Writing, asked: str) -> None:
        fed = record.fed.hexdigest()
        if fed != asked:
            text = f"the forwards were fed {fed}, the request is {asked}"
            record.fail(Refused(Refusal.TOKENS_DIFFER, text))
            return
        assert record.file is not None  # a record has at least one part
        header = self._header(record)
        if len(header) > record.base:
            record.file, record.base = self._moved(record, record.file, len(header)), len(header)
        write_at(record.file.descriptor, padded(header, record.base), 0)
        file, record.file = record.file, None
        file.publish()

    def _header(self, record: _Writing) -> bytes:
        opened = record.opened
        made = RecordHeader(
            rid=opened.rid,
            spec_id=self._spec.spec_id,
            tokens=record.fed.hexdigest(),
            rows=opened.tokens,
            positions=opened.positions,
            runs=opened.runs,
            chunks=record.chunks,
            aux=record.aux.hexdigest(),
            last=record.last.hexdigest(),
        )
        tensors = [
            ("aux", self._spec.stored_dtype, self._spec.aux_shape(opened.tokens)),
            ("last", self._spec.stored_dtype, self._spec.last_shape(opened.positions)),
        ]
        return layout(tensors, {RECORD_METADATA: made.to_json()}).header

    def _header_room(self, record: _Writing) -> int:
        """Bytes to leave for the header: exact for a record of one chunk, else with room for chunks to come."""
        exact = len(self._header(record))
        (start, stop), tokens = record.chunks[0], record.opened.tokens
        if stop == tokens:
            return exact
        chunks = 4 * -(-tokens // (stop - start)) + 64
        return exact + min(chunks * _CHUNK_TEXT, _MOST_HEADER_ROOM) // 8 * 8

    def _moved(self, record: _Writing, old: NewFile, base: int) -> NewFile:
        """The file again, with more room for its header: it was cut into more chunks than anyone expects."""
        reader = os.open(f"/proc/self/fd/{old.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            new = self._files.record(record.opened.rid)  # takes the name of the old one, which then goes when closed
            os.close(old.descriptor)
            record.file, done = new, 0
            while piece := os.pread(reader, PIECE_BYTES, record.base + done):
                write_at(new.descriptor, piece, base + done)
                done += len(piece)
        finally:
            os.close(reader)
        return new

    def _bytes(self, field: Sequence[int]) -> memoryview:
        offset, size = field
        return self._memory[offset : offset + size]


@dataclass(slots=True)
class _Writing:
    """A record on its way into its file; `refused` says why there will be none."""

    opened: Open
    file: NewFile | None = None
    base: int = 0
    last_bytes: int = 0
    chunks: list[list[int]] = field(default_factory=list)
    aux: Any = field(default_factory=xxhash.xxh3_64)
    last: Any = field(default_factory=xxhash.xxh3_64)
    fed: Any = field(default_factory=xxhash.xxh3_128)
    refused: Refused | None = None

    def fail(self, refused: Refused) -> None:
        self.refused = refused
        self.discard()

    def discard(self) -> None:
        if self.file is not None:
            self.file.discard()
            self.file = None


def write_part(descriptor: int, data: memoryview, offset: int, digest: Any) -> None:
    """Hash and write bytes, piece by piece. Raises OSError."""
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        hash_piece(digest, piece)
        write_at(descriptor, piece, offset + start)


def hash_piece(digest: Any, piece: memoryview) -> None:
    digest.update(piece)


# --- threads ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Lane:
    """One thread's queue; `waiting` counts the bytes in it."""

    writer: RecordWriter
    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    waiting: int = 0


class ThreadWriters:
    """Threads of this process, each with records of its own. Between jobs they hold the GIL, during them they do not.

    Args:
        memory, spec, files, freed, done: as of `RecordWriter`; `freed` and `done` are called from any thread.
        threads: how many.
    """

    failure = ""

    def __init__(
        self, memory: memoryview, spec: CaptureSpec, files: SpoolFiles, freed: Freed, done: Done, threads: int
    ) -> None:
        self._lanes = [_Lane(RecordWriter(memory, spec, files, freed, done)) for _ in range(threads)]
        self._lane_of: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"eyas-writer-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if isinstance(job, Open):
                self._lane_of[job.key] = min(self._lanes, key=lambda lane: lane.waiting)
            lane = self._lane_of[job.key] if isinstance(job, Open | Part | Lost) else self._lane_of.pop(job.key)
            self._count(lane, job, 1)
            lane.jobs.put(job)

    def close(self) -> None:
        for lane in self._lanes:
            lane.jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: _Lane) -> None:
        while True:
            job = lane.jobs.get()
            if job is None:
                lane.writer.discard()
                return
            try:
                lane.writer.do(job)
            except Exception:  # all later records of this lane would be promised and never come
                logger.exception("eyas: a writer's answer was lost")
            self._count(lane, job, -1)

    def _count(self, lane: _Lane, job: Job, sign: int) -> None:
        if isinstance(job, Part):
            with self._lock:
                lane.waiting += sign * (job.aux[1] + job.last[1] + 1)
