"""What the server's own processes are told: how to capture, and where to leave records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from eyas.capture.contract import MAX_NOTE_BYTES, with_layers
from eyas.capture.strictjson import build, loads, shown

SETTINGS_ENV: Final = "EYAS_CAPTURE"  # JSON of ServerSettings; the plugin does nothing without it
WRITER_MODES: Final = ("threads", "process")
MAX_WRITER_THREADS: Final = 64


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the plugin captures; given to the server's processes as JSON in the environment variable EYAS_CAPTURE.

    Attributes:
        layers, last, dtype: as in CaptureSpec.
        spool: folder for finished records, on RAM-backed storage.
        quota_bytes: most bytes of records waiting there, over all of the server's ranks.
        mode, group: permission bits of record files, and the group they get (None: the server's own).
        orphan_age_s: records nobody fetched are removed after this many seconds.
        writers: who hashes and writes records: `threads` of the server's own process or a `process` of its own.
        writer_threads: how many of them, in either.
        arena_bytes: host memory through which states travel to their files, over all ranks; 0 chooses (see
            `arena.arena_size`). Allocated at start, and pinned where the server computes on a GPU.
    """

    layers: tuple[int, ...]
    spool: str
    last: str = "loss"
    dtype: str = "bf16"
    quota_bytes: int = 8 << 30
    mode: int = 0o600
    group: str | None = None
    orphan_age_s: float = 3600.0
    writers: str = "process"
    writer_threads: int = 8
    arena_bytes: int = 0

    def __post_init__(self) -> None:
        if self.writers not in WRITER_MODES:
            raise ValueError(f"writers must be one of {WRITER_MODES}, got {shown(self.writers)}")
        if not 1 <= self.writer_threads <= MAX_WRITER_THREADS:
            raise ValueError(f"writer_threads must be from 1 to {MAX_WRITER_THREADS}, got {self.writer_threads}")
        if self.arena_bytes < 0:
            raise ValueError(f"arena_bytes must not be negative, got {self.arena_bytes}")

    def to_env(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_env(cls, text: str) -> ServerSettings:
        """Raises ValueError for anything but what `to_env` writes."""
        try:
            return build(cls, with_layers(loads(text, MAX_NOTE_BYTES)))
        except ValueError as error:
            raise ValueError(f"{SETTINGS_ENV} is not capture settings: {error}") from error
