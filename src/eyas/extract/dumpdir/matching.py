"""Which dump may be whose. Pure: sightings in, a verdict out.

A token count is no identity, so the rules are made for what goes wrong:

- what lay in a folder before the request was sent is not looked at (the caller shows only what is new);
- a dump of another count, a decode step's of one token above all, is another's;
- a dump that is being written may be anyone's: those begun before a match was found are waited for;
- two of one count are refused, and the row is asked again with nothing else of ours in flight. Alone, one of several
  may be taken only where the content tells it from all others, or where all are the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from eyas.extract.engine import Failed, Retry

AMBIGUOUS = "ambiguous-dump"
NO_DUMP = "the server answered, but no dump of this token count came"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A dump folder in which something is new since the request was sent.

    Attributes:
        name: of the folder.
        finished: its marker is new.
        count: its token count, where that is known and new.
    """

    name: str
    finished: bool
    count: int | None


class Fit(Enum):
    """What a finished dump of the right count is by its content."""

    RIGHT = "gives the reply's log-probabilities"
    OTHER = "gives clearly other ones"
    UNCLEAR = "is neither near enough nor far enough away"
    MISFIT = "is not as the settings say"  # and looking again, or waiting for another, would not change that


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished dump of the right count.

    Attributes:
        name: of the folder.
        fit: its content; every readable one is RIGHT where contents are not compared.
        digest: of all its bytes.
        detail: for a person.
        reason: why it does not fit, where it is a MISFIT.
    """

    name: str
    fit: Fit
    digest: int = 0
    detail: str = ""
    reason: str = "dump-layout"


def sort_out(tokens: int, sightings: Iterable[Sighting]) -> tuple[list[str], set[str]]:
    """Names of the finished dumps of `tokens` tokens, and of those that may still become one."""
    finished: list[str] = []
    unfinished: set[str] = set()
    for seen in sightings:
        if seen.finished and seen.count == tokens:
            finished.append(seen.name)
        elif seen.count is None or (seen.count == tokens and not seen.finished):
            unfinished.add(seen.name)
    return sorted(finished), unfinished


class Vigil:
    """The wait for one row's dump: fed with one look at the folder after another until it decides.

    Args:
        alone: nothing else of ours is in flight, because the row met several dumps before.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._awaited: set[str] | None = None

    def decide(self, candidates: Sequence[Candidate], unfinished: set[str], late: bool) -> str | Failed | None:
        """The dump to take, by name; or why there is none; or None: look again.

        Args:
            candidates: finished dumps of the right count.
            unfinished: dumps that may become one.
            late: the deadline has passed: decide now.
        """
        right = [candidate for candidate in candidates if candidate.fit is Fit.RIGHT]
        if not right:
            misfits = any(candidate.fit is Fit.MISFIT for candidate in candidates)
            return _why_none(candidates, unfinished) if late or misfits else None
        if self._awaited is None:
            # Those alone: with decode steps of others there is always one that has just begun.
            self._awaited = set(unfinished)
        if still := self._awaited & unfinished:
            detail = f"{_names(still)} was begun since, never finished, and may be this row's"
            return Failed("dump-unfinished", detail, Retry.PROBE) if late else None
        if len(candidates) == 1:
            return right[0].name
        names = _names(candidate.name for candidate in candidates)
        if not self._alone:
            return Failed(AMBIGUOUS, f"{names} have this row's token count; asked again alone")
        others = [candidate for candidate in candidates if candidate.fit is not Fit.RIGHT]
        told_apart = all(candidate.fit in (Fit.OTHER, Fit.MISFIT) for candidate in others)
        if told_apart and len({candidate.digest for candidate in right}) == 1:
            return right[0].name
        return Failed(AMBIGUOUS, f"{names} have this row's token count, and nothing tells which is its own")


def _why_none(candidates: Sequence[Candidate], unfinished: set[str]) -> Failed:
    for fit in (Fit.MISFIT, Fit.UNCLEAR, Fit.OTHER):
        for candidate in candidates:
            if candidate.fit is fit:
                reason = candidate.reason if fit is Fit.MISFIT else "content-differs"
                return Failed(reason, f"{candidate.name}: {candidate.detail}")
    if unfinished:
        return Failed("dump-unfinished", _names(unfinished), Retry.PROBE)
    return Failed("dump-late", NO_DUMP, Retry.PROBE)


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
