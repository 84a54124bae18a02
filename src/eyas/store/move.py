"""`eyas store move`: complete shards to another volume, also while the store is being filled or read.

The shard is copied, checked against its own hashes, and replaced in the store by a symbolic link in one step. A reader
that has it mapped keeps the old file. Open shards are never touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from eyas.capture.folder import read_limited
from eyas.capture.strictjson import loads
from eyas.disk import fsync_dir
from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.store.check import verify_shard
from eyas.store.documents import read_sidecar, read_store_info
from eyas.store.files import (
    ShardPaths,
    allocate,
    create_new,
    disk_errors,
    lock_file,
    open_regular,
    tmp_of,
    write_atomic,
)
from eyas.store.format import Sidecar
from eyas.store.plan import Shard
from eyas.store.shardfile import read_index

_MAX_NOTE_BYTES = 64 << 10


class MoveState(StrEnum):
    """What became of a shard that was to be moved."""

    MOVED = "moved"
    THERE = "there"  # it was there already
    UNFINISHED = "unfinished"  # absent or being written
    BUSY = "busy"  # another process has it: reopening or moving


@dataclass(frozen=True, slots=True)
class Move:
    """The outcome for one shard; `bytes` were copied."""

    name: str
    state: MoveState
    bytes: int = 0


def move_shards(root: str | Path, names: Iterable[str] | None, dest_dir: str | Path) -> list[Move]:
    """Move complete shards to `dest_dir`; the store then holds links to them. `dest_dir` may be the store itself.

    A move that is interrupted leaves the store valid, and is completed by repeating it.

    Args:
        root: the store's folder.
        names: shard file names, in the order to move them; None for all.
        dest_dir: an existing folder on the other volume, used by one store only.

    Raises:
        ConfigError: a name that is not of this store, or no such folder.
        StoreError: no space (the original stays), or another file of the name is there.
        IntegrityError: the copy, hence the original, is not what its hashes say. The original stays.
    """
    folder, target = Path(root), Path(dest_dir)
    shards = {shard.name: shard for shard in read_store_info(folder).plan.shards}
    chosen = list(shards) if names is None else list(names)
    if unknown := [name for name in chosen if name not in shards]:
        raise ConfigError("not a shard of this store", unknown[0], f"names run from {next(iter(shards))}")
    if not target.is_dir():
        raise ConfigError("no such folder", target, "create it on the volume to move to")
    return [_move(folder, shards[name], target) for name in chosen]


def _move(root: Path, shard: Shard, target: Path) -> Move:
    paths = ShardPaths(root, shard.stem)
    if not paths.sidecar.exists() or not os.path.lexists(paths.final):
        return Move(shard.name, MoveState.UNFINISHED)
    paths.check_volume()
    with disk_errors(paths.final):
        try:
            lock = lock_file(paths.final)
        except FileNotFoundError:  # reopened meanwhile
            return Move(shard.name, MoveState.UNFINISHED)
        if lock is None:
            return Move(shard.name, MoveState.BUSY)
        try:
            sidecar = read_sidecar(paths.sidecar)
            if sidecar is None:
                return Move(shard.name, MoveState.UNFINISHED)
            _finish_interrupted(paths)
            dest = target.resolve() / shard.name
            if paths.final.resolve() == (root.resolve() / shard.name if target.samefile(root) else dest):
                return Move(shard.name, MoveState.THERE)
            return _copy_and_switch(paths, sidecar, dest, home=target.samefile(root))
        finally:
            os.close(lock)


def _intent(paths: ShardPaths) -> Path:
    """Names a file that is to be removed once the store no longer points to it."""
    return paths.root / f"{paths.stem}.move"


def _finish_interrupted(paths: ShardPaths) -> None:
    """Remove the file that an interrupted move left behind, if the store points elsewhere by now."""
    intent = _intent(paths)
    hint = "remove it, and look for copies"
    try:
        old = Path(loads(read_limited(intent, _MAX_NOTE_BYTES)[0], _MAX_NOTE_BYTES)["remove"])
        if old.name != paths.final.name or not old.is_absolute():
            raise ValueError("it names no shard")
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError("damaged note of an interrupted move", intent, f"{hint} ({error})") from error
    if old.exists() and not old.samefile(paths.final):
        # Whoever gave us the store may have written the note: nothing but a copy of this shard is removed for it.
        if _header(old) != _header(paths.final):
            raise IntegrityError(f"the note of an interrupted move names {old}, no copy of this shard", intent, hint)
        old.unlink()
        fsync_dir(old.parent)
    intent.unlink()


def _header(path: Path) -> bytes:
    """A shard file's header, which says of what store it is and which of its shards; empty for another file."""
    fd = open_regular(path)
    try:
        return read_index(fd, path).layout.header
    except IntegrityError:
        return b""
    finally:
        os.close(fd)


def _copy_and_switch(paths: ShardPaths, sidecar: Sidecar, dest: Path, *, home: bool) -> Move:
    old = paths.final.resolve()
    was_link = paths.final.is_symlink()
    tmp = tmp_of(dest)
    copied = 0
    if not home and dest.exists():
        # Left by a move interrupted before the switch; or by somebody else, and then it is not ours to replace.
        if dest.is_symlink() or not verify_shard(dest, sidecar, finite=False).ok:
            raise StoreError("another file of this name is there", dest, "use a folder of its own for each store")
    else:
        _copy(old, tmp, sidecar)
        copied = sidecar.bytes
    if was_link:
        write_atomic(_intent(paths), json.dumps({"remove": str(old)}).encode())
    if home:
        tmp.replace(paths.final)
    else:
        if copied:
            tmp.replace(dest)
            fsync_dir(dest.parent)
        link = tmp_of(paths.final)
        link.unlink(missing_ok=True)
        link.symlink_to(dest)
        link.replace(paths.final)
    fsync_dir(paths.root)
    if was_link:
        _finish_interrupted(paths)
    return Move(sidecar.name, MoveState.MOVED, copied)


def _copy(source: Path, tmp: Path, sidecar: Sidecar) -> None:
    """Copy and check, or leave nothing."""
    tmp.unlink(missing_ok=True)
    try:
        with source.open("rb") as src, open(create_new(tmp), "wb") as dst:
            allocate(dst.fileno(), sidecar.bytes)
            offset = 0
            while offset < sidecar.bytes:
                sent = os.sendfile(dst.fileno(), src.fileno(), offset, sidecar.bytes - offset)
                if not sent:
                    raise IntegrityError("shard is shorter than its sidecar says", source, "verify the store")
                offset += sent
            os.fsync(dst.fileno())
            os.posix_fadvise(dst.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read back what the disk holds
        report = verify_shard(tmp, sidecar, finite=False)
        if not report.ok:
            raise IntegrityError(f"copy of the shard is damaged ({report.problems[0]})", source, "verify the store")
    except BaseException:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise
