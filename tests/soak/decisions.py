"""What a soak run will do, drawn from its seed alone. Pure: two runs of one seed decide the same, timing aside.

Every decision has a random generator of its own, named by what it decides, so that none depends on how many others
were drawn before it or on what a busy machine did first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

#: Steps of the capture path that fail at random (tests/sglang_cpu/plugin/eyas_fault_injection.py).
FAULT_STEPS = (
    *("sweep", "own-shares", "share", "answer", "stream-output", "assemble", "reserve", "take-rows", "snapshot"),
    *("reply", "host-copy", "record", "hash", "header", "record-create", "record-write", "record-rename"),
    *("failure-call", "failure-note", "orphans"),
)
CONTEXT = 256
CHUNK = 64
#: Server restarts that an event costs.
RESTARTS = {"kill": 1, "terminate": 1, "other-model": 2, "other-layers": 2}
#: Rows asked for are about this many requests: retries, probes and sessions that are killed ask again.
REQUESTS_PER_ROW = 1.15
ROWS_PER_ROUND = 1300
RESTART_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Variant:
    """How a server is started; all variants agree on one spec."""

    flags: tuple[str, ...]
    env: dict[str, str]
    quota_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to the server or to a folder once `at` of a round's rows were asked for."""

    at: float
    kind: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One corpus (or two, into two stores at once), extracted through events."""

    index: int
    rows: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One `eyas extract`: how it ends (`run` is by itself) once `after` of its rows were asked for."""

    workers: int
    ending: str
    after: float
    window: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults in the server and on the way from its spool, from one session's start to the next one's."""

    faults: dict[str, Any]
    relay: dict[str, Any] = field(default_factory=dict)


CALM = Weather({"steps": {}}, {})


@dataclass(frozen=True, slots=True)
class Decisions:
    """All of a run's decisions.

    Attributes:
        seed: the printed one.
        requests: at least so many own requests are wanted.
        restarts: most restarts of the server.
    """

    seed: int
    requests: int
    restarts: int = RESTART_LIMIT

    def _random(self, *what: object) -> Random:
        return Random(":".join(map(str, (self.seed, *what))))

    def rounds(self) -> list[RoundPlan]:
        """Rounds that will do if every row is asked for about REQUESTS_PER_ROW times."""
        rows = math.ceil(self.requests / REQUESTS_PER_ROW)
        count = max(1, round(rows / ROWS_PER_ROUND))
        events = self._server_events(count)
        return [self.round(index, rows // count + 1, events[index]) for index in range(count)]

    def round(self, index: int, rows: int, server_events: Sequence[Event] = ()) -> RoundPlan:
        """Round `index`; those beyond the planned ones leave the server alone."""
        random = self._random("round", index)
        share = random.choice([1.0, 0.5, 0.35]) if rows > 200 else 1.0
        sizes = (rows,) if share == 1.0 else (int(rows * share), rows - int(rows * share))
        others = [
            Event(random.uniform(0.05, 0.95), kind, random.uniform(1.0, 3.0))
            for kind in ("stall-relay", "server-spool-away", "client-spool-away", "delete-records")
            for _ in range(random.choice([0, 1, 1]))
        ]
        return RoundPlan(index, sizes, tuple(sorted([*server_events, *others], key=lambda event: event.at)))

    def _server_events(self, rounds: int) -> list[list[Event]]:
        """Restarts spread over the rounds; every kind occurs while the limit allows it."""
        random, left = self._random("server-events"), self.restarts
        events: list[list[Event]] = [[] for _ in range(rounds)]
        wanted = ["other-model", "kill", "other-layers", "terminate"]
        while len(wanted) < 4 * rounds:
            wanted.append(random.choice(["kill", "kill", "kill", "terminate", "other-layers"]))
        for number, kind in enumerate(wanted):
            if RESTARTS[kind] <= left:
                left -= RESTARTS[kind]
                into = events[number % rounds]
                into.append(Event(random.uniform(0.1, 0.4) + 0.45 * bool(into), kind, random.uniform(0.0, 2.0)))
        return events

    def session(self, round_index: int, store: int, number: int) -> SessionPlan:
        """Session `number` of a store's extraction."""
        random = self._random("session", round_index, store, number)
        ending = random.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT-twice", "run"])
        return SessionPlan(
            workers=random.choice([1, 1, 2]),
            ending=ending if number < (4 if self.requests > 2000 else 2) else "run",
            after=random.uniform(0.0, 0.7),
            window=random.choice([4, 16, 32, 64]),
            grace_s=random.uniform(0.0, 1.0),
        )

    def weather(self, round_index: int, number: int) -> Weather:
        """What fails while the `number`-th session of a round runs."""
        random = self._random("weather", round_index, number)
        steps = random.sample(FAULT_STEPS, random.randint(1, 4))
        faults: dict[str, Any] = {step: {"rate": round(random.uniform(0.002, 0.03), 4)} for step in steps}
        if random.random() < 0.2:
            faults["record"] = {"rate": 0.05, "delay_s": 0.5}
        relay = {
            "mutate": round(random.uniform(0.04, 0.12), 4),
            "delay": round(random.uniform(0.0, 0.03), 4),
            "drop": round(random.uniform(0.0, 0.004), 4),
            "double": round(random.uniform(0.0, 0.03), 4),
            "seed": f"{self.seed}:{round_index}:{number}",
        }
        return Weather({"steps": faults, "seed": random.randrange(1 << 30)}, relay)

    def variant(self, start: int) -> Variant:
        """How the server is started for the `start`-th time."""
        random = self._random("variant", start)
        flags = ["--chunked-prefill-size", str(CHUNK), "--context-length", str(CONTEXT)]
        flags += ["--max-running-requests", "64", "--log-requests", "--log-requests-level", "0"]
        flags += ["--log-requests-format", "json"]
        flags += random.choice([["--enable-mixed-chunk"], []])
        flags += random.choice([["--disable-radix-cache"], [], []])
        flags += random.choice([["--skip-server-warmup"], []])
        flags += random.choice([["--skip-tokenizer-init"], [], []])
        # Few pages and much optimism: requests are taken back once those that run have grown.
        flags += random.choice([["--max-total-tokens", "768", "--schedule-conservativeness", "0.05"], []])
        env = {"SGLANG_LOG_REQUEST_EXCEEDED_MS": "100000000"}  # received requests only, not what became of them
        env |= random.choice([{"SGLANG_TEST_RETRACT": "1"}, {}, {}])
        return Variant(tuple(flags), env, random.choice([600_000, 1_200_000, 8_000_000]))
