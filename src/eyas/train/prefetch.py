"""Things made ahead by threads, handed over in order. Knows nothing of what is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")


class Prefetcher(Generic[_T]):
    """Makes item 0, 1, 2 ... by number, at most `ahead` of which exist at a time, and gives them in order.

    Which thread makes an item, and when, decides nothing: the order is the numbers'. What a thread raises is raised
    where its item was to be given. How many items there are may become known on the way.

    Args:
        make: makes an item; called from several threads.
        first: number of the first item.
        threads: how many make; 0 makes each when it is asked for.
        ahead: most items that are made or being made and not given yet.

    Attributes:
        wait_s: seconds that `next` waited so far.
        given: items given.
    """

    def __init__(self, make: Callable[[int], _T], *, first: int = 0, threads: int = 2, ahead: int = 4) -> None:
        self._make, self._ahead = make, max(1, ahead)
        self._next = self._ticket = first
        self._limit, self._finished, self._closed = first, False, False
        self._failure: BaseException | None = None
        self._made: dict[int, tuple[_T | None, BaseException | None]] = {}
        self._changed = threading.Condition()
        self._first, self.wait_s = first, 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"eyas-read-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def given(self) -> int:
        return self._next - self._first

    # --- how many there are ---

    def extend(self, limit: int) -> None:
        """Items before number `limit` can be made."""
        with self._changed:
            self._limit = max(self._limit, limit)
            self._changed.notify_all()

    def finish(self) -> None:
        """There is no item beyond those that can be made already."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No further item can be made, for this reason: raised after the last one that can."""
        with self._changed:
            self._failure = error
            self._finished = True
            self._changed.notify_all()

    def sleep(self, seconds: float) -> bool:
        """Wait, or less when this is closed; whether it is. For whoever calls `extend`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)
            return self._closed

    # --- making ---

    def _work(self) -> None:
        while (number := self._take()) is not None:
            try:
                made: tuple[_T | None, BaseException | None] = (self._make(number), None)
            except BaseException as error:  # noqa: BLE001  raised to whoever asks for the item
                made = (None, error)
            with self._changed:
                self._made[number] = made
                self._changed.notify_all()
            del made  # an item must not live on while the next one is made

    def _take(self) -> int | None:
        """The next number to make, once there is one and room for it; None at the end."""
        with self._changed:
            while not self._closed:
                if self._ticket < min(self._limit, self._next + self._ahead):
                    self._ticket += 1
                    return self._ticket - 1
                if self._finished and self._ticket >= self._limit:
                    return None
                self._changed.wait()
        return None

    # --- giving ---

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        began = time.perf_counter()
        try:
            item, error = self._given()
        finally:
            self.wait_s += time.perf_counter() - began
        if error is not None:
            self.close()
            raise error
        return item  # pyright: ignore[reportReturnType]  None only beside an error

    def _given(self) -> tuple[_T | None, BaseException | None]:
        with self._changed:
            number = self._next
            while not self._closed and number not in self._made:
                if number < self._limit and not self._threads:
                    break
                if number >= self._limit and self._finished:
                    if self._failure is not None:
                        return None, self._failure
                    raise StopIteration
                self._changed.wait()
            if self._closed:
                raise StopIteration
            if number in self._made:
                self._next += 1
                self._changed.notify_all()
                return self._made.pop(number)
        try:
            item = self._make(number)
        except Exception as error:  # noqa: BLE001  raised by next, which closes first
            return None, error
        self._next += 1
        return item, None

    def close(self) -> None:
        """Stop making; waits for the items that are being made. Later calls do nothing, `next` ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._made.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
