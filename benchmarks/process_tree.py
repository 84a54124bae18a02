"""Runs a command and measures it with all its processes: wall time and peak memory. Linux only."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

EVERY_S: Final = 0.25
SHARED: Final = "shared memory"
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a command.

    Attributes:
        code: exit status; negative: the signal that ended it.
        wall_s: from start to exit, imports and all.
        cpu_s: processor time of all its processes, the kernel's included.
        rss: peak over the run of the sum of the resident sets of all processes, in bytes. A page that several hold
            counts for each of them, and so does a mapped file in the page cache.
        own: peak of the sum of their own memory, in bytes: anonymous pages, a shared one counted once.
        output: path of what it printed, standard error included.
    """

    code: int
    wall_s: float
    cpu_s: float
    rss: int
    own: int
    output: Path


def measure(
    command: Sequence[str],
    output: Path,
    *,
    env: Mapping[str, str],
    with_sessions: Sequence[int] = (),
    limit_s: float | None,
) -> Measured:
    """Runs `command` in a session of its own, for at most `limit_s` seconds where given.

    Args:
        with_sessions: further sessions whose time and memory are counted as well, such as a server's.
    """
    with output.open("wb") as printed, session(command, printed, env=env) as process:
        sampler = _Sampler([process.pid, *with_sessions])
        began, before_s = time.monotonic(), _ended_cpu_s() + cpu_of(with_sessions)
        sampler.start()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill(process)
        wall_s = time.monotonic() - began
        sampler.finish()
        cpu_s = _ended_cpu_s() + cpu_of(with_sessions) - before_s
    return Measured(process.returncode, wall_s, cpu_s, sampler.rss, sampler.own, output)


@contextmanager
def session(command: Sequence[str], printed: IO[bytes], *, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`command` in a session of its own, whose id is its process id; ended with all its processes afterwards."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a session's processes: asked first, then made to."""
    for number, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if not _processes({process.pid}):
            break
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def resident(sessions: Sequence[int]) -> dict[str, int]:
    """Bytes that the processes of sessions hold now: each name's own (anonymous), and what is shared or on RAM disk."""
    sizes = {SHARED: 0}
    for process in _processes(set(sessions)):
        name = _read(process / "comm").strip()
        sizes[name] = sizes.get(name, 0) + own_bytes(process)
        sizes[SHARED] += _mapped(process, "Pss_Shmem:")
    return sizes


class _Sampler(threading.Thread):
    def __init__(self, sessions: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._sessions, self._done = set(sessions), threading.Event()
        self.rss = self.own = 0

    def run(self) -> None:
        number = 0
        while not self._done.wait(EVERY_S):
            processes = _processes(self._sessions)
            self.rss = max(self.rss, sum(map(_rss, processes)))
            if number % 4 == 0:  # the kernel walks every page for this one
                self.own = max(self.own, sum(map(own_bytes, processes)))
            number += 1

    def finish(self) -> None:
        self._done.set()
        self.join()


def _processes(sessions: set[int]) -> list[Path]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _read(folder / "stat").rpartition(")")[2].split()  # the name before it may hold anything
            if fields and int(fields[3]) in sessions and fields[0] != "Z":
                found.append(folder)
    return found


def _ended_cpu_s() -> float:
    """Of all processes started here that have ended, and of those that they had waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of(sessions: Sequence[int]) -> float:
    """So far, of the processes that run in these sessions."""
    fields = (_read(process / "stat").rpartition(")")[2].split() for process in _processes(set(sessions)))
    return sum(TICK_S * (int(one[11]) + int(one[12])) for one in fields if one)


def _rss(process: Path) -> int:
    fields = _read(process / "statm").split()
    return int(fields[1]) * PAGE if fields else 0


def own_bytes(process: Path) -> int:
    """Of a process of /proc: its anonymous pages, a shared one divided among those that hold it."""
    return _mapped(process, "Pss_Anon:")


def _mapped(process: Path, kind: str) -> int:
    lines = _read(process / "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # it has ended meanwhile
