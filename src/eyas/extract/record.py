"""A record file that a server's plugin wrote: read once, believed only after every claim was checked.

It is read into memory and not mapped. Others may write to the spool: what is hashed must be what is stored, and a file
that is cut short under a mapping kills the process that looks at it. (Measured: as fast up to 2 MB a row, a fifth more
processor time in the store's threads at 32 MB.)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from eyas.capture.contract import (
    RECORD_METADATA,
    CaptureSpec,
    RecordHeader,
    Refusal,
    count_of,
    runs_hash,
    token_hash,
)
from eyas.capture.tensorfile import Layout, parse_header
from eyas.extract.engine import Captured, CaptureRequest, Failed, Retry

_MAX_HEADER_BYTES: Final = 1 << 20  # tens of thousands of chunks
_TORCH: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}

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


def open_record(
    path: Path,
    request: CaptureRequest,
    spec: CaptureSpec,
    release: Callable[[], None] = lambda: None,
    owners: Collection[int] | None = None,
) -> Captured | Failed:
    """Read a record and check that it is the answer to `request` under `spec`. Blocks: call it in a thread.

    Args:
        path: the file.
        request, spec: what it must answer, and how.
        release: drops the record at its origin.
        owners: user ids whose file it may be; None is anybody.

    Returns:
        Its tensors in memory of our own, with the digests its header claims (comparing them with the bytes is the
        reader's, who passes over the bytes anyway); or a failure named after the first claim that does not hold.
    """
    most = _MAX_HEADER_BYTES + spec.record_bytes(len(request.tokens), count_of(request.last_runs))
    data = _read(path, most, owners)
    if isinstance(data, Failed):
        return data
    try:
        plan = parse_header(data.data, len(data))
        header = RecordHeader.from_json(plan.metadata[RECORD_METADATA])
        digests = int(header.aux, 16), int(header.last, 16)
    except (ValueError, TypeError) as error:
        return Failed("record-damaged", str(error))
    except KeyError:
        return Failed("record-damaged", "the file has no record header")
    if (failure := _mismatch(header, request, spec) or _shape_mismatch(plan, header, spec)) is not None:
        return failure
    return Captured(_view(data, plan, "aux"), _view(data, plan, "last"), *digests, release)


def _read(path: Path, most: int, owners: Collection[int] | None) -> npt.NDArray[np.uint8] | Failed:
    """The whole file, where it is a plain one of at most `most` bytes."""
    try:
        # In a folder that others may write to, a link must not lead elsewhere nor a pipe make us wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Failed("record-unreadable", "not a regular file")
            if owners is not None and status.st_uid not in owners:
                return Failed("record-foreign", f"the file belongs to user {status.st_uid}")
            if status.st_size > most:
                return Failed("record-damaged", f"the file has {status.st_size} bytes, the row's needs {most} at most")
            data = np.empty(status.st_size, dtype=np.uint8)
            done, view = 0, data.data
            while done < len(data) and (got := os.preadv(descriptor, [view[done:]], done)):
                done += got
        finally:
            os.close(descriptor)
    except OSError as error:
        return Failed("record-unreadable", error.strerror or str(error))
    if done < len(data):
        return Failed("record-damaged", f"the file ended at byte {done} of {len(data)} while it was read")
    return data


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


def _view(data: npt.NDArray[np.uint8], plan: Layout, name: str) -> torch.Tensor:
    info = plan.tensors[name]
    dtype = _TORCH[info.dtype]
    if info.start == info.stop:  # frombuffer takes no empty range
        return torch.empty(info.shape, dtype=dtype)
    count = (info.stop - info.start) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=info.start).reshape(info.shape)
