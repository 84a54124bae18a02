"""The spool: a folder in RAM-backed storage where finished records wait for their client.

    Quota    how many bytes may wait: reserved at a record's first chunk, freed when the client removes the file
    Spool    the folder's accounting: what may come, what was published, `<rid>.failed` for what was accepted and then
             lost, orphans

Nothing in the folder is touched unless its name is exactly one of ours. Files are made by `spool_files`.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.capture.contract import FAILED_SUFFIX, RECORD_SUFFIX, SPEC_FILE, Refusal, Refused
from eyas.capture.settings import ServerSettings
from eyas.capture.spool_files import TMP_SUFFIX, SpoolFiles, is_torn, parse_name

_RESCAN_INTERVAL_S: Final = 0.02  # a client that keeps asking must not make the scheduler list the folder every time
_TORN_AGE_S: Final = 2.0  # of a .tmp that has no writer any more; one just made may not be locked yet


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """A file of ours in the folder: its record's id, its suffix, its size and age."""

    name: str
    rid: str
    suffix: str
    size: int
    modified_s: float


class Quota:
    """Bytes this rank may have in the spool, counted by record id. Not thread-safe: the spool holds the lock.

    Args:
        limit: this rank's share.
        stale: records already in the folder when the server started, file name -> bytes this rank answers for.
    """

    def __init__(self, limit: int, stale: Mapping[str, int] | None = None) -> None:
        self.limit = limit
        self._reserved: dict[str, int] = {}
        self._published: dict[str, int] = dict(stale or {})
        self.used = sum(self._published.values())

    def reserve(self, rid: str, size: int) -> bool:
        """Set bytes aside; False when they do not fit. A second reservation under one id replaces the first."""
        self.release(rid)
        if self.used + size > self.limit:
            return False
        self._reserved[rid] = size
        self.used += size
        return True

    def release(self, rid: str) -> None:
        self.used -= self._reserved.pop(rid, 0)

    def reserved(self) -> set[str]:
        """Ids of records on their way."""
        return set(self._reserved)

    def publish(self, rid: str, name: str) -> None:
        """The reserved record is now a file; it counts until it disappears from the folder."""
        self.used -= self._published.pop(name, 0)  # an earlier record under the same name was replaced
        self._published[name] = self._reserved.pop(rid, 0)

    def retain(self, present: set[str]) -> None:
        """Forget published records whose files are gone."""
        for name in [name for name in self._published if name not in present]:
            self.used -= self._published.pop(name)


class Spool:
    """The folder and its accounting. Methods may be called from any thread.

    Args:
        settings: folder, quota, file mode and group.
        shares: server ranks that divide the quota.
        clock: seconds since the epoch, as file times are.

    Raises:
        OSError, KeyError: the folder cannot be made or is not to be believed (a link, another user's, writable for
            those whom the settings do not name), or no such group.
    """

    def __init__(self, settings: ServerSettings, *, shares: int = 1, clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(settings.spool)
        self.files = SpoolFiles(
            self.folder, settings.mode, None if settings.group is None else _group_id(settings.group)
        )
        self._orphan_age_s = settings.orphan_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failing = False
        self._scanned_s = 0.0
        self.files.make()
        try:
            with self.files.opened() as folder:
                stale = {file.name: -(-file.size // shares) for file in _files(folder)}
        except PermissionError as error:
            known = f"a spool is user {os.geteuid()}'s or root's, or of a group of ours named in serve.spool_group"
            raise PermissionError(error.errno, f"{error.strerror}; {known}", str(self.folder)) from error
        self._quota = Quota(settings.quota_bytes // shares, stale)

    @property
    def quota_bytes(self) -> int:
        """This rank's share."""
        return self._quota.limit

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._quota.used

    def reserve(self, rid: str, size: int, *, again: bool = False) -> Refused | None:
        """Set aside room for a record of `size` bytes, or say by name why not. Fast: called by the scheduler.

        `again`: the folder was seen a moment ago, for another record of the same forward.
        """
        if size > self._quota.limit:
            return Refused(Refusal.ROW_TOO_LARGE, f"{size} bytes, the quota is {self._quota.limit}")
        if (not again or self._failing) and (problem := self._unwritable(size)):
            return Refused(Refusal.WRITE_FAILED, problem)
        with self._lock:
            if self._quota.reserve(rid, size):
                return None
            self._rescan()
            if self._quota.reserve(rid, size):
                return None
            return Refused(Refusal.SPOOL_FULL, f"{self._quota.used} + {size} bytes of {self._quota.limit}")

    def release(self, rid: str) -> None:
        """Give back what was reserved; harmless where nothing was."""
        with self._lock:
            self._quota.release(rid)

    def published(self, rid: str) -> None:
        """A record whose room was reserved is a file now."""
        self._failing = False
        with self._lock:
            self._quota.publish(rid, f"{rid}{RECORD_SUFFIX}")

    def fail(self, rid: str, reason: Refusal, detail: str) -> None:
        """Say that an accepted record will not come. Best effort: the folder may be the reason."""
        self._failing = self._failing or reason is Refusal.WRITE_FAILED
        self.release(rid)
        text = json.dumps({"reason": str(reason), "detail": detail})
        with contextlib.suppress(OSError):
            self.files.write(f"{rid}{FAILED_SUFFIX}", text)

    def write_hello(self, text: str) -> None:
        """Publish spec.json. Raises OSError."""
        self.files.write(SPEC_FILE, text)

    def remove_orphans(self) -> list[str]:
        """Remove files nobody fetched for `orphan_age_s`, and those whose writer is gone; returns their names."""
        now_s = self._clock()
        with self._lock:
            busy = self._quota.reserved()
        removed: list[str] = []
        with contextlib.suppress(OSError), self.files.opened() as folder:
            for file in _files(folder):
                torn = file.suffix == TMP_SUFFIX and is_torn(folder, file.name)
                age_s = min(self._orphan_age_s, _TORN_AGE_S) if torn else self._orphan_age_s
                if file.modified_s < now_s - age_s and file.rid not in busy:
                    with contextlib.suppress(OSError):
                        os.unlink(file.name, dir_fd=folder)
                        removed.append(file.name)
        return removed

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _rescan(self) -> None:
        now_s = self._clock()
        if 0 <= now_s - self._scanned_s < _RESCAN_INTERVAL_S:
            return
        self._scanned_s = now_s
        with contextlib.suppress(FileNotFoundError):
            self._quota.retain({path.name for path in self.folder.iterdir()})

    def _unwritable(self, size: int) -> str | None:
        """Why records cannot be written now. Looks closer after a failure, so that a full disk is named at once."""
        if not os.access(self.folder, os.W_OK | os.X_OK):
            return f"{self.folder} is {'not writable' if self.folder.is_dir() else 'gone'}"
        if self._failing:
            status = os.statvfs(self.folder)
            free = status.f_bavail * status.f_frsize
            if free < size:
                return f"{self.folder} has {free} bytes free, the record needs {size}"
        return None


def _files(folder: int) -> list[SpoolFile]:
    files: list[SpoolFile] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if parsed := parse_name(entry.name):
                with contextlib.suppress(OSError):  # a client may remove it between listing and stat
                    status = entry.stat(follow_symlinks=False)
                    files.append(SpoolFile(entry.name, *parsed, status.st_size, status.st_mtime))
    return files


def _group_id(group: str) -> int:
    return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
