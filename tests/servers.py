"""Real SGLang servers on CPU for tests: started by our own serve command, with the extras a CPU needs.

The server runs in `.venv-sglang` (versions frozen in constraints/sglang-cpu.txt, this package installed beside it).
Where that environment is missing tests are skipped; in CI a skip would hide a failure, so there it is one.

A server's three processes spend 8 s of CPU each on imports. So most are forked from a process that has SGLang imported,
and fork their own processes (`sglang_cpu/stubs/forking.py`); some start as SGLang starts itself, by `quick=False`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.serve import serve_command
from preloaded import Forked, Preloaded

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / ".venv-sglang" / "bin" / "python"
PYTHON = Path(os.environ.get("EYAS_SGLANG_PYTHON", OURS))
STAND_INS = Path(__file__).parent / "sglang_cpu"
START_DEADLINE_S = 300.0
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (STAND_INS / "stubs", STAND_INS / "plugin", ROOT / "src"))),
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models: threads that wait for each other on a busy machine cost more than they bring
    "PYTHONUNBUFFERED": "1",
}
FAULTS_ENV = "EYAS_TEST_FAULTS"  # see `sglang_cpu/plugin/eyas_fault_injection.py`
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--sleep-on-idle"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        url: http://127.0.0.1:<port>
        spool: its record folder.
        log: its stdout and stderr.
        pid: leader of its process group.
    """

    url: str
    spool: Path
    log: Path
    pid: int

    def generate(self, **payload: Any) -> Any:
        """POST /generate. Raises urllib.error.HTTPError for a refusal."""
        return _call(f"{self.url}/generate", payload, timeout_s=120)

    def kill(self) -> None:
        """SIGKILL to every process of the server, as a machine that runs out of memory does; nothing is cleaned up."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _call(url: str, payload: Mapping[str, Any] | None, timeout_s: float) -> Any:
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        body = response.read()
    return json.loads(body) if body else None


def free_port() -> int:
    """A port nobody listens on. SGLang derives its own ports from it, so stay well below the ephemeral range."""
    with socket.socket() as probe:
        # Test processes that run beside each other keep apart: worker gw0, gw1, ...
        first = 21000 + 4000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        for port in range(first + os.getpid() % 2000, 32000, 7):
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def require_sglang() -> None:
    """Skip the calling test where the SGLang environment is missing; fail it in CI."""
    if not PYTHON.exists():
        message = f"{PYTHON} is missing: `make test` prepares it"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def sglang_server(
    model: Path,
    folder: Path,
    *,
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    stored: str | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    capture: bool = True,
    port: int | None = None,
    quick: bool = PYTHON == OURS,
    **settings: Any,
) -> Iterator[Server]:
    """Start the server, yield it when it answers, kill its whole process group at the end.

    Args:
        model: folder of the target.
        folder: for the spool and the log; made when missing.
        layers: as in `serve_command`.
        dtype: computation dtype, `float32` or `bfloat16`.
        stored: dtype of the records; None is f32 or bf16, as computed.
        flags: further SGLang flags.
        env: further environment; an empty EYAS_CAPTURE switches the plugin off.
        capture: False is a plain server: no capture flags, the plugin off.
        port: where it listens; a server that "comes back" takes the port (and the folder) of the one before.
        quick: with imports done, see above; False is as SGLang starts, and so start all other releases than ours.
        settings: further keyword arguments of `serve_command` (last, quota_bytes, ...).
    """
    require_sglang()
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    environment = {**os.environ, **CPU_ENV}
    settings = {"dtype": stored or {"float32": "f32", "bfloat16": "bf16"}[dtype], "spool": folder / "spool"} | settings
    if FAULTS_ENV in (env or {}):  # writers in a process of their own could not be made to fail
        settings = {"writers": "threads"} | settings
    command = serve_command(
        str(model),
        layers=layers,
        port=port,
        sglang_version=_sglang_version({**environment, **(env or {})}),
        python=str(PYTHON),
        extra=[*CPU_FLAGS, "--dtype", dtype, *flags],
        **settings,
    )
    log = folder / "server.log"
    argv: Sequence[str] = command.argv
    if not capture:
        port_at = argv.index("--port") + 2
        argv = [*argv[:port_at], *argv[argv.index(CPU_FLAGS[0]) :]]  # between them are the capture flags
    environment |= {**(command.env if capture else {}), **(env or {})}
    process = (_start_quick if quick else _start)(argv, environment, log)
    server = Server(f"http://127.0.0.1:{port}", Path(settings["spool"]), log, process.pid)
    try:
        _wait_ready(server, process)
        yield server
    finally:
        with suppress(ProcessLookupError):  # asked to end, SGLang would sleep for 5 s and then kill them itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _start(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _start_quick(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    # Some of SGLang's own variables are read while it is imported; ours are not, and the plugin's least of all.
    of_others = {name: value for name, value in environment.items() if not name.startswith(("EYAS_", "PYTEST_"))}
    return _template(tuple(sorted(of_others.items()))).start(argv[1:], env=environment, output=log)


@functools.lru_cache(maxsize=1)
def _template(environment: tuple[tuple[str, str], ...]) -> Preloaded:
    """A process that has all of SGLang imported, by its environment."""
    modules = ["forking", "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"]
    return Preloaded(modules, python=PYTHON, env=dict(environment))


def _sglang_version(environment: Mapping[str, str]) -> str:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    done = subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True, env=dict(environment))
    return done.stdout.strip()


def _wait_ready(server: Server, process: subprocess.Popen[bytes] | Forked) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{server.log_tail(60)}")
        try:
            _call(f"{server.url}/health", None, timeout_s=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"the server was not ready within {START_DEADLINE_S:.0f} s:\n{server.log_tail(60)}")
