"""What files are built on that must survive a crash or be one process's own: the store's shards, the answer files."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Numbers of the errors that mean a full disk.
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def lock_opened(path: Path, opened: Callable[[Path], int]) -> int | None:
    """Open `path` under an exclusive `flock`; None while another process holds it. Closing the descriptor releases it.

    The lock counts only if the path still names the file that was locked: between open and lock the holder may have
    put another file in its place, or renamed it, and let go.

    Args:
        path: the file.
        opened: opens it; called again where it was another process's turn to replace it.

    Raises:
        OSError: as `opened`, or a file system without locks.
    """
    while True:
        fd = opened(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(fd)):
                    return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_there(path: Path) -> bool:
    """Whether the path names anything that may be looked at. False too where `Path.exists` raises: in a folder that is
    closed to this user, or by a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False


def is_file_there(path: Path) -> bool:
    """As `is_there`, of a file."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder_there(path: Path) -> bool:
    """As `is_there`, of a folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def fsync_dir(folder: Path) -> None:
    """Make new names, renames and removals in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
