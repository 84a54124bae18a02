"""The server under test: started, killed and started again on one port and one spool, as itself or as another."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import Server, free_port, sglang_server
from soak.decisions import Variant

LAYERS = (1, 3, 5)
OTHER_LAYERS = (1, 2, 5)
_TERMINATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the target and of another model of the same architecture."""

    target: Path
    other: Path


class ChaosServer:
    """One server at a time, always at the same address.

    Args:
        models: what it may serve.
        folder: for log and spool.
        faults: control file of the fault injection.

    Attributes:
        url, spool, log: as `Server`'s; the log is appended to.
        starts: how often it was started.
        right: whether what runs, or last ran, is the target with the agreed layers.
        up: set while it answers.
    """

    def __init__(self, models: Models, folder: Path, faults: Path) -> None:
        self._models, self._folder, self._faults = models, folder, faults
        self._port = free_port()
        self._running: AbstractContextManager[Server] | None = None
        self._server: Server | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.spool, self.log = folder / "spool", folder / "server.log"
        self.starts = 0
        self.right = True
        self.up = threading.Event()

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def died(self) -> bool:
        """Whether it ended although nobody ended it."""
        return self.up.is_set() and self._server is not None and not _lives(self._server.pid)

    def start(self, variant: Variant, what: str = "target") -> None:
        """Start it and wait until it answers.

        Args:
            variant: flags, environment, quota.
            what: `target`, `other-model` or `other-layers`.
        """
        settings: dict[str, Any] = {"quota_bytes": variant.quota_bytes, "port": self._port, "spool": self.spool}
        self.right = what == "target"
        self.starts += 1
        self._running = sglang_server(
            self._models.other if what == "other-model" else self._models.target,
            self._folder,
            layers=OTHER_LAYERS if what == "other-layers" else LAYERS,
            flags=variant.flags,
            env={**variant.env, "EYAS_TEST_FAULTS": str(self._faults)},
            **settings,
        )
        self._server = self._running.__enter__()
        self.up.set()

    def kill(self) -> None:
        """SIGKILL, as when the machine runs out of memory."""
        assert self._server is not None
        self.up.clear()
        self._server.kill()
        self.stop()

    def terminate(self) -> None:
        """SIGTERM to its leader: it ends what it is doing, or not."""
        assert self._server is not None
        self.up.clear()
        with suppress(ProcessLookupError):
            os.kill(self._server.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _TERMINATE_S
        while _lives(self._server.pid) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        self.stop()

    def stop(self) -> None:
        """End it and everything it started; harmless where nothing runs."""
        self.up.clear()
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None


def _lives(pid: int) -> bool:
    """Whether a child of ours has not ended yet; it is reaped by whoever started it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
