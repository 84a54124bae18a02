"""The error tree. Every message says what happened, where, and what to do next.

    EyasError
    ├── ConfigError      exit 2   a flag, a config key or an input file the user can correct
    ├── EngineError      exit 3   the inference engine or server: absent, wrong model, no plugin
    ├── IntegrityError   exit 4   bytes that are not what they claim to be
    ├── StoreError       exit 5   the store or its disks: full, leased, foreign
    ├── RowsFailed       exit 6   the run is finished, but some rows could not be captured
    ├── TrainError       exit 7   training cannot go on: a loss that is no number, a rank that is gone
    └── Interrupted      exit 130 Ctrl-C or SIGTERM, after draining what was in flight

A traceback is for a bug only: `cli` prints these and exits with `exit_code`.
"""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class EyasError(Exception):
    """Base of every error a user may see.

    Args:
        what: what happened, one short clause.
        where: the file, URL, row or key it happened at; may be empty.
        hint: what to do next; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, where: object = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, str(where), hint
        super().__init__(what, str(where), hint)

    def __str__(self) -> str:
        text = f"{self.what}: {self.where}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class ConfigError(EyasError):
    """A flag, config key or input file that the user can correct."""

    exit_code = 2


class EngineError(EyasError):
    """The inference engine or server is absent, misconfigured or of another model."""

    exit_code = 3


class IntegrityError(EyasError):
    """Bytes are not what they claim to be."""

    exit_code = 4


class StoreError(EyasError):
    """The store or the disk under it: full, leased by another process, of another run."""

    exit_code = 5


class RowsFailed(EyasError):
    """Every row was tried; some are recorded as failed, by name, and the rest are stored."""

    exit_code = 6


class TrainError(EyasError):
    """Training cannot go on as it is: the loss is no number, or another process of the run has ended."""

    exit_code = 7


class Interrupted(EyasError):
    """The user stopped the run; what was in flight is journalled and the same command resumes."""

    exit_code = 130


def cause_of(error: BaseException | None, kind: type[_Error]) -> _Error | None:
    """The first of a kind among an error and those that it came from: HTTP clients wrap what the network raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """What a foreign error says, in one line: its first one, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
