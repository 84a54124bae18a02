"""What the fault tests share: a run in the background, its neighbours on the server, and the law that must hold after.

The law: every row is right or failed by name; none lost, none doubled, none wrong; the server lives on; its other users
get the same tokens as alone and no `eyas` key; the spool is empty at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from eyas.capture.contract import SPEC_FILE, CaptureReply, ServerHello
from eyas.config import Config, load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.engine import CaptureRequest, Failed
from eyas.extract.runner import Summary, extract
from eyas.extract.sglang_client import SGLangClient
from eyas.store.reader import StoreReader
from eyas.verify import verify
from servers import FAULTS_ENV, Server
from sglang_cpu.models import VOCAB_SIZE

CHUNK = 64
CONTEXT = 768
LONGEST = CONTEXT - 7
#: One token below, at and above the chunk size and twice it, and the longest row the server admits.
EDGES = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, LONGEST - 1, LONGEST)
SERVER_FLAGS = ("--chunked-prefill-size", str(CHUNK), "--context-length", str(CONTEXT))


def quiet() -> Console:
    return Console(file=io.StringIO())


def make_corpus(path: Path, lengths: Sequence[int], *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Random rows of the given lengths. Every fifth is an exact copy of the one before it where lengths allow."""
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="named-by-the-test", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        before = np.empty(0, np.int64)
        for row, length in enumerate(lengths):
            tokens = rng.integers(10, vocab_size, length)
            if row % 5 == 4 and len(before) == length:
                tokens = before
            mask = (np.arange(length) >= length // 3).astype(np.uint8)
            mask[-1] = length == 1
            writer.add(str(row), tokens, mask)
            before = tokens
    return path


def some_lengths(rows: int, *, seed: int = 0, longest: int = 300) -> list[int]:
    """Lengths in twos and threes, so that many rows are equally long."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while len(lengths) < rows:
        lengths += [rng.choice([1, 5, 40, CHUNK - 1, CHUNK, CHUNK + 1, 130, 200, longest])] * rng.choice([1, 2, 3])
    return lengths[:rows]


def settings(server: Server, *overrides: str) -> Config:
    """A client's settings for a server of tests: patience counted in seconds."""
    return load(
        overrides=[
            f"server.spool={server.spool}",
            "server.record_deadline_s=5",
            "server.restart_timeout_s=300",
            "capture.dtype=f32",
            "extract.window_requests=8",
            "extract.attempts=4",
            "store.shard_bytes=16MB",
            "store.reserve_bytes=0",
            *overrides,
        ]
    )


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """`eyas extract` of one corpus into one store."""

    corpus: Path
    store: Path
    model: Path
    server: Server
    cfg: Config

    def now(self, **kwargs: Any) -> Summary:
        """Run it, here."""
        return extract(
            self.corpus,
            self.store,
            cfg=self.cfg,
            model=str(self.model),
            server=self.server.url,
            console=quiet(),
            **kwargs,
        )

    @contextmanager
    def going(self, **kwargs: Any) -> Iterator[Future[Summary]]:
        """Run it in a thread; entered when the first row is stored, left when the run has ended."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.now, **kwargs)
            wait_until(lambda: future.done() or self.rows_stored() > 0, "no row was ever stored")
            yield future
            future.exception()  # waits; raised where the test asks for the result

    def rows_stored(self) -> int:
        """Entries of all journals and finished shards, read from outside."""
        rows = 0
        for file in self.store.glob("*.journal"):
            with contextlib.suppress(OSError):  # a journal goes when its shard is done
                rows += file.read_bytes().count(b'"row":')
        for file in self.store.glob("shard-*.json"):
            with contextlib.suppress(OSError, ValueError):
                start, stop = json.loads(file.read_text())["rows"]
                rows += stop - start
        return rows

    def session(self) -> str:
        """The session of the run that is going, as its event log's name tells."""
        return self._log().stem

    def retries(self) -> int:
        """Rows the run that is going has asked for again, as its event log tells."""
        return self._log().read_text().count('"row_retried"')

    def retried_for(self, reason: str) -> int:
        """Rows asked for again for one reason, in the last run."""
        events = map(json.loads, self._log().read_text().splitlines())
        return sum(event["event"] == "row_retried" and event["reason"] == reason for event in events)

    def _log(self) -> Path:
        logs = [path for path in (self.store / "events").glob("*.jsonl") if not path.name.startswith("verify-")]
        return max(logs, key=lambda path: path.stat().st_mtime_ns)

    def must_be_right(self, *, failed: int = 0) -> None:
        """The law for the store: all of its rows recomputed by transformers, with every control told apart."""
        rows = len(Corpus.open(self.corpus))
        report = verify(self.store, corpus=self.corpus, against=str(self.model), sample=0, console=quiet())
        report.check()
        assert report.comparison is not None
        assert (report.rows, report.failed, report.comparison.rows) == (rows - failed, failed, rows - failed)
        reader = StoreReader(self.store)
        controls = set(report.comparison.nearest)
        for layer in reader.spec.layers:
            assert {f"{layer - 1} as {layer}", f"{layer + 1} as {layer}", f"shifted by one as {layer}"} <= controls
        assert {"pre-norm as last", "shifted by one as last"} <= controls

    def must_end_well(self, summary: Summary) -> None:
        """`must_be_right`, none failed, and nothing left in the spool."""
        assert (summary.rows_done, summary.failed) == (summary.rows, 0), summary.first_failures
        self.must_be_right()
        must_be_empty(self.server.spool)


@contextmanager
def held() -> Iterator[None]:
    """The runs of this process ask for no further row while the body runs: however fast, they stay in their middle."""
    send, released = SGLangClient.generate, threading.Event()

    async def wait_and_send(client: SGLangClient, request: CaptureRequest, spec_id: str) -> CaptureReply | Failed:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return await send(client, request, spec_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangClient, "generate", wait_and_send)
        try:
            yield
        finally:
            released.set()


def must_be_empty(spool: Path, patience_s: float = 10.0) -> None:
    """Nothing but spec.json in the spool; writers may be about to finish, and the client about to remove."""

    def left() -> list[str]:
        return [path.name for path in spool.iterdir() if path.name != SPEC_FILE]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "", patience_s)
    assert left() == []


def wait_until(happened: Callable[[], Any], otherwise: str, patience_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.01)


# --- a server's other users -------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """Other users of a server, asking the same few things over and over.

    Attributes:
        server: whose.
        health: whether its health is asked for, too.
        asked: kinds of request -> how many were answered.
        seconds: how long each took.
        wrong: what was not as it is alone.
    """

    server: Server
    health: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _alone: dict[int, list[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for seed in range(3):
            self._alone[seed] = self.server.generate(**self.body(seed, 24))["output_ids"]

    @contextmanager
    def around(self, users: int = 4, *, tokens: int = 24, pause_s: float = 0.02) -> Iterator[None]:
        """They ask while the body runs; afterwards every answer was right and at least one came."""
        stop = threading.Event()
        began = self.asked.total()
        with ThreadPoolExecutor(users + 1) as pool:
            going = [pool.submit(self._ask_on, stop, number, tokens, pause_s) for number in range(users)]
            if self.health:
                going.append(pool.submit(self._poll_health, stop))
            try:
                yield
            finally:
                stop.set()
        for each in going:
            each.result()
        assert self.wrong == []
        assert self.asked.total() > began

    def alone(self, seed: int) -> list[int]:
        """What the server answers to a request when it has nothing else to do."""
        return self._alone[seed]

    def ask(self, kind: str, seed: int, tokens: int = 24, rid: str | None = None) -> None:
        """One request; what differs from the answer to it alone goes to `wrong`."""
        body = self.body(seed, tokens) | ({"rid": rid} if rid else {})
        began_s = time.monotonic()
        replies = self._streamed(body) if kind == "streamed" else [self.server.generate(**body)]
        with self._lock:
            self.asked[kind] += 1
            self.seconds.append(time.monotonic() - began_s)
            if (got := replies[-1]["output_ids"][:24]) != self._alone[seed][: len(got)] or not got:
                self.wrong.append(f"{kind}: tokens {got}, alone {self._alone[seed]}")
            if any("eyas" in reply["meta_info"] for reply in replies):
                self.wrong.append(f"{kind}: an eyas key")

    def _ask_on(self, stop: threading.Event, number: int, tokens: int, pause_s: float) -> None:
        for count in itertools.count(number):
            if stop.is_set():
                return
            kind = ("plain", "named", "streamed")[count % 3]
            self.ask(kind, count % 3, tokens, f"user-{number}-{count}" if kind == "named" else None)
            stop.wait(pause_s)

    def _poll_health(self, stop: threading.Event) -> None:
        """Twenty times a second, as far as the server answers; each is a request of one token with an id of its own."""
        with httpx.Client(timeout=60) as client:
            while not stop.wait(0.05):
                status = client.get(f"{self.server.url}/health_generate").status_code
                with self._lock:
                    self.asked["health"] += 1
                    if status != 200:
                        self.wrong.append(f"health: HTTP {status}")

    def _streamed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        with httpx.stream("POST", f"{self.server.url}/generate", json=body | {"stream": True}, timeout=60) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @staticmethod
    def body(seed: int, tokens: int) -> dict[str, Any]:
        ids = random.Random(seed).choices(range(10, VOCAB_SIZE), k=30 + 50 * seed)
        # Not ignore_eos: of such requests SGLang knows the length, admits only what fits and takes none back.
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}


def hello(server: Server) -> ServerHello:
    return ServerHello.from_json((server.spool / SPEC_FILE).read_text())


# --- faults inside the server -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injector:
    """Steers `eyas_fault_injection` in a server that was started with `env`."""

    control: Path

    @property
    def env(self) -> dict[str, str]:
        return {FAULTS_ENV: str(self.control)}

    @contextmanager
    def injecting(self, **steps: Mapping[str, float]) -> Iterator[None]:
        """Faults while the body runs; `_` in a step's name stands for `-`."""
        self.write(**steps)
        try:
            yield
        finally:
            self.write()

    def write(self, **steps: Mapping[str, float]) -> None:
        named = {step.replace("_", "-"): dict(asked) for step, asked in steps.items()}
        text = json.dumps({"seed": 1, "steps": named})
        new = self.control.with_name(f"{self.control.name}.new")
        new.write_text(text)
        new.rename(self.control)

    def counts(self) -> Counter[str]:
        """Injections so far, by step."""
        count = self.control.with_name(f"{self.control.name}.injected")
        return Counter(count.read_text().split() if count.exists() else ())
