"""The run log: one JSON object a line, append only, so that a report can be drawn long after the run.

    {"t": 1764437000.12, "event": "shard_done", "shard": 3, ...}

The file is locked while its session lives, which is how others tell a session that died from one that works.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

#: In the folder of a store or of a run: its logs, one file a session. For people, no part of a format.
EVENTS_DIR: Final = "events"
#: Packages on which the numbers of a run depend.
_TOLD: Final = ("eyas", "torch", "transformers")


class EventLog:
    """Appends events to a JSON-lines file. Losing the log never fails a run: a full disk silences it."""

    def __init__(self, path: Path | None) -> None:
        self._fd = -1
        if path is None:
            return
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700, parents=True)
                path.parent.chmod(0o700)  # whatever the umask: the log names hosts, paths and rows
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            os.fchmod(self._fd, 0o600)
            # Fails on a file system without locks: sessions then look dead to one another.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event with the current time (seconds since the epoch)."""
        if self._fd >= 0:
            line = json.dumps({"t": round(time.time(), 3), "event": event} | fields) + "\n"
            with contextlib.suppress(OSError):
                os.write(self._fd, line.encode())

    def close(self) -> None:
        """Close the file and give up its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_open(path: Path) -> bool:
    """Whether a living process holds the log at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not make us wait
        with open(descriptor, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def versions() -> dict[str, str]:
    """What a run works with, for its log: package -> version, of those that are installed."""
    found: dict[str, str] = {}
    for name in _TOLD:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
