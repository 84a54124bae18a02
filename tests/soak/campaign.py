"""A whole soak run: the stage is set, rounds are played until enough requests were made, and the books are closed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from eyas.capture.contract import ServerHello
from servers import PYTHON
from sglang_cpu.models import VOCAB_SIZE, tiny_llama
from soak.chaos_server import ChaosServer, Models
from soak.decisions import RESTART_LIMIT, Decisions
from soak.neighbours import NEIGHBOUR, Neighbours
from soak.relay import RelayConfig
from soak.rounds import Findings, Round, Stage
from soak.server_log import ServerLog
from soak.sessions import environment
from soak.truth import Truth

_SAY_EVERY_S: Final = 15.0
_EXTRA_ROUND_ROWS: Final = 600
_TESTS: Final = Path(__file__).resolve().parents[1]
_FIRST_FEW: Final = 20


@dataclass(slots=True)
class Settings:
    """What was asked for.

    Attributes:
        requests: own requests that must have reached the server.
        seed: of everything.
        minutes: no round begins after so many.
        out: folder for summary.json; the work is done in `out/work`, which is gone after a good run.
        restarts: most restarts of the server.
    """

    requests: int
    seed: int
    minutes: float
    out: Path
    restarts: int = RESTART_LIMIT


@dataclass(slots=True)
class Progress:
    """The line that lives while the run does."""

    settings: Settings
    began_s: float = field(default_factory=time.monotonic)
    doing: str = "preparing"
    round: str = ""

    def text(self, requests: int, findings: Findings, restarts: int) -> str:
        minutes = (time.monotonic() - self.began_s) / 60
        bad = sum(map(len, (findings.wrong, findings.lost, findings.doubled, findings.undetected, findings.unexpected)))
        asked = f"{requests:,}/{self.settings.requests:,} requests"
        found = f"{findings.rows:,} rows right  {bad} bad"
        return f"soak  {minutes:5.1f} min  {asked}  {found}  {restarts} restarts  {self.round} {self.doing}"


class Soak:
    """One run.

    Args:
        settings: what was asked for.
        console: where the live line goes.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._decisions = Decisions(settings.seed, settings.requests, settings.restarts)
        self._findings = Findings()
        self._stopping = threading.Event()
        self._progress = Progress(settings)
        self._work = settings.out.resolve() / "work"
        self._server: ChaosServer | None = None
        self._log: ServerLog | None = None
        self._neighbours: Neighbours | None = None

    def run(self) -> dict[str, Any]:
        """Play until done, or stopped by Ctrl-C; returns the summary, which is also in summary.json.

        Raises:
            KeyboardInterrupt: once everything was ended and written down.
        """
        environment()
        self._prepare_folder()
        self._console.print(f"soak: seed {self._settings.seed}, results in {self._settings.out}", highlight=False)
        interrupted: KeyboardInterrupt | None = None
        with self._live():
            try:
                self._play()
            except KeyboardInterrupt as error:
                interrupted = error
            except Exception as error:
                self._findings.unexpected.append(f"the run itself: {error!r}")
                self._write(complete=False)
                raise
        summary = self._write(complete=interrupted is None)
        if interrupted is not None:
            raise interrupted
        if not failures(summary):
            self._clean()
        return summary

    # --- playing ------------------------------------------------------------------------------------------------------

    def _play(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._stopping.set)
            stage = self._set_stage(stack)
            rounds = self._decisions.rounds()
            until_s = self._progress.began_s + 60 * self._settings.minutes
            while (rounds or stage.log.own < self._settings.requests) and time.monotonic() < until_s:
                if rounds:
                    plan = rounds.pop(0)
                else:  # fewer requests a row than expected
                    missing = self._settings.requests - stage.log.own
                    plan = self._decisions.round(self._findings.rounds, min(missing, _EXTRA_ROUND_ROWS) + 20)
                self._progress.round = f"round {plan.index + 1}/{plan.index + 1 + len(rounds)}"
                Round(stage, plan, self._findings).play()
                if self._stopping.is_set():
                    return
                stage.log.read()

    def _set_stage(self, stack: ExitStack) -> Stage:
        work = self._work
        models = Models(tiny_llama(work / "target", hidden_size=64), tiny_llama(work / "other", hidden_size=64, seed=5))
        _other_norms(models.other)
        faults, relay, client_spool = work / "faults.json", work / "relay.json", work / "client-spool"
        client_spool.mkdir()
        self._server = server = ChaosServer(models, work, faults)
        stack.callback(server.stop)
        self._progress.doing = "server starts"
        server.start(self._decisions.variant(0))
        self._log = log = stack.enter_context(ServerLog(server.log, NEIGHBOUR))
        config = RelayConfig(
            *map(str, (server.spool, client_spool, relay, work / "ledger.jsonl")), neighbour=NEIGHBOUR
        ).write(work / "relay-config.json")
        process = stack.enter_context(_relay(config))
        hello = ServerHello.from_json((server.spool / "spec.json").read_text())
        self._neighbours = neighbours = Neighbours(
            server.url, VOCAB_SIZE, self._settings.seed, lambda: server.right, lambda: hello.spec_id
        )
        neighbours.ask_alone()
        stack.enter_context(neighbours)
        return Stage(
            folder=work,
            decisions=self._decisions,
            server=server,
            log=log,
            truth=Truth(models.target),
            model=models.target,
            vocab_size=VOCAB_SIZE,
            longest=hello.max_row_tokens,
            client_spool=client_spool,
            faults=faults,
            relay=relay,
            ledger=work / "ledger.jsonl",
            say=self._say,
            stopping=self._stopping,
            relay_lives=lambda: process.poll() is None,
        )

    def _say(self, doing: str) -> None:
        self._progress.doing = doing

    @contextlib.contextmanager
    def _live(self) -> Iterator[None]:
        """A line that is drawn again on a terminal, and written now and then elsewhere."""
        done = threading.Event()
        terminal = self._console.is_terminal
        live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None

        def draw() -> None:
            while not done.wait(0.5 if live else _SAY_EVERY_S):
                text = self._progress.text(*self._figures())
                if live:
                    live.update(Text(text), refresh=True)
                else:
                    self._console.print(text, highlight=False, soft_wrap=True)

        thread = threading.Thread(target=draw, name="progress", daemon=True)
        with live or contextlib.nullcontext():
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def _figures(self) -> tuple[int, Findings, int]:
        return self._log.own if self._log else 0, self._findings, self._server.restarts if self._server else 0

    # --- books --------------------------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        if self._work.exists():
            subprocess.run(["rm", "-rf", str(self._work)], check=True)
        self._work.mkdir(parents=True)

    def _clean(self) -> None:
        subprocess.run(["rm", "-rf", str(self._work)], check=True)

    def _write(self, *, complete: bool) -> dict[str, Any]:
        requests, found, restarts = self._figures()
        enough = complete and requests >= self._settings.requests
        summary = {
            "requests": requests,
            "rows": found.rows,
            "wrong_rows": len(found.wrong),
            "lost_rows": len(found.lost),
            "doubled_rows": len(found.doubled),
            "undetected_mutations": len(found.undetected),
            "server_restarts": restarts,
            "seed": self._settings.seed,
            "details": self._details(enough),
        }
        path = self._settings.out / "summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
        return summary

    def _details(self, complete: bool) -> dict[str, Any]:
        found, log, neighbours = self._findings, self._log, self._neighbours
        injected = Counter((self._work / "faults.json.injected").read_text().split()) if self._injected() else Counter()
        mutated = {kind: dict(names.most_common()) for kind, names in sorted(found.mutations.items())}
        return {
            "complete": complete,
            "minutes": round((time.monotonic() - self._progress.began_s) / 60, 2),
            "rounds": found.rounds,
            "mutations": sum(sum(names.values()) for names in mutated.values()),
            "mutation_kinds": len(mutated),
            "mutations_by_kind_and_refusal": mutated,
            "records_by_what_the_relay_did": dict(found.relay.most_common()),
            "refusals_by_name": dict(found.refusals.most_common()),
            "faults_injected": sum(injected.values()),
            "faults_injected_by_step": dict(sorted(injected.items())),
            "sessions": dict(found.sessions.most_common()),
            "session_endings": dict(found.endings.most_common()),
            "events": dict(found.events.most_common()),
            "retractions": log.retractions if log else 0,
            "plugin_errors_logged": dict(log.plugin_errors) if log else {},
            "foreign_requests": dict(neighbours.requests) if neighbours else {},
            "foreign_unanswered": neighbours.unanswered if neighbours else 0,
            "foreign_differences": len(neighbours.differences) if neighbours else 0,
            "unexpected": found.unexpected[:_FIRST_FEW],
            "examples": {
                "wrong": found.wrong[:_FIRST_FEW],
                "lost": found.lost[:_FIRST_FEW],
                "doubled": found.doubled[:_FIRST_FEW],
                "undetected": found.undetected[:_FIRST_FEW],
                "foreign": neighbours.differences[:_FIRST_FEW] if neighbours else [],
            },
            "versions": _versions(),
            "command": shlex.join([Path(sys.executable).name, "-m", "soak", *sys.argv[1:]]),
        }

    def _injected(self) -> bool:
        return (self._work / "faults.json.injected").exists()


def failures(summary: dict[str, Any]) -> list[str]:
    """Why a run is no good one; nothing for a good one."""
    details = summary["details"]
    bad = [
        f"{key}: {summary[key]}"
        for key in ("wrong_rows", "lost_rows", "doubled_rows", "undetected_mutations")
        if summary[key]
    ]
    if details["foreign_differences"]:
        bad.append(f"foreign_differences: {details['foreign_differences']}")
    if details["unexpected"]:
        bad.append(f"unexpected: {details['unexpected'][0]}")
    if not details["complete"]:
        bad.append(f"incomplete: {summary['requests']} requests")
    return bad


def _other_norms(model: Path) -> None:
    """Another model must be told by its fingerprint, which is made of its norms."""
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if "norm" in name:
            weights[name] = weights[name] + 0.1 * torch.rand_like(weights[name])
    save_file(weights, path, {"format": "pt"})


@contextlib.contextmanager
def _relay(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment_ = {**os.environ, "PYTHONPATH": str(_TESTS)}
    process = subprocess.Popen([sys.executable, "-m", "soak.relay", str(config)], env=environment_)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _versions() -> dict[str, str]:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    names = ("eyas", "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in names} | {
        "sglang": asked.stdout.strip(),
        "python": platform.python_version(),
    }
