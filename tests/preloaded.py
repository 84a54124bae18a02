"""Python processes that begin with their imports done: forked from a template process that has them.

    with Preloaded(["torch"]) as python:
        process = python.start(["-m", "eyas", "--help"])
        assert process.wait(60) == 0

A server or a client spends most of a short life on importing torch, SGLang or transformers. What is asked of these
processes is what they do afterwards, so tests that start many fork them instead. Run as a script this is the template.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self


class Forked:
    """One such process, as `subprocess.Popen` has it.

    Attributes:
        pid: of the process, and of the session and the process group that it leads.
        returncode: None while it runs; negative is the signal that ended it.
    """

    def __init__(self, template: Preloaded, pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._template.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        began_s = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began_s > timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """A template, and the processes forked from it.

    Args:
        modules: what it imports before the first fork; none of them may start a thread.
        python: the interpreter.
        env: its environment, and that of every process which is not given another.
    """

    def __init__(
        self, modules: Sequence[str], *, python: Path | str = sys.executable, env: Mapping[str, str] | None = None
    ) -> None:
        self._asking = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  as long as the template lives
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).resolve()), *modules],
            env=None if env is None else dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        self._end = weakref.finalize(
            self, _end, self._process, self._said
        )  # no process that is used loses its template

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, output: Path | None = None) -> Forked:
        """Run a script, or a module after `-m`, as the interpreter's own command line would.

        Args:
            argv: what follows the interpreter's name.
            env: the whole environment; what the modules read while they were imported is as the template had it.
            output: stdout and stderr are appended to it; None is /dev/null.
        """
        asked = {"argv": list(argv), "env": None if env is None else dict(env), "output": str(output or os.devnull)}
        return Forked(self, self.ask(asked))

    def ask(self, asked: Mapping[str, Any]) -> Any:
        """One line there, one line back, from any thread. Raises RuntimeError when the template is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            if line := self._process.stdout.readline():
                return json.loads(line)
        self._said.seek(0)
        raise RuntimeError(f"the template process ended: {self._said.read().decode(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[str], said: IO[bytes]) -> None:
    process.communicate()  # end of file ends it
    said.close()


def main(modules: Sequence[str]) -> None:
    """The template: fork and tell the process id, or tell how a process has ended."""
    answers = os.fdopen(os.dup(1), "w")  # what a module says while it is imported is no answer
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            answers.close()
            break
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    else:
        return
    become(asked)


def become(asked: Mapping[str, Any]) -> None:
    """In the forked process: its own session, streams, environment and command line; then it is what was asked for."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(0)  # noqa: SIM115  what is buffered is the template's
    if asked["env"] is not None:
        os.environ.clear()
        os.environ.update(asked["env"])
    match asked["argv"]:
        case ["-m", module, *arguments]:
            sys.path[0] = str(Path.cwd())
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *arguments]:
            sys.path[0] = str(Path(script).parent)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
