"""Test only: faults inside the capture path of a running server, switched on and off from outside.

Does nothing unless EYAS_TEST_FAULTS names a JSON control file, which is read again whenever it changes:

    {"seed": 1, "steps": {"record-write": {"rate": 0.3}, "assemble": {"times": 2}, "record": {"rate": 1, "delay_s": 4}}}

A step with `rate` fails that share of its calls, one with `times` its next so many; with `delay_s` it sleeps that long
and then goes on. Every injection adds a line `<step>` to `<control file>.injected`, so that a test can assert that its
fault really happened.

    start, hello                       the capture's start in a server; spec.json
    sweep, own-shares, share, answer   the hook after each forward; `answer` is where a request's reply is made
    stream-output                      the hook around a server's outputs
    assemble, reserve, take-rows, snapshot, reply     the forward thread's part of one chunk
    host-copy                          waiting for the forward's copy to the host (a CPU makes none, and waits for none)
    record, hash, header               the writers' part of one record
    record-create, record-write, record-rename        its file (OSError: no space left)
    failure-call, failure-note         saying that a record will not come; `failure-note` is its file (OSError)
    orphans                            tidying the spool

The writers' steps are those of a server with `writers=threads`: in a process of their own nothing is wrapped.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.capture import assembler, contract, forward, recorder, sglang_plugin, spool, spool_files, writing

CONTROL_ENV = "EYAS_TEST_FAULTS"
COUNT_SUFFIX = ".injected"
_FAILED_IN_NAME = f"{contract.FAILED_SUFFIX}."  # `.<rid>.failed.<pid>...`: a note on its way


class Faults:
    """The control file, and what of it is still to be done in this process."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._count = control.with_name(control.name + COUNT_SUFFIX)
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._steps: dict[str, dict[str, Any]] = {}
        self._random = random.Random(0)

    def due(self, step: str) -> bool:
        """Count and slow down an injection; True where the step has to fail now."""
        with self._lock:
            self._reread()
            asked = self._steps.get(step)
            if asked is None:
                return False
            if "times" in asked:
                if asked["times"] < 1:
                    return False
                asked["times"] -= 1
            elif self._random.random() >= asked.get("rate", 1.0):
                return False
            with self._count.open("a") as file:
                file.write(f"{step}\n")
        if delay_s := asked.get("delay_s", 0):
            time.sleep(delay_s)
            return False
        return True

    def _reread(self) -> None:
        try:
            status = self._control.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen == self._seen:
                return
            told = json.loads(self._control.read_text())
        except (OSError, ValueError):  # gone, or being written
            self._seen, self._steps = None, {}
            return
        self._seen, self._steps = seen, {step: dict(asked) for step, asked in told.get("steps", {}).items()}
        self._random = random.Random(told.get("seed", 0))


def register() -> None:
    """Entry point."""
    if control := os.environ.get(CONTROL_ENV):
        install(Faults(Path(control)))


def install(faults: Faults) -> None:
    """Wrap the capture path's functions where their callers look them up."""

    def broken() -> Exception:
        return RuntimeError("injected by a test")

    def no_space() -> Exception:
        return OSError(errno.ENOSPC, "No space left on device (injected by a test)")

    def wrap(owner: Any, name: str, step: str, error: Callable[[], Exception] = broken) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if faults.due(step):
                raise error()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(sglang_plugin.Plugin, "_start", "start")
    wrap(spool.Spool, "write_hello", "hello", no_space)
    wrap(recorder.Recorder, "sweep", "sweep")
    wrap(sglang_plugin, "own_shares", "own-shares")
    wrap(sglang_plugin.Share, "take", "share")
    wrap(sglang_plugin.Plugin, "_answer", "answer")
    wrap(assembler.Assembler, "add", "assemble")
    wrap(spool.Spool, "reserve", "reserve")
    wrap(forward, "take_rows", "take-rows")
    wrap(recorder, "jobs_of", "snapshot")
    wrap(contract.CaptureReply, "to_dict", "reply")
    wrap(recorder, "arrive", "host-copy")
    wrap(writing.RecordWriter, "_finish", "record")
    wrap(writing, "hash_piece", "hash")
    wrap(contract.RecordHeader, "to_json", "header")
    wrap(writing, "write_at", "record-write", no_space)
    wrap(spool.Spool, "fail", "failure-call")
    wrap(spool.Spool, "remove_orphans", "orphans")
    _wrap_streaming(faults, broken)
    _wrap_files(faults, no_space)


def _wrap_streaming(faults: Faults, error: Callable[[], Exception]) -> None:
    """The hook itself is registered by reference, perhaps before us: fail what it asks of each request."""
    original = sglang_plugin.has_reply
    hook = sglang_plugin.around_stream_output.__name__

    def wrapped(request: Any) -> bool:
        frame = sys._getframe(1)
        names = {frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back else ""}
        replied = original(request)
        if replied and hook in names and faults.due("stream-output"):  # among others' outputs it would cost nobody
            raise error()
        return replied

    sglang_plugin.has_reply = wrapped


def _wrap_files(faults: Faults, error: Callable[[], Exception]) -> None:
    """By file name, below whatever function makes, writes or renames the file."""
    plain_open, plain_rename, plain_replace = os.open, os.rename, os.replace

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        name = Path(path).name if isinstance(path, str | os.PathLike) else ""
        if flags & os.O_CREAT and name.startswith(".eyas."):
            step = "failure-note" if _FAILED_IN_NAME in name else "record-create"
            if faults.due(step):
                raise error()
        return plain_open(path, flags, *args, **kwargs)

    def renamer(plain: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            name = Path(target).name
            parsed = spool_files.parse_name(name)
            if parsed and parsed[1] == contract.RECORD_SUFFIX and faults.due("record-rename"):
                raise error()
            plain(source, target, *args, **kwargs)

        return renamed

    os.open, os.rename, os.replace = opened, renamer(plain_rename), renamer(plain_replace)
