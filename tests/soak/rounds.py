"""One round: a corpus or two, extracted through sessions and events, then a quiet session, then the truth."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import eyas
from eyas.capture.contract import RECORD_SUFFIX
from eyas.data.corpus import Corpus
from eyas.errors import EyasError
from soak.chaos_server import ChaosServer
from soak.corpora import make_corpus
from soak.decisions import CALM, CHUNK, Decisions, Event, RoundPlan, SessionPlan
from soak.journal_watch import JournalWatch
from soak.relay import DELAYED, DOUBLED, read_ledger
from soak.server_log import ServerLog
from soak.sessions import OTHER_SERVER, RECORD_DEADLINE_S, StoreRun
from soak.truth import Evidence, Truth, Verdict, judge

_QUIET: Final = SessionPlan(workers=1, ending="run", after=1.0, window=32, grace_s=0.0)
_MOST_SESSIONS: Final = 12
_OTHER_SERVER_S: Final = 150.0


@dataclass(slots=True)
class Findings:
    """What all rounds together came to; `unexpected` is whatever no row count tells and must not happen."""

    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    undetected: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    mutations: dict[str, Counter[str]] = field(default_factory=dict)
    relay: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def add(self, name: str, verdict: Verdict) -> None:
        """Take in what is known of a store."""
        self.rows += verdict.rows
        for into, found in (
            (self.wrong, verdict.wrong),
            (self.lost, verdict.lost),
            (self.doubled, verdict.doubled),
            (self.undetected, verdict.undetected),
        ):
            into.extend(f"{name} row {row}: {why}" for row, why in found.items())


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything a round plays on."""

    folder: Path
    decisions: Decisions
    server: ChaosServer
    log: ServerLog
    truth: Truth
    model: Path
    vocab_size: int
    longest: int
    client_spool: Path
    faults: Path
    relay: Path
    ledger: Path
    say: Callable[[str], None]
    stopping: threading.Event
    relay_lives: Callable[[], bool]


class Round:
    """Plays one round.

    Args:
        stage: where.
        plan: what.
        findings: is added to.
    """

    def __init__(self, stage: Stage, plan: RoundPlan, findings: Findings) -> None:
        self._stage, self._plan, self._findings = stage, plan, findings
        self._lock = threading.Lock()
        self._weathers = 0
        self._weather = CALM
        self._stalled = False
        self._busy: set[int] = set()  # stores whose session may run now
        self._stores = [self._store(number, rows) for number, rows in enumerate(plan.rows)]

    def play(self) -> None:
        """Chaos, quiet, truth. The round's files are gone afterwards, unless something was wrong with them."""
        threads = [
            threading.Thread(target=self._guarded, args=(store,), name=f"store-{store.number}", daemon=True)
            for store in self._stores
        ]
        for thread in threads:
            thread.start()
        self._stage.say("chaos")
        try:
            self._direct(threads)
        except BaseException:
            self._stage.stopping.set()
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._stage.stopping.is_set():
            return
        self._calm_down()
        for store in self._stores:
            self._stage.say("quiet session")
            give_up = self._stage.stopping.is_set
            store.session(_QUIET, self._stage.server.url, self._stage.client_spool, quiet=True, give_up=give_up)
        if not self._stage.stopping.is_set():
            self._judge()

    # --- chaos --------------------------------------------------------------------------------------------------------

    def _store(self, number: int, rows: int) -> StoreRun:
        stage, name = self._stage, f"round-{self._plan.index:03d}-{number}"
        seed = Random(f"{stage.decisions.seed}:corpus:{self._plan.index}:{number}").randrange(1 << 32)
        corpus = make_corpus(
            stage.folder / f"{name}.parquet",
            rows,
            model=stage.model,
            vocab_size=stage.vocab_size,
            chunk=CHUNK,
            longest=stage.longest,
            seed=seed,
        )
        store = stage.folder / name
        return StoreRun(number, corpus, store, stage.log, JournalWatch(store))

    def _guarded(self, store: StoreRun) -> None:
        try:
            self._extract(store)
        except Exception as error:  # a thread's error would be printed and forgotten
            self._findings.unexpected.append(f"{store.store.name}: {error!r}")

    def _extract(self, store: StoreRun) -> None:
        """Sessions of one store until it is done, each in a weather of its own."""
        stage = self._stage
        while store.sessions < _MOST_SESSIONS and not stage.stopping.is_set():
            while not (stage.server.right and stage.server.up.is_set()):
                if stage.stopping.wait(0.2):
                    return
            plan = stage.decisions.session(self._plan.index, store.number, store.sessions)
            self._next_weather()
            with self._lock:
                self._busy.add(store.number)
            code = store.session(plan, stage.server.url, stage.client_spool, give_up=stage.stopping.is_set)
            with self._lock:
                self._busy.discard(store.number)
                self._findings.sessions[plan.ending if code < 0 or code == 130 else "ended by themselves"] += 1
            if code in (0, 6):
                return

    def _next_weather(self) -> None:
        with self._lock:
            self._weather = self._stage.decisions.weather(self._plan.index, self._weathers)
            self._weathers += 1
            self._write_weather()

    def _write_weather(self) -> None:
        relay: dict[str, Any] = self._weather.relay | {"deadline_s": RECORD_DEADLINE_S, "stalled": self._stalled}
        _write(self._stage.faults, self._weather.faults)
        _write(self._stage.relay, relay)

    def _direct(self, threads: list[threading.Thread]) -> None:
        """Let the plan's events happen when their time has come."""
        rows = sum(self._plan.rows)
        left = list(self._plan.events)
        while any(thread.is_alive() for thread in threads) and not self._stage.stopping.is_set():
            asked = sum(self._stage.log.sent(store.run) for store in self._stores)
            if left and asked >= left[0].at * rows:
                event = left.pop(0)
                self._findings.events[event.kind] += 1
                self._stage.say(event.kind)
                self._happen(event)
                self._stage.say("chaos")
            self._look_after()
            time.sleep(0.05)
        if left:
            self._findings.events["too late to happen"] += len(left)

    def _look_after(self) -> None:
        """A server that dies of what we do to its plugin has failed its other users; then it comes back."""
        server, stage = self._stage.server, self._stage
        if server.died():
            self._findings.unexpected.append(f"the server died in {self._weather.faults}")
            server.stop()
            server.start(stage.decisions.variant(server.starts))
        if not stage.relay_lives():
            self._findings.unexpected.append("the relay died")
            stage.stopping.set()

    def _happen(self, event: Event) -> None:
        server, stage = self._stage.server, self._stage
        match event.kind:
            case "kill" | "terminate":
                server.kill() if event.kind == "kill" else server.terminate()
                stage.stopping.wait(event.seconds)
                server.start(stage.decisions.variant(server.starts))
            case "other-model" | "other-layers":
                self._be_another(event)
            case "stall-relay":
                self._stall(event.seconds)
            case "server-spool-away":
                self._away(server.spool, event.seconds)
            case "client-spool-away":
                self._away(stage.client_spool, event.seconds)
            case "delete-records":
                self._delete(event.seconds)

    def _be_another(self, event: Event) -> None:
        """Another server at the same address: running sessions must end and say so; then the right one comes back."""
        server, stage = self._stage.server, self._stage
        before = self._refusals()
        with self._lock:
            running = set(self._busy)
        server.right = False  # no session begins meanwhile
        server.kill()
        server.start(stage.decisions.variant(server.starts), event.kind)
        deadline_s = time.monotonic() + _OTHER_SERVER_S
        while running and time.monotonic() < deadline_s and not stage.stopping.is_set():
            with self._lock:
                running &= self._busy
            time.sleep(0.1)
        if running and not stage.stopping.is_set():
            self._findings.unexpected.append(f"{event.kind}: sessions went on for {_OTHER_SERVER_S:.0f} s")
        self._findings.events[f"sessions ended by {event.kind}"] += self._refusals() - before
        server.kill()
        server.start(stage.decisions.variant(server.starts))

    def _refusals(self) -> int:
        return sum(
            count
            for store in self._stores
            for ending, count in store.endings.items()
            if any(name in ending for name in OTHER_SERVER)
        )

    def _stall(self, seconds: float) -> None:
        """Nothing is fetched from the server's spool, which fills up to its quota."""
        for self._stalled in (True, False):
            with self._lock:
                self._write_weather()
            if self._stalled:
                self._stage.stopping.wait(seconds)

    def _away(self, folder: Path, seconds: float) -> None:
        """The folder is not there for a while, as a volume that was unmounted."""
        aside = folder.with_name(f"{folder.name}-away")
        folder.rename(aside)
        self._stage.stopping.wait(min(seconds, 1.5))
        with suppress(OSError):
            shutil.rmtree(folder)  # somebody may have made it anew
        aside.rename(folder)

    def _delete(self, seconds: float) -> None:
        """Records disappear from the client's spool, whether they were read or not."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._stage.stopping.wait(0.02):
            for path in self._stage.client_spool.glob(f"*{RECORD_SUFFIX}"):
                path.unlink(missing_ok=True)

    def _calm_down(self) -> None:
        with self._lock:
            self._weather, self._stalled = CALM, False
            self._write_weather()
        time.sleep(1.0)  # what the relay holds back has come

    # --- truth --------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        stage, findings = self._stage, self._findings
        ledger = read_ledger(stage.ledger)
        for store in self._stores:
            stage.say("truth")
            evidence = Evidence(
                stage.log.run(store.run), ledger, frozenset(store.watch.doubled), tuple(store.stored_at)
            )
            corpus = Corpus.open(store.corpus)
            verdict = judge(store.store, corpus, stage.truth, evidence)
            findings.add(store.store.name, verdict)
            findings.endings += store.endings
            findings.unexpected += store.unexpected
            if problem := _verified(store):
                findings.unexpected.append(f"eyas verify {store.store.name}: {problem}")
            self._count_mutations(store, ledger, verdict)
            if not (verdict.wrong or verdict.lost or verdict.doubled or verdict.undetected or store.unexpected):
                self._remove(store)
        findings.rounds += 1
        stage.ledger.write_text("")  # the relay appends: it goes on at the new end
        for path in (*stage.client_spool.glob("eyas.*"), *stage.client_spool.glob("away-*")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    def _count_mutations(self, store: StoreRun, ledger: dict[str, dict[str, str]], verdict: Verdict) -> None:
        """By which name each mutated record was refused, from the sessions' own event logs."""
        named: dict[str, str] = {}
        for path in sorted((store.store / "events").glob("*.jsonl")):
            for event in _events(path):
                if event["event"] in ("row_retried", "row_failed"):
                    attempt = f"{event['attempt']:02d}" if event["event"] == "row_retried" else "last"
                    named[f"eyas.{store.run}.{path.stem}.{event['row']:08d}.{attempt}"] = event["reason"]
                    self._findings.refusals[event["reason"]] += 1
        undetected = {why.partition(":")[0] for why in verdict.undetected.values()}
        for rid, entry in ledger.items():
            if not rid.startswith(f"eyas.{store.run}."):
                continue
            self._findings.relay[entry["kind"] or "as it was"] += 1
            if entry["kind"] in ("", DELAYED, DOUBLED):
                continue
            name = named.get(rid) or named.get(f"{rid[:-2]}last") or "its session ended before"
            name = "NOT DETECTED" if rid in undetected else name
            self._findings.mutations.setdefault(entry["kind"], Counter())[name] += 1

    def _remove(self, store: StoreRun) -> None:
        shutil.rmtree(store.store)
        store.corpus.unlink()
        for path in store.store.parent.glob(f"{store.store.name}-*.err"):
            path.unlink()


def _verified(store: StoreRun) -> str:
    """What `eyas verify` says against a store, or nothing."""
    try:
        eyas.verify_store(store.store, corpus=store.corpus).check()
    except EyasError as error:
        return str(error)
    return ""


def _write(path: Path, told: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(told))
    temporary.replace(path)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a session; a killed one may have left half a line."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            yield json.loads(line)
