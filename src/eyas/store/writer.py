"""Creating, resuming and sharing a store. Everything is decided from files: no counter, no server, no world size.

writer = StoreWriter.open(root, spec=..., corpus=..., tokens_N=..., positions_N=..., shard_bytes=..., provenance=...)
for shard in writer.plan.shards:
    if (lease := writer.lease(shard, contents)) is None:
        continue                      # complete, or another process has it
    with lease:
        for row in lease.pending:
            lease.put(row, aux, last)
        lease.finish()
writer.write_manifest()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from eyas.capture.contract import CaptureSpec
from eyas.disk import fsync_dir
from eyas.errors import IntegrityError, StoreError
from eyas.events import EVENTS_DIR
from eyas.store.check import row_problems
from eyas.store.documents import read_complete, read_sidecar, read_store_info, write_manifest
from eyas.store.files import (
    ShardPaths,
    allocate,
    disk_errors,
    lock_file,
    make_folder,
    pread_all,
    read_journal,
    sweep_new,
    write_atomic,
    write_new,
)
from eyas.store.format import (
    STORE_FILE,
    Contents,
    RowStatus,
    Sidecar,
    StoreInfo,
    pack_contents,
)
from eyas.store.journal import RowFailed, RowOk, Session, decode_journal, encode_journal
from eyas.store.plan import Plan, Shard, make_plan
from eyas.store.shard_writer import ShardWriter, publish_sidecar
from eyas.store.shardfile import read_index

NEW_STORE_HINT: Final = "use a new store folder, or the settings the store was made with"


class ShardState(StrEnum):
    """What the files say of a shard."""

    ABSENT = "absent"
    OPEN = "open"  # being written, or left unfinished
    COMPLETE = "complete"
    CONSUMED = "consumed"  # trained on and removed: see `eyas.store.consumed`

    @property
    def done(self) -> bool:
        """Whether no row of it is still to be captured."""
        return self in (ShardState.COMPLETE, ShardState.CONSUMED)


class StoreWriter:
    """A store being filled, by this process and perhaps by others.

    Attributes:
        root: the store's folder.
        info: what the store is for.
    """

    def __init__(self, root: Path, info: StoreInfo, provenance: Mapping[str, str]) -> None:
        self.root, self.info = root, info
        self._provenance = {str(key): str(value) for key, value in sorted(provenance.items())}

    @classmethod
    def open(
        cls,
        root: str | Path,
        *,
        spec: CaptureSpec,
        corpus: Mapping[str, Any],
        tokens_N: npt.ArrayLike,
        positions_N: npt.ArrayLike,
        shard_bytes: int,
        provenance: Mapping[str, str],
        dry: bool = False,
    ) -> StoreWriter:
        """Create the store, or resume it.

        Args:
            root: folder; created when absent.
            spec: the agreement every row follows.
            corpus: JSON-able; holds "digest", and what else identifies it (tokenizer and template hashes).
            tokens_N: [N] tokens of each corpus row.
            positions_N: [N] positions at which each row's `last` is kept.
            shard_bytes: largest shard file.
            provenance: engine, versions, host: kept per shard, never part of identity.
            dry: create and change nothing; for forecasts.

        Raises:
            StoreError: the folder holds something else, the store is for another spec, corpus or plan, or the disk.
            ValueError: no rows, or counts out of range.
        """
        folder = Path(root)
        plan = make_plan(tokens_N, positions_N, spec, shard_bytes)
        if not plan.shards:
            raise ValueError("a store needs at least one row")
        info = StoreInfo(spec, {**corpus, "digest": str(corpus["digest"])}, shard_bytes, plan)
        with disk_errors(folder):
            if folder.exists() and not folder.is_dir():
                raise StoreError("not a folder", folder, "name one to keep the store in")
            if not dry:
                make_folder(folder)
            path = folder / STORE_FILE
            if not path.exists():
                own = (STORE_FILE, EVENTS_DIR)
                strangers = sorted(p.name for p in folder.glob("*") if not p.name.startswith(own))
                if strangers:
                    raise StoreError("folder is not empty and not a store", folder, f"it holds {strangers[0]}")
                if dry:
                    return cls(folder, info, provenance)
                write_new(path, info.to_json().encode())
            existing = read_store_info(folder)
            if differences := existing.differences(info):
                raise StoreError(
                    f"the store was made for something else ({'; '.join(differences)})", folder, NEW_STORE_HINT
                )
            writer = cls(folder, existing, provenance)
            if not dry:
                sweep_new(path)
                writer._sweep()
        return writer

    @property
    def plan(self) -> Plan:
        return self.info.plan

    def paths(self, shard: Shard) -> ShardPaths:
        return ShardPaths(self.root, shard.stem)

    def state(self, shard: Shard) -> ShardState:
        """What the files say, without opening any."""
        paths = self.paths(shard)
        if paths.consumed.exists():
            return ShardState.CONSUMED
        final = os.path.lexists(paths.final)
        if final and paths.sidecar.exists():
            return ShardState.COMPLETE
        return ShardState.OPEN if final or os.path.lexists(paths.part) else ShardState.ABSENT

    def sidecar(self, shard: Shard) -> Sidecar | None:
        """The sidecar of a complete shard, else None. Raises as `read_complete`."""
        return read_complete(self.paths(shard)) if self.state(shard) is ShardState.COMPLETE else None

    def lease(self, shard: Shard, contents: Contents) -> ShardWriter | None:
        """Take a shard for writing; None when it is complete, was consumed, or another process has it.

        A shard that was left between rename and sidecar is finished here (and None returned).

        Args:
            shard: one of `plan.shards`.
            contents: gives the corpus's part of the shard's rows.

        Raises:
            StoreError: the disk is full (nothing is left behind), or the shard's volume is not there.
            IntegrityError: a finished file without a sidecar is damaged, or the corpus is not the planned one.
        """
        if self.state(shard).done:
            return None
        paths = self.paths(shard)
        paths.check_volume()
        with disk_errors(paths.part):
            if paths.final.exists():
                self._recover(shard)
                return None
            fd = lock_file(paths.part, create=True)
            if fd is None:
                return None
            fresh = os.fstat(fd).st_size == 0
            try:
                if paths.final.exists():  # finished by another process between our look and our lock
                    paths.part.unlink()
                    os.close(fd)
                    return None
                self._check_own(shard, fd)
                paths.sidecar.unlink(missing_ok=True)  # of a shard that somebody removed
                known = self._known(shard, contents)
                allocate(fd, self.info.layout(shard).file_bytes)
                fsync_dir(self.root)
                writer = ShardWriter(self.info, shard, paths, known, fd)
                writer.open(self._provenance)
            except BaseException:
                if fresh:  # a part that holds nothing gives its space back
                    os.ftruncate(fd, 0)
                    paths.part.unlink()
                os.close(fd)
                raise
            return writer

    def _check_own(self, shard: Shard, fd: int) -> None:
        """A part that is a link is written to only if it is this shard's: a store may come from anybody.

        Raises:
            StoreError: it leads to another file.
        """
        path, status = self.paths(shard).part, os.fstat(fd)
        if not path.is_symlink() and status.st_nlink == 1:
            return
        planned = self.info.layout(shard)
        if status.st_size != planned.file_bytes or pread_all(fd, 0, len(planned.header)) != planned.header:
            hint = "remove the link; its target was not touched"
            raise StoreError("an open shard is a link to another file", path, hint)

    def _known(self, shard: Shard, contents: Contents) -> Any:
        try:
            return pack_contents(shard, contents(shard))
        except ValueError as error:
            raise IntegrityError(f"corpus does not fit the plan: {error}", shard.name, "has it changed?") from error

    def _recover(self, shard: Shard) -> None:
        """Finish a shard that was renamed but has no sidecar, unless its writer is alive and doing so."""
        paths = self.paths(shard)
        if paths.sidecar.exists():
            return
        fd = lock_file(paths.final)
        if fd is None:
            return
        try:
            if paths.sidecar.exists():
                return
            index = read_index(fd, paths.final)
            problems = row_problems(fd, index, finite=False)
            if index.layout.header != self.info.layout(shard).header:
                raise IntegrityError("shard is of another plan", paths.final, "remove it to capture its rows again")
            if problems:
                raise IntegrityError(
                    f"finished shard is damaged: {problems[0]}", paths.final, "remove it and run again"
                )
            publish_sidecar(paths, fd, self._journal(paths))
            self._remove_strays([paths.part, *paths.temporaries], paths)
        finally:
            os.close(fd)

    def _journal(self, paths: ShardPaths) -> list[Session]:
        sessions = decode_journal(read_journal(paths.journal)).sessions
        return [session for session in sessions if self.info.owns(session)]

    def reopen_failed(self, shard: Shard) -> bool:
        """Make the failed rows of a complete shard pending again: the shard becomes open, its good rows stay.

        A reader that has the shard open keeps its rows: their bytes do not change, nor does the file they are in.

        Returns:
            False when there is nothing to retry, or another process has the shard.

        Raises:
            StoreError, IntegrityError: as lease.
        """
        paths = self.paths(shard)
        if paths.consumed.exists():
            return False
        paths.check_volume()
        with disk_errors(paths.final):
            if paths.final.exists():
                self._recover(shard)
                return self._reopen_complete(paths)
            if not paths.part.exists():
                return False
            fd = lock_file(paths.part)
            if fd is None:
                return False
            try:
                return self._forget_failed(paths, self._journal(paths))
            finally:
                os.close(fd)

    def _reopen_complete(self, paths: ShardPaths) -> bool:
        sidecar = read_sidecar(paths.sidecar)
        if sidecar is None or not sidecar.failed:
            return False
        fds = []
        try:
            # Both locks, so that nobody is creating a new part under the name that the rename will take.
            for path, create in ((paths.final, False), (paths.part, True)):
                fd = lock_file(path, create=create)
                if fd is None:
                    return False
                fds.append(fd)
            index = read_index(fds[0], paths.final)
            session = self.info.session(sidecar.provenance)
            for position, (status, hashes) in enumerate(zip(index.row_status, index.row_xxh3, strict=True)):
                row = index.shard.start + position
                if status == RowStatus.OK:
                    session.rows[row] = RowOk(row, int(hashes[2]), int(hashes[3]))
                else:
                    session.rows[row] = RowFailed(row, sidecar.failed.get(row, ""))
            # With the reasons until the rename: a crash before it ends in `_recover`, which needs them.
            write_atomic(paths.journal, encode_journal([session]))
            paths.sidecar.unlink()
            fsync_dir(paths.root)
            paths.final.rename(paths.part)
            fsync_dir(paths.root)
            return self._forget_failed(paths, [session])
        finally:
            if len(fds) == 2 and paths.final.exists():
                paths.part.unlink(missing_ok=True)  # the one that was made to hold its name
            for fd in fds:
                os.close(fd)

    def _forget_failed(self, paths: ShardPaths, sessions: list[Session]) -> bool:
        """Rewrite the journal without its failed rows; whether there were any."""
        found = False
        for session in sessions:
            for row in [row for row, entry in session.rows.items() if isinstance(entry, RowFailed)]:
                del session.rows[row]
                found = True
        if found:
            write_atomic(paths.journal, encode_journal(s for s in sessions if s.rows))
        return found

    def write_manifest(self) -> None:
        """As the function of this name."""
        write_manifest(self.root)

    def _sweep(self) -> None:
        """Remove what a killed process left beside complete shards."""
        names = set(os.listdir(self.root))  # noqa: PTH208
        for shard in self.plan.shards:
            paths = self.paths(shard)
            strays = [p for p in (paths.part, paths.journal, *paths.temporaries) if p.name in names]
            if not strays or shard.name not in names or not paths.final.exists():
                continue
            fd = lock_file(paths.final)
            if fd is None:
                continue
            try:
                if paths.sidecar.exists():
                    self._remove_strays(strays, paths)
            finally:
                os.close(fd)

    def _remove_strays(self, strays: list[Path], paths: ShardPaths) -> None:
        """Remove `strays` of a complete shard whose file the caller has locked."""
        for path in strays:
            if path != paths.part:
                path.unlink(missing_ok=True)
            elif path.exists() and (fd := lock_file(path)) is not None:
                path.unlink()
                os.close(fd)
