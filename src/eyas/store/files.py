"""The few file operations the store is built on: locking, atomic replacement, full-size creation, error translation.

What is made here is its owner's alone, whatever the umask: folders 0700, files 0600.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from eyas.capture.folder import read_limited
from eyas.disk import FULL, fsync_dir, lock_opened
from eyas.errors import IntegrityError, StoreError

MAX_DOCUMENT_BYTES: Final = 256 << 20  # store.json and manifest.json have a line for each shard
MAX_SIDECAR_BYTES: Final = 64 << 20  # a line for each failed row
MAX_JOURNAL_BYTES: Final = 1 << 30  # a line for each row
# Of whole items of any dtype; in the cache between its uses, and rare enough that threads seldom wait for the GIL.
CHUNK_BYTES: Final = 4 << 20
_NO_FALLOCATE: Final = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}


@dataclass(frozen=True, slots=True)
class ShardPaths:
    """Where a shard's files lie. `final` and `part` may be symbolic links to another volume."""

    root: Path
    stem: str

    @property
    def final(self) -> Path:
        return self.root / f"{self.stem}.safetensors"

    @property
    def part(self) -> Path:
        return self.root / f"{self.stem}.safetensors.part"

    @property
    def journal(self) -> Path:
        return self.root / f"{self.stem}.journal"

    @property
    def sidecar(self) -> Path:
        return self.root / f"{self.stem}.json"

    @property
    def consumed(self) -> Path:
        """What stands in the shard's place once it was trained on and removed (`eyas.store.consumed`)."""
        return self.root / f"{self.stem}.consumed"

    @property
    def temporaries(self) -> tuple[Path, ...]:
        """What `write_atomic` may leave behind when it is killed."""
        return (tmp_of(self.journal), tmp_of(self.sidecar))

    def check_volume(self) -> None:
        """Raises StoreError for a link whose volume is gone: its rows exist and must not be captured again."""
        for path in (self.final, self.part):
            if path.is_symlink() and not path.exists():
                raise StoreError(
                    "shard lies on a volume that is not there",
                    f"{path} -> {path.readlink()}",
                    "mount it, or remove the link to capture these rows again",
                )


def tmp_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


@contextmanager
def disk_errors(where: object) -> Iterator[None]:
    """Every OSError within becomes a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        at = error.filename or where
        if error.errno in FULL:
            raise StoreError("disk full", at, "free space or move shards to another volume, then run again") from error
        if error.errno == errno.EIO:
            raise StoreError("the disk reports an I/O error", at, "check the disk, then run again") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise StoreError("no permission to write", at, "check owner and mount options") from error
        raise StoreError(error.strerror or type(error).__name__, at) from error


def make_folder(path: Path) -> None:
    """Make a folder for its owner alone; one that is there stays as it is. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # mkdir's mode is narrowed by the umask


def create_new(path: Path) -> int:
    """A descriptor of a new file for its owner alone, open for reading and writing.

    Raises:
        OSError: it exists (a link counts), or cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # whatever the umask
    return fd


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of an existing regular file; a link is followed, but a pipe, which would make us wait, refused.

    Raises:
        OSError: absent, not a regular file, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _open_or_create(path: Path) -> int:
    while True:
        try:
            return open_regular(path, os.O_RDWR)
        except FileNotFoundError:
            if path.is_symlink():  # it leads nowhere
                raise
        with suppress(FileExistsError):  # another process was first: open that one
            return create_new(path)


def lock_file(path: Path, *, create: bool = False) -> int | None:
    """Open `path` for reading and writing under an exclusive lock (`lock_opened`); None while another process has it.

    Raises:
        OSError: the file is absent (without `create`) or cannot be opened.
    """
    return lock_opened(path, _open_or_create if create else functools.partial(open_regular, flags=os.O_RDWR))


def allocate(fd: int, size: int) -> None:
    """Give the file its full size with its blocks reserved, so that a full disk shows here and not in the middle.

    Raises:
        OSError: no space.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    os.ftruncate(fd, size)


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes of a flat buffer at `offset` (one call writes at most 2 GiB)."""
    done = 0
    view = memoryview(data)
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call that Python has no name for; None where the C library has none either."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        call.restype = ctypes.c_int
    return call


_SYNC_FILE_RANGE: Final = _sync_file_range()
_START_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE


def start_write_back(fd: int) -> None:
    """Tell the disk to begin with what was written to the file; waits only where the disk's queue is full.

    A hint: where it is not heard, or fails, the fsync at the end has more to do and says what is wrong.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, 0, 0, _START_WRITE)


def pwrite_zeros(fd: int, start: int, stop: int) -> None:
    """Zero the byte range [start, stop)."""
    zeros = bytes(min(CHUNK_BYTES, stop - start))
    for offset in range(start, stop, CHUNK_BYTES):
        pwrite_all(fd, memoryview(zeros)[: stop - offset], offset)


def pread_all(fd: int, start: int, stop: int) -> bytearray:
    """Read the byte range [start, stop).

    Raises:
        OSError: EIO, also where the file ends early.
    """
    data = bytearray(stop - start)
    view, done = memoryview(data), 0
    while done < len(data):
        got = os.preadv(fd, [view[done:]], start + done)
        if not got:
            raise OSError(errno.EIO, f"file ends at byte {start + done}, expected {stop}")
        done += got
    return data


def hash_range(fd: int, start: int, stop: int, look: Callable[[memoryview], None] | None = None) -> int:
    """xxh3-64 of the byte range [start, stop); `look` sees each chunk while it is in the cache.

    Read with pread and not through a mapping: a failing disk is then an error and not a SIGBUS.

    Raises:
        OSError: as pread_all.
    """
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    offset = start
    while offset < stop:
        # A short read would split an item between chunks, so fill each chunk.
        want = min(CHUNK_BYTES, stop - offset)
        done = 0
        while done < want:
            got = os.preadv(fd, [buffer[done:want]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"file ends at byte {offset + done}, expected {stop}")
            done += got
        digest.update(buffer[:want])
        if look is not None:
            look(buffer[:want])
        offset += want
    return digest.intdigest()


def read_journal(path: Path) -> bytes:
    """An open shard's journal; empty where there is none.

    Raises:
        IntegrityError: larger than any journal.
        OSError: the disk.
    """
    try:
        return read_limited(path, MAX_JOURNAL_BYTES)[0]
    except FileNotFoundError:
        return b""
    except ValueError as error:
        raise IntegrityError(f"not a journal: {error}", path, "remove it to capture its rows again") from error


def _write_synced(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # left by a killed process; whatever it is, it is not written to
    with open(create_new(path), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` as a whole or not at all. The caller holds the lock that covers `path`."""
    tmp = tmp_of(path)
    try:
        _write_synced(tmp, data)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
    tmp.replace(path)
    fsync_dir(path.parent)


def write_new(path: Path, data: bytes) -> bool:
    """Create `path` as a whole, or leave the one that is there; False when another process was first."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        _write_synced(tmp, data)
        # A link never replaces, which a rename would. The temporary name may vanish (see sweep_new) once `path` exists.
        with suppress(FileExistsError, FileNotFoundError):
            path.hardlink_to(tmp)
            fsync_dir(path.parent)
            return True
        return False
    finally:
        tmp.unlink(missing_ok=True)


def sweep_new(path: Path) -> None:
    """Remove what killed `write_new` calls left. Call only once `path` exists: nobody needs theirs any more."""
    for tmp in path.parent.glob(f"{path.name}.*.tmp"):
        tmp.unlink(missing_ok=True)
