"""The server's side of the writer process: jobs go over a socket, states through the arena that both have mapped.

A process that dies costs the records it had: their blocks are free again, and each is refused by name. The next job
starts another one, unless they keep dying.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

from eyas.capture.arena import Arena
from eyas.capture.contract import CaptureSpec, Refusal, Refused
from eyas.capture.spool_files import SpoolFiles
from eyas.capture.writer import WriterSettings, jobs_to_line
from eyas.capture.writing import Done, Drop, Finish, Freed, Job, Open, Part

logger = logging.getLogger(__name__)

_MOST_DEATHS: Final = 3  # in a row, without one record written
_PATIENCE_S: Final = 60.0  # for its last records, when the server closes in order
_ENDED: Final = "the writer process ended"


class _Child:
    """One life of the process."""

    def __init__(self, arena: Arena, settings: WriterSettings) -> None:
        ours, theirs = socket.socketpair()
        # It must find this package and xxhash wherever we found them.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eyas.capture.writer", str(theirs.fileno()), str(arena.descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena.descriptor),
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = ours
        self.blocks: list[int] = []  # a block stands here once for each part that is not answered
        self.open: dict[int, str] = {}
        self.finished: dict[int, str] = {}
        ours.sendall(settings.to_line())

    def note(self, jobs: Sequence[Job]) -> None:
        """What it will owe."""
        for job in jobs:
            match job:
                case Open():
                    self.open[job.key] = job.rid
                case Part():
                    self.blocks.append(job.block)
                case Finish():
                    self.finished[job.key] = self.open.pop(job.key)
                case Drop():
                    self.open.pop(job.key, None)


class ProcessWriters:
    """As `writing.ThreadWriters`, in a process of their own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, arena: Arena, spec: CaptureSpec, files: SpoolFiles, freed: Freed, done: Done, threads: int
    ) -> None:
        self._arena = arena
        self._settings = WriterSettings(spec.to_dict(), str(files.folder), files.mode, files.group, threads)
        self._freed = freed
        self._done = done
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._lost: dict[int, str] = {}  # records that a dead process had begun
        self._deaths = 0
        self._closing = False
        self.failure = ""
        with self._lock:
            self._start()

    @property
    def pid(self) -> int | None:
        """Of the process that lives now."""
        with self._lock:
            return None if self._child is None else self._child.process.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            child = self._child or self._restarted()
            going = [] if child is None else [job for job in jobs if job.key not in self._lost]
            refused = self._without_process([job for job in jobs if child is None or job.key in self._lost])
            if child is not None:
                child.note(going)
        self._answer(*refused)
        if child is not None and going:
            try:
                child.channel.sendall(jobs_to_line(going))
            except OSError:
                logger.warning("eyas: the writer process does not listen")  # whoever listens to it hears its end

    def close(self) -> None:
        with self._lock:
            self._closing, child = True, self._child
        if child is not None:
            try:
                child.channel.sendall(jobs_to_line([]))
                child.process.wait(_PATIENCE_S)
            except (OSError, subprocess.TimeoutExpired):
                logger.warning("eyas: the writer process does not end; its last records are lost")
                child.process.kill()
            self._listener.join()

    # --- its lives ----------------------------------------------------------------------------------------------------

    def _start(self) -> _Child:
        child = _Child(self._arena, self._settings)
        self._listener = threading.Thread(target=self._listen, args=(child,), name="eyas-writers", daemon=True)
        self._child = child
        self._listener.start()
        return child

    def _restarted(self) -> _Child | None:
        if self.failure or self._closing:
            return None
        try:
            return self._start()
        except OSError as error:
            self.failure = f"the writer process cannot be started: {error}"
            logger.exception("eyas: no writers any more")
            return None

    def _listen(self, child: _Child) -> None:
        try:
            with child.channel.makefile("rb") as lines:
                for line in lines:
                    self._heard(child, json.loads(line))
        except (OSError, ValueError):
            logger.warning("eyas: the writer process spoke no more than half a line")
        finally:
            self._ended(child)

    def _heard(self, child: _Child, words: list[object]) -> None:
        match words:
            case ["freed", int(block)]:
                with self._lock:
                    child.blocks.remove(block)
                self._freed(block)
            case ["done", int(key), str(rid), str(reason), str(detail)]:
                with self._lock:
                    self._deaths = 0
                    child.finished.pop(key, None)
                self._done(key, rid, Refused(Refusal(reason), detail) if reason else None)
            case _:
                raise ValueError(f"not an answer: {words!r}"[:200])

    def _ended(self, child: _Child) -> None:
        child.process.kill()  # it may have closed the socket and live
        code = child.process.wait()
        with self._lock:
            self._child = None
            self._lost.update(child.open)
            if not self._closing:
                self._deaths += 1
                logger.error("eyas: the writer process ended (%s) with %d records", code, len(child.finished))
                if self._deaths >= _MOST_DEATHS:
                    self.failure = f"{_ENDED} {self._deaths} times in a row"
            owed = child.blocks, child.finished
        child.channel.close()
        self._answer(*owed)

    def _without_process(self, jobs: Sequence[Job]) -> tuple[list[int], dict[int, str]]:
        """Blocks and finished records of jobs that nobody will do."""
        blocks, finished = [], {}
        for job in jobs:
            match job:
                case Open():
                    self._lost[job.key] = job.rid
                case Part():
                    blocks.append(job.block)
                case Finish():
                    finished[job.key] = self._lost.pop(job.key)
                case Drop():
                    self._lost.pop(job.key, None)
        return blocks, finished

    def _answer(self, blocks: Sequence[int], finished: dict[int, str]) -> None:
        for block in blocks:
            self._freed(block)
        for key, rid in finished.items():
            self._done(key, rid, Refused(Refusal.WRITE_FAILED, self.failure or _ENDED))
