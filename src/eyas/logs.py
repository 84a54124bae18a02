"""Run logs (`eyas.events`) as they are read: whatever a line holds, it is a value of the kind asked for or none.

A log may be torn, from another version or from a stranger; a line that is no event is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from eyas.capture.folder import read_limited
from eyas.capture.strictjson import loads
from eyas.disk import is_folder_there
from eyas.events import EVENTS_DIR

_MAX_LOG_BYTES: Final = 512 << 20
_MAX_LINE_BYTES: Final = 1 << 20
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """One log: a process from its start to its end, or to where it was cut off.

    Attributes:
        name: of the file.
        events: in the order written; each with a finite `t`, in seconds since the epoch.
    """

    name: str
    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def began(self) -> float:
        return float(self.events[0]["t"])


def read_sessions(folder: Path) -> list[Session]:
    """The logs in `folder`/events, in the order of time; what cannot be read is left out."""
    found: list[Session] = []
    events = folder / EVENTS_DIR
    for path in sorted(events.glob("*.jsonl")) if is_folder_there(events) else ():
        try:
            lines = read_limited(path, _MAX_LOG_BYTES)[0].split(b"\n")
        except (OSError, ValueError):
            continue
        read = [event for line in lines if line and (event := _event(line)) is not None]
        if read:
            found.append(Session(path.stem, tuple(read)))
    return sorted(found, key=lambda session: (session.began, session.name))


def _event(line: bytes) -> Event | None:
    try:
        event = loads(line, _MAX_LINE_BYTES)
    except ValueError:
        return None
    return event if isinstance(event, dict) and read_number(event, "t") is not None else None


# --- values of a kind -------------------------------------------------------------------------------------------------


def read_number(event: Any, key: str) -> float | None:
    """A finite number, else None."""
    value = event.get(key) if isinstance(event, Mapping) else None
    return as_number(value)


def as_number(value: Any) -> float | None:
    """A finite number that can be drawn, else None; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and abs(value) < 1e30 else None


def read_numbers(event: Any, key: str) -> tuple[float | None, ...]:
    """A list with what is no number in it as None; empty where there is no list."""
    value = event.get(key) if isinstance(event, Mapping) else None
    return tuple(map(as_number, value)) if isinstance(value, list) else ()


def read_text(event: Any, key: str, default: str = "") -> str:
    """A text, else the default; numbers are texts too."""
    value = event.get(key) if isinstance(event, Mapping) else None
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def read_object(event: Any, key: str) -> dict[str, Any]:
    """An object, else an empty one."""
    value = event.get(key) if isinstance(event, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


def read_list(event: Any, key: str) -> list[Any]:
    """A list, else an empty one."""
    value = event.get(key) if isinstance(event, Mapping) else None
    return list(value) if isinstance(value, list) else []
