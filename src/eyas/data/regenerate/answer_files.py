"""Files of lines that grow while answers come in: locked, cut where a writer was killed, durable in groups."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from eyas.disk import FULL, fsync_dir, lock_opened
from eyas.errors import IntegrityError, StoreError


@contextmanager
def disk_errors(where: object) -> Iterator[None]:
    """Every OSError within becomes a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            hint = "free space; the same command goes on, what was answered is kept"
            raise StoreError("disk full", where, hint) from error
        raise StoreError("cannot write", where, error.strerror or type(error).__name__) from error


class AppendFile:
    """Lines are appended at once and whole; `synced` makes all appended so far durable, many callers by one fsync.

    Raises:
        StoreError: another process has it locked, or the disk refuses; a half-written line is taken back.
    """

    def __init__(self, path: Path, *, lock: bool = False) -> None:
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = _locked(path) if lock else _opened(path)
            self.size = os.fstat(self.fd).st_size
            os.fsync(self.fd)  # a writer that was killed had not synced all that is read here
            fsync_dir(path.parent)
        self._durable = self.size
        self._syncing: asyncio.Task[None] | None = None

    def cut(self, size: int) -> None:
        """Drop what follows the first `size` bytes: the line a killed writer left."""
        with disk_errors(self.path):
            os.ftruncate(self.fd, size)
            os.fsync(self.fd)
        self.size = self._durable = size

    def append(self, line: bytes) -> int:
        """Write one line; returns its offset."""
        at, done = self.size, 0
        with disk_errors(self.path):
            try:
                while done < len(line):
                    done += os.pwrite(self.fd, line[done:], at + done)
            except OSError:
                with suppress(OSError):  # if that fails too, the next session cuts the line
                    os.ftruncate(self.fd, at)
                raise
        self.size = at + len(line)
        return at

    async def synced(self) -> None:
        """Returns once everything appended before the call survives a power loss."""
        want = self.size
        while self._durable < want:
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        size = self.size
        try:
            with disk_errors(self.path):
                await asyncio.to_thread(os.fsync, self.fd)
            self._durable = size
        finally:
            self._syncing = None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line with its end) of every line, a torn last one included."""
        with disk_errors(self.path), self.path.open("rb") as file:
            at = 0
            for line in file:
                yield at, line
                at += len(line)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Put other lines in place of all, as a whole or not at all; the lock moves along."""
        tmp = self.path.with_name(f"{self.path.name}.tmp")
        with disk_errors(tmp):
            tmp.unlink(missing_ok=True)
            fd, size = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), 0
            try:
                with suppress(OSError):  # where the first lock was had, this one is
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with os.fdopen(os.dup(fd), "wb") as file:
                    for line in lines:
                        file.write(line)
                        size += len(line)
                os.fsync(fd)
                tmp.replace(self.path)
            except BaseException:
                os.close(fd)
                tmp.unlink(missing_ok=True)
                raise
            fsync_dir(self.path.parent)
            os.close(self.fd)
        self.fd, self.size, self._durable = fd, size, size

    def remove(self) -> None:
        """Close, and leave no file."""
        with disk_errors(self.path):
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Make all durable, close, and give the lock up."""
        if self.fd >= 0:
            with suppress(OSError):  # what needed to be durable was synced
                os.fsync(self.fd)
            os.close(self.fd)
            self.fd = -1


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _locked(path: Path) -> int:
    if (fd := lock_opened(path, _opened)) is None:
        raise StoreError("another process is writing these answers", path, "wait for it, or name another")
    return fd


def json_line(row: dict[str, Any]) -> bytes:
    """One row of JSON lines."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def sealed_line(entry: dict[str, Any]) -> bytes:
    r"""`<xxh3-64 of the JSON, 16 hex> <JSON>\n`"""
    text = json_line(entry)[:-1]
    return b"%b %b\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def open_sealed(line: bytes) -> dict[str, Any]:
    """What `sealed_line` wrote.

    Raises:
        ValueError: it is not that.
    """
    seal, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or seal != xxhash.xxh3_64_hexdigest(text).encode():
        raise ValueError("damaged")
    return json.loads(text)


def good_lines(file: AppendFile, read: Callable[[bytes], Any], hint: str) -> Iterator[tuple[int, Any]]:
    """(offset, what `read` makes of the line) of each line; damaged ones at the end are cut off the file.

    Raises:
        IntegrityError: a damaged line with good ones behind it: that was no killed writer.
    """
    damaged: tuple[int, int] | None = None  # number and offset of the first one
    for number, (at, line) in enumerate(file.lines(), 1):
        try:
            found = read(line)
        except ValueError:
            damaged = damaged or (number, at)
            continue
        if damaged:
            raise IntegrityError(f"line {damaged[0]} is damaged", file.path, hint)
        yield at, found
    if damaged:
        file.cut(damaged[1])
