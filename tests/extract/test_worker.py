"""One worker against the shipped FakeEngine: stops, failures of disk and engine, and what becomes of rows in flight."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.capture.contract import CaptureSpec, field_hash
from eyas.config import Config, ExtractConfig, StoreConfig
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.errors import EngineError, StoreError
from eyas.extract.build import Job, open_store
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry, StatesLost
from eyas.extract.fake import FakeEngine
from eyas.extract.worker import Report, Worker
from eyas.store.check import verify_store
from eyas.store.plan import Shard
from eyas.store.shard_writer import ShardWriter
from eyas.store.writer import ShardState, StoreWriter

SPEC = CaptureSpec((1, 3), "loss", "bf16", 32, 1000, 6, "0" * 32)
ROWS = 24


class CountingEngine(FakeEngine):
    """Counts what it handed out and what was released."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.out: Counter[int] = Counter()
        self.released: Counter[int] = Counter()

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        result = await super().capture(request)
        if isinstance(result, Captured):
            row = request.rid.row
            self.out[row] += 1
            return replace(result, release=lambda: self.released.update([row]))
        return result


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    rng = np.random.default_rng(3)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(tmp_path / "corpus.parquet", meta) as writer:
        for row in range(ROWS):
            tokens = rng.integers(0, 1000, 40)
            writer.add(f"r{row}", tokens, np.ones(40, np.uint8))
    return Corpus.open(tmp_path / "corpus.parquet")


class SlowStore(StoreWriter):
    """A store whose writers wait for `gate` before each row."""

    gate: Callable[[int], None] = staticmethod(lambda row: None)

    def lease(self, shard: Shard, contents) -> ShardWriter | None:
        writer = super().lease(shard, contents)
        if writer is None:
            return None
        put = writer.put

        def gated(row, *args):
            self.gate(row)
            return put(row, *args)

        writer.put = gated  # an instance's own: the shipped writer under a slow disk
        return writer


class Bench:
    """A worker, and all that it reported."""

    def __init__(self, corpus: Corpus, folder: Path, engine: FakeEngine, *, shards: int = 1, **settings: object):
        size = 1 << 20 if shards == 1 else ROWS * 40 * 200 // shards  # about 200 bytes a token
        cfg = Config(store=StoreConfig(shard_bytes=size), extract=ExtractConfig(**settings))  # pyright: ignore
        job = Job(corpus.path, folder / "store", "made-up", (), cfg, "session0")
        opened = open_store(job, corpus, EngineInfo(SPEC, {"engine": "fake"}))
        self.store = SlowStore(opened.root, opened.info, {"engine": "fake"})
        self.reports: list[Report] = []
        self.engine = engine
        self.make = lambda: Worker(
            corpus,
            self.store,
            engine,
            SPEC,
            run="run00000",
            session="session0",
            cfg=cfg.extract,
            window_bytes=1 << 30,
            report=self.reports.append,
        )

    def run(self, stops: tuple[float, ...] = ()) -> None:
        async def main() -> None:
            worker = self.make()
            loop = asyncio.get_running_loop()
            for at_s in stops:
                loop.call_later(at_s, worker.stop)
            await worker.run()

        asyncio.run(main())
        self.store.write_manifest()  # as a run does when its workers are done

    @property
    def rows(self) -> int:
        """Stored by this worker."""
        return sum(report.rows for report in self.reports if not report.leased)

    def journalled(self) -> int:
        """Rows that the files hold."""
        shards = self.store.plan.shards
        done = sum(sidecar.ok_rows for shard in shards if (sidecar := self.store.sidecar(shard)))
        lines = [p.read_text().splitlines() for p in self.store.root.glob("*.journal")]
        return done + sum('"aux"' in line for text in lines for line in text)


def test_a_second_stop_keeps_what_has_come_and_releases_it(corpus: Corpus, tmp_path: Path) -> None:
    """Four rows are being written and more wait for a thread: all of them are here, none may be dropped or leaked."""
    engine = CountingEngine(SPEC)
    bench = Bench(corpus, tmp_path, engine, window_requests=ROWS)
    stopped = threading.Event()
    bench.store.gate = lambda row: stopped.wait(10)

    async def main() -> None:
        worker = bench.make()
        running = asyncio.create_task(worker.run())
        while sum(engine.out.values()) <= 4:
            await asyncio.sleep(0.001)
        worker.stop()
        worker.stop()
        await asyncio.sleep(0.01)  # those that wait for their rows hear of it
        stopped.set()
        await running

    asyncio.run(main())
    bench.store.write_manifest()
    assert engine.released == engine.out
    assert bench.journalled() == bench.rows == sum(engine.out.values())
    again = Bench(corpus, tmp_path, CountingEngine(SPEC))
    again.run()
    assert again.rows + bench.rows == ROWS
    assert verify_store(tmp_path / "store").problems == ()


def test_a_stop_that_finds_rows_just_started_leaves_none_unawaited(
    corpus: Corpus, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC, delay_s=1), window_requests=ROWS)

    async def main() -> None:
        worker = bench.make()
        spawned = asyncio.create_task(worker.run())
        while not worker._tasks:
            await asyncio.sleep(0)
        worker.stop()
        worker.stop()
        await spawned

    asyncio.run(main())
    gc.collect()
    assert [str(w.message) for w in recwarn] == []
    assert bench.rows == 0


def test_no_room_for_the_next_shard_lets_rows_in_flight_land(corpus: Corpus, tmp_path: Path) -> None:
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC, delay_s=0.1), shards=3, window_requests=ROWS)
    lease = bench.store.lease
    assert len(bench.store.plan.shards) >= 3
    last = bench.store.plan.shards[-1]

    def full(shard: Shard, contents) -> ShardWriter | None:
        if shard == last:
            raise StoreError("disk full", "here")
        return lease(shard, contents)

    bench.store.lease = full
    with pytest.raises(StoreError, match="disk full"):
        bench.run()
    states = [bench.store.state(shard) for shard in bench.store.plan.shards]
    assert states == [ShardState.COMPLETE] * (len(states) - 1) + [ShardState.ABSENT]
    assert bench.rows == last.start


def test_a_disk_that_fails_in_the_middle_ends_the_run_and_loses_nothing_written(corpus: Corpus, tmp_path: Path) -> None:
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC), window_requests=8)

    def gate(row: int) -> None:
        if row == 10:
            raise StoreError("disk full", "here")

    bench.store.gate = gate
    with pytest.raises(StoreError, match="disk full"):
        bench.run()
    assert bench.journalled() == bench.rows
    again = Bench(corpus, tmp_path, FakeEngine(SPEC))
    again.run()
    assert again.rows + bench.rows == ROWS
    assert verify_store(tmp_path / "store").problems == ()


def test_an_error_while_finishing_is_raised_and_the_next_session_finishes(corpus: Corpus, tmp_path: Path) -> None:
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC))
    lease = bench.store.lease

    def failing(shard: Shard, contents) -> ShardWriter | None:
        writer = lease(shard, contents)
        if writer is not None:

            def finish() -> None:
                raise StoreError("disk full", "here")

            writer.finish = finish
        return writer

    bench.store.lease = failing
    with pytest.raises(StoreError, match="disk full"):
        bench.run()
    assert (bench.rows, [report.done for report in bench.reports].count(True)) == (ROWS, 0)
    again = Bench(corpus, tmp_path, FakeEngine(SPEC))
    again.run()
    assert (again.rows, again.reports[0].rows, again.reports[-1].done) == (0, ROWS, True)


def test_an_engine_that_gives_up_ends_the_run_at_once(corpus: Corpus, tmp_path: Path) -> None:
    class Dying(FakeEngine):
        async def capture(self, request: CaptureRequest) -> Captured | Failed:
            if request.rid.row == 5:
                raise EngineError("the server went away", "there")
            if request.rid.row > 5:
                await asyncio.sleep(60)
            return await super().capture(request)

    bench = Bench(corpus, tmp_path, Dying(SPEC), window_requests=8)
    with pytest.raises(EngineError, match="went away"):
        bench.run()
    assert bench.journalled() == bench.rows


def test_rows_held_back_stay_pending_when_the_run_stops(corpus: Corpus, tmp_path: Path) -> None:
    full = Failed("spool-full", retry=Retry.WAIT)
    engine = FakeEngine(SPEC, faults=lambda request: full if request.rid.row % 2 else None)
    bench = Bench(corpus, tmp_path, engine, window_requests=ROWS)
    bench.run(stops=(0.4,))
    assert bench.rows == ROWS / 2
    assert sum(report.failed for report in bench.reports) == 0
    assert sum(report.waits for report in bench.reports) > ROWS / 2
    again = Bench(corpus, tmp_path, FakeEngine(SPEC))
    again.run()
    assert verify_store(tmp_path / "store").rows == ROWS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["aux", "last"])
def test_states_that_are_not_finite_are_refused(corpus: Corpus, tmp_path: Path, value: float, where: str) -> None:
    class Broken(FakeEngine):
        async def capture(self, request: CaptureRequest) -> Captured | Failed:
            states = await super().capture(request)
            if request.rid.row != 7 or not isinstance(states, Captured):
                return states
            getattr(states, where).view(-1)[-1] = value
            hashes = [field_hash(part.contiguous().view(torch.uint8).numpy()) for part in (states.aux, states.last)]
            return Captured(states.aux, states.last, *hashes)

    bench = Bench(corpus, tmp_path, Broken(SPEC), attempts=2)
    bench.run()
    failures = [report.failure for report in bench.reports if report.failure]
    assert [(row, reason) for row, reason, _ in failures] == [(7, "not-finite")]
    assert bench.rows == ROWS - 1


class Held:
    """States that lie elsewhere, and end before their last byte where `cut`."""

    def __init__(self, tensor: torch.Tensor, cut: bool = False) -> None:
        self._data, self._cut = tensor.view(torch.uint8).numpy().tobytes(), cut

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def pieces(self, size: int) -> Iterator[memoryview]:
        yield memoryview(self._data)[:100]
        if self._cut:
            raise StatesLost(Failed("record-damaged", "it ended early"))
        yield memoryview(self._data)[100:]


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("fault", ["checksum-differs", "record-damaged"])
def test_states_that_prove_wrong_on_their_way_are_tried_again_or_given_up(
    corpus: Corpus, tmp_path: Path, fault: str, for_good: bool
) -> None:
    """Their bytes lay in the row's place already: nothing of them is left."""

    class Struck(CountingEngine):
        async def capture(self, request: CaptureRequest) -> Captured | Failed:
            states = await super().capture(request)
            assert isinstance(states, Captured)
            assert isinstance(states.aux, torch.Tensor)
            assert isinstance(states.last, torch.Tensor)
            wrong = request.rid.row == 7 and (for_good or request.rid.attempt == 0)
            aux, last = Held(states.aux), Held(states.last, wrong and fault == "record-damaged")
            claim = states.last_xxh3 ^ (wrong and fault == "checksum-differs")
            return replace(states, aux=aux, last=last, last_xxh3=claim)

    engine = Struck(SPEC)
    bench = Bench(corpus, tmp_path / "struck", engine, attempts=3)
    bench.run()
    assert [report.retried[:3] for report in bench.reports if report.retried] == [
        (7, attempt, fault) for attempt in range(2 if for_good else 1)
    ]
    assert [report.failure[:2] for report in bench.reports if report.failure] == [(7, fault)] * for_good
    assert engine.released == engine.out
    assert verify_store(bench.store.root).ok
    failing = {7: Failed(fault, retry=Retry.NEVER)} if for_good else None
    calm = Bench(corpus, tmp_path / "calm", FakeEngine(SPEC, faults=failing))
    calm.run()
    (name,) = [shard.name for shard in calm.store.plan.shards]
    assert (bench.store.root / name).read_bytes() == (calm.store.root / name).read_bytes()


def test_rows_do_not_wait_for_a_full_shards_fsync(corpus: Corpus, tmp_path: Path) -> None:
    """The first shards' ends are held until the last row of all is stored."""
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC), shards=6)
    lease, shards = bench.store.lease, bench.store.plan.shards
    assert len(shards) > 5  # more than there are threads for rows
    stored = threading.Event()

    def holding(shard: Shard, contents) -> ShardWriter | None:
        writer = lease(shard, contents)
        if writer is not None and shard is not shards[-1]:
            finish = writer.finish

            def held() -> None:
                assert stored.wait(30)
                finish()

            writer.finish = held
        return writer

    def gate(row: int) -> None:
        if row == ROWS - 1:
            stored.set()

    bench.store.lease, bench.store.gate = holding, gate
    bench.run()
    assert bench.rows == ROWS
    assert verify_store(bench.store.root).ok


def test_a_row_group_is_decoded_once_however_many_shards_lie_in_it(corpus: Corpus, tmp_path: Path) -> None:
    class Counting(Corpus):
        reads = 0

        def _read(self, number: int):
            type(self).reads += 1
            return super()._read(number)

    counting = Counting.open(corpus.path)
    bench = Bench(counting, tmp_path, FakeEngine(SPEC), shards=6)
    bench.run()
    assert len(bench.store.plan.shards) >= 6
    assert (bench.rows, Counting.reads) == (ROWS, 1)


def test_what_a_resume_does_not_believe_is_one_line_a_kind(corpus: Corpus, tmp_path: Path) -> None:
    """A power loss may have taken the states of thousands of journalled rows."""
    bench = Bench(corpus, tmp_path, FakeEngine(SPEC), window_requests=1)

    def full(row: int) -> None:
        if row == ROWS - 1:
            raise StoreError("disk full", "here")

    bench.store.gate = full
    with pytest.raises(StoreError):
        bench.run()
    (shard,) = bench.store.plan.shards
    aux = bench.store.info.layout(shard).tensors["aux"]
    with bench.store.paths(shard).part.open("r+b") as part:
        part.seek(aux.start)
        part.write(bytes(aux.stop - aux.start))
    bench.store.gate = lambda row: None
    bench.reports.clear()
    bench.run()
    notes = [report.note for report in bench.reports if report.note]
    assert len(notes) == 1
    assert notes[0].startswith(f"{shard.name}: row-differs: ")
    assert notes[0].endswith(f" (and {ROWS - 2} more); captured again")
    assert bench.rows == ROWS
    assert verify_store(bench.store.root).ok
