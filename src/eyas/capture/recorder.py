"""One rank's capture: chunks in from the forward thread, records out through writer threads.

    reply = recorder.capture(chunk, aux, last, ids)     # forward thread: copies on the device, never waits
    ...                                                 # writers: device to host, hashes, file, rename

`capture` answers `accepted` once the whole prompt has been seen; the rename that follows is the publication. What goes
wrong later becomes `<rid>.failed`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import xxhash

from eyas.capture.assembler import Assembler, Chunk, Record, Refused, kept_slices, take_rows
from eyas.capture.contract import (
    RECORD_METADATA,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    Refusal,
    runs_hash,
    token_hash,
)
from eyas.capture.hostcopy import HostCopy, Snapshot, host_bytes, snapshot
from eyas.capture.spool import Spool, write_all
from eyas.capture.tensorfile import layout

logger = logging.getLogger(__name__)

TORCH_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
MAX_DEVICE_BYTES: Final = 1 << 30  # snapshots waiting for their host copy; beyond it the server's own memory is at risk
_IDLE_S: Final = 5.0


@dataclass(slots=True)
class _Copy:
    """A chunk's snapshot on its way to the host; slots of `Record.parts` in chunk order."""

    record: Record
    index: int
    shot: Snapshot


@dataclass(slots=True)
class _Finish:
    record: Record


@dataclass(slots=True)
class _Lane:
    """One writer thread's queue. A record stays in one lane, so its jobs run in order."""

    jobs: queue.SimpleQueue[_Copy | _Finish | None] = field(default_factory=queue.SimpleQueue)
    host: HostCopy = field(default_factory=HostCopy)


class Recorder:
    """Captures for one rank.

    Args:
        spec: the agreement.
        spool: where records go.
        is_over: whether the server is done with a request object.
        threads: writers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        spool: Spool,
        *,
        is_over: Callable[[Any], bool] = lambda owner: False,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.spec_id = spec.spec_id
        self.spool = spool
        self._assembler = Assembler(spec, is_over=is_over)
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._clock = clock
        self._lanes = [_Lane() for _ in range(threads)]
        self._device_bytes = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(lane, number == 0), name=f"eyas-writer-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    # --- forward thread -----------------------------------------------------------------------------------------------

    def capture(
        self, chunk: Chunk, aux: torch.Tensor | None, last: torch.Tensor | None, ids: torch.Tensor | None
    ) -> CaptureReply | None:
        """Take one request's rows of one forward.

        Args:
            chunk: whose rows, and which.
            aux: [n, A * H] outputs of the agreed layers, any float dtype; None when the forward brought none.
            last: [n, H] states after the final norm, or None.
            ids: [n] token ids the forward was fed, or None.

        Returns:
            The reply once it is known, None while the prompt goes on.
        """
        step = self._assembler.add(chunk, self._clock())
        refused = step if isinstance(step, Refused) else self._take(step, chunk, aux, last, ids)
        if refused is not None:
            return self.refuse(chunk.rid, chunk.prompt, refused)
        assert isinstance(step, Record)
        if not step.complete:
            return None
        reply = CaptureReply("accepted", self.spec_id, token_hash(chunk.prompt), step.tokens)
        self._lane_of(step).jobs.put(_Finish(step))  # last: nothing after it can fail, so it is never answered with no
        return reply

    def refuse(self, rid: str, prompt: Sequence[int], refused: Refused) -> CaptureReply:
        """Give up a request's record by name."""
        self._assembler.drop(rid)
        self.spool.release(rid)
        return refusal(self.spec_id, prompt, refused)

    def sweep(self) -> None:
        """Release what aborted requests left behind. Cheap when nothing is in assembly."""
        if len(self._assembler):
            for record in self._assembler.sweep(self._clock()):
                self.spool.release(record.rid)

    def _take(
        self,
        record: Record,
        chunk: Chunk,
        aux: torch.Tensor | None,
        last: torch.Tensor | None,
        ids: torch.Tensor | None,
    ) -> Refused | None:
        rows, width = chunk.stop - chunk.start, self.spec.hidden_size
        if aux is None or last is None or ids is None:
            return Refused(Refusal.NO_STATES, "the forward brought no hidden states")
        want = ((rows, len(self.spec.layers) * width), (rows, width), (rows,))
        have = (tuple(aux.shape), tuple(last.shape), tuple(ids.shape))
        if want != have:
            return Refused(Refusal.NO_STATES, f"aux, last and ids of shapes {have}, expected {want}")
        if record.fresh and (refused := self.spool.reserve(record.rid, record.bytes)):
            return refused
        if aux.device.type != "cpu" and self._device_bytes:  # one chunk alone must always fit
            size = self.spec.record_bytes(rows, rows)
            if self._device_bytes + size > MAX_DEVICE_BYTES:
                return Refused(Refusal.SPOOL_FULL, f"writers are behind by {self._device_bytes} bytes")
        kept = take_rows(last, kept_slices(record.runs, chunk.start, chunk.stop), self._dtype)
        shot = snapshot((aux.to(self._dtype, copy=True).contiguous(), kept, ids.clone()))
        record.parts.append(shot.tensors if shot.event is None else None)
        if shot.event is not None:
            with self._lock:
                self._device_bytes += shot.device_bytes
            self._lane_of(record).jobs.put(_Copy(record, len(record.parts) - 1, shot))
        return None

    def _lane_of(self, record: Record) -> _Lane:
        return self._lanes[hash(record.rid) % len(self._lanes)]

    # --- writer threads -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is queued and stop the writers (a server simply exits)."""
        for lane in self._lanes:
            lane.jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: _Lane, tends_spool: bool) -> None:
        tended_s = self._clock()
        while True:
            try:
                job = lane.jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = ...
            if job is None:
                return
            if isinstance(job, _Copy):
                self._fetch(lane, job)
            elif isinstance(job, _Finish):
                self._write(job.record)
            del job  # while the next one is awaited it would keep a whole chunk in device memory
            if tends_spool and self._clock() - tended_s > _IDLE_S:
                tended_s = self._clock()
                try:
                    self.spool.remove_orphans()
                except Exception:  # records of this lane would wait for ever for a thread that died tidying up
                    logger.exception("eyas: orphans not removed")

    def _fetch(self, lane: _Lane, job: _Copy) -> None:
        try:
            job.record.parts[job.index] = lane.host.fetch(job.shot)
        except Exception as error:  # the thread must live: the error becomes this record's refusal
            logger.exception("eyas: host copy failed")
            job.record.parts[job.index] = error
        finally:
            with self._lock:
                self._device_bytes -= job.shot.device_bytes

    def _write(self, record: Record) -> None:
        try:
            refused = write_record(record, self.spec, self.spool)
        except OSError as error:
            logger.warning("eyas: record %s not written: %s", record.rid, error)
            refused = Refused(Refusal.WRITE_FAILED, str(error))
        except Exception as error:  # as above: one record's fault must not stop the others
            logger.exception("eyas: record %s not written", record.rid)
            refused = Refused(Refusal.PLUGIN_ERROR, repr(error))
        record.parts.clear()
        if refused is not None:
            self._fail(record.rid, refused)

    def _fail(self, rid: str, refused: Refused) -> None:
        try:
            self.spool.fail(rid, refused.reason, refused.detail)
        except Exception:  # as above; the client's deadline says so too
            logger.exception("eyas: no word of %s, which was not written", rid)


def refusal(spec_id: str, prompt: Sequence[int], refused: Refused) -> CaptureReply:
    """The reply that says no; `spec_id` is empty where no spec was agreed."""
    return CaptureReply("refused", spec_id, token_hash(prompt), len(prompt), str(refused.reason), refused.detail)


def write_record(record: Record, spec: CaptureSpec, spool: Spool) -> Refused | None:
    """Check, hash and publish a complete record whose parts are on the host.

    Returns:
        Why it was not published, where the forwards were fed other tokens than the request's.

    Raises:
        OSError: the spool could not take it.
    """
    for part in record.parts:
        if isinstance(part, Exception):
            raise part
    aux, last, ids = (list(column) for column in zip(*record.parts, strict=True))
    fed = token_hash(bytes(host_bytes(torch.cat(ids).to(torch.int32))))
    asked = token_hash(record.prompt)
    if fed != asked:
        return Refused(Refusal.TOKENS_DIFFER, f"the forwards were fed {fed}, the request is {asked}")
    header = RecordHeader(
        rid=record.rid,
        spec_id=spec.spec_id,
        tokens=fed,
        rows=record.tokens,
        positions=record.positions,
        runs=f"{runs_hash(record.runs):016x}",
        chunks=[list(chunk) for chunk in record.chunks],
        aux=_field_hash(aux),
        last=_field_hash(last),
    )
    plan = layout(
        [
            ("aux", spec.stored_dtype, spec.aux_shape(record.tokens)),
            ("last", spec.stored_dtype, spec.last_shape(record.positions)),
        ],
        {RECORD_METADATA: header.to_json()},
    )
    with spool.record_file(record.rid) as descriptor:
        write_all(descriptor, plan.header)
        for tensor in (*aux, *last):
            write_all(descriptor, host_bytes(tensor))
    return None


def _field_hash(parts: list[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(host_bytes(part))
    return digest.hexdigest()
