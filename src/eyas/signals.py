"""Ctrl-C and SIGTERM from a run's first line to its last."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def heeded() -> tuple[signal.Signals, ...]:
    """Those of both signals that this process may take; none outside the main thread, where Python lets nobody.

    A process that was started with one of them ignored, as a shell starts its background jobs, goes on ignoring it.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class StopSignals:
    """Takes the signals that are `heeded` while it is entered; whoever works listens.

    While nobody listens a signal is KeyboardInterrupt: nothing has been started that would have to be drained. Where
    Python ignores exceptions (a destructor, a callback of the import system) that one is lost: `check` raises it again.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._listener: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on) for number in heeded()}
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

    def check(self) -> None:
        """Raises KeyboardInterrupt where one of them came."""
        if self.stopped:
            raise KeyboardInterrupt

    def _on(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped = True
        if self._listener is None:
            raise KeyboardInterrupt
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
