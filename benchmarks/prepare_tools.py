"""The preparations that prepare_cpu.py runs: their command lines, vLLM's render server, one measured run."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prepare_outputs import Count, Row, count, eyas_rows, specforge_rows, speculators_rows
from process_tree import measure, session

ROOT: Final = Path(__file__).resolve().parents[1]
CORES: Final = 2
MAX_TOKENS: Final = 8192  # SmolLM2's context; the longest made row has fewer
SERVER_START_S: Final = 240.0
MESSAGES: Final = 5


@dataclass(frozen=True, slots=True)
class Job:
    """One preparation: what to read, and where it all goes.

    Attributes:
        data: chat file of `rows` rows.
        target: folder with the tokenizer and the chat template.
        folder: for the output (`folder/out`) and for all that is cached on the way; not there yet.
        peers: where setup.sh installed them.
        template: SpecForge's name for the target's chat format.
        limit_s: longest time, if there is one.
    """

    data: Path
    rows: int
    target: Path
    folder: Path
    peers: Path
    template: str
    limit_s: float | None = None

    @property
    def out(self) -> Path:
        return self.folder / "out"


@dataclass(frozen=True, slots=True)
class Tool:
    """A way to prepare a chat file.

    Attributes:
        command: the command line for a job and the render server's URL, which is empty for who needs none.
        rows: reads its output.
        row_per_answer: each of its rows trains one answer.
    """

    name: str
    command: Callable[[Job, str], list[str]]
    rows: Callable[[Path], Iterator[Row]]
    needs_server: bool = False
    row_per_answer: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: rows given, what came out, wall and processor time, peaks of memory and space on disk in bytes.

    Attributes:
        messages: its warnings and errors, each kind once with how often it came; the end of its output if it failed.
    """

    tool: str
    rows_in: int
    code: int
    out: Count
    wall_s: float
    cpu_s: float
    rss: int
    own: int
    disk: int
    messages: list[str]


def run(tool: Tool, job: Job) -> Run:
    """Runs a tool on a job; its output stays in `job.out`."""
    for folder in (job.out, job.folder / "tmp"):
        folder.mkdir(parents=True)
    log = job.folder / "log"
    with _server(tool, job) as (url, sessions):
        seen = measure(tool.command(job, url), log, env=_environment(job), with_sessions=sessions, limit_s=job.limit_s)
    disk = sum(file.stat().st_blocks * 512 for file in job.folder.rglob("*") if file.is_file())
    out = count(tool.rows(job.out)) if seen.code == 0 else Count()
    text = log.read_text(errors="replace").replace(str(job.folder), "FOLDER").replace(str(ROOT), ".")
    messages = _messages(text, failed=seen.code != 0)
    return Run(tool.name, job.rows, seen.code, out, seen.wall_s, seen.cpu_s, seen.rss, seen.own, disk, messages)


# --- the command lines ------------------------------------------------------------------------------------------------


def _eyas(job: Job, _url: str) -> list[str]:
    command = [sys.executable, "-m", "eyas", "prepare", str(job.data)]
    return [*command, "--target", str(job.target), "--out", str(job.out), "--workers", str(CORES)]


def _specforge(job: Job, _url: str) -> list[str]:
    command = [str(job.peers / "specforge/bin/python"), str(ROOT / "benchmarks/peers/specforge_prepare.py")]
    command += ["--data", str(job.data), "--target", str(job.target), "--template", job.template]
    return [*command, "--cache", str(job.out), "--max-tokens", str(MAX_TOKENS), "--processes", str(CORES)]


def _speculators(job: Job, url: str) -> list[str]:
    command = [str(job.peers / "speculators/bin/speculators"), "prepare-data"]
    command += ["--data", str(job.data), "--model", str(job.target), "--output", str(job.out)]
    command += ["--render-endpoint", url, "--num-preprocessing-workers", str(CORES)]
    return [*command, "--seq-length", str(MAX_TOKENS)]


EYAS: Final = Tool("Eyas", _eyas, eyas_rows)
SPECFORGE: Final = Tool("SpecForge 0.2.0", _specforge, specforge_rows)
SPECULATORS: Final = Tool("speculators 0.9.0", _speculators, speculators_rows, needs_server=True, row_per_answer=True)
TOOLS: Final = (EYAS, SPECFORGE, SPECULATORS)


def _environment(job: Job) -> dict[str, str]:
    """Nothing is fetched, and nothing that was cached before is found."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("TOKENIZERS_PARALLELISM", "HF_DATASETS_CACHE")}
    own = {"HF_HOME": str(job.folder / "hf"), "TMPDIR": str(job.folder / "tmp"), "HF_HUB_OFFLINE": "1"}
    return inherited | own | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}


# --- vLLM's render server ---------------------------------------------------------------------------------------------


@contextmanager
def _server(tool: Tool, job: Job) -> Iterator[tuple[str, list[int]]]:
    """The server a tool needs, which renders and tokenises with no model behind it: its URL and its session."""
    if not tool.needs_server:
        yield "", []
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(job.peers / "speculators/bin/vllm"), "launch", "render", str(job.target), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(MAX_TOKENS), "--renderer-num-workers", str(CORES)]
    log = job.folder / "tmp" / "server.log"
    with log.open("wb") as printed, session(command, printed, env=_environment(job)) as process:
        until = time.monotonic() + SERVER_START_S
        while not _is_up(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM's render server did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", [process.pid]


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


# --- what was printed -------------------------------------------------------------------------------------------------


def _messages(text: str, *, failed: bool) -> list[str]:
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    faults = (re.search(r"\b(WARNING|ERROR)\b.*|\w+(Warning|Error): .*", line) for line in lines)
    kinds = Counter(re.sub(r"\d+", "#", fault[0])[:300] for fault in faults if fault)
    told = [f"{line} ({number} times)" if number > 1 else line for line, number in kinds.most_common(MESSAGES)]
    return told + lines[-MESSAGES:] if failed else told
