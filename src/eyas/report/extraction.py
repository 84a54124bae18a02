"""An extraction's logs: how fast it went, over the time that was worked, and what failed under which name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eyas.logs import Event, Session, as_number, read_number, read_object, read_sessions, read_text


@dataclass(frozen=True, slots=True)
class Sitting:
    """One session of an extraction.

    Attributes:
        began: seconds since the epoch.
        engine, workers: what it worked with.
        seconds, tokens_per_s, rows_done, failed: as its end says; None where it was killed.
        worked_before_s: what earlier sessions worked, by their logs.
        speed: (seconds since it began, tokens/s over the last minute).
    """

    began: float
    engine: str
    workers: float | None
    seconds: float
    tokens_per_s: float | None
    rows_done: float | None
    failed: float | None
    ended: bool
    stopped: bool
    worked_before_s: float
    speed: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Extraction:
    """What a store's logs tell of its extraction.

    Attributes:
        sittings: sessions that did something, in the order of time.
        idle: sessions that found everything done.
        retried, failed: attempts that failed, by reason, and rows that were given up.
        verified: what `eyas verify` left, the last one, and whether rows were written after it.
    """

    sittings: list[Sitting] = field(default_factory=list)
    idle: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    verified: Event | None = None

    @property
    def stale(self) -> bool:
        """Whether rows were written after the last verification."""
        if self.verified is None or not self.sittings:
            return False
        last = self.sittings[-1]
        return last.began + last.seconds > float(self.verified["t"])

    @property
    def tokens_per_s(self) -> float | None:
        """Over all sessions that tell, by the time each worked."""
        told = [(s.tokens_per_s, s.seconds) for s in self.sittings if s.tokens_per_s]
        worked = sum(seconds for _, seconds in told)
        return sum(rate * seconds for rate, seconds in told) / worked if worked else None


def read_extraction(store: Path) -> Extraction:
    """What the logs of the store in `store` tell."""
    found = Extraction()
    worked = 0.0
    for session in read_sessions(store):
        if checks := session.of("verified"):
            found.verified = checks[-1]
        if not (starts := session.of("start")):
            continue
        sitting = _sitting(session, starts[0], worked)
        found.retried.update(read_text(event, "reason", "unknown") for event in session.of("row_retried"))
        found.failed.update(read_text(event, "reason", "unknown") for event in session.of("row_failed"))
        found.notes += [read_text(event, "text") for event in session.of("note")]
        if _did_nothing(session, sitting):
            found.idle += 1
            continue
        found.sittings.append(sitting)
        worked += sitting.seconds
    return found


def _did_nothing(session: Session, sitting: Sitting) -> bool:
    kinds = {event.get("event") for event in session.events}
    return sitting.ended and not sitting.tokens_per_s and not kinds & {"shard_done", "progress", "row_retried"}


def _sitting(session: Session, start: Event, worked_before_s: float) -> Sitting:
    end = next(iter(session.of("end")), None)
    began, last = float(start["t"]), float(session.events[-1]["t"])
    speed = [(read_number(event, "t"), read_number(event, "rate")) for event in session.of("progress")]
    provenance = read_object(start, "provenance")
    version = next((read_text(provenance, key) for key in ("sglang", "transformers") if key in provenance), "")
    return Sitting(
        began=began,
        engine=f"{read_text(start, 'engine', 'unknown')} {version}".strip(),
        workers=read_number(start, "workers"),
        seconds=max(0.0, as_number(end and end.get("seconds")) or last - began),
        tokens_per_s=read_number(end, "tokens_per_s"),
        rows_done=read_number(end, "rows_done"),
        failed=read_number(end, "failed"),
        ended=end is not None,
        stopped=bool(end and end.get("stopped")),
        worked_before_s=worked_before_s,
        speed=tuple((at - began, rate) for at, rate in speed if at is not None and rate is not None and at >= began),
    )
