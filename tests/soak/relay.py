"""Between the server's spool and the client's: moves records across, and lies about some of them.

    python -m soak.relay CONFIG       with CONFIG a JSON file of RelayConfig

The relay is the only one that reads the server's spool. A control file, read again whenever it changes, says how often
it mutates, delays, drops or doubles a record; whatever it does is a line of the ledger, with the checksums of the
states that it passed on. Probes and other users' records pass as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO

from eyas.capture.contract import FAILED_SUFFIX, PROBE_ROW, RECORD_SUFFIX, SPEC_FILE, RequestId
from soak.record_mutations import MUTATIONS, Earlier, RecordFile

SWAP: Final = "two-records-swapped"
LINK: Final = "link-instead-of-a-file"
FALSE_NOTE: Final = "damaged-failure-note"
DROPPED: Final = "dropped"
DELAYED: Final = "delayed"
DOUBLED: Final = "doubled"
#: What a client must refuse by name; delayed and doubled records are right ones.
REFUSED_KINDS: Final = (*MUTATIONS, SWAP, LINK, FALSE_NOTE)
_PAUSE_S: Final = 0.004
_REMEMBERED: Final = 200
_SWAP_WAIT_S: Final = 0.5
_DAMAGED_NOTES: Final = (b"", b"{", b"[]", b'{"reason": "sunspots"}', b"\xff\xfe")


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Where a relay works; `neighbour` is the run name of requests that are not ours."""

    server_spool: str
    client_spool: str
    control: str
    ledger: str
    neighbour: str

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass(slots=True)
class _Late:
    """A file to put into the client's spool at `due_s`."""

    due_s: float
    put: Callable[[], None]


@dataclass(slots=True)
class Memory:
    """What was seen before, for stale records."""

    by_row: OrderedDict[tuple[str, int], bytes] = field(default_factory=OrderedDict)
    by_size: dict[int, tuple[tuple[str, int], bytes]] = field(default_factory=dict)
    sessions: dict[str, bytes] = field(default_factory=dict)

    def earlier(self, rid: RequestId, size: int) -> Earlier:
        """What there is for a record."""
        key, same = (rid.run, rid.row), self.by_size.get(size)
        others = [data for session, data in self.sessions.items() if session != rid.session]
        return Earlier(
            same_size=same[1] if same and same[0] != key else None,
            same_row=self.by_row.get(key),
            any_record=others[-1] if others else None,
        )

    def remember(self, rid: RequestId, data: bytes) -> None:
        key = (rid.run, rid.row)
        self.by_row[key] = data
        self.by_row.move_to_end(key)
        while len(self.by_row) > _REMEMBERED:
            self.by_row.popitem(last=False)
        self.by_size[len(data)] = (key, data)
        self.sessions[rid.session] = data
        while len(self.sessions) > 8:
            del self.sessions[next(iter(self.sessions))]


class Relay:
    """One pass at a time over the server's spool.

    Args:
        config: the folders and files.
        clock: monotonic seconds.
    """

    def __init__(self, config: RelayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._from, self._to = Path(config.server_spool), Path(config.client_spool)
        self._control, self._clock = Path(config.control), clock
        self._ledger: TextIO = Path(config.ledger).open("a", buffering=1)  # noqa: SIM115
        self._seen_control: tuple[int, int] | None = None
        self._seen_spec: tuple[int, int] | None = None
        self._told: dict[str, Any] = {}
        self._memory = Memory()
        self._late: list[_Late] = []
        self._to_swap: tuple[RequestId, RecordFile, float] | None = None

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    def step(self) -> bool:
        """Move what is there; whether anything was."""
        self._read_control()
        if self._told.get("stalled"):
            return False
        self._copy_spec()
        now_s = self._clock()
        for late in [late for late in self._late if late.due_s <= now_s]:
            self._late.remove(late)
            late.put()
        if self._to_swap is not None and now_s - self._to_swap[2] > _SWAP_WAIT_S:
            rid, record, _ = self._to_swap
            self._to_swap = None  # no partner came: it is a late one
            self._pass_on(rid, record, DELAYED)
        moved = False
        for name in self._names():
            moved = True
            with contextlib.suppress(OSError):  # the spool was moved away, or a newer server tidies up
                self._take(name)
        return moved

    # --- one file -----------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self._from)  # noqa: PTH208
        except OSError:
            return []
        return sorted(name for name in names if name.endswith((RECORD_SUFFIX, FAILED_SUFFIX)) and name[0] != ".")

    def _take(self, name: str) -> None:
        path = self._from / name
        if name.endswith(FAILED_SUFFIX):
            self._put(name, path.read_bytes())
            path.unlink()
            return
        data = path.read_bytes()
        rid = RequestId.parse(name.removesuffix(RECORD_SUFFIX))
        if rid is None or rid.row == PROBE_ROW or rid.run == self._config.neighbour:
            self._put(name, data)
            path.unlink()
            return
        record = RecordFile.parse(data)
        random = Random(f"{self._told.get('seed')}:{rid.row}:{rid.attempt}")
        for action in ("mutate", "delay", "drop", "double"):
            if random.random() < self._told.get(action, 0.0):
                getattr(self, f"_{action}")(rid, record, random)
                break
        else:
            self._pass_on(rid, record, "")
        self._memory.remember(rid, data)
        path.unlink()

    def _pass_on(self, rid: RequestId, record: RecordFile, kind: str) -> None:
        self._log(rid, kind, record)
        self._put(f"{rid}{RECORD_SUFFIX}", record.data)

    def _delay(self, rid: RequestId, record: RecordFile, random: Random) -> None:
        self._log(rid, DELAYED, record)
        due_s = self._clock() + random.choice([0.05, 0.3, 1.0, self._told.get("deadline_s", 3.0) + 0.5])
        self._late.append(_Late(due_s, lambda: self._put(f"{rid}{RECORD_SUFFIX}", record.data)))

    def _drop(self, rid: RequestId, record: RecordFile, _: Random) -> None:
        self._log(rid, DROPPED, record)

    def _double(self, rid: RequestId, record: RecordFile, random: Random) -> None:
        self._pass_on(rid, record, DOUBLED)
        due_s = self._clock() + random.choice([0.0, 0.05, 0.5])
        self._late.append(_Late(due_s, lambda: self._put(f"{rid}{RECORD_SUFFIX}", record.data)))

    def _mutate(self, rid: RequestId, record: RecordFile, random: Random) -> None:
        if (waiting := self._to_swap) is not None and len(waiting[1].data) == len(record.data):
            self._to_swap = None
            self._log(rid, SWAP)
            self._log(waiting[0], SWAP)
            self._put(f"{rid}{RECORD_SUFFIX}", waiting[1].data)
            self._put(f"{waiting[0]}{RECORD_SUFFIX}", record.data)
            return
        kinds = list(REFUSED_KINDS)
        random.shuffle(kinds)
        for kind in kinds:
            if self._mutated_as(kind, rid, record, random):
                return

    def _mutated_as(self, kind: str, rid: RequestId, record: RecordFile, random: Random) -> bool:
        name = f"{rid}{RECORD_SUFFIX}"
        if kind == SWAP:
            if self._to_swap is not None:
                return False
            self._to_swap = (rid, record, self._clock())
        elif kind == LINK:
            self._log(rid, kind)
            target = self._to / f"away-{rid}"
            target.write_bytes(record.data)
            (self._to / f".{rid}.link").symlink_to(target)
            (self._to / f".{rid}.link").rename(self._to / name)
        elif kind == FALSE_NOTE:
            self._log(rid, kind)
            self._put(f"{rid}{FAILED_SUFFIX}", random.choice(_DAMAGED_NOTES))
        else:
            data = MUTATIONS[kind](record, self._memory.earlier(rid, len(record.data)), random)
            if data is None or data == record.data:
                return False
            self._log(rid, kind)
            self._put(name, data)
        return True

    # --- files --------------------------------------------------------------------------------------------------------

    def _put(self, name: str, data: bytes) -> None:
        temporary = self._to / f".relay-{os.getpid()}"
        with contextlib.suppress(OSError):  # the client's spool is away: the record is lost on its way
            temporary.write_bytes(data)
            temporary.rename(self._to / name)

    def _copy_spec(self) -> None:
        with contextlib.suppress(OSError):
            source = self._from / SPEC_FILE
            status = source.stat()
            if (seen := (status.st_mtime_ns, status.st_ino)) != self._seen_spec:
                self._put(SPEC_FILE, source.read_bytes())
                self._seen_spec = seen
            elif not (self._to / SPEC_FILE).exists():
                self._seen_spec = None

    def _read_control(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            status = self._control.stat()
            if (seen := (status.st_mtime_ns, status.st_ino)) != self._seen_control:
                self._told = json.loads(self._control.read_text())
                self._seen_control = seen

    def _log(self, rid: RequestId, kind: str, record: RecordFile | None = None) -> None:
        """Before the file is there: whoever ends with it finds it in the ledger."""
        hashes = {} if record is None else {"aux": record.header.aux, "last": record.header.last}
        self._ledger.write(json.dumps({"rid": str(rid), "kind": kind} | hashes) + "\n")


def read_ledger(path: Path) -> dict[str, dict[str, str]]:
    """What became of each record, by its id."""
    with contextlib.suppress(FileNotFoundError):
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return {entry["rid"]: entry for entry in entries}
    return {}


def main() -> None:
    """Relay until killed, or until the parent is gone."""
    config, parent = RelayConfig(**json.loads(Path(sys.argv[1]).read_text())), os.getppid()
    with Relay(config) as relay:
        while os.getppid() == parent:
            if not relay.step():
                time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
