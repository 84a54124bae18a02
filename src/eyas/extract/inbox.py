"""The client's side of the spool: waits for records, removes them, counts them.

The folder may lie where anyone can make one first, and others may write to it: it is opened by descriptor each time and
believed only if its owner is (see `capture.folder`); no link is followed.

One poller serves all waiters: a listing of the folder every 1 to 50 ms while somebody waits, none otherwise, and never
for more than a tenth of the time. (The spool may be on a mount where change notifications do not arrive.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pwd
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.capture.contract import (
    FAILED_SUFFIX,
    MAX_NOTE_BYTES,
    PROBE_ROW,
    RECORD_SUFFIX,
    SPEC_FILE,
    RequestId,
    ServerHello,
)
from eyas.capture.folder import Trust, open_folder, read_limited
from eyas.capture.spool import parse_name
from eyas.capture.strictjson import loads
from eyas.errors import ConfigError, EngineError
from eyas.extract.engine import Failed, Retry
from eyas.extract.record import refused

RECORD_LATE: Final = "record-late"
_SHORTEST_POLL_S: Final = 0.001
_LONGEST_POLL_S: Final = 0.05
_POLL_GROWTH: Final = 1.5
_REST: Final = 9.0  # so many times as long as a listing took it pauses: a tenth of the loop's time at most
_DETAIL: Final = 1000  # characters of a failure's text that are kept
_REMEMBERED: Final = 1024  # fetched records; a second one under such a name comes at once or never


@dataclass(frozen=True, slots=True)
class _Waiter:
    future: asyncio.Future[Path | Failed]
    deadline_s: float  # on time.monotonic


class Inbox:
    """The spool folder as this client sees it.

    Args:
        folder: the server's spool.
        owner: user (name or number) whose folder it may be besides root, this user, and the owner of a folder that
            belongs to a group of ours.

    Raises:
        ConfigError: no such user.
    """

    def __init__(self, folder: Path, owner: str | None = None) -> None:
        self.folder = folder
        named = frozenset() if owner is None else frozenset({_user_id(owner)})
        self._trust = Trust(named, frozenset({os.getegid(), *os.getgroups()}))
        self._server: int | None = None
        self._waiting: dict[str, _Waiter] = {}
        self._abandoned: set[str] = set()
        self._removed: deque[str] = deque(maxlen=_REMEMBERED)
        self._poller: asyncio.Task[None] | None = None
        self._pause_s = _SHORTEST_POLL_S

    def hello(self) -> ServerHello:
        """What the plugin said when its server's model was loaded.

        Raises:
            EngineError: no spool here, not readable, or a plugin that speaks another contract.
        """
        path = self.folder / SPEC_FILE
        try:
            with self._opened() as folder:
                status = os.fstat(folder)
                # Into a folder of root's, whoever it lets in may have put it.
                owners = None if status.st_uid == 0 else {0, os.geteuid(), status.st_uid, *self._trust.owners}
                text, status = read_limited(SPEC_FILE, MAX_NOTE_BYTES, folder=folder, owners=owners)
            hello = ServerHello.from_json(str(text, "utf-8"))
            self._server = status.st_uid
            return hello
        except FileNotFoundError:
            hint = "the client must see the server's spool folder; set server.spool where it is mounted elsewhere"
            raise EngineError("found no spool of a capturing server", self.folder, hint) from None
        except PermissionError as error:
            if error.errno == errno.EPERM:
                hint = "a link or a folder that anyone may write to is never used; one of another user is where "
                hint += "server.spool_owner names him, or the folder's group is one of yours (serve.spool_group)"
                raise EngineError(f"the spool is not to be trusted: it {error.strerror}", path, hint) from error
            hint = "run as the server's user, or serve with a spool mode and group that you belong to"
            raise EngineError("may not read the spool", path, hint) from error
        except (OSError, ValueError) as error:
            hint = "install the same eyas in the server's environment and restart it"
            raise EngineError(f"cannot understand the plugin ({error})", path, hint) from error

    def started_ns(self) -> int | None:
        """When the server that writes here said so, in its spec.json: another start, another time. None: not there.

        A time and not an inode: file systems of containers make those up.
        """
        with contextlib.suppress(OSError), self._opened() as folder:
            return os.stat(SPEC_FILE, dir_fd=folder, follow_symlinks=False).st_mtime_ns
        return None

    @property
    def owners(self) -> frozenset[int] | None:
        """User ids whose records are believed: root, this one, and whoever wrote spec.json; None before `hello`."""
        return None if self._server is None else frozenset({0, os.geteuid(), self._server})

    async def wait(self, rid: str, deadline_s: float) -> Path | Failed:
        """Wait for a record: its path, or by name why it did not come within `deadline_s` seconds."""
        future: asyncio.Future[Path | Failed] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = _Waiter(future, time.monotonic() + deadline_s)
        self._pause_s = _SHORTEST_POLL_S
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            return await future
        finally:
            self._waiting.pop(rid, None)

    def remove(self, rid: str) -> None:
        """Drop a record at its origin; harmless where there is none. Callable from any thread.

        Should another one come under its name (somebody imitates our ids), it goes too.
        """
        self._removed.append(rid)
        self._unlink(rid)

    def abandon(self, rid: str) -> None:
        """Nobody wants this record any more: remove it now, or when it comes."""
        self._abandoned.add(rid)
        self._drop(rid)

    def usage_bytes(self) -> int:
        """Bytes of all records waiting in the spool, whoever asked for them."""
        return sum(size for _, suffix, size in self._files() if suffix == RECORD_SUFFIX)

    def clean_stale(self, run: str, is_alive: Callable[[str], bool]) -> int:
        """Remove what dead sessions of a run left behind.

        Args:
            run: see RequestId.
            is_alive: whether a session's process still lives.

        Returns:
            Files removed.
        """
        removed = 0
        for text, suffix, _ in self._files():
            rid = RequestId.parse(text)
            # Probes are removed by whoever sent them, under sessions of their own.
            if rid is None or rid.run != run or rid.row == PROBE_ROW or suffix not in (RECORD_SUFFIX, FAILED_SUFFIX):
                continue
            if not is_alive(rid.session):
                with contextlib.suppress(OSError):  # a folder of that name, say: no reason not to start
                    self.remove(text)
                    removed += 1
        return removed

    async def close(self) -> None:
        """Stop polling and remove abandoned records that have come meanwhile."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        there = {rid for rid, _, _ in self._files()}  # one look: nearly all are long gone
        for rid in there & self._abandoned.union(self._removed):
            self._drop(rid)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = open_folder(self.folder, self._trust)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    async def _poll(self) -> None:
        try:
            while self._waiting:
                began_s = time.monotonic()
                found = self._scan()
                self._pause_s = _SHORTEST_POLL_S if found else min(self._pause_s * _POLL_GROWTH, _LONGEST_POLL_S)
                # Thousands of names take milliseconds to list: the loop has other work than that.
                await asyncio.sleep(max(self._pause_s, _REST * (time.monotonic() - began_s)))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            for waiter in self._waiting.values():
                if not waiter.future.done():
                    waiter.future.set_exception(error)

    def _scan(self) -> bool:
        """Settle every waiter whose record came, failed or is late; whether any came."""
        # The clock is read first: a record that came by the deadline counts, however long the listing takes.
        now_s = time.monotonic()
        try:
            with self._opened() as folder:
                names = set(os.listdir(folder))  # noqa: PTH208
        except OSError as error:
            for waiter in self._waiting.values():
                _settle(waiter, Failed("spool-gone", error.strerror or str(error), Retry.PROBE))
            return False
        found = False
        for rid, waiter in self._waiting.items():
            if f"{rid}{RECORD_SUFFIX}" in names:
                _settle(waiter, self.folder / f"{rid}{RECORD_SUFFIX}")
            elif f"{rid}{FAILED_SUFFIX}" in names:
                _settle(waiter, self._failure(rid))
            elif now_s >= waiter.deadline_s:
                _settle(waiter, Failed(RECORD_LATE, "accepted, but it did not come", Retry.PROBE))
                continue
            else:
                continue
            found = True
        removed = set(self._removed.copy())  # copied in one step: other threads append
        # They may grow for as long as the run lives: look the names up, not the other way round.
        for rid in {name.removesuffix(RECORD_SUFFIX).removesuffix(FAILED_SUFFIX) for name in names}:
            if rid in self._abandoned or rid in removed:
                self._drop(rid)
                self._abandoned.discard(rid)
        return found

    def _failure(self, rid: str) -> Failed:
        try:
            name = f"{rid}{FAILED_SUFFIX}"
            with self._opened() as folder:
                text, _ = read_limited(name, MAX_NOTE_BYTES, folder=folder, owners=self.owners)
            told = loads(text, MAX_NOTE_BYTES)
            failure = refused(str(told["reason"])[:_DETAIL], str(told["detail"])[:_DETAIL])
        except (OSError, ValueError, KeyError, TypeError) as error:
            failure = Failed("record-damaged", f"unreadable failure note: {error!r}")
        self._drop(rid)
        return failure

    def _drop(self, rid: str) -> None:
        """`remove`, where it is not worth failing for: what stays behind ages out."""
        with contextlib.suppress(OSError):
            self._unlink(rid)

    def _unlink(self, rid: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._opened() as folder:
            for suffix in (RECORD_SUFFIX, FAILED_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{rid}{suffix}", dir_fd=folder)

    def _files(self) -> list[tuple[str, str, int]]:
        """(rid, suffix, bytes) of every file of ours in the folder."""
        files: list[tuple[str, str, int]] = []
        with contextlib.suppress(OSError), self._opened() as folder, os.scandir(folder) as entries:
            for entry in entries:
                if (parsed := parse_name(entry.name)) is not None:
                    with contextlib.suppress(OSError):  # others remove files too
                        files.append((*parsed, entry.stat(follow_symlinks=False).st_size))
        return files


def _user_id(user: str) -> int:
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError("no such user", f"server.spool_owner={user}", "a user's name or number") from None


def _settle(waiter: _Waiter, result: Path | Failed) -> None:
    if not waiter.future.done():
        waiter.future.set_result(result)
