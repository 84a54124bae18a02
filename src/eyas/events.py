"""The run log: one JSON object a line, append only, so that a report can be drawn long after the run.

{"t": 1764437000.12, "event": "shard_done", "shard": 3, "rows": 512, ...}
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a JSON-lines file. Losing the log never fails a run: a full disk silences it."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event with the current time (seconds since the epoch)."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"t": round(time.time(), 3), "event": event} | fields) + "\n")
        except OSError:
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
