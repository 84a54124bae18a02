"""A record file that a server's plugin wrote: read once, believed only after every claim was checked.

    open_record   the header's claims; the states stay in the file until `ShardWriter.put` takes them piece by piece
    read_record   the states as tensors, for who needs their numbers

Pieces are read into one buffer a thread, and not mapped. Others may write to the spool: what is hashed must be what is
stored, and a file that is cut short under a mapping kills the process that looks at it.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from eyas.capture.contract import (
    RECORD_METADATA,
    CaptureSpec,
    RecordHeader,
    Refusal,
    count_of,
    field_hash,
    runs_hash,
    token_hash,
)
from eyas.capture.encoding import STORED_DTYPES
from eyas.capture.tensorfile import Layout, TensorInfo, parse_header
from eyas.extract.engine import Captured, CaptureRequest, Failed, Retry, StatesLost

_HEADER_GUESS: Final = 4096  # one of a row in a few chunks has about a thousand bytes
_MAX_HEADER_BYTES: Final = 1 << 20  # tens of thousands of chunks

#: What each of the server's refusals means for the row.
RETRY: Final[Mapping[Refusal, Retry]] = {
    Refusal.SPOOL_FULL: Retry.WAIT,
    Refusal.ROW_TOO_LARGE: Retry.NEVER,
    Refusal.PREFIX_CACHED: Retry.ATTEMPT,
    Refusal.CHUNK_GAP: Retry.ATTEMPT,
    Refusal.TOKENS_DIFFER: Retry.ATTEMPT,
    Refusal.RETRACTED: Retry.ATTEMPT,
    Refusal.ABORTED: Retry.ATTEMPT,
    Refusal.SPEC_DIFFERS: Retry.PROBE,  # the server came back with other settings: the probe says which
    Refusal.BAD_REQUEST: Retry.NEVER,
    Refusal.NO_STATES: Retry.PROBE,
    # Either may be the row's or the server's: where a probe meets it too, no further row need fail of it.
    Refusal.WRITE_FAILED: Retry.PROBE,
    Refusal.PLUGIN_ERROR: Retry.PROBE,
}


def refused(reason: str, detail: str = "") -> Failed:
    """The failure that a refusal by the server amounts to; a reason of a newer contract is tried again."""
    known = next((refusal for refusal in Refusal if refusal == reason), None)
    if known is None:
        return Failed("unknown-refusal", f"{reason}: {detail}" if detail else reason)
    return Failed(str(known), detail, RETRY[known])


class _RecordFile:
    """An open record. Closed when its states are stored, or when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.status = os.fstat(descriptor)
        self.size = self.status.st_size

    def fill(self, view: memoryview, offset: int) -> None:
        """Read the bytes at `offset`, as many as the view has.

        Raises:
            StatesLost: the disk, or the file was cut short meanwhile.
        """
        done = 0
        try:
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
                if not got:
                    detail = f"the file ended at byte {offset + done} of {self.size} while it was read"
                    raise StatesLost(Failed("record-damaged", detail))
                done += got
        except OSError as error:
            raise StatesLost(Failed("record-unreadable", error.strerror or str(error))) from error

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class _Field:
    """One field of an open record: a `Source`."""

    def __init__(self, file: _RecordFile, info: TensorInfo, dtype: torch.dtype) -> None:
        self._file, self._info, self._dtype = file, info, dtype

    @property
    def nbytes(self) -> int:
        return self._info.stop - self._info.start

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Raises StatesLost where the file ends early or cannot be read."""
        buffer = _buffer(size) if self.nbytes else memoryview(b"")
        for start in range(self._info.start, self._info.stop, size):
            piece = buffer[: min(size, self._info.stop - start)]
            self._file.fill(piece, start)
            yield piece

    def tensor(self) -> torch.Tensor:
        """All of it, in memory of its own. Raises StatesLost."""
        tensor = torch.empty(self._info.shape, dtype=self._dtype)
        if self.nbytes:
            self._file.fill(tensor.view(-1).view(torch.uint8).numpy().data, self._info.start)
        return tensor


_buffers = threading.local()


def _buffer(size: int) -> memoryview:
    """This thread's own, kept until the thread ends: fresh memory would cost more than the reading."""
    buffer: memoryview | None = getattr(_buffers, "own", None)
    if buffer is None or len(buffer) != size:
        buffer = _buffers.own = memoryview(mmap.mmap(-1, size))
    return buffer


def read_record(
    path: Path, request: CaptureRequest, spec: CaptureSpec, owners: Collection[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor] | Failed:
    """As `open_record`, but `aux` [T, A, W] and `last` [L, W] in memory, compared with the header's digests."""
    opened = open_record(path, request, spec, owners=owners)
    if isinstance(opened, Failed):
        return opened
    try:
        return tensors_of(opened)
    finally:
        opened.release()


def tensors_of(states: Captured) -> tuple[torch.Tensor, torch.Tensor] | Failed:
    """`aux` and `last` in memory, once their digests were compared; a failure where they cannot be had."""
    tensors: list[torch.Tensor] = []
    for part, claimed in ((states.aux, states.aux_xxh3), (states.last, states.last_xxh3)):
        try:
            tensor = part.tensor() if isinstance(part, _Field) else part
        except StatesLost as lost:
            return lost.failure
        assert isinstance(tensor, torch.Tensor), "no other source is known"
        if field_hash(tensor.contiguous().flatten().view(torch.uint8).numpy()) != claimed:
            return Failed("checksum-differs", "not the bytes that the header's digests are of")
        tensors.append(tensor)
    return tensors[0], tensors[1]


def open_record(
    path: Path,
    request: CaptureRequest,
    spec: CaptureSpec,
    release: Callable[[], None] = lambda: None,
    owners: Collection[int] | None = None,
) -> Captured | Failed:
    """Check that a record is the answer to `request` under `spec`. Blocks: call it in a thread.

    Args:
        path: the file.
        request, spec: what it must answer, and how.
        release: drops the record at its origin.
        owners: user ids whose file it may be; None is anybody.

    Returns:
        Its states as sources that read the very file whose claims were checked, with the digests it claims: whoever
        passes over the bytes compares them. Or a failure named after the first claim that does not hold.
    """
    most = _MAX_HEADER_BYTES + spec.record_bytes(len(request.tokens), count_of(request.last_runs))
    file = _open(path, most, owners)
    if isinstance(file, Failed):
        return file
    failure: Failed | None
    try:
        plan = parse_header(_head(file), file.size)
        header = RecordHeader.from_json(plan.metadata[RECORD_METADATA])
        digests = int(header.aux, 16), int(header.last, 16)
        failure = _mismatch(header, request, spec) or _shape_mismatch(plan, header, spec)
    except StatesLost as lost:
        failure = lost.failure
    except (ValueError, TypeError) as error:
        failure = Failed("record-damaged", str(error))
    except KeyError:
        failure = Failed("record-damaged", "the file has no record header")
    else:
        if failure is None:

            def done() -> None:
                file.close()
                release()

            aux, last = (_Field(file, plan.tensors[name], STORED_DTYPES[spec.dtype]) for name in ("aux", "last"))
            return Captured(aux, last, *digests, done)
    file.close()
    return failure


def _open(path: Path, most: int, owners: Collection[int] | None) -> _RecordFile | Failed:
    """The file, where it is a plain one of at most `most` bytes."""
    try:
        # In a folder that others may write to, a link must not lead elsewhere nor a pipe make us wait.
        file = _RecordFile(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return Failed("record-unreadable", error.strerror or str(error))
    if not stat.S_ISREG(file.status.st_mode):
        failure = Failed("record-unreadable", "not a regular file")
    elif owners is not None and file.status.st_uid not in owners:
        failure = Failed("record-foreign", f"the file belongs to user {file.status.st_uid}")
    elif file.size > most:
        failure = Failed("record-damaged", f"the file has {file.size} bytes, the row's needs {most} at most")
    else:
        return file
    file.close()
    return failure


def _head(file: _RecordFile) -> memoryview:
    """The file's first bytes, with the whole header where its length is a possible one. Raises StatesLost."""
    view = memoryview(bytearray(min(_HEADER_GUESS, file.size)))
    file.fill(view, 0)
    needed = 8 + int.from_bytes(view[:8], "little")
    if len(view) < needed <= min(file.size, 8 + _MAX_HEADER_BYTES):
        view = memoryview(bytearray(needed))
        file.fill(view, 0)
    return view


def _mismatch(header: RecordHeader, request: CaptureRequest, spec: CaptureSpec) -> Failed | None:
    """The first claim of the header that is not what was asked for."""
    asked_tokens, asked_runs = token_hash(request.tokens), f"{runs_hash(request.last_runs):016x}"
    positions = count_of(request.last_runs)
    checks: list[tuple[str, object, object]] = [
        ("rid-differs", header.rid, str(request.rid)),
        ("spec-differs", header.spec_id, spec.spec_id),
        ("tokens-differ", header.tokens, asked_tokens),
        ("rows-differ", header.rows, len(request.tokens)),
        ("positions-differ", header.positions, positions),
        ("positions-differ", header.runs, asked_runs),
    ]
    for reason, got, wanted in checks:
        if got != wanted:
            retry = Retry.PROBE if reason == Refusal.SPEC_DIFFERS else Retry.ATTEMPT
            return Failed(reason, f"{got}, asked for {wanted}", retry)
    if not _gapless(header.chunks, header.rows):
        return Failed("chunks-gap", f"assembled from {header.chunks} for {header.rows} rows")
    return None


def _gapless(chunks: object, rows: int) -> bool:
    """Whether chunks are [start, stop) pairs from 0 to `rows`, each beginning where the last one ended."""
    edge = 0
    if not isinstance(chunks, list):
        return False
    for chunk in chunks:
        if not (isinstance(chunk, list) and len(chunk) == 2 and all(isinstance(end, int) for end in chunk)):
            return False
        if chunk[0] != edge or chunk[1] <= edge:
            return False
        edge = chunk[1]
    return edge == rows


def _shape_mismatch(plan: Layout, header: RecordHeader, spec: CaptureSpec) -> Failed | None:
    wanted: dict[str, tuple[str, Sequence[int]]] = {
        "aux": (spec.stored_dtype, spec.aux_shape(header.rows)),
        "last": (spec.stored_dtype, spec.last_shape(header.positions)),
    }
    got = {name: (info.dtype, info.shape) for name, info in plan.tensors.items()}
    return None if got == wanted else Failed("shape-differs", f"{got}, expected {wanted}")
