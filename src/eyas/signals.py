"""Ctrl-C and SIGTERM from a run's first line to its last."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Takes both signals while it is entered; whoever works listens.

    While nobody listens a signal is KeyboardInterrupt: nothing has been started that would have to be drained. In a
    thread other than the main one signals cannot be taken, and stay with whoever has them.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._listener: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Every signal calls `listener`, within a signal handler, instead of raising."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def _on(self, _number: int, _frame: FrameType | None) -> None:
        if self._listener is None:
            raise KeyboardInterrupt
        self.stopped = True
        self._listener()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Processes started within never see the two signals: they inherit this thread's mask, which is lifted at the end.

    (This process may see them: the kernel gives them to any of its threads.)
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
