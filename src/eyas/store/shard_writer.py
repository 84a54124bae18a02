"""Writing one leased shard: rows land at their own offsets in any order, each followed by its journal line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

import numpy as np
import xxhash

from eyas.capture.contract import CaptureSpec
from eyas.capture.tensorfile import Layout
from eyas.disk import fsync_dir
from eyas.errors import IntegrityError, StoreError
from eyas.store.check import finite_check
from eyas.store.files import (
    CHUNK_BYTES,
    ShardPaths,
    disk_errors,
    hash_range,
    pwrite_all,
    pwrite_zeros,
    read_journal,
    start_write_back,
    write_atomic,
)
from eyas.store.format import KnownTensors, RowStatus, StoreInfo
from eyas.store.journal import (
    Provenance,
    RowFailed,
    RowOk,
    Session,
    decode_journal,
    encode_journal,
    row_line,
)
from eyas.store.plan import Shard
from eyas.store.shardfile import read_index, sidecar_of, state_span
from eyas.store.source import Source, flat, source_of

_WRITE_BACK_BYTES: Final = 64 << 20  # what may lie in memory before the disk is told to begin
_DETAIL: Final = 1000  # characters of a reason that are kept: a server may say anything


def _plain(text: str) -> str:
    """A reason as the journal can give it back: not without end, and no half of a surrogate pair."""
    return text[:_DETAIL].encode(errors="replace").decode()


class Distrust(StrEnum):
    """Why what a journal says of a row is not believed. The row is captured again."""

    DAMAGED = "journal-damaged"  # a line is not what was written; nor is what follows it believed
    FOREIGN = "journal-foreign"  # rows of another plan, spec or corpus, or of another shard
    DIFFERS = "row-differs"  # the bytes in the file are not those that were journalled


class Rejected(StrEnum):
    """Why states that came were not stored. The row stays pending."""

    CHECKSUM = "checksum-differs"  # not the bytes that their origin hashed
    NOT_FINITE = "not-finite"  # NaN or infinity among them


@dataclass(frozen=True, slots=True)
class Distrusted:
    """One finding of a journal's replay."""

    kind: Distrust
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class ShardWriter:
    """A shard under lease. `put` and `fail` may be called from several threads.

    Made by `StoreWriter.lease`. Leaving the `with` block releases the lease; a shard that is not finished then is
    resumed by the next lease, here or in another process.

    Attributes:
        shard: what is being written.
        distrusted: what the journal that was found claimed and is not believed.
    """

    def __init__(self, info: StoreInfo, shard: Shard, paths: ShardPaths, known: KnownTensors, fd: int) -> None:
        self.shard = shard
        self.distrusted: list[Distrusted] = []
        self._info, self._paths, self._known, self._fd = info, paths, known, fd
        self._layout: Layout = info.layout(shard)
        self._spec: CaptureSpec = info.spec
        self._lock = threading.Condition()  # notified when a row is no longer in flight
        self._rows: dict[int, RowOk | RowFailed] = {}
        self._in_flight: set[int] = set()
        self._sessions: list[Session] = []
        self._journal_fd = -1
        self._journal_bytes = 0
        self._unsent = 0  # bytes written since the disk was last told to begin
        self._broken = self._closed = False

    # --- opening ---

    def open(self, provenance: Provenance) -> None:
        """Write what the corpus knows, replay and rehash the journal, and start a session in it.

        Raises:
            StoreError: the disk.
        """
        with disk_errors(self._paths.part):
            self._write_known()
            journal = decode_journal(read_journal(self._paths.journal))
            if journal.damage:
                self.distrusted.append(Distrusted(Distrust.DAMAGED, journal.damage))
            self._sessions = self._trusted(journal.sessions)
            mine = [dict(provenance)]
            if not self._sessions or self._sessions[-1].provenance != mine:
                self._sessions.append(self._info.session(mine))
            self._rows = {row: entry for session in self._sessions for row, entry in session.rows.items()}
            # Rewritten as a whole: a torn tail would damage the line appended after it.
            text = encode_journal(self._sessions)
            write_atomic(self._paths.journal, text)
            self._journal_fd = os.open(self._paths.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._journal_bytes = len(text)

    def _write_known(self) -> None:
        # Also on resume: pages may have been lost with the power, and the bytes are the same.
        known, tensors = self._known, self._layout.tensors
        pwrite_all(self._fd, self._layout.header, 0)
        for name, values in (
            ("row_offsets", known.row_offsets),
            ("last_index", known.last_index),
            ("tokens", known.tokens),
            ("loss_mask", known.loss_mask),
        ):
            pwrite_all(self._fd, flat(values), tensors[name].start)

    def _trusted(self, sessions: list[Session]) -> list[Session]:
        """Sessions of this store, with the rows whose bytes in the file are the journalled ones."""
        # Clean pages are dropped first, so that what is hashed is what the disk holds.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        kept = []
        for session in sessions:
            if not self._info.owns(session):
                if session.rows:
                    detail = f"{len(session.rows)} rows of another plan, spec or corpus"
                    self.distrusted.append(Distrusted(Distrust.FOREIGN, detail))
                continue
            session.rows = {row: entry for row, entry in session.rows.items() if self._holds(entry)}
            if session.rows:
                kept.append(session)
        return kept

    def _holds(self, entry: RowOk | RowFailed) -> bool:
        if not self.shard.start <= entry.row < self.shard.stop:
            self.distrusted.append(Distrusted(Distrust.FOREIGN, f"row {entry.row} is another shard's"))
            return False
        if isinstance(entry, RowFailed):
            return True
        claimed = {"aux": entry.aux, "last": entry.last}
        differ = [field for field in claimed if hash_range(self._fd, *self._span(field, entry.row)) != claimed[field]]
        if differ:
            detail = f"bytes of row {entry.row}'s {' and '.join(differ)} are not those that were journalled"
            self.distrusted.append(Distrusted(Distrust.DIFFERS, detail))
        return not differ

    def _span(self, field: str, row: int) -> tuple[int, int]:
        offsets = self._known.row_offsets if field == "aux" else self._known.last_offsets
        return state_span(self._layout, self._spec, field, offsets, row - self.shard.start)

    # --- rows ---

    @property
    def pending(self) -> list[int]:
        """Corpus row numbers that are neither written nor failed, ascending."""
        with self._lock:
            return [row for row in range(self.shard.start, self.shard.stop) if row not in self._rows]

    @property
    def failed(self) -> dict[int, str]:
        """Reason by corpus row number of the rows given up."""
        with self._lock:
            return {row: e.reason for row, e in sorted(self._rows.items()) if isinstance(e, RowFailed)}

    def put(self, row: int, aux: Any, last: Any, claimed: tuple[int, int] | None = None) -> Rejected | None:
        """Store a row's states: read, hashed, checked and written piece by piece, each while it is in the cache.

        What is wrong shows only at the end, when wrong bytes are in the row's place. There they are nobody's: the row
        is not journalled, the next attempt overwrites them, and `finish` zeroes the place of a row given up.

        Args:
            row: corpus row number, pending.
            aux: [T, A, W] items as stored (`CaptureSpec.aux_shape`): a C-contiguous buffer, or a `Source`.
            last: same of [L, W].
            claimed: xxh3-64 of the two by their origin. What is not so, or not finite, is rejected; without it, what
                comes is stored.

        Returns:
            Why they were rejected, or None: stored.

        Raises:
            IntegrityError: another length than the plan's.
            StoreError: the disk. The row stays pending.
            ValueError: the row is not of this shard, is already written, or is being written.
            Whatever a source raises; the row stays pending.
        """
        sources = source_of(aux), source_of(last)
        spans = self._claim(row)
        try:
            for field, source, (start, stop) in zip(("aux", "last"), sources, spans, strict=True):
                if source.nbytes != stop - start:
                    raise IntegrityError(
                        f"{field} has {source.nbytes} bytes, the plan says {stop - start}",
                        f"row {row}",
                        "another model?",
                    )
            aux_xxh3, aux_finite = self._write(sources[0], spans[0][0])
            last_xxh3, last_finite = self._write(sources[1], spans[1][0])
            if claimed is not None and (aux_xxh3, last_xxh3) != claimed:
                return Rejected.CHECKSUM
            if claimed is not None and not (aux_finite and last_finite):
                return Rejected.NOT_FINITE
            self._record(RowOk(row, aux_xxh3, last_xxh3))
            self._written(sum(source.nbytes for source in sources))
            return None
        finally:
            self._land(row)

    def _write(self, source: Source, start: int) -> tuple[int, bool]:
        """Bring a field to its place; its xxh3-64, and whether all of it is finite."""
        digest, look, finite, at = xxhash.xxh3_64(), finite_check(self._spec), True, start
        for piece in source.pieces(CHUNK_BYTES):
            digest.update(piece)
            finite = look(piece) and finite
            with disk_errors(self._paths.part):
                pwrite_all(self._fd, piece, at)
            at += len(piece)
        if at - start != source.nbytes:
            raise ValueError(f"a source of {source.nbytes} bytes gave {at - start}")
        return digest.intdigest(), finite

    def _written(self, size: int) -> None:
        """Let the disk begin while rows still come: `finish` then waits for little."""
        with self._lock:
            self._unsent += size
            if self._unsent < _WRITE_BACK_BYTES:
                return
            self._unsent = 0
        start_write_back(self._fd)

    def fail(self, row: int, reason: str, detail: str = "") -> None:
        """Give a row up by name. It is not pending any more; `StoreWriter.reopen_failed` makes it so again.

        Raises:
            StoreError: the disk. The row stays pending.
            ValueError: as put.
        """
        self._claim(row)
        try:
            self._record(RowFailed(row, _plain(reason), _plain(detail)))
        finally:
            self._land(row)

    def _claim(self, row: int) -> tuple[tuple[int, int], tuple[int, int]]:
        if not self.shard.start <= row < self.shard.stop:
            raise ValueError(f"row {row} is not of {self.shard.name}, rows {self.shard.start} to {self.shard.stop - 1}")
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.shard.name} is closed")
            if row in self._in_flight or isinstance(self._rows.get(row), RowOk):
                raise ValueError(f"row {row} of {self.shard.name} is already written or being written")
            self._in_flight.add(row)
        return self._span("aux", row), self._span("last", row)

    def _land(self, row: int) -> None:
        with self._lock:
            self._in_flight.discard(row)
            self._lock.notify_all()

    def _record(self, entry: RowOk | RowFailed) -> None:
        line = row_line(entry)
        with self._lock, disk_errors(self._paths.journal):
            if self._broken:
                raise StoreError("journal could not be repaired after a failed write", self._paths.journal, "run again")
            try:
                if os.write(self._journal_fd, line) < len(line):
                    # A short write is how a full disk begins: the next attempt would say so, but the line is torn.
                    raise StoreError("disk full", self._paths.journal, "free space, then run again")
            except (OSError, StoreError):
                self._broken = True
                os.ftruncate(self._journal_fd, self._journal_bytes)
                self._broken = False
                raise
            self._journal_bytes += len(line)
            for session in self._sessions:
                session.rows.pop(entry.row, None)
            self._sessions[-1].rows[entry.row] = entry
            self._rows[entry.row] = entry

    # --- the end ---

    def finish(self) -> None:
        """Publish the shard: index, fsync, rename, sidecar. Releases the lease.

        A crash between any two steps is finished by the next `StoreWriter.lease` (docs/store-format.md has the table).

        Raises:
            StoreError: the disk. The lease is kept: finish again, or close.
            ValueError: a row is still pending.
        """
        if pending := self.pending:
            raise ValueError(f"{self.shard.name} still has {len(pending)} pending rows, first {pending[0]}")
        paths = self._paths
        with disk_errors(paths.part):
            self._write_index()
            os.fsync(self._fd)
            os.fsync(self._journal_fd)  # it holds reasons and provenance until the sidecar does
            if paths.part.exists():  # a second finish may find the rename done
                paths.part.rename(paths.final)
                fsync_dir(paths.root)
            publish_sidecar(paths, self._fd, self._sessions)
        self.close()

    def _write_index(self) -> None:
        known, tensors, start = self._known, self._layout.tensors, self.shard.start
        row_xxh3 = np.zeros((self.shard.rows, 4), dtype="<u8")
        row_xxh3[:, :2] = known.xxh3
        status = np.full(self.shard.rows, RowStatus.OK, dtype="u1")
        for row, entry in self._rows.items():
            match entry:
                case RowOk(aux=aux, last=last):
                    row_xxh3[row - start, 2:] = (aux, last)
                case RowFailed():
                    status[row - start] = RowStatus.FAILED
                    # An attempt that was cut off may have left bytes, and a shard's bytes do not depend on its history.
                    for field in ("aux", "last"):
                        pwrite_zeros(self._fd, *self._span(field, row))
        pwrite_all(self._fd, flat(row_xxh3), tensors["row_xxh3"].start)
        pwrite_all(self._fd, flat(status), tensors["row_status"].start)

    def close(self) -> None:
        """Release the lease, once the rows being put are in place. Later calls do nothing."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._in_flight)
            for fd in (self._journal_fd, self._fd):
                if fd >= 0:
                    os.close(fd)
            self._journal_fd = self._fd = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def publish_sidecar(paths: ShardPaths, fd: int, sessions: Iterable[Session]) -> None:
    """Describe the finished file open at `fd` and drop its journal: the last step of every way to finish a shard."""
    sidecar = sidecar_of(read_index(fd, paths.final), list(sessions))
    write_atomic(paths.sidecar, sidecar.to_json().encode())
    paths.journal.unlink(missing_ok=True)
    fsync_dir(paths.root)
