"""A store's rows for training: read with pread into memory that is used again, verified on the way.

Beside `eyas.store.reader`, whose rows are views of mapped files: a failing disk is an error here and no SIGBUS, what is
read is what was hashed when it was written, and a row comes at the disk's speed and not a page fault at a time.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eyas.capture.contract import field_hash
from eyas.capture.encoding import STORED_DTYPES, decode, is_quantised
from eyas.errors import IntegrityError, StoreError
from eyas.store.documents import read_sidecar
from eyas.store.files import ShardPaths, open_regular, pread_all
from eyas.store.format import FIELDS, Sidecar, StoreInfo
from eyas.store.plan import Shard
from eyas.store.reader import StoreRow
from eyas.store.shardfile import ShardIndex, read_index

_ALIGNMENT: Final = 64
_READ_BYTES: Final = 8 << 20  # of one system call: a reader that is closed does not wait for more


class RowTable(NamedTuple):
    """What is known of a shard's good rows without reading their states.

    Attributes:
        rows: [R] int64, corpus row numbers, ascending.
        tokens: [R] int32.
        hashes: [R] uint64, xxh3-64 of each row's tokens.
    """

    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]


def read_table(info: StoreInfo, shard: Shard, paths: ShardPaths, sidecar: Sidecar) -> RowTable:
    """The rows of a complete shard, from 40 bytes a row of its index.

    Raises:
        StoreError: the file cannot be read. IntegrityError: it is not the planned one.
    """
    layout = info.layout(shard)
    offsets_at, hashes_at = layout.tensors["row_offsets"], layout.tensors["row_xxh3"]
    try:
        fd = open_regular(paths.final)
        try:
            offsets = np.frombuffer(pread_all(fd, offsets_at.start, offsets_at.stop), "<i8")
            hashes = np.frombuffer(pread_all(fd, hashes_at.start, hashes_at.stop), "<u8").reshape(-1, len(FIELDS))
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(
            f"cannot read shard: {error.strerror or error}", paths.final, "is its volume there?"
        ) from error
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != shard.tokens or not np.all(lengths > 0):
        raise IntegrityError("shard index contradicts itself", paths.final, "verify the store")
    rows = np.arange(shard.start, shard.stop)
    good = ~np.isin(rows, list(sidecar.failed)) if sidecar.failed else np.ones(shard.rows, dtype=np.bool_)
    return RowTable(rows[good], lengths[good].astype(np.int32), hashes[good, 0].astype(np.uint64))


class Scratch:
    """Memory that rows are read into, one after another; `reset` gives all of it to the next ones."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reset(self, nbytes: int = 0) -> None:
        """Forget what was taken, and have room for `nbytes`."""
        self._used = 0
        if nbytes > len(self._buffer):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, uninitialised, aligned for every dtype; valid until the next reset."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = start + nbytes
        if self._used > len(self._buffer):
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[start : self._used]


class _ShardFile:
    """One open shard and its index; closed with the last reference to it."""

    def __init__(self, path: Path, sidecar: Sidecar) -> None:
        self.path, self._fd = path, -1
        try:
            self._fd = open_regular(path)
            self.index: ShardIndex = read_index(self._fd, path)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # rows are long: read far ahead
        except OSError as error:
            hint = "is its volume mounted, or was it reopened to retry failed rows, or removed?"
            raise StoreError(f"cannot open shard: {error.strerror or error}", path, hint) from error
        if self.index.index_xxh3 != sidecar.index_xxh3 and not self._retried(sidecar):
            raise IntegrityError("shard and sidecar differ", path, "verify the store")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _retried(self, sidecar: Sidecar) -> bool:
        """Whether failed rows were filled in since: the rows that were good then still are."""
        now = read_sidecar(self.path.with_suffix(".json"))
        return (
            now is not None and now.index_xxh3 == self.index.index_xxh3 and now.failed.keys() <= sidecar.failed.keys()
        )

    def read(self, field: str, position: int, out: torch.Tensor, verify: bool) -> None:
        """Fill `out`, of uint8, with a row's `aux` or `last`, or the beginning of it; verified if that is all of it."""
        start, stop = self.index.span(field, position)
        self._fill(out, start)
        if verify and start + len(out) == stop:
            expected = int(self.index.row_xxh3[position, FIELDS.index(field)])
            if field_hash(out.numpy()) != expected:
                row = self.index.shard.start + position
                hint = "verify the store; remove the shard to capture it again"
                raise IntegrityError(f"row {row}'s {field} is not what was written", self.path, hint)

    def _fill(self, out: torch.Tensor, start: int) -> None:
        view, done = out.numpy().data, 0
        try:
            while done < len(view):
                got = os.preadv(self._fd, [view[done : done + _READ_BYTES]], start + done)
                if not got:
                    raise IntegrityError("shard ends early", self.path, "verify the store")
                done += got
        except OSError as error:
            raise StoreError(f"cannot read shard: {error.strerror}", self.path, "check the disk") from error


class RowReader:
    """Rows of a store's complete shards by corpus row number, from any number of threads.

    Args:
        root: the store's folder.
        info: what it is for.
        floats: dtype of the states given; None is what they are stored in, bfloat16 for quantised ones.
        verify: compare each whole row with its checksums.
        max_open: most shards whose index is kept: 5 bytes a token, 45 a row.

    Attributes:
        floats: dtype of the states given.
    """

    def __init__(
        self,
        root: Path,
        info: StoreInfo,
        *,
        floats: torch.dtype | None = None,
        verify: bool = True,
        max_open: int = 64,
    ) -> None:
        self._root, self._info, self._verify, self._max_open = root, info, verify, max_open
        stored = torch.bfloat16 if is_quantised(info.spec.dtype) else STORED_DTYPES[info.spec.dtype]
        self.floats = floats or stored  # of what is given
        self._lock = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._open: OrderedDict[int, _ShardFile] = OrderedDict()

    def close(self) -> None:
        """Let the files go."""
        with self._lock:
            self._open.clear()

    def forget(self, shards: Iterable[int]) -> None:
        """Let these shards' files go: a file that is removed takes its space until nobody has it open."""
        with self._lock:
            for number in shards:
                self._open.pop(number, None)

    def row(
        self,
        shard: Shard,
        sidecar: Sidecar,
        row: int,
        scratch: Scratch,
        *,
        longest: int | None = None,
        aux_into: torch.Tensor | None = None,
    ) -> StoreRow:
        """One row, or the first `longest` tokens of it. States are views of `scratch`, or copies.

        Args:
            shard, sidecar: where the row is.
            row: corpus row number.
            scratch: what it may be read into.
            longest: tokens at most.
            aux_into: [T or more, A * H] of the reader's dtype: `aux` is put there, without a copy where it can be.

        Raises:
            StoreError: the file is gone or cannot be read.
            IntegrityError: it is not what was written.
        """
        file = self._file(shard, sidecar)
        index, spec, position = file.index, self._info.spec, row - shard.start
        start, stop = (int(x) for x in index.row_offsets[position : position + 2])
        first, end = (int(x) for x in index.last_offsets[position : position + 2])
        kept = index.last_index[first:end].astype(np.int64) - start
        length = stop - start if longest is None else min(longest, stop - start)
        kept = kept[: int(np.searchsorted(kept, length))]
        last = scratch.take(len(kept) * spec.last_bytes_per_position)
        file.read("last", position, last, self._verify)
        return StoreRow(
            row=row,
            tokens=torch.from_numpy(index.tokens[start : start + length].copy()),
            loss_mask=torch.from_numpy(index.loss_mask[start : start + length].copy()),
            aux=self._aux(file, position, length, scratch, aux_into),
            last=self._decoded(last, spec.last_shape(len(kept))),
            last_index=torch.from_numpy(kept),
        )

    def _aux(
        self, file: _ShardFile, position: int, length: int, scratch: Scratch, into: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, A, H]."""
        spec = self._info.spec
        nbytes, shape = length * spec.aux_bytes_per_token, (length, len(spec.layers), spec.hidden_size)
        if into is None:
            stored = scratch.take(nbytes)
            file.read("aux", position, stored, self._verify)
            return self._decoded(stored, spec.aux_shape(length))
        out = into[:length].view(shape)
        if self.floats is STORED_DTYPES[spec.dtype]:
            file.read("aux", position, out.view(-1).view(torch.uint8), self._verify)
        else:
            stored = scratch.take(nbytes)
            file.read("aux", position, stored, self._verify)
            out.copy_(self._decoded(stored, spec.aux_shape(length)))
        return out

    def _decoded(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        states = stored.view(STORED_DTYPES[self._info.spec.dtype]).view(shape)
        return decode(states, self._info.spec.dtype, self._info.spec.hidden_size, self.floats)

    def _file(self, shard: Shard, sidecar: Sidecar) -> _ShardFile:
        with self._lock:
            lock = self._locks.setdefault(shard.index, threading.Lock())
        with lock:  # of one shard: the others are not held up while its index is read
            with self._lock:
                if (known := self._open.get(shard.index)) is not None:
                    self._open.move_to_end(shard.index)
                    return known
            made = _ShardFile(ShardPaths(self._root, shard.stem).final, sidecar)
            with self._lock:
                self._open[shard.index] = made
                while len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            return made
