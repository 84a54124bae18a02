"""One rank's capture: chunks in from the forward thread, records out through writers.

    forward = recorder.forward(aux, last, ids)      # what one forward of the server brought
    reply = forward.take(chunk, row)                # for each request of ours: decides, copies nothing
    forward.send()                                  # one copy for all of them, on the forward's own stream

Another thread waits until the states are in the arena and hands them to the writers. `take` answers `accepted` once the
whole prompt has been seen; that holds when `send` has returned. The rename that follows is the publication. What goes
wrong later becomes `<rid>.failed`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from eyas.capture.arena import Arena, arena_size, segment_size
from eyas.capture.assembler import Assembler, Chunk, Record, kept_slices
from eyas.capture.contract import CaptureReply, CaptureSpec, Refusal, Refused, token_hash
from eyas.capture.cost import ForwardCost
from eyas.capture.forward import FieldSizes, Share, fill, jobs_of, prompt_bytes, sizes_of
from eyas.capture.hostcopy import CpuStage, DeviceStage, Span, Stage, arrive
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Spool
from eyas.capture.writer_process import ProcessWriters
from eyas.capture.writing import Drop, Job, Lost, Part, ThreadWriters, Writers

logger = logging.getLogger(__name__)

_IDLE_S: Final = 5.0
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a rank's capture may use.

    Attributes:
        device: where the states are.
        forward_tokens: most tokens of a forward; three such forwards fit the device memory set aside.
        arena_bytes: of host memory for this rank; 0 chooses.
        writers: a mode of `contract.WRITER_MODES`.
        threads: of the writers.
    """

    device: torch.device = _CPU
    forward_tokens: int = 1024
    arena_bytes: int = 16 << 20
    writers: str = "threads"
    threads: int = 2

    @classmethod
    def of(cls, settings: ServerSettings, device: torch.device, forward_tokens: int, shares: int) -> Resources:
        """As the settings say, divided among `shares` ranks."""
        arena = -(-settings.arena_bytes // shares)
        return cls(device, forward_tokens, arena, settings.writers, settings.writer_threads)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A forward's states on their way to the arena, and what is to be done with them there."""

    span: Span
    jobs: list[Job]


class Recorder:
    """Captures for one rank.

    Args:
        spec: the agreement.
        spool: where records go.
        resources: memory and writers.
        is_over: whether the server is done with a request object.
        clock: monotonic seconds.

    Raises:
        OSError, RuntimeError: no such memory, or the writers cannot be started.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        spool: Spool,
        resources: Resources | None = None,
        *,
        is_over: Callable[[Any], bool] = lambda owner: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.spec_id = spec.spec_id
        self.spool = spool
        self.cost = ForwardCost()
        resources = resources or Resources()
        self._clock = clock
        self._assembler = Assembler(spec, is_over=is_over, on_drop=self._dropped)
        on_device = resources.device.type != "cpu"
        forward_bytes = FieldSizes(spec, resources.forward_tokens, resources.forward_tokens).total
        self.arena = Arena(arena_size(resources.arena_bytes, forward_bytes, spool.quota_bytes, on_device=on_device))
        # Before anything of the accelerator is touched: a process is started here.
        self.writers = self._writers(resources)
        if on_device:
            self.stage: Stage = DeviceStage(self.arena, resources.device, segment_size(forward_bytes))
        else:
            self.stage = CpuStage(self.arena)
        self._flights: queue.SimpleQueue[_Flight | list[Job] | None] = queue.SimpleQueue()
        self._carrier = threading.Thread(target=self._carry, name="eyas-carrier", daemon=True)
        self._carrier.start()

    # --- forward thread -----------------------------------------------------------------------------------------------

    def forward(self, aux: torch.Tensor | None, last: torch.Tensor | None, ids: torch.Tensor | None) -> Forward:
        """Begin with what a forward brought.

        Args:
            aux: [n, A * H] outputs of the agreed layers, any float dtype; None when the forward brought none.
            last: [n, H] states after the final norm, or None.
            ids: [n] token ids the forward was fed, or None.
        """
        return Forward(self, aux, last, ids)

    def capture(
        self, chunk: Chunk, aux: torch.Tensor | None, last: torch.Tensor | None, ids: torch.Tensor | None
    ) -> CaptureReply | None:
        """A forward of one request only: its reply once it is known, None while the prompt goes on."""
        forward = self.forward(aux, last, ids)
        reply = forward.take(chunk, 0)
        if reply is None or reply.status == "accepted":
            forward.send()
        return reply

    def add(self, chunk: Chunk) -> Record | Refused:
        """The record that a chunk belongs to."""
        if self.writers.failure:
            self._assembler.drop(chunk.rid)
            return Refused(Refusal.PLUGIN_ERROR, self.writers.failure)
        return self._assembler.add(chunk, self._clock())

    def drop(self, record: Record) -> None:
        """Give up a record, complete or not."""
        self._assembler.drop(record.rid)
        self._dropped(record)

    def refuse(self, rid: str, prompt: Sequence[int], refused: Refused) -> CaptureReply:
        """Give up a request's record by name."""
        self._assembler.drop(rid)
        return refusal(self.spec_id, prompt, refused)

    def sweep(self) -> None:
        """Release what aborted requests left behind. Cheap when nothing is in assembly."""
        if len(self._assembler):
            self._assembler.sweep(self._clock())

    def end(self) -> None:
        """Capture no more: give up what is in assembly; what was accepted is still written."""
        self._assembler.clear()

    def fly(self, span: Span, jobs: list[Job]) -> None:
        """Hand on a forward."""
        self._flights.put(_Flight(span, jobs))

    def _dropped(self, record: Record) -> None:
        if record.dropped:
            return
        record.dropped = True
        self.spool.release(record.rid)
        if record.on_its_way:
            self._flights.put([Drop(record.key)])

    # --- the other threads --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was accepted and stop (a server simply exits)."""
        self._flights.put(None)
        self._carrier.join()
        self.writers.close()
        self.arena.close()

    def _writers(self, resources: Resources) -> Writers:
        freed, done, files = self.arena.read, self._done, self.spool.files
        if resources.writers == "process":
            return ProcessWriters(self.arena, self.spec, files, freed, done, resources.threads)
        return ThreadWriters(memoryview(self.arena.memory), self.spec, files, freed, done, resources.threads)

    def _carry(self) -> None:
        tended_s = self._clock()
        while True:
            try:
                job = self._flights.get(timeout=_IDLE_S)
            except queue.Empty:
                job = []
            if job is None:
                return
            try:
                self.writers.submit(self._landed(job) if isinstance(job, _Flight) else job)
            except Exception:  # the thread must live
                logger.exception("eyas: records were not handed to their writers")
            del job  # while the next one is awaited it would keep what it refers to
            if self._clock() - tended_s > _IDLE_S:
                tended_s = self._clock()
                try:
                    self.spool.remove_orphans()
                except Exception:  # records would wait for ever for a thread that died tidying up
                    logger.exception("eyas: orphans not removed")

    def _landed(self, flight: _Flight) -> list[Job]:
        """The jobs of a forward whose states are in the arena now, or were lost on the way."""
        jobs, error = flight.jobs, None
        try:
            arrive(flight.span)
        except Exception as caught:  # the thread must live: the error becomes these records' refusal
            logger.exception("eyas: host copy failed")
            error = repr(caught)[:200]
        self.stage.landed(flight.span)
        if error is None:
            return jobs
        for job in jobs:
            if isinstance(job, Part):
                self.arena.read(job.block)
        return [Lost(job.key, error) if isinstance(job, Part) else job for job in jobs]

    def _done(self, key: int, rid: str, refused: Refused | None) -> None:
        """A writer's word on a record."""
        try:
            if refused is None:
                self.spool.published(rid)
            else:
                self.spool.fail(rid, refused.reason, refused.detail)
        except Exception:  # its thread must live; the client's deadline says so too
            logger.exception("eyas: no word of %s (%d)", rid, key)


class Forward:
    """The own requests of one forward of the server."""

    def __init__(
        self, recorder: Recorder, aux: torch.Tensor | None, last: torch.Tensor | None, ids: torch.Tensor | None
    ) -> None:
        self._recorder = recorder
        self._brought = aux, last, ids
        self._shares: list[Share] = []
        self._rows = self._kept = self._there = 0
        self._lacking = self._lack()

    def take(self, chunk: Chunk, row: int) -> CaptureReply | None:
        """Take a request's rows.

        Args:
            chunk: whose rows, and which.
            row: where they begin in what the forward brought.

        Returns:
            The reply once it is known, None while the prompt goes on. It is true once `send` has returned.
        """
        record = self._recorder.add(chunk)
        if isinstance(record, Refused):
            return refusal(self._recorder.spec_id, chunk.prompt, record)
        slices = kept_slices(record.runs, chunk.start, chunk.stop)
        share = Share(record, chunk.start, row, chunk.stop - chunk.start, slices)
        refused = self._misfit(chunk, row, share.kept)
        if refused is None and record.fresh:
            refused = self._recorder.spool.reserve(record.rid, record.bytes, again=bool(self._shares))
        if refused is not None:
            self._recorder.drop(record)
            return refusal(self._recorder.spec_id, chunk.prompt, refused)
        share.asked = token_hash(prompt_bytes(chunk.prompt)) if record.complete else ""
        self._shares.append(share)
        self._rows += share.rows
        self._kept += share.kept
        if not record.complete:
            return None
        cost = self._recorder.cost
        return CaptureReply(
            "accepted",
            self._recorder.spec_id,
            share.asked,
            record.tokens,
            forward_us_p50=cost.p50_us,
            forward_us_p99=cost.p99_us,
        )

    def send(self) -> None:
        """Copy the rows that were taken, and hand them on. Raises where that fails; then call `abandon`."""
        shares = [share for share in self._shares if not share.record.dropped]
        if not shares:
            return
        stage, sizes = self._recorder.stage, sizes_of(self._recorder.spec, shares)
        span = stage.begin(sizes.total)
        try:
            fill(span.bytes, self._recorder.spec, shares, sizes, *self._brought)
            stage.send(span)
            jobs = jobs_of(span.block, self._recorder.spec, shares, sizes)
        except BaseException:  # whatever it was goes on; the ring must have its bytes back
            stage.cancel(span)
            raise
        span.block.readers = len(shares)
        self._recorder.fly(span, jobs)  # last: nothing after it can fail, so nothing accepted is answered with no
        for share in shares:
            share.record.on_its_way = True
        self._shares = []

    def abandon(self, rid: str | None = None) -> None:
        """Give up what was taken and not sent: of one request, or of all."""
        for share in self._shares:
            if rid in (None, share.record.rid):
                self._recorder.drop(share.record)

    def _misfit(self, chunk: Chunk, row: int, kept: int) -> Refused | None:
        """Why the rows cannot be taken, `kept` of them with their last state."""
        if self._lacking or row + chunk.stop - chunk.start > self._there:
            text = self._lacking or f"the forward brought {self._there} rows, not those of this request"
            return Refused(Refusal.NO_STATES, text)
        spec, rows = self._recorder.spec, chunk.stop - chunk.start
        size = FieldSizes(spec, self._rows + rows, self._kept + kept).total
        if size <= (room := self._recorder.stage.room()):
            return None
        if (alone := FieldSizes(spec, rows, kept).total) > self._recorder.stage.capacity:
            text = f"{rows} tokens in one forward take {alone} bytes of {self._recorder.stage.capacity}"
            return Refused(Refusal.ROW_TOO_LARGE, f"{text}: raise serve.arena_bytes or lower the chunked prefill size")
        behind = self._recorder.stage.behind()
        return Refused(Refusal.SPOOL_FULL, f"{behind}: room for {room} bytes of this forward's {size}")

    def _lack(self) -> str:
        """What is missing of the states agreed on, empty where nothing is."""
        aux, last, ids = self._brought
        if aux is None or last is None or ids is None:
            return "the forward brought no hidden states"
        hidden_size, layers = self._recorder.spec.hidden_size, len(self._recorder.spec.layers)
        have = tuple(aux.shape), tuple(last.shape), tuple(ids.shape)
        want = (layers * hidden_size,), (hidden_size,), ()
        if any(not h or h[1:] != w for h, w in zip(have, want, strict=True)):
            return f"aux, last and ids of shapes {have}, expected rows of {want}"
        self._there = min(shape[0] for shape in have)
        return ""


def refusal(spec_id: str, prompt: Sequence[int], refused: Refused) -> CaptureReply:
    """The reply that says no; `spec_id` is empty where no spec was agreed."""
    tokens = token_hash(prompt_bytes(prompt))
    return CaptureReply("refused", spec_id, tokens, len(prompt), str(refused.reason), refused.detail)
