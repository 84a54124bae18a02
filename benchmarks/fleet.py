"""SGLang servers for a benchmark, several at once: they start beside each other and outlive the command that did it.

with started(options, [Wanted("1b-bf16", model), ...], folder) as fleet:     # or start, and later read and stop
    fleet["1b-bf16"].url
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.serve import draft_command, installed_sglang, serve_command

_STATE = "fleet.json"


@dataclass(frozen=True, slots=True)
class Options:
    """How servers run here.

    Attributes:
        python: interpreter that has SGLang. pythonpath: of the server.
        sglang: its release, where it is not installed as a package.
        flags: further SGLang flags of every server.
        patience_s: for all of them to start.
        port: of the first; each next one has eleven more.
    """

    python: str
    pythonpath: str
    sglang: str | None
    flags: str
    patience_s: float
    port: int

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
        parser.add_argument("--pythonpath", default="", help="PYTHONPATH of the servers")
        parser.add_argument("--sglang", default=None, help="release, where it is not installed as a package")
        parser.add_argument("--flags", default="", help="further SGLang flags")
        parser.add_argument("--start-timeout", type=float, default=400)
        parser.add_argument("--first-port", type=int, default=30100)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        return cls(args.python, args.pythonpath, args.sglang, args.flags, args.start_timeout, args.first_port)

    @property
    def release(self) -> str:
        return self.sglang or installed_sglang() or "unknown"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One server.

    Attributes:
        name: of the server.
        model: folder.
        flags: SGLang's.
        gpu: its number; None leaves the choice to CUDA.
        capture: False is a server as SGLang comes: no capture flag, no plugin.
        settings: keyword arguments of `serve_command`, with a draft of `draft_command`.
        draft: exported drafter to serve with; nothing is captured then.
        chats: it has its tokenizer, and answers chats.
    """

    name: str
    model: Path
    flags: tuple[str, ...] = ()
    gpu: int | None = None
    capture: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft: Path | None = None
    chats: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `capture` says whether its plugin is on."""

    name: str
    url: str
    spool: str
    log: str
    model: str
    pid: int
    capture: bool


@contextmanager
def started(options: Options, wanted: Sequence[Wanted], folder: Path) -> Iterator[dict[str, Running]]:
    """`start`, and `stop` at the end; on an exception the logs' ends are printed."""
    fleet: dict[str, Running] = {}
    try:
        fleet = start(options, wanted, folder)
        yield fleet
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", flush=True)
        raise
    finally:
        stop(folder)


def start(options: Options, wanted: Sequence[Wanted], folder: Path) -> dict[str, Running]:
    """Start them all, wait until all answer, and write who they are into `folder`. Raises RuntimeError."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    fleet: dict[str, Running] = {}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for number, want in enumerate(wanted):
        fleet[want.name], processes[want.name] = _launch(options, want, folder, options.port + 11 * number)
        _write(folder, fleet)
    waiting = dict(fleet)
    while waiting:
        for name, server in list(waiting.items()):
            if processes[name].poll() is not None:
                raise RuntimeError(f"{name} ended with {processes[name].returncode}")
            with suppress(OSError):
                urllib.request.urlopen(f"{server.url}/health", timeout=5)
                print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
                del waiting[name]
        if time.monotonic() - began > options.patience_s:
            raise RuntimeError(f"not up after {options.patience_s:.0f} s: {', '.join(waiting)}")
        time.sleep(0.5)
    return fleet


def read(folder: Path) -> dict[str, Running]:
    """The servers that an earlier `start` left running."""
    return {entry["name"]: Running(**entry) for entry in json.loads((folder / _STATE).read_text())}


def stop(folder: Path) -> None:
    """Kill them."""
    with suppress(OSError):
        for server in read(folder).values():
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
        (folder / _STATE).unlink()


def _launch(options: Options, want: Wanted, folder: Path, port: int) -> tuple[Running, subprocess.Popen[bytes]]:
    spool, log = folder / f"spool-{want.name}", folder / f"{want.name}.log"
    tokenizer = () if want.chats else ("--skip-tokenizer-init",)
    extra = [*tokenizer, "--sleep-on-idle", *shlex.split(options.flags), *want.flags]
    served: dict[str, Any] = {"port": port, "python": options.python, "extra": extra, **want.settings}
    if want.draft is not None:
        command = draft_command(str(want.model), want.draft, **served)
    else:
        command = serve_command(str(want.model), spool=spool, sglang_version=options.sglang, **served)
    capture = want.capture and want.draft is None
    argv = list(command.argv)
    if not want.capture and want.draft is None:
        argv = [*argv[: argv.index("--host") + 2], *extra]  # between them are the capture flags
    env = {**os.environ, **(command.env if capture else {}), "HF_HUB_OFFLINE": "1"}
    if options.pythonpath:
        env["PYTHONPATH"] = options.pythonpath
    if want.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(want.gpu)
    print(f"{want.name}: {shlex.join(argv)}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    return Running(want.name, url, str(spool), str(log), str(want.model), process.pid, capture), process


def _write(folder: Path, fleet: Mapping[str, Running]) -> None:
    (folder / _STATE).write_text(json.dumps([asdict(server) for server in fleet.values()], indent=1))
