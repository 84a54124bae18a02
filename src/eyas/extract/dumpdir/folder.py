"""The dump folder: what in it is new since a request was sent, who holds it, and the removal of what was consumed.

Names are no identity here (a restart begins again at `req_0`, and writes over what is there), so every file is known by
device, inode, size and times. A file that has not changed since a look is not new after it, whatever its folder's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import fnmatch
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.errors import EngineError

_MOST_FOLDERS: Final = 100_000
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FileId:
    """One state of one file."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> FileId:
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class _Known:
    """A dump folder in one look. Numbers are those of the look in which something was first seen as it is."""

    place: tuple[int, int]  # device and inode
    since: int
    files: Mapping[str, tuple[FileId, int]]


@dataclass(frozen=True, slots=True)
class Fresh:
    """What is new in one dump folder.

    Attributes:
        name: of the folder.
        place: its device and inode.
        files: the new files in it; others are never read.
        old: names of its other files.
    """

    name: str
    place: tuple[int, int]
    files: Mapping[str, FileId]
    old: frozenset[str] = frozenset()


class DumpFolder:
    """A folder in which a server leaves its dumps.

    Args:
        path: the folder.
        pattern: glob of the dump folders in it.
    """

    def __init__(self, path: Path, pattern: str) -> None:
        self.path = path
        self._pattern = pattern
        self._number = 0
        self._known: Mapping[str, _Known] = {}
        self._one_look = asyncio.Lock()
        self._next: asyncio.Task[int] | None = None
        self._lock: int | None = None

    def lock(self) -> None:
        """Hold the folder until `unlock`: of two clients, each would take the other's dumps for its own.

        Raises:
            EngineError: no such folder, not ours to read, or held by another process.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            hint = "--dump-dir names the folder in which the server makes its req_N folders, as it is seen from here"
            raise EngineError(f"cannot read the dump folder ({error.strerror})", self.path, hint) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            hint = "wait for it, or give each server and each run a dump folder of its own"
            raise EngineError("another extraction reads this dump folder", self.path, hint) from None
        except OSError as error:
            os.close(descriptor)
            hint = "the folder must lie on a file system with locks, best in RAM on the server's host"
            raise EngineError(f"cannot lock the dump folder ({error.strerror})", self.path, hint) from error
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def look(self) -> int:
        """See what is there, in a look that begins after this call; its number. Callers share one.

        Raises:
            OSError: the folder cannot be read.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._look_after_the_running_one())
        task = self._next
        await asyncio.wait([task])
        return task.result()

    async def _look_after_the_running_one(self) -> int:
        async with self._one_look:
            self._next = None  # whoever comes from now on needs the one after
            return await asyncio.to_thread(self.look_now)

    def look_now(self) -> int:
        """`look`, in this thread; for one caller at a time."""
        number, known = self._number + 1, {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if fnmatch.fnmatchcase(entry.name, self._pattern) and entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        known[entry.name] = _look_into(entry, self._known.get(entry.name), number)
        if len(known) > _MOST_FOLDERS:
            hint = "clear what earlier runs left there: every look at the folder passes over all of it"
            raise EngineError(f"{len(known):,} dumps lie in the dump folder", self.path, hint)
        self._number, self._known = number, known
        return number

    def since(self, number: int) -> list[Fresh]:
        """Folders in which something is new, as of the last look, compared with look `number`."""
        fresh: list[Fresh] = []
        for name, known in self._known.items():
            files = {file: identity for file, (identity, since) in known.files.items() if since > number}
            if files or known.since > number:
                fresh.append(Fresh(name, known.place, files, frozenset(known.files.keys() - files.keys())))
        return fresh

    def remove(self, dump: Fresh) -> None:
        """Remove a consumed dump: the files that were new in it, and its folder if that leaves none in it.

        What has taken its name or its place meanwhile stays. Callable from any thread, any number of times.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path / dump.name, _FOLDER_FLAGS)
            try:
                if place_of(os.fstat(descriptor)) != dump.place:
                    return
                for file, identity in dump.files.items():
                    with contextlib.suppress(FileNotFoundError):
                        if FileId.of(os.stat(file, dir_fd=descriptor, follow_symlinks=False)) == identity:
                            os.unlink(file, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            (self.path / dump.name).rmdir()


def place_of(info: os.stat_result) -> tuple[int, int]:
    """A folder's device and inode."""
    return info.st_dev, info.st_ino


def _look_into(entry: os.DirEntry[str], before: _Known | None, number: int) -> _Known:
    place = place_of(entry.stat(follow_symlinks=False))
    if before is not None and before.place != place:
        before = None
    files: dict[str, tuple[FileId, int]] = {}
    with os.scandir(entry.path) as entries:
        for file in entries:
            with contextlib.suppress(FileNotFoundError):
                info = file.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    identity = FileId.of(info)
                    known = before.files.get(file.name) if before else None
                    files[file.name] = known if known and known[0] == identity else (identity, number)
    return _Known(place, before.since if before else number, files)
