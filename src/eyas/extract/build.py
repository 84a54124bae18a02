"""From settings to a run's parts: which engine, which agreement, which identity."""

from __future__ import annotations

import hashlib
import secrets
import socket
import string
from dataclasses import dataclass
from pathlib import Path

from eyas.config import Config

_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker process needs to know; picklable.

    Attributes:
        corpus, store: their paths.
        model: the target's folder or hub id.
        url: the server, for the sglang engine.
        session: see `RequestId`.
    """

    corpus: Path
    store: Path
    model: str
    url: str | None
    cfg: Config
    session: str

    @property
    def engine(self) -> str:
        """The engine's name, `auto` resolved."""
        if self.cfg.extract.engine != "auto":
            return self.cfg.extract.engine
        return "sglang" if self.url else "hf"

    @property
    def run(self) -> str:
        """8 characters that name this store on this host: the `run` of its request ids."""
        text = f"{socket.gethostname()}\0{self.store.resolve()}"
        return _short(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def new_session() -> str:
    """8 random characters naming one process's life."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(8))


def _short(number: int) -> str:
    digits = []
    for _ in range(8):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)
