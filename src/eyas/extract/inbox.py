"""The client's side of the spool: waits for records, removes them, counts them.

One poller serves all waiters: a listing of the folder every 1 to 50 ms while somebody waits, none otherwise. (The
spool may be on a mount where change notifications do not arrive.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eyas.capture.contract import FAILED_SUFFIX, PROBE_ROW, RECORD_SUFFIX, SPEC_FILE, RequestId, ServerHello
from eyas.capture.spool import parse_name
from eyas.errors import EngineError
from eyas.extract.engine import Failed, Retry
from eyas.extract.record import refused

_SHORTEST_POLL_S: Final = 0.001
_LONGEST_POLL_S: Final = 0.05
_POLL_GROWTH: Final = 1.5


@dataclass(frozen=True, slots=True)
class _Waiter:
    future: asyncio.Future[Path | Failed]
    deadline_s: float  # on time.monotonic


class Inbox:
    """The spool folder as this client sees it.

    Args:
        folder: the server's spool.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[str, _Waiter] = {}
        self._abandoned: set[str] = set()
        self._poller: asyncio.Task[None] | None = None
        self._pause_s = _SHORTEST_POLL_S

    def hello(self) -> ServerHello:
        """What the plugin said when its server's model was loaded.

        Raises:
            EngineError: no spool here, not readable, or a plugin that speaks another contract.
        """
        path = self.folder / SPEC_FILE
        try:
            return ServerHello.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            hint = "the client must see the server's spool folder; set server.spool where it is mounted elsewhere"
            raise EngineError("found no spool of a capturing server", self.folder, hint) from None
        except PermissionError as error:
            hint = "run as the server's user, or serve with a spool mode and group that you belong to"
            raise EngineError("may not read the spool", path, hint) from error
        except (OSError, ValueError) as error:
            hint = "install the same eyas in the server's environment and restart it"
            raise EngineError(f"cannot understand the plugin ({error})", path, hint) from error

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
        """Drop a record at its origin; harmless where there is none. Callable from any thread."""
        for suffix in (RECORD_SUFFIX, FAILED_SUFFIX):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.folder / f"{rid}{suffix}").unlink()

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
                self.remove(text)
                removed += 1
        return removed

    async def close(self) -> None:
        """Stop polling and remove abandoned records that have come meanwhile."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        for rid in self._abandoned:
            self._drop(rid)

    async def _poll(self) -> None:
        try:
            while self._waiting:
                found = self._scan()
                self._pause_s = _SHORTEST_POLL_S if found else min(self._pause_s * _POLL_GROWTH, _LONGEST_POLL_S)
                await asyncio.sleep(self._pause_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            for waiter in self._waiting.values():
                if not waiter.future.done():
                    waiter.future.set_exception(error)

    def _scan(self) -> bool:
        """Settle every waiter whose record came, failed or is late; whether any came."""
        # The clock is read first: a record that came by the deadline counts, however long the listing takes.
        now_s = time.monotonic()
        try:
            names = {entry.name for entry in os.scandir(self.folder)}
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
                _settle(waiter, Failed("record-late", "accepted, but it did not come", Retry.PROBE))
                continue
            else:
                continue
            found = True
        if self._abandoned:  # it may grow for as long as the run lives: look the names up, not the other way round
            for rid in {name.removesuffix(RECORD_SUFFIX).removesuffix(FAILED_SUFFIX) for name in names}:
                if rid in self._abandoned:
                    self._drop(rid)
                    self._abandoned.discard(rid)
        return found

    def _failure(self, rid: str) -> Failed:
        try:
            told = json.loads((self.folder / f"{rid}{FAILED_SUFFIX}").read_text(encoding="utf-8"))
            failure = refused(str(told["reason"]), str(told["detail"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            failure = Failed("record-damaged", f"unreadable failure note: {error!r}")
        self._drop(rid)
        return failure

    def _drop(self, rid: str) -> None:
        """`remove`, where it is not worth failing for: what stays behind ages out."""
        with contextlib.suppress(OSError):
            self.remove(rid)

    def _files(self) -> list[tuple[str, str, int]]:
        """(rid, suffix, bytes) of every file of ours in the folder."""
        files: list[tuple[str, str, int]] = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if (parsed := parse_name(entry.name)) is not None:
                    with contextlib.suppress(OSError):  # others remove files too
                        files.append((*parsed, entry.stat(follow_symlinks=False).st_size))
        return files


def _settle(waiter: _Waiter, result: Path | Failed) -> None:
    if not waiter.future.done():
        waiter.future.set_result(result)
