"""The folder that `eyas prepare` writes: all is made in a hidden folder in it, and moved into place at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from eyas.data.corpus import CORPUS_FILE
from eyas.data.names import display
from eyas.errors import ConfigError, StoreError

HOLDOUT_FILE: Final = "holdout.parquet"
PROMPTS_FILE: Final = "prompts.jsonl"
DROPPED_FILE: Final = "dropped.jsonl"
SUMMARY_FILE: Final = "summary.json"
#: In the order in which they are put into place: a summary is never older than what it describes.
FILES: Final = (CORPUS_FILE, HOLDOUT_FILE, PROMPTS_FILE, DROPPED_FILE, SUMMARY_FILE)
_WORK: Final = ".prepare"


class OutFolder:
    """A folder of results, replaced as a whole or left as it was.

    Attributes:
        path: the folder.
        work: a folder in it for what is being made; gone afterwards.

    Raises:
        ConfigError: the path is a file, would be written over an input, or another process is preparing there.
        StoreError: it cannot be written.
    """

    def __init__(self, path: Path, inputs: Iterable[str] = ()) -> None:
        if path.suffix == ".parquet":
            hint = f"for example --out {path.with_suffix('')}, which gets a {CORPUS_FILE}"
            raise ConfigError("--out is a folder", path, hint)
        try:
            self._check(path, inputs)
        except (OSError, RuntimeError, ValueError) as error:  # too long a name; a link to itself; a NUL
            reason = error.strerror if isinstance(error, OSError) else None
            raise ConfigError("--out cannot be a folder", display(path), reason or "the path leads nowhere") from error
        self.path, self.work = path, path / _WORK
        self._made: list[Path] = []
        self._lock: int | None = None
        self._is_ours = False

    @staticmethod
    def _check(path: Path, inputs: Iterable[str]) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError("--out is a folder, and this is a file", path)
        if display(path) != str(path):
            raise ConfigError("the folder's name is not UTF-8", display(path), "Parquet files cannot be written there")
        ours = {(path / name).resolve() for name in FILES}
        for one in inputs:
            if Path(one).resolve() in ours:
                raise ConfigError("an input would be written over", one, "name another --out")

    def __enter__(self) -> Self:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            if self.path in self._made:
                self.path.chmod(0o700)  # chats are their owner's alone; a folder that was there stays as it is
            self._lock = os.open(self.path, os.O_RDONLY)
            self._take()
            self._is_ours = True
            shutil.rmtree(self.work, ignore_errors=True)  # of a killed run: whoever lives holds the lock
            self.work.mkdir()
        except BaseException as error:
            self._leave()
            if isinstance(error, OSError):
                raise self.failed(error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        with contextlib.ExitStack() as steps:  # each of them, whatever comes in between
            steps.callback(self._release)
            steps.callback(self._remove_made)
            if self._is_ours:
                steps.callback(shutil.rmtree, self.work, ignore_errors=True)

    def _remove_made(self) -> None:
        for folder in self._made:  # those that nothing was put into, from the inside out
            with contextlib.suppress(OSError):
                folder.rmdir()

    def publish(self, *, keep: Iterable[str] = ()) -> None:
        """Moves what was made into place; files of an earlier run that this one did not make go, but for `keep`.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            for name in FILES:
                made, final = self.work / name, self.path / name
                if made.exists():
                    with made.open("rb") as file:
                        os.fsync(file.fileno())
                    made.replace(final)
                elif name not in keep:
                    final.unlink(missing_ok=True)
            if self._lock is not None:
                os.fsync(self._lock)
        except OSError as error:
            raise self.failed(error) from error

    def failed(self, error: OSError) -> StoreError:
        """What a write that failed is told as."""
        return StoreError("cannot write the corpus", error.filename or self.path, error.strerror or str(error))

    def _take(self) -> None:
        if self._lock is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another eyas prepare writes to this folder", self.path, "wait, or name another"
            ) from None
        except OSError:  # a file system that cannot lock a folder
            return

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
