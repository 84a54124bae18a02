from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
import xxhash

from eyas.errors import StoreError
from eyas.store.files import (
    CHUNK_BYTES,
    allocate,
    disk_errors,
    hash_range,
    lock_file,
    pread_all,
    pwrite_all,
    pwrite_zeros,
    sweep_new,
    write_atomic,
    write_new,
)


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EDQUOT, "disk full"),
        (errno.EFBIG, "disk full"),
        (errno.EIO, "I/O error"),
        (errno.EROFS, "no permission to write"),
        (errno.EACCES, "no permission to write"),
        (errno.ENOLCK, os.strerror(errno.ENOLCK)),
        (errno.ESTALE, os.strerror(errno.ESTALE)),
    ],
)
def test_every_os_error_becomes_a_store_error(number, what):
    with pytest.raises(StoreError, match=what) as caught, disk_errors("/some/where"):
        raise OSError(number, os.strerror(number))
    assert caught.value.where == "/some/where"
    with pytest.raises(StoreError) as caught, disk_errors("/some/where"):
        raise OSError(number, os.strerror(number), "/a/file")
    assert caught.value.where == "/a/file"


def test_a_real_full_device():
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StoreError, match="disk full"), disk_errors("/dev/full"):
        os.write(full, b"x")
    os.close(full)


def test_locks_exclude_and_follow_the_name(tmp_path):
    path = tmp_path / "part"
    with pytest.raises(FileNotFoundError):
        lock_file(path)
    fd = lock_file(path, create=True)
    assert fd is not None
    assert lock_file(path) is None
    path.rename(tmp_path / "final")
    assert lock_file(tmp_path / "final") is None
    other = lock_file(path, create=True)  # the name is free: a file of its own
    assert other is not None
    os.close(fd)
    again = lock_file(tmp_path / "final")
    assert again is not None
    for each in (other, again):
        os.close(each)


def test_locking_while_names_come_and_go_never_returns_a_file_without_its_name(tmp_path):
    path, rounds = tmp_path / "part", 300
    held: list[int] = []
    inside = threading.Lock()

    def churn() -> None:
        for _ in range(rounds):
            fd = lock_file(path, create=True)
            if fd is None:
                continue
            assert inside.acquire(blocking=False)
            assert os.path.samestat(os.fstat(fd), path.stat())
            held.append(fd)
            inside.release()
            path.rename(tmp_path / f"final-{len(held)}")
            os.close(fd)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            churn()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list(tmp_path.glob("final-*"))) == len(held) > 0


def test_ranges(tmp_path):
    size = 2 * CHUNK_BYTES + 12_346
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    allocate(fd, size)
    assert os.fstat(fd).st_size == size
    pwrite_all(fd, data, 0)
    seen: list[bytes] = []
    assert hash_range(fd, 7, size, lambda chunk: seen.append(bytes(chunk))) == xxhash.xxh3_64_intdigest(data[7:])
    assert b"".join(seen) == data[7:]
    assert {len(chunk) % 4 for chunk in seen[:-1]} == {0}
    assert hash_range(fd, 5, 5) == xxhash.xxh3_64_intdigest(b"")
    assert pread_all(fd, 100, size) == data[100:]
    pwrite_zeros(fd, 50, size - 50)
    assert pread_all(fd, 0, size) == data[:50] + bytes(size - 100) + data[-50:]
    pwrite_zeros(fd, 50, 50)
    for read in (pread_all, hash_range):
        with pytest.raises(OSError, match="file ends at byte"):
            read(fd, 0, size + 1)
    allocate(fd, 10)
    assert os.fstat(fd).st_size == 10
    os.close(fd)


def test_atomic_and_exclusive_creation(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, b"1")
    write_atomic(path, b"2")
    assert not write_new(path, b"3")
    assert path.read_bytes() == b"2"
    assert write_new(tmp_path / "b.json", b"4")
    (tmp_path / "b.json.123-abc.tmp").touch()
    sweep_new(tmp_path / "b.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_failed_atomic_write_leaves_no_temporary(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match=r".+"):
        write_atomic(tmp_path / "target", b"x")
    (tmp_path / "gone.tmp").mkdir()
    with pytest.raises(OSError, match=r".+"):
        write_atomic(tmp_path / "gone", b"x")
