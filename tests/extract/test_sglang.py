from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sglang_double import PluginServer, changed, in_memory, reply_of

from eyas.capture.contract import PROBE_ROW, SPEC_FILE, CaptureReply, CaptureSpec, Refusal, RequestId, token_hash
from eyas.errors import EngineError
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.fake import FakeEngine
from eyas.extract.proof import Proof
from eyas.extract.record import RETRY
from eyas.extract.sglang import SGLangEngine, check_reply

SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)
RUN, SESSION = "run00000", "ses00000"


def request(row: int = 0, tokens: list[int] | None = None, runs: list[int] | None = None) -> CaptureRequest:
    ids = [row + 1, 5, 6, 7] if tokens is None else tokens
    return CaptureRequest(RequestId(RUN, SESSION, row, 0), ids, [1, len(ids)] if runs is None else runs)


@pytest.fixture
def server(tmp_path: Path) -> PluginServer:
    return PluginServer(SPEC, tmp_path / "spool")


def engine_of(server: PluginServer, spec: CaptureSpec = SPEC, share: int = 1, **settings: Any) -> SGLangEngine:
    cfg = server.config(**settings)
    return SGLangEngine(server.url, spec, cfg, RUN, SESSION, share, transport=server.transport)


def with_engine(engine: SGLangEngine, work: Callable[[SGLangEngine], Awaitable[Any]], start: bool = True) -> Any:
    async def scenario() -> Any:
        try:
            if start:
                await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(scenario())


def start(engine: SGLangEngine) -> EngineInfo:
    return with_engine(engine, lambda engine: engine.start(), start=False)


def capture_one(server: PluginServer, asked: CaptureRequest | None = None, **settings: Any) -> Captured | Failed:
    return with_engine(engine_of(server, **settings), lambda engine: engine.capture(asked or request()))


# --- start


def test_start_proves_the_whole_path_and_leaves_nothing_behind(server: PluginServer) -> None:
    info = start(engine_of(server, share=4))
    assert info.spec == SPEC
    assert info.max_row_tokens == 2000
    assert info.spool_bytes == (1 << 30) // 4
    assert info.provenance == {"engine": "sglang", "sglang": "0.5.23", "host": "mock", "model_check": "fingerprint"}
    (probe,) = server.asked
    rid = RequestId.parse(probe["rid"])
    assert rid is not None
    assert (rid.run, rid.row) == (RUN, PROBE_ROW)
    assert rid.session != SESSION
    assert server.records() == []


def test_two_workers_of_one_session_probe_under_different_ids(server: PluginServer) -> None:
    async def scenario() -> None:
        engines = [engine_of(server) for _ in range(8)]
        await asyncio.gather(*(engine.start() for engine in engines))
        for engine in engines:
            await engine.close()

    asyncio.run(scenario())
    assert len({body["rid"] for body in server.asked}) == 8


def test_spool_is_found_by_the_servers_port(server: PluginServer) -> None:
    assert engine_of(server).spool == server.spool
    assert engine_of(server, spool=None).spool == Path("/dev/shm/eyas-30000")


def test_open_spec_takes_the_servers_word_and_says_so(server: PluginServer) -> None:
    info = start(engine_of(server, replace(SPEC, model="")))
    assert info.spec == SPEC
    assert "unchecked" in info.provenance["model_check"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": "0" * 32}, "serves another model"),
        ({"hidden_size": 48}, "serves another model"),
        ({"num_layers": 12}, "serves another model"),
        ({"vocab_size": 7}, "serves another model"),
        ({"layers": (1, 4, 6)}, r"captures other layers.*\[1, 3, 6\] != \[1, 4, 6\]"),
        ({"layers": (1, 3)}, "captures other layers"),
        ({"last": "all"}, "captures with other settings.*last"),
        ({"dtype": "f32"}, "captures with other settings.*dtype"),
    ],
)
@pytest.mark.parametrize("open_spec", [False, True])
def test_another_agreement_is_refused_by_name(
    change: dict[str, Any], what: str, open_spec: bool, server: PluginServer
) -> None:
    if open_spec and "model" in change:
        pytest.skip("nothing to compare")
    server.restart(replace(SPEC, **change))
    with pytest.raises(EngineError, match=what) as error:
        start(engine_of(server, replace(SPEC, model="") if open_spec else SPEC))
    assert next(iter(change)) in str(error.value)
    assert server.records() == []


def test_no_server_is_named(server: PluginServer) -> None:
    engine = SGLangEngine("http://127.0.0.1:9", SPEC, server.config(), RUN, SESSION)
    with pytest.raises(
        EngineError, match=r"no server: http://127.0.0.1:9 \(is the URL right, and the server running\?"
    ):
        start(engine)


def test_server_without_the_plugin_is_named_even_with_an_old_spool(server: PluginServer) -> None:
    server.probe_answers = lambda _: reply_of(None)
    with pytest.raises(EngineError, match=r"without the capture plugin.*eyas serve"):
        start(engine_of(server))
    (server.spool / SPEC_FILE).unlink()
    with pytest.raises(EngineError, match="without the capture plugin"):
        start(engine_of(server))


def test_plugin_whose_spool_we_do_not_see_is_named(server: PluginServer, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"found no spool.*elsewhere.*server\.spool"):
        start(engine_of(server, spool=tmp_path / "elsewhere"))


def test_spool_of_another_server_is_named(server: PluginServer, tmp_path: Path) -> None:
    other = PluginServer(replace(SPEC, dtype="f16"), tmp_path / "other")
    with pytest.raises(EngineError, match="belongs to another server"):
        start(engine_of(server, spool=other.spool))


def test_spool_of_a_twin_server_is_named(server: PluginServer, tmp_path: Path) -> None:
    twin = PluginServer(SPEC, tmp_path / "twin")
    with pytest.raises(EngineError, match=r"probe's record did not come.*record-late"):
        start(engine_of(server, spool=twin.spool, record_deadline_s=0.1))


def test_plugin_of_another_contract_is_named(server: PluginServer) -> None:
    path = server.spool / SPEC_FILE
    path.write_text(path.read_text().replace('"contract": 1', '"contract": 9'))
    with pytest.raises(EngineError, match="contract version 9"):
        start(engine_of(server))


def test_reply_of_another_contract_is_named(server: PluginServer) -> None:
    server.probe_answers = lambda _: reply_of({"status": "accepted", "spec": "x"})
    with pytest.raises(EngineError, match="cannot understand the plugin"):
        start(engine_of(server))


def test_wrong_key_is_named(server: PluginServer) -> None:
    server.api_key = "right"
    with pytest.raises(EngineError, match="EYAS_API_KEY"):
        start(engine_of(server, api_key="wrong"))
    assert start(engine_of(server, api_key="right")).spec == SPEC


def test_failed_plugin_is_named_by_its_own_words(server: PluginServer) -> None:
    word = CaptureReply("refused", "", "0" * 32, 4, "plugin-error", "no such layer")
    server.probe_answers = lambda _: reply_of(word.to_dict())
    with pytest.raises(EngineError, match=r"plugin-error.*no such layer"):
        start(engine_of(server))


def test_full_spool_is_named(server: PluginServer) -> None:
    word = CaptureReply("refused", SPEC.spec_id, "0" * 32, 4, "spool-full", "8 GiB of 8 GiB")
    server.probe_answers = lambda _: reply_of(word.to_dict())
    with pytest.raises(EngineError, match="the spool is full"):
        start(engine_of(server))


def test_refused_probe_is_named(server: PluginServer) -> None:
    server.probe_answers = lambda _: httpx.Response(400, json={"error": {"message": "unknown key custom_params"}})
    with pytest.raises(EngineError, match=r"refuses the probe: bad-request.*custom_params"):
        start(engine_of(server))


def test_wrong_record_of_the_probe_is_named_and_removed(server: PluginServer) -> None:
    server.faults_hit_probes = True
    server.header = changed(tokens="0" * 32)
    with pytest.raises(EngineError, match="record is wrong: tokens-differ"):
        start(engine_of(server))
    assert server.records() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_spool_we_may_not_clean_is_named(server: PluginServer) -> None:
    server.record_delay_s = 0.05

    async def scenario(engine: SGLangEngine) -> None:
        job = asyncio.create_task(engine.start())
        while not server.records():
            await asyncio.sleep(0.005)
        server.spool.chmod(0o500)
        try:
            await job
        finally:
            server.spool.chmod(0o700)

    with pytest.raises(EngineError, match="may not remove records"):
        with_engine(engine_of(server), scenario, start=False)


# --- capture


def test_states_arrive_and_release_removes_the_record(server: PluginServer) -> None:
    asked = request()
    got = capture_one(server, asked)
    assert isinstance(got, Captured)
    expected = asyncio.run(FakeEngine(SPEC).capture(asked))
    assert isinstance(expected, Captured)
    states = in_memory(got)
    assert torch.equal(states.aux, expected.aux)
    assert torch.equal(states.last, expected.last)
    assert server.records() == [f"{asked.rid}.safetensors"]
    got.release()
    got.release()
    assert server.records() == []


@pytest.mark.parametrize("reason", list(Refusal))
def test_every_refusal_keeps_its_name(reason: Refusal, server: PluginServer) -> None:
    server.reply = lambda word: {**word, "status": "refused", "reason": str(reason), "detail": "why"}
    assert capture_one(server) == Failed(str(reason), "why", RETRY[reason])
    assert server.records() == []


@pytest.mark.parametrize(
    ("change", "reason", "retry"),
    [
        ({"status": "perhaps"}, "bad-reply", Retry.PROBE),
        ({"spec_id": "0" * 32}, "spec-differs", Retry.PROBE),
        ({"tokens": token_hash([9, 9, 9, 9])}, "tokens-differ", Retry.ATTEMPT),
        ({"rows": 3}, "rows-differ", Retry.ATTEMPT),
        ({"extra": 1}, "bad-reply", Retry.PROBE),
        (None, "no-plugin-reply", Retry.PROBE),
    ],
)
def test_wrong_words_of_the_plugin_have_names(
    change: dict[str, Any] | None, reason: str, retry: Retry, server: PluginServer
) -> None:
    server.reply = lambda word: None if change is None else {**word, **change}
    failed = capture_one(server)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, retry)
    assert server.records() == []  # the record that came all the same


def test_check_reply_accepts_only_this_request() -> None:
    word = CaptureReply("accepted", SPEC.spec_id, token_hash(request().tokens), 4)
    assert check_reply(word, request(), SPEC) is None
    assert check_reply(word, request(1), SPEC) is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rid": "eyas.run00000.ses00000.00000001.00"}, "rid-differs"),
        ({"spec_id": "0" * 32}, "spec-differs"),
        ({"tokens": "0" * 32}, "tokens-differ"),
        ({"rows": 5}, "rows-differ"),
        ({"positions": 4}, "positions-differ"),
        ({"runs": "0" * 16}, "positions-differ"),
        ({"chunks": [[0, 1], [2, 4]]}, "chunks-gap"),
        ({"aux": "xyz"}, "record-damaged"),
    ],
)
def test_wrong_headers_have_names_and_are_removed(fields: dict[str, Any], reason: str, server: PluginServer) -> None:
    server.header = changed(**fields)
    failed = capture_one(server)
    assert isinstance(failed, Failed)
    assert failed.reason == reason
    assert server.records() == []


def test_cut_record_is_named_and_removed(server: PluginServer) -> None:
    server.record = lambda data: data[:-1]
    failed = capture_one(server)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-damaged"
    assert server.records() == []


def test_record_that_never_comes_is_late(server: PluginServer) -> None:
    server.record = lambda _: None
    failed = capture_one(server, record_deadline_s=0.1)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == ("record-late", Retry.PROBE)


def test_record_that_comes_too_late_is_removed(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> Failed | Captured:
        server.record_delay_s = 0.3
        failed = await engine.capture(request())
        await asyncio.sleep(0.5)
        assert server.records() == [f"{request().rid}.safetensors"]
        return failed

    failed = with_engine(engine_of(server, record_deadline_s=0.1), work)
    assert isinstance(failed, Failed)
    assert server.records() == []


@pytest.mark.parametrize(
    ("response", "reason", "retry"),
    [
        (
            httpx.Response(400, json={"error": {"message": "The input is longer than the model's"}}),
            "row-too-long",
            Retry.NEVER,
        ),
        (httpx.Response(503, json={"error": {"message": "The request queue is full."}}), "server-busy", Retry.WAIT),
        (httpx.Response(500), "server-error", Retry.PROBE),
    ],
)
def test_http_errors_are_failures_of_the_row(
    response: httpx.Response, reason: str, retry: Retry, server: PluginServer
) -> None:
    server.answers = lambda _: response
    failed = capture_one(server)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, retry)


def test_revoked_key_ends_the_run(server: PluginServer) -> None:
    server.answers = lambda _: httpx.Response(401)
    with pytest.raises(EngineError, match="EYAS_API_KEY"):
        capture_one(server)


@pytest.mark.parametrize(("tokens", "reason"), [([], "empty-row"), ([1] * 2001, "row-too-long")])
def test_rows_it_cannot_take_are_not_even_sent(tokens: list[int], reason: str, server: PluginServer) -> None:
    failed = capture_one(server, request(tokens=tokens, runs=[]))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, Retry.NEVER)
    assert len(server.asked) == 1  # the probe


def test_cancelled_capture_leaves_no_record(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> None:
        server.record_delay_s = 0.1
        job = asyncio.create_task(engine.capture(request()))
        await asyncio.sleep(0.05)
        job.cancel()
        await asyncio.wait([job])
        assert job.cancelled()
        await asyncio.sleep(0.15)

    with_engine(engine_of(server), work)
    assert server.records() == []


def test_many_in_flight_overlap(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> tuple[list[Captured | Failed], float]:
        server.record_delay_s = 0.2
        started = time.monotonic()
        results = await asyncio.gather(*(engine.capture(request(row)) for row in range(64)))
        return results, time.monotonic() - started

    results, wall_s = with_engine(engine_of(server), work)
    assert all(isinstance(result, Captured) for result in results)
    assert wall_s < 5


# --- reprobe


def test_reprobe_waits_for_a_server_that_restarts(server: PluginServer) -> None:
    answers = iter([httpx.Response(503), httpx.Response(503)])

    async def work(engine: SGLangEngine) -> Captured | Failed:
        server.probe_answers = lambda _: next(answers, None)
        await engine.reprobe()
        return await engine.capture(request())

    assert isinstance(with_engine(engine_of(server), work), Captured)
    assert next(answers, None) is None


@pytest.mark.parametrize("reason", ["plugin-error", "write-failed", "no-states"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_fails_every_row_ends_the_run_and_what_fails_one_does_not(
    reason: str, everywhere: bool, server: PluginServer
) -> None:
    """Capture switched off, a full disk: without the probe each row of the corpus would be recorded as failed."""
    server.faults_hit_probes = everywhere

    async def work(engine: SGLangEngine) -> None:
        server.reply = lambda word: word | {"status": "refused", "reason": reason, "detail": "why"}
        failed = await engine.capture(request())
        assert failed == Failed(reason, "why", Retry.PROBE)
        await engine.reprobe()

    if everywhere:
        with pytest.raises(EngineError, match=f"{reason}.*why"):
            with_engine(engine_of(server), work)
    else:
        with_engine(engine_of(server), work)


def test_callers_that_fail_together_share_one_probe(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> int:
        await asyncio.gather(*(engine.reprobe() for _ in range(16)))
        await engine.reprobe()
        return len(server.asked)

    assert with_engine(engine_of(server), work) == 3  # start, the sixteen, the one after


@pytest.mark.parametrize(
    ("change", "what"),
    [({"model": "0" * 32}, "serves another model"), ({"layers": (0, 1, 2)}, "captures other layers")],
)
def test_server_that_comes_back_as_another_ends_the_run(
    change: dict[str, Any], what: str, server: PluginServer
) -> None:
    async def work(engine: SGLangEngine) -> None:
        server.restart(replace(SPEC, **change))
        failed = await engine.capture(request())
        assert isinstance(failed, Failed)
        assert (failed.reason, failed.retry) == ("spec-differs", Retry.PROBE)
        await engine.reprobe()

    # Also where the client had no weights: what it was told at the start is the agreement.
    for spec in (SPEC, replace(SPEC, model="")):
        server.restart(SPEC)
        with pytest.raises(EngineError, match=what):
            with_engine(engine_of(server, spec), work)


def test_server_that_comes_back_without_the_plugin_ends_the_run(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> None:
        server.answers = server.probe_answers = lambda _: reply_of(None)
        failed = await engine.capture(request())
        assert isinstance(failed, Failed)
        assert failed.retry is Retry.PROBE
        await engine.reprobe()

    with pytest.raises(EngineError, match="without the capture plugin"):
        with_engine(engine_of(server), work)
    assert server.records() == []


@pytest.mark.parametrize("patience_s", [0.0, 1.5])
def test_server_that_stays_away_ends_the_run(patience_s: float, server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> None:
        server.probe_answers = lambda _: httpx.Response(503)
        with pytest.raises(EngineError, match="server-error"):
            await engine.reprobe()

    started = time.monotonic()
    with_engine(engine_of(server, restart_timeout_s=patience_s), work)
    assert time.monotonic() - started < patience_s + 5
    assert (len(server.asked) - 1 == 1) == (patience_s == 0)  # patience is more than one try


# --- the spool


def test_usage_and_stale_records(server: PluginServer) -> None:
    async def work(engine: SGLangEngine) -> None:
        got = await engine.capture(request())
        assert isinstance(got, Captured)
        (record,) = server.spool.glob("eyas.*")
        assert engine.spool_usage() == record.stat().st_size
        assert engine.clean_stale(RUN, lambda session: session == SESSION) == 0
        assert engine.clean_stale("another0", lambda _: False) == 0
        assert engine.clean_stale(RUN, lambda _: False) == 1
        assert engine.spool_usage() == 0

    with_engine(engine_of(server), work)


# --- what a run must not take for its server's word


def passing(reason: str, times: int) -> Callable[[dict[str, Any]], httpx.Response | None]:
    """A probe's first so many answers are refusals."""
    left = [times]

    def answer(_: dict[str, Any]) -> httpx.Response | None:
        left[0] -= 1
        word = CaptureReply("refused", SPEC.spec_id, "", 4, reason, "passing").to_dict()
        return reply_of(None if reason == "no-plugin-reply" else word) if left[0] >= 0 else None

    return answer


@pytest.mark.parametrize("reason", ["plugin-error", "write-failed", "chunk-gap", "no-plugin-reply"])
def test_a_passing_fault_of_the_probe_ends_no_run(server: PluginServer, reason: str) -> None:
    server.probe_answers = passing(reason, 2)
    assert start(engine_of(server)).spec == SPEC
    server.probe_answers = passing(reason, 3)
    with pytest.raises(EngineError, match="plugin"):
        start(engine_of(server))


def test_a_server_that_came_back_with_other_weights_is_another_model(server: PluginServer, tmp_path: Path) -> None:
    """Under the very same agreement: only the states of the probe tell."""

    def engine() -> SGLangEngine:
        cfg = server.config()
        proof = Proof(tmp_path / "probe")
        return SGLangEngine(server.url, SPEC, cfg, RUN, SESSION, proof=proof, transport=server.transport)

    async def work(engine: SGLangEngine) -> None:
        await engine.reprobe()
        server.seed = 1
        with pytest.raises(EngineError, match="another model"):
            await engine.reprobe()

    with_engine(engine(), work)
    with pytest.raises(EngineError, match="another model"):
        start(engine())
    server.seed = 0
    assert start(engine()).spec == SPEC


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("while_proving", [False, True])
def test_a_restart_between_two_requests_is_noticed(server: PluginServer, seed: int, while_proving: bool) -> None:
    """No request failed of it, and the agreement is the same: it may serve other weights all the same."""

    async def work(engine: SGLangEngine) -> tuple[Any, ...]:
        assert isinstance(await engine.capture(request(0)), Captured)
        server.restart()
        server.seed = seed
        if while_proving:  # the other one's record comes while its probe is judged: nor is it believed then
            rows = asyncio.gather(*(engine.capture(request(row)) for row in range(1, 5)))
            proof, found = await asyncio.gather(engine.reprobe(), rows, return_exceptions=True)
            return proof, *found
        failed = await engine.capture(request(1))
        assert isinstance(failed, Failed)
        assert (failed.reason, failed.retry) == ("server-restarted", Retry.PROBE)
        assert server.records() == [f"{request(0).rid}.safetensors"]
        (proof,) = await asyncio.gather(engine.reprobe(), return_exceptions=True)
        return proof, await engine.capture(request(2))

    proof, *found = with_engine(engine_of(server), work)
    if seed:
        assert "another model" in str(proof)
        assert {type(one) for one in found} == {Failed}
        assert {one.reason for one in found} == {"server-restarted"}
    else:
        assert proof is None
        assert {type(one) for one in found} == {Captured} or while_proving


def test_a_record_under_an_id_that_somebody_else_uses_is_nobodys(server: PluginServer) -> None:
    """Its sender has it in flight: what comes under it is removed, whenever it comes."""
    asked = request()
    server.answers = lambda _: httpx.Response(400, json={"error": {"message": "Duplicate request ID detected: x"}})

    async def work(engine: SGLangEngine) -> Any:
        failed = await engine.capture(asked)
        (server.spool / f"{asked.rid}.safetensors").write_bytes(b"theirs")
        return failed

    failed = with_engine(engine_of(server), work)
    assert (failed.reason, failed.retry) == ("duplicate-rid", Retry.ATTEMPT)
    assert server.records() == []


def test_a_record_that_cannot_be_removed_is_a_row_all_the_same(server: PluginServer) -> None:
    """The spool became read-only between its coming and its removal: what was read is right, and kept."""
    asked = request()

    async def work(engine: SGLangEngine) -> Captured:
        captured = await engine.capture(asked)
        assert isinstance(captured, Captured)
        captured = in_memory(captured)
        record = server.spool / f"{asked.rid}.safetensors"
        record.unlink(missing_ok=True)
        record.mkdir()  # for root, too, something that unlink refuses
        captured.release()
        assert record.is_dir()
        return captured

    assert with_engine(engine_of(server), work).aux.shape[0] == len(asked.tokens)
