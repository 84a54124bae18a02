"""Shards that were trained on and removed, to make room: their names, and what stands in their place.

shard-00042.consumed    JSON: which rows the shard held, of how many tokens, and that they were used

It is written and synced before the shard goes. Extraction does not capture those rows again, verification says where
they went, and the run that used them can work out where it was. To capture them again, remove this file.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from eyas.capture.folder import read_limited
from eyas.capture.strictjson import loads
from eyas.disk import fsync_dir
from eyas.errors import IntegrityError, StoreError
from eyas.store.documents import write_manifest
from eyas.store.files import MAX_SIDECAR_BYTES, ShardPaths, disk_errors, lock_file, tmp_of, write_atomic
from eyas.store.format import FORMAT, FORMAT_VERSION, MANIFEST_FILE, Sidecar, StoreInfo
from eyas.store.journal import digest_field, int_field, text_field
from eyas.store.plan import Shard
from eyas.store.rowfile import RowTable

_KIND: Final = "consumed"
_LOOKS: Final = 8  # at a folder in which files are renamed


@dataclass(frozen=True, slots=True)
class Consumed:
    """A shard that is gone: its good rows, and the reasons of those that had failed."""

    table: RowTable
    failed: dict[int, str]

    def to_json(self, info: StoreInfo, shard: Shard) -> str:
        head = {
            "format": FORMAT,
            "kind": _KIND,
            "version": FORMAT_VERSION,
            "name": shard.name,
            "note": "trained on and removed; remove this file to have its rows captured again",
            "spec_id": info.spec.spec_id,
            "corpus": info.corpus["digest"],
            "plan": info.plan.digest,
            "failed": {str(row): reason for row, reason in sorted(self.failed.items())},
        }
        table = self.table
        hashes = [f"{value:016x}" for value in table.hashes.tolist()]
        rows = [list(row) for row in zip(table.rows.tolist(), table.tokens.tolist(), hashes, strict=True)]
        return json.dumps(head | {"rows": rows}, separators=(",", ":"), ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: bytes, info: StoreInfo, shard: Shard) -> Consumed:
        """Raises ValueError for anything but what `to_json` writes of this shard."""
        data: Any = loads(text, len(text))
        try:
            if (data["format"], data["kind"], data["version"]) != (FORMAT, _KIND, FORMAT_VERSION):
                raise ValueError("not a consumed shard's file, or of another version")
            mine = (shard.name, info.spec.spec_id, info.corpus["digest"], info.plan.digest)
            if (data["name"], data["spec_id"], data["corpus"], data["plan"]) != mine:
                raise ValueError("of another store")
            failed = {int(row): text_field(reason) for row, reason in data["failed"].items()}
            parsed = [(int_field(row), int_field(tokens), digest_field(digest)) for row, tokens, digest in data["rows"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or ill-typed: {error!r}"[:300]) from error
        if sorted([*failed, *(row for row, _, _ in parsed)]) != list(range(shard.start, shard.stop)):
            raise ValueError(f"not the rows {shard.start} to {shard.stop - 1}")
        columns = list(zip(*parsed, strict=True)) or [(), (), ()]
        rows, tokens, hashes = (np.array(c, dtype=d) for c, d in zip(columns, ("i8", "i4", "u8"), strict=True))
        return cls(RowTable(rows, tokens, hashes), failed)


def read_consumed(info: StoreInfo, shard: Shard, paths: ShardPaths) -> Consumed | None:
    """What stands in a removed shard's place; None where nothing does.

    Raises:
        IntegrityError: damaged, or of another store. StoreError: the disk.
    """
    try:
        return Consumed.from_json(read_limited(paths.consumed, MAX_SIDECAR_BYTES)[0], info, shard)
    except FileNotFoundError:
        return None
    except ValueError as error:
        hint = f"{error}; remove it to have the shard's rows captured again"
        raise IntegrityError("damaged file of a consumed shard", paths.consumed, hint) from error
    except OSError as error:
        raise StoreError(error.strerror or "cannot read", paths.consumed) from error


def remove_consumed(root: Path, info: StoreInfo, known: tuple[Shard, Sidecar, RowTable]) -> int:
    """Remove a complete shard whose rows nobody needs any more. The caller owns the store (`own_store`).

    A shard that is a link, and so on another volume, stays; so does one that another process has reopened. Killed in
    the midst, `sweep_consumed` goes on.

    Returns:
        Bytes freed; 0 where it stays.

    Raises:
        StoreError: the disk.
    """
    shard, sidecar, table = known
    paths = ShardPaths(root, shard.stem)
    with disk_errors(root):
        if paths.final.is_symlink() or not paths.final.exists() or (lock := lock_file(paths.final)) is None:
            return 0
        try:
            write_atomic(paths.consumed, Consumed(table, dict(sidecar.failed)).to_json(info, shard).encode())
            _unlink(paths)
        finally:
            os.close(lock)
        fsync_dir(root)
        if (root / MANIFEST_FILE).exists():
            write_manifest(root)
    return sidecar.bytes


def sweep_consumed(root: Path, info: StoreInfo) -> None:
    """Finish the removals that a killed process began. The caller owns the store."""
    names = set(os.listdir(root))  # noqa: PTH208
    with disk_errors(root):
        for shard in info.plan.shards:
            paths = ShardPaths(root, shard.stem)
            if (tmp := tmp_of(paths.consumed)).name in names:
                tmp.unlink(missing_ok=True)
            if paths.consumed.name in names and read_consumed(info, shard, paths) is not None:
                _unlink(paths)
    if MANIFEST_FILE in names:
        write_manifest(root)


def _unlink(paths: ShardPaths) -> None:
    paths.sidecar.unlink(missing_ok=True)  # first: without it nobody takes the file for a complete shard
    paths.final.unlink(missing_ok=True)


def store_bytes(root: Path) -> int:
    """What the store's own shards, complete and open, take of its disk; links lead to others."""
    total = 0
    with disk_errors(root):
        for _ in range(_LOOKS):
            total, whole = _disk_bytes(root)
            if whole:
                break
    return total


def _disk_bytes(root: Path) -> tuple[int, bool]:
    """The size, and whether no file went, or got another name, while it was added up."""
    total, whole = 0, True
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.endswith((".safetensors", ".safetensors.part")) and entry.is_file(follow_symlinks=False):
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    whole = False
    return total, whole


def share_store(root: Path) -> int | None:
    """Say that this process reads the store, until the descriptor is closed: nobody removes its shards meanwhile.

    Returns:
        None where the file system has no such locks.

    Raises:
        StoreError: a run that removes shards has it.
    """
    return _lock(root, fcntl.LOCK_SH, "a training run that removes shards is reading this store")


def own_store(root: Path) -> int:
    """Be the only reader, until the descriptor is closed, and so allowed to remove shards.

    Raises:
        StoreError: others read it, or the file system cannot tell.
    """
    fd = _lock(root, fcntl.LOCK_EX, "another training run is reading this store")
    if fd is None:
        raise StoreError("cannot lock the folder", root, "without locks no shard can be removed: use another volume")
    return fd


def _lock(root: Path, how: int, taken: str) -> int | None:
    fd = -1
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StoreError(taken, root, "wait for it to end, or copy the store") from error
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return fd
