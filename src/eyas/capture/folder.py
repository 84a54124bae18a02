"""Files in a folder that other users may reach. By descriptor: no link is followed, no name is taken for another file.

Trust          whose folder and files are believed
open_folder    the folder itself, or PermissionError that says why not
create         a new file under a name, whatever was there before
publish        its final name, only if it is still that file
read_limited   a small regular file of a trusted owner
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TRIES: Final = 16  # somebody who keeps putting files in our way is a failed write, not an endless loop


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose folder is believed: root's, our own, that of `owners`, and one that belongs to a group of `groups`.

    A member of such a group may remove what is in the folder, as a client must; never may everybody.
    """

    owners: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def problem(self, status: os.stat_result) -> str:
        """Why a folder is not believed; empty when it is."""
        if status.st_mode & stat.S_IWOTH:
            return f"belongs to user {status.st_uid} and anyone may write there"
        if status.st_uid in {0, os.geteuid(), *self.owners} or status.st_gid in self.groups:
            return ""
        return f"belongs to user {status.st_uid}"


def open_folder(path: Path, trust: Trust) -> int:
    """A descriptor of the folder, for use as `dir_fd`; the caller closes it.

    Raises:
        PermissionError: a link, or not to be believed.
        OSError: not there, or not a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            text = "is a symbolic link, which is not followed: name the folder itself"
            raise PermissionError(errno.EPERM, text, str(path)) from None
        raise
    if problem := trust.problem(os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, problem, str(path))
    return descriptor


def create(folder: int, name: str, mode: int, group: int | None = None) -> int:
    """A descriptor to write a new file with; what had the name before is unlinked, never opened.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_TRIES):
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            continue
        try:
            if group is not None:
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, mode)  # not os.open's mode: the umask would narrow it
        except OSError:
            os.close(descriptor)
            os.unlink(name, dir_fd=folder)
            raise
        return descriptor
    raise OSError(errno.EEXIST, "somebody keeps making files of this name", name)


def publish(folder: int, descriptor: int, temporary: str, name: str) -> None:
    """Rename the open file into place.

    Raises:
        OSError: it cannot be renamed, or another file had come under the temporary name; that one is removed.
    """
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    try:
        published = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:  # whoever waited for it has read and removed it already
        return
    if not os.path.samestat(published, os.fstat(descriptor)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise OSError(errno.ESTALE, "another file came under its temporary name", name)


def read_limited(
    path: str | Path, limit: int, *, folder: int | None = None, owners: Collection[int] | None = None
) -> tuple[bytes, os.stat_result]:
    """A regular file's bytes and status, unless it is larger than `limit` or belongs to none of `owners`.

    Args:
        path: the file; in `folder` where that is given, and then no link is followed.
        limit: most bytes.
        folder: descriptor of the folder.
        owners: user ids; None is anybody.

    Raises:
        ValueError: too large.
        PermissionError: another owner's.
        OSError: cannot be read, or is no regular file.
    """
    # Opening a pipe without O_NONBLOCK would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if folder is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if owners is not None and status.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}", str(path))
        if status.st_size > limit:
            raise ValueError(f"{status.st_size} bytes, at most {limit} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size), status  # what is appended meanwhile is for the next reader
    finally:
        os.close(descriptor)
