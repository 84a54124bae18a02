"""The server's own log, read as it grows: which of our requests reached it, in which order, and what it says of itself.

SGLang logs every request it receives (`--log-requests`, level 0, JSON), before anything is done with it; that line is
what counts as a request here, whoever sent it and whatever became of it.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from eyas.capture.contract import PROBE_ROW, RequestId

_RECEIVED: Final = re.compile(rb'"event": "request\.received", "rid": "([^"]*)"')
_RETRACTED: Final = re.compile(rb"Retract requests|retracted_reqs: [1-9]|Testing retraction")
_PERIOD_S: Final = 0.1


@dataclass(slots=True)
class RunSends:
    """Requests of one store's run, in the order in which the server received them."""

    sends: list[RequestId] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)

    def last_of_rows(self) -> dict[int, RequestId]:
        """The last request for each row: where the row is stored, it is this one's record that was believed.

        A row is asked for again only after its last record was refused, or its session ended without storing it.
        """
        return {rid.row: rid for rid in self.sends if rid.row != PROBE_ROW}


class ServerLog:
    """Follows a log file in a thread; it may be appended to by one server after another.

    Args:
        path: the log.
        neighbour: run name of requests that only look like ours.
    """

    def __init__(self, path: Path, neighbour: str) -> None:
        self._path, self._neighbour = path, neighbour
        self._lock = threading.Lock()
        self._runs: dict[str, RunSends] = {}
        self._offset = 0
        self._tail = b""
        self._stop = threading.Event()
        self.own = 0
        self.other = 0
        self.retractions = 0
        self.plugin_errors: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._follow, name="server-log", daemon=True)

    def __enter__(self) -> ServerLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.read()

    def run(self, name: str) -> RunSends:
        """A copy of what is known of a run."""
        with self._lock:
            known = self._runs.get(name, RunSends())
            return RunSends(list(known.sends), set(known.sessions))

    def sent(self, name: str) -> int:
        """How many requests of a run were received."""
        with self._lock:
            known = self._runs.get(name)
            return len(known.sends) if known else 0

    def read(self) -> None:
        """Take in what was added."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        with self._lock:
            self._offset += len(data)
            *lines, self._tail = (self._tail + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        if match := _RECEIVED.search(line):
            rid = RequestId.parse(match[1].decode(errors="replace"))
            if rid is None or rid.run == self._neighbour:
                self.other += 1
                return
            self.own += 1
            known = self._runs.setdefault(rid.run, RunSends())
            known.sends.append(rid)
            known.sessions.add(rid.session)
        elif _RETRACTED.search(line):
            self.retractions += 1
        elif b"logged once" in line:
            self.plugin_errors[line.split(b"eyas: ", 1)[-1].decode(errors="replace")[:100]] += 1

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.read()
