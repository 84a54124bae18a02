"""Files in the spool folder: made under a temporary name, renamed when they are whole. Knows nothing of quotas.

Whoever writes records has one, in the server's process or beside it. Everything by descriptor: see `folder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from eyas.capture.contract import FAILED_SUFFIX, RECORD_SUFFIX, SPEC_FILE, RequestId
from eyas.capture.folder import Trust, create, open_folder, publish

TMP_SUFFIX: Final = ".tmp"  # .<rid>.tmp while a record is being written
_WRITE_BYTES: Final = 64 << 20  # per write call; Linux takes at most 2 GiB


def parse_name(name: str) -> tuple[str, str] | None:
    """`(rid, suffix)` of a spool file's name, None for anything else."""
    suffix = next((s for s in (RECORD_SUFFIX, FAILED_SUFFIX, TMP_SUFFIX) if name.endswith(s)), None)
    if suffix is None:
        return None
    stem = name[: -len(suffix)]
    if suffix == TMP_SUFFIX:
        if not stem.startswith("."):
            return None
        stem = stem[1:]
    return (stem, suffix) if RequestId.parse(stem) else None


class SpoolFiles:
    """The folder, and how files come to be in it. From any thread.

    Args:
        folder: the spool.
        mode, group: permission bits of its files, and their group (None: the process's own).
    """

    def __init__(self, folder: Path, mode: int, group: int | None) -> None:
        self.folder = folder
        self.mode = mode
        self.group = group
        self._trust = Trust(groups=frozenset() if group is None else frozenset({group}))

    def make(self) -> None:
        """Make the folder where it is missing. Raises OSError."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The folder's descriptor. Opened each time: somebody may have removed the folder and made another.

        Raises:
            OSError: it is not there, or not to be believed.
        """
        descriptor = open_folder(self.folder, self._trust)
        try:
            self._settle(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def record(self, rid: str) -> NewFile:
        """A record to be written. Raises OSError."""
        return NewFile(self, f".{rid}{TMP_SUFFIX}", f"{rid}{RECORD_SUFFIX}")

    def write(self, name: str, text: str) -> None:
        """Publish a small file at once. Raises OSError."""
        with NewFile(self, f".{name}.{os.getpid()}.{threading.get_ident()}{TMP_SUFFIX}", name) as descriptor:
            write_at(descriptor, text.encode(), 0)

    def _settle(self, folder: int) -> None:
        """Give a folder of our own that holds nothing else the mode and group of the settings.

        Raises:
            PermissionError: another folder, which more users may write to than the settings say.
        """
        # A client removes what it has read, so the group's readers may write here; everyone else may only look.
        readable = self.mode & 0o444
        mode = readable | (readable & 0o440) >> 1 | readable >> 2
        status = os.fstat(folder)
        group = status.st_gid if self.group is None else self.group
        if (stat.S_IMODE(status.st_mode) & 0o777, status.st_gid) == (mode, group):
            return
        if status.st_uid == os.geteuid() and all(_is_ours(name) for name in os.listdir(folder)):
            if group != status.st_gid:
                os.fchown(folder, -1, group)
            os.fchmod(folder, mode | status.st_mode & 0o7000)
        elif status.st_mode & stat.S_IWGRP & ~mode:
            text = f"group {status.st_gid} may write there, and the mode of the settings is {self.mode:o}"
            raise PermissionError(errno.EPERM, text, str(self.folder))


class NewFile:
    """A file under its temporary name: `publish` it or `discard` it. As a context it does either at the end.

    It is locked meanwhile, and thus known for one that is being written, until its process ends.

    Attributes:
        descriptor: to write with.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, files: SpoolFiles, temporary: str, name: str) -> None:
        self._files, self._temporary, self._name = files, temporary, name
        with files.opened() as folder:
            self.descriptor = create(folder, temporary, files.mode, files.group)
            with contextlib.suppress(OSError):  # not every file system has locks: `is_torn` then knows nothing
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        """Rename it into place. Raises OSError, and then it is gone."""
        try:
            with self._files.opened() as folder:
                publish(folder, self.descriptor, self._temporary, self._name)
        except BaseException:
            self.discard()
            raise
        os.close(self.descriptor)

    def discard(self) -> None:
        """Remove it, unless another file has come under its temporary name."""
        with contextlib.suppress(OSError), self._files.opened() as folder:
            found = os.stat(self._temporary, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(self.descriptor)):
                os.unlink(self._temporary, dir_fd=folder)
        os.close(self.descriptor)

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.publish()
        else:
            self.discard()


def is_torn(folder: int, temporary: str) -> bool:
    """Whether nobody is writing the file any more; False where that cannot be told."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_ours(name: str) -> bool:
    return name == SPEC_FILE or parse_name(name) is not None


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """os.pwrite until everything is written. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
        view, offset = view[done:], offset + done
