"""Extraction beside everything else a server does: other users, imitators, aborts, disconnects, a tiny KV pool.

One server: radix cache on, chunks of 64 tokens that decoding requests may share, a KV pool of 1,100 tokens, so that
decoding requests are taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.capture.contract import LAST_PARAM, SPEC_FILE, SPEC_PARAM, CaptureReply, RequestId
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, Interrupted, StoreError
from eyas.extract.build import Job
from eyas.extract.engine import Captured, CaptureRequest, Failed, Retry
from eyas.extract.runner import plan
from eyas.extract.sglang_client import SGLangClient
from eyas.positions import kept_runs
from faults_support import (
    CONTEXT,
    EDGES,
    LONGEST,
    SERVER_FLAGS,
    Neighbours,
    Run,
    hello,
    make_corpus,
    must_be_empty,
    settings,
    some_lengths,
    wait_until,
)
from servers import Server, sglang_server
from sglang_cpu.models import VOCAB_SIZE

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

POOL = 1100  # tokens: the longest row fits, and not all users of a test
TAKEN_BACK = "KV cache pool is full"  # what the server logs of it


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*SERVER_FLAGS, "--enable-mixed-chunk", "--max-total-tokens", str(POOL)]
    flags += ["--schedule-conservativeness", "0.05"]  # admits more than fits, so that some are taken back
    with sglang_server(model, tmp_path_factory.mktemp("traffic"), flags=flags) as running:
        yield running


@pytest.fixture
def new_run(server: Server, model: Path, tmp_path: Path) -> Callable[..., Run]:
    def make(lengths: list[int], *overrides: str, name: str = "store") -> Run:
        corpus = make_corpus(tmp_path / f"{name}.parquet", lengths, seed=len(lengths))
        return Run(corpus, tmp_path / name, model, server, settings(server, *overrides))

    return make


@contextmanager
def repeating(function: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Call it over and over in the background while the body runs; the caller's exception counts."""
    stop = threading.Event()

    def go() -> None:
        while not stop.is_set():
            function()

    with ThreadPoolExecutor(threads) as pool:
        going = [pool.submit(go) for _ in range(threads)]
        try:
            yield
        finally:
            stop.set()
        for each in going:
            each.result()


def test_a_servers_own_warm_up_is_not_captured(server: Server) -> None:
    assert [path.name for path in server.spool.iterdir()] == [SPEC_FILE]
    log = server.log.read_text(errors="replace")
    assert "The server is fired up" in log
    assert re.search(r'"POST /generate HTTP/1.1" 200', log), "no warm-up was sent"


def test_rows_at_the_edges_of_chunk_and_context(new_run: Callable[..., Run], neighbours: Neighbours) -> None:
    run = new_run([*EDGES, *EDGES])
    with neighbours.around():
        summary = run.now()
    run.must_end_well(summary)


@pytest.mark.parametrize("length", [LONGEST + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * POOL])
def test_a_row_above_the_context_limit(new_run: Callable[..., Run], server: Server, length: int) -> None:
    """Refused before the run; a server that admits less than it said fails it by name, and for good."""
    run = new_run([40, length, 64])
    with pytest.raises(ConfigError, match=f"1 rows are longer than the engine admits.*{LONGEST}") as caught:
        plan(run.corpus, run.store, cfg=run.cfg, model=str(run.model), server=server.url).check(run.store)
    assert caught.value.where == "row 1"
    with pytest.raises(ConfigError, match="longer than the engine admits"):
        run.now()
    assert not run.store.exists()

    async def asked() -> Captured | Failed | CaptureReply:
        client = SGLangClient(server.url, run.cfg.server)
        try:
            request = CaptureRequest(RequestId("t" * 8, "s" * 8, 0, 0), [11] * length, [0, 1])
            return await client.generate(request, hello(server).spec_id)
        finally:
            await client.close()

    failed = asyncio.run(asked())
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == ("row-too-long", Retry.NEVER), failed
    must_be_empty(server.spool)


def test_decoding_users_requests_are_taken_back_while_rows_are_prefilled(
    new_run: Callable[..., Run], neighbours: Neighbours
) -> None:
    """More decoding users than the KV pool holds: SGLang takes some back and prefills them again, mixed with ours."""
    before = server_log(neighbours.server).count(TAKEN_BACK)
    run = new_run(some_lengths(50, seed=1))
    with neighbours.around(16, tokens=150, pause_s=0), run.going() as going:
        going.exception()
        wait_until(lambda: server_log(neighbours.server).count(TAKEN_BACK) > before, "nothing was taken back")
    run.must_end_well(going.result())


def server_log(server: Server) -> str:
    return server.log.read_text(errors="replace")


def test_users_who_hang_up(new_run: Callable[..., Run], neighbours: Neighbours) -> None:
    """In the queue, in prefill, while decoding; under ids of their own and under ids like ours."""
    server, rng = neighbours.server, random.Random(3)
    hung_up = []

    def hang_up() -> None:
        body = {
            "rid": f"eyas.{'x' * 8}.{'y' * 8}.{rng.randrange(10**8):08d}.00",
            "input_ids": rng.choices(range(10, VOCAB_SIZE), k=rng.choice([10, 150, 500])),
            "sampling_params": {"max_new_tokens": 100},
        }
        if rng.random() < 0.5:
            del body["rid"]
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/generate", json=body, timeout=rng.choice([0.02, 0.1, 0.4]))
        hung_up.append(1)

    run = new_run(some_lengths(50, seed=2))
    with neighbours.around(2), repeating(hang_up, 2), run.going() as going:
        pass
    assert len(hung_up) > 10
    run.must_end_well(going.result())


@pytest.mark.parametrize("whose", ["one of ours", "ours by prefix", "all"])
def test_abort_request(new_run: Callable[..., Run], server: Server, whose: str) -> None:
    """Many times in the run, in prefill where they meet one: rows fail, are tried again, and end right."""
    run = new_run(some_lengths(60, seed=4, longest=600), "extract.attempts=50")

    def abort(body: dict[str, Any]) -> None:
        httpx.post(f"{server.url}/abort_request", json=body, timeout=30).raise_for_status()

    def abort_some() -> None:
        match whose:
            case "one of ours":
                for rid in list(in_flight):
                    abort({"rid": rid})
            case "ours by prefix":  # SGLang aborts what it knows by the exact id, and all that begin like it
                body = {"rid": f"eyas.{_run_of(run)}", "input_ids": [11] * 200}
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(f"{server.url}/generate", json=body, timeout=0.05)
                abort({"rid": body["rid"]})
            case _:
                abort({"abort_all": True})

    with in_flight_of_ours() as in_flight, run.going() as going:
        for times in itertools.count():
            if going.done() or (times >= 20 and run.retries()):
                break
            abort_some()
            time.sleep(0.1)
    summary = going.result()
    assert summary.retries > 0, "no abort met a row"
    run.must_end_well(summary)


@contextmanager
def in_flight_of_ours() -> Iterator[set[str]]:
    """Ids of the requests that runs of this process wait for."""
    send, waiting = SGLangClient.generate, set[str]()

    async def watched(client: SGLangClient, request: CaptureRequest, spec_id: str) -> CaptureReply | Failed:
        waiting.add(str(request.rid))
        try:
            return await send(client, request, spec_id)
        finally:
            waiting.discard(str(request.rid))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangClient, "generate", watched)
        yield waiting


def _run_of(run: Run) -> str:
    return Job(run.corpus, run.store, "", (), run.cfg, "").run


# --- those who imitate us ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "kept"), [("other", "same"), ("same", "other"), ("same", "same")])
def test_a_user_takes_our_very_ids(new_run: Callable[..., Run], server: Server, tokens: str, kept: str) -> None:
    """Before, at the same time and after ours, under exactly our run, session, row and attempt, with our spec."""
    run = new_run(some_lengths(40, seed=5), "extract.window_requests=1", "extract.attempts=10")
    rows = list(Corpus.open(run.corpus).rows(0, 40))
    agreed = hello(server).spec_id
    sent, before_ours = [], []

    def imitate(row: int) -> None:
        ids = rows[row].tokens.tolist()
        runs = kept_runs(rows[row].loss_mask, "loss") if kept == "same" else [0, 1]
        body = {
            "rid": str(RequestId(_run_of(run), run.session(), row, 0)),
            "input_ids": ids if tokens == "same" else [(token + 1) % VOCAB_SIZE for token in ids],
            "extra_key": f"imitator-{len(sent)}",
            "sampling_params": {"max_new_tokens": 1, "custom_params": {SPEC_PARAM: agreed, LAST_PARAM: runs}},
        }
        sent.append(httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code)
        if sent[-1] == 200 and row > run.rows_stored():  # ours are asked for one after the other
            before_ours.append(row)

    try:
        with run.going() as going, ThreadPoolExecutor(6) as pool:
            for job in [pool.submit(imitate, row) for row in [*reversed(range(40)), *range(40)]]:
                job.result()
        summary = going.result()
    finally:  # what was sent after the run had ended nobody fetches
        wait_until(lambda: not list(server.spool.glob(".eyas.*")), "a record is still being written")
        for path in server.spool.glob(f"eyas.{_run_of(run)}.*"):
            path.unlink(missing_ok=True)
    assert sent.count(200) > 10
    assert before_ours, "no imitator was ever quicker"
    run.must_end_well(summary)


def test_users_with_ids_like_ours(new_run: Callable[..., Run], neighbours: Neighbours) -> None:
    """Malformed and well-formed, with and without our parameters: they get their tokens, and no record."""
    server = neighbours.server
    names = ["eyas.", "eyas.x", "eyas.../../x", "eyas." + "a" * 300, "eyas.AAAAAAAA.bbbbbbbb.00000001.00", "EYAS.x"]
    names.append(f"eyas.{'q' * 8}.{'r' * 8}.00000001.01")
    params: list[dict[str, Any] | None] = [None, {SPEC_PARAM: "0" * 32, LAST_PARAM: [0, 1]}, {SPEC_PARAM: 7}]
    params.append({LAST_PARAM: "x", "eyas": [1]})
    run = new_run(some_lengths(40, seed=6), "extract.window_requests=2")

    def ask(name: str, given: dict[str, Any] | None) -> list[int]:
        body = Neighbours.body(0, 8)
        if given is not None:
            body["sampling_params"]["custom_params"] = given
        return server.generate(rid=name, **body)["output_ids"]

    with run.going() as going:
        got = [ask(name, given) for name in names for given in params]
    assert all(tokens == neighbours.alone(0)[:8] for tokens in got)
    run.must_end_well(going.result())


# --- several of us ----------------------------------------------------------------------------------------------------


def test_two_clients_on_one_server(new_run: Callable[..., Run], neighbours: Neighbours) -> None:
    """Two stores of equally long rows, one of them filled by two worker processes."""
    one, two = (new_run([130] * 40 + some_lengths(20, seed=n), name=f"store{n}") for n in (1, 2))
    with neighbours.around(2), one.going() as first, two.going(workers=2) as second:
        pass
    one.must_end_well(first.result())
    two.must_end_well(second.result())


def test_two_clients_on_one_store_share_its_shards(new_run: Callable[..., Run]) -> None:
    """Whole shards are leased; the client that finds the last ones leased says so, and nothing is stored twice."""
    run = new_run([200] * 60, "store.shard_bytes=2MB")
    results = []
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run.now, workers=2), pool.submit(run.now, workers=2)]:
            try:
                results.append(future.result())
            except StoreError as error:
                assert "another process has leased them" in error.what
    run.must_end_well(run.now())
    assert sum(summary.rows_now for summary in results) <= 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_client_that_is_stopped_resumes(new_run: Callable[..., Run], number: signal.Signals) -> None:
    run = new_run(some_lengths(60, seed=7), "extract.window_requests=2")
    config = run.store.with_suffix(".yaml")
    config.write_text(run.cfg.model_dump_json())
    command = [sys.executable, "-m", "eyas", "extract", str(run.corpus), str(run.store), "--model", str(run.model)]
    command += ["--server", run.server.url, "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: run.rows_stored() > 3 or process.poll() is not None, "no row was ever stored")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else Interrupted.exit_code), errors
    assert "Traceback" not in errors
    assert 0 < run.rows_stored() < 60
    run.must_end_well(run.now())
