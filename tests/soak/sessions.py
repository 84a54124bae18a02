"""`eyas extract` as a user runs it: a process of its own, ended by a signal somewhere in the middle, and run again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from eyas.capture.contract import PROBE_ROW
from eyas.config import Config
from eyas.data.corpus import Corpus
from eyas.extract.build import Job
from soak.chaos_server import LAYERS
from soak.decisions import SessionPlan
from soak.journal_watch import JournalWatch
from soak.server_log import ServerLog

_POLL_S: Final = 0.05
_LONGEST_S: Final = 420.0
RECORD_DEADLINE_S: Final = 3.0
DONE, ENGINE = 0, 3
#: How a session may end while the server is another one: it must be one of these.
OTHER_SERVER: Final = ("the server serves another model", "the server captures other layers")
#: Further errors by which a session may end in chaos. It must be one of ours, and name what happened.
IN_CHAOS: Final = (
    *OTHER_SERVER,
    *("the plugin refuses the probe", "the probe's record did not come", "the probe's record is wrong"),
    *(
        "the probe failed",
        "the server refuses the probe",
        "found no spool of a capturing server",
        "may not remove records",
    ),
    *("no server", "the connection broke", "the server does not answer", "the server is not ready"),
    *("the spool belongs to another server", "the spool is full"),
)


@dataclass(slots=True)
class StoreRun:
    """One store's extraction: its sessions, and what was seen of them.

    Attributes:
        number: which store of its round.
        run: its name in request ids.
        endings: of its sessions, counted by name.
        unexpected: what no session may do.
        stored_at: after each session: rows stored, and the sessions seen until then.
    """

    number: int
    corpus: Path
    store: Path
    log: ServerLog
    watch: JournalWatch
    run: str = ""
    rows: int = 0
    sessions: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    stored_at: list[tuple[set[int], set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = Job(self.corpus, self.store, "", (), Config(), "").run
        self.rows = len(Corpus.open(self.corpus))

    def session(
        self, plan: SessionPlan, url: str, spool: Path, *, quiet: bool = False, give_up: Callable[[], bool]
    ) -> int:
        """Run one session to its end, whichever way that is.

        Args:
            plan: how it runs and ends.
            url, spool: the server, and where its records arrive.
            quiet: nothing fails any more: failed rows are tried again, and only exit code 0 is right.
            give_up: asked now and then; True ends the session at once.

        Returns:
            Its exit code, negative for a signal.
        """
        self.sessions += 1
        error_path = self.store.with_name(f"{self.store.name}-{self.sessions}.err")
        began = self._asked()
        left = self.rows - len(self.watch.stored())
        with error_path.open("wb") as errors:
            process = subprocess.Popen(
                self._command(plan, url, spool, quiet), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
            hung = self._wait(process, plan, began + plan.after * left, give_up)
        if not give_up():
            text = error_path.read_text(errors="replace")
            self._judge_ending(process.returncode, text, plan, quiet=quiet, hung=hung)
        self._snapshot()
        return process.returncode

    def _command(self, plan: SessionPlan, url: str, spool: Path, quiet: bool) -> list[str]:
        settings = {
            "server.spool": spool,
            "server.timeout_s": 60,
            "server.record_deadline_s": 20 if quiet else RECORD_DEADLINE_S,
            "server.restart_timeout_s": 180,
            "capture.dtype": "f32",
            "capture.layers": list(LAYERS),
            "extract.window_requests": plan.window,
            "extract.attempts": 20 if quiet else 4,  # a server with few pages goes on taking requests back
            "extract.drain_s": 10,
            "store.shard_bytes": "2MB",
            "store.reserve_bytes": 0,
        }
        command = [sys.executable, "-m", "eyas", "extract", str(self.corpus), str(self.store), "--server", url]
        command += ["--workers", str(plan.workers), *(["--retry-failed"] if quiet else [])]
        return command + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]

    def _wait(
        self, process: subprocess.Popen[bytes], plan: SessionPlan, until: float, give_up: Callable[[], bool]
    ) -> bool:
        """Wait, send the plan's signal when enough rows were asked for; True where it had to be ended by us."""
        deadline_s, signalled = time.monotonic() + _LONGEST_S, False
        while process.poll() is None:
            self.watch.look()
            if give_up() or time.monotonic() > deadline_s:
                process.kill()
                process.wait()
                return not give_up()
            if not signalled and plan.ending != "run" and self._asked() > until:
                signalled = True
                time.sleep(plan.grace_s)
                _signal(process, plan.ending)
            time.sleep(_POLL_S)
        self.watch.look()
        return False

    def _asked(self) -> int:
        """Requests for rows so far; a session that has not come beyond its probes has asked for none."""
        return sum(rid.row != PROBE_ROW for rid in self.log.run(self.run).sends)

    def _judge_ending(self, code: int, text: str, plan: SessionPlan, *, quiet: bool, hung: bool) -> None:
        error = _error_of(text)
        named = f"exit {code}: {error}" if code == ENGINE else f"exit {code}"
        self.endings[named] += 1
        if hung:
            self.unexpected.append(f"{self.store.name}: a session hung: {text[-300:]}")
        elif "Traceback" in text:
            self.unexpected.append(f"{self.store.name}: a traceback: {text[-1500:]}")
        elif quiet:
            if code != DONE:
                self.unexpected.append(f"{self.store.name}: the last, quiet session ended with {code}: {text[-500:]}")
        elif not _allowed(code, error, plan.ending):
            self.unexpected.append(f"{self.store.name}: a session ({plan.ending}) ended with {code}: {text[-500:]}")

    def _snapshot(self) -> None:
        self.log.read()
        self.stored_at.append((self.watch.stored(), self.log.run(self.run).sessions))


def _allowed(code: int, error: str, ending: str) -> bool:
    """Whether a session may end so in chaos."""
    match code:
        case 0 | 6:  # done, or done but for failed rows
            return True
        case -9:
            return ending == "SIGKILL"
        case 130 | -15 | -2:  # before Python has installed any handler a signal just ends it
            return ending.startswith(("SIGTERM", "SIGINT"))
        case 3:
            return error.startswith(IN_CHAOS)
        case _:
            return False


def _signal(process: subprocess.Popen[bytes], ending: str) -> None:
    name, _, twice = ending.partition("-")
    process.send_signal(signal.Signals[name])
    if twice:
        time.sleep(0.3)
        process.send_signal(signal.Signals[name])


def _error_of(text: str) -> str:
    """What `eyas` said went wrong, in one line."""
    match = re.search(r"^error (.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def environment() -> None:
    """One thread each: many small processes share few cores."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
