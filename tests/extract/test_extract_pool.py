from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_double import PluginServer, reply_of

from eyas.capture.contract import CaptureSpec, RequestId
from eyas.config import ServerConfig, load
from eyas.errors import ConfigError, EngineError, EyasError
from eyas.extract.build import Job, check_dumps
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.pool import ServerPool, open_servers, spools_of
from eyas.extract.proof import Proof
from eyas.extract.sglang import SGLangEngine
from eyas.extract.window import Limits

SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)
RUN, SESSION = "run00000", "ses00000"
ROOMY = Limits(64, 1 << 20, 1 << 30)


def request(row: int, attempt: int = 0, tokens: int = 4) -> CaptureRequest:
    return CaptureRequest(RequestId(RUN, SESSION, row, attempt), [row % 1000, *range(5, 4 + tokens)], [1, tokens])


class Servers:
    """Doubles with URLs of their own, and a pool over them."""

    def __init__(self, folder: Path, count: int = 2, spec: CaptureSpec = SPEC) -> None:
        self.each = [
            PluginServer(spec, folder / f"spool{index}", url=f"http://host{index}:30000") for index in range(count)
        ]
        self.said: list[str] = []

    def pool(self, limits: Limits = ROOMY, spec: CaptureSpec = SPEC, **changes: Any) -> ServerPool:
        proof = Proof()
        engines = [
            SGLangEngine(s.url, spec, s.config(**changes), RUN, SESSION, proof=proof, transport=s.transport)
            for s in self.each
        ]
        return ServerPool(engines, limits, self.said.append)

    def rows(self, index: int) -> list[str]:
        """Ids of the rows that a server was asked for; probes have sessions of their own."""
        return [body["rid"] for body in self.each[index].asked if f".{SESSION}." in body["rid"]]

    def asked(self) -> list[str]:
        return [rid for index in range(len(self.each)) for rid in self.rows(index)]

    def left(self) -> list[str]:
        return [name for server in self.each for name in server.records()]


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def with_pool(pool: ServerPool, work: Callable[[ServerPool], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        try:
            await pool.start()
            return await asyncio.wait_for(work(pool), 30)
        finally:
            await pool.close()

    return asyncio.run(scenario())


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not met():
            await asyncio.sleep(0.005)


async def stored(pool: ServerPool, row: int, attempts: int = 5) -> int:
    """Capture a row as a worker does; returns the attempt that brought it."""
    for attempt in range(attempts):
        result = await pool.capture(request(row, attempt))
        if isinstance(result, Captured):
            result.release()
            return attempt
        assert result.retry in (Retry.ATTEMPT, Retry.WAIT), result
    raise AssertionError(f"row {row}: {result}")  # pyright: ignore[reportPossiblyUnboundVariable]


def away(_: dict[str, Any]) -> httpx.Response:
    raise httpx.ConnectError("no route")


def refusing(reason: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda word: {**word, "status": "refused", "reason": reason}


# --- start


def test_all_are_proven_and_named(servers: Servers) -> None:
    servers.each[1].max_row_tokens = 500
    servers.each[1].restart()
    info: EngineInfo = with_pool(pool := servers.pool(), lambda pool: pool.start())
    assert info.spec == SPEC
    assert info.provenance["servers"] == "http://host0:30000, http://host1:30000"
    assert (info.provenance["host"], info.provenance["sglang"]) == ("mock", "0.5.23")
    assert (info.max_row_tokens, info.spool_bytes, info.servers) == (500, 1 << 30, 2)
    assert [len(server.asked) for server in servers.each] == [2, 2]
    assert pool.spool_usage() == 0


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_is_away_at_the_start_ends_it(index: int, servers: Servers) -> None:
    servers.each[index].probe_answers = away
    with pytest.raises(EngineError, match=f"host{index}"):
        with_pool(servers.pool(), lambda pool: pool.start())
    assert servers.left() == []


@pytest.mark.parametrize(
    "change", [{"model": "0" * 32}, {"layers": (0, 1, 2)}, {"last": "all"}, {"dtype": "f32"}, {"hidden_size": 48}]
)
@pytest.mark.parametrize("index", [0, 1])
def test_servers_that_do_not_serve_the_same_are_both_named(
    index: int, change: dict[str, Any], servers: Servers
) -> None:
    """Where no checkpoint says what is right: each server's own word is as good as the other's."""
    servers.each[index].restart(replace(SPEC, **change))
    wanted = replace(SPEC, model="", **{k: v for k, v in change.items() if k != "model"})
    with pytest.raises(EngineError) as caught:
        with_pool(servers.pool(spec=wanted if "model" not in change else replace(SPEC, model="")), lambda p: p.start())
    text = str(caught.value)
    if "model" in change:
        assert "do not serve the same" in text
        assert "http://host0:30000 and http://host1:30000" in text
        assert "model" in text
    else:
        assert f"host{1 - index}" in text  # the one that differs from what is wanted


def test_same_agreement_and_other_weights_are_told_by_the_probe(servers: Servers) -> None:
    servers.each[1].seed = 1
    with pytest.raises(EngineError, match="another model") as caught:
        with_pool(servers.pool(), lambda pool: pool.start())
    assert "host0" in str(caught.value)
    assert "host1" in str(caught.value)


@pytest.mark.parametrize(
    ("urls", "what"),
    [
        (("http://a:1", "http://a:1/"), "named twice"),
        (("http://localhost:30000", "http://127.0.0.1:30000"), "named twice"),
        (("http://A:30000", "http://u:p@a:30000"), "named twice"),
        (("http://a", "http://a:80"), "named twice"),
        (("http://a:30000", "http://b:30000"), "have one spool.*eyas-30000.*server.spools"),
    ],
)
def test_urls_that_lead_to_one_place_are_refused(urls: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        asyncio.run(open_servers(urls, SPEC, load(), RUN, SESSION).start())
    assert "u:p" not in str(caught.value)


def test_one_folder_under_two_names_is_one_spool(servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(servers.each[0].spool)
    servers.each[1].spool = tmp_path / "other"
    with pytest.raises(ConfigError, match="http://host0:30000 and http://host1:30000 have one spool"):
        with_pool(servers.pool(), lambda pool: pool.start())


def test_spools_follow_the_servers() -> None:
    a, b = Path("/a"), Path("/b")
    assert list(spools_of(ServerConfig(), 2)) == [None, None]
    assert list(spools_of(ServerConfig(spool=a), 1)) == [a]
    assert list(spools_of(ServerConfig(spools=(a,)), 1)) == [a]
    assert list(spools_of(ServerConfig(spools=(b, a)), 2)) == [b, a]
    for cfg, servers, what in (
        (ServerConfig(spools=(a, b)), 3, "2 spool folders are named for 3 servers"),
        (ServerConfig(spools=(a, b)), 1, "2 spool folders are named for 1 servers"),
        (ServerConfig(spool=a), 2, "one spool folder is named for 2 servers"),
        (ServerConfig(spool=a, spools=(a,)), 1, "named twice"),
        (ServerConfig(spool=a, spools=(a, b)), 2, "one spool folder is named for 2 servers"),
    ):
        with pytest.raises(ConfigError, match=what):
            spools_of(cfg, servers)


def test_settings_name_the_servers_where_no_flag_does(tmp_path: Path) -> None:
    cfg = load(overrides=["server.urls=[http://a:1, http://b:2]"])
    assert Job(tmp_path, tmp_path, "m", (), cfg, SESSION).urls == ("http://a:1", "http://b:2")
    assert Job(tmp_path, tmp_path, "m", (), cfg, SESSION).engine == "sglang"
    assert Job(tmp_path, tmp_path, "m", ("http://c:3",), cfg, SESSION).urls == ("http://c:3",)


@pytest.mark.parametrize("engine", ["hf", "fake", "dumpdir"])
def test_engines_that_cannot_share_rows_say_so_and_show_no_password(engine: str, tmp_path: Path) -> None:
    cfg = load(overrides=[f"extract.engine={engine}", f"dumpdir.folder={tmp_path}"][: 2 if engine == "dumpdir" else 1])
    job = Job(tmp_path, tmp_path, "m", ("http://u:secret@a:1", "http://b:2"), cfg, SESSION)
    with pytest.raises(ConfigError, match=r"http://a:1, http://b:2") as caught:
        check_dumps(job, 1)
    assert "secret" not in str(caught.value)


# --- who gets a row


def test_rows_go_to_the_least_loaded(servers: Servers) -> None:
    async def work(pool: ServerPool) -> None:
        long = await pool.capture(request(0, tokens=100))
        rest = [await pool.capture(request(row, tokens=10)) for row in range(1, 11)]
        assert len(servers.rows(0)) == 1  # 100 tokens in flight there, 100 here
        for states in (long, *rest):
            assert isinstance(states, Captured)
            states.release()
        await asyncio.sleep(0)
        for row in range(11, 31):
            await stored(pool, row)
        assert abs(len(servers.rows(0)) - len(servers.rows(1))) == 9  # in turn where both are idle

    with_pool(servers.pool(), work)
    assert servers.left() == []


def test_what_is_in_flight_counts_and_not_what_was(servers: Servers) -> None:
    async def work(pool: ServerPool) -> None:
        await stored(pool, 0)
        long = await pool.capture(request(1, tokens=100))
        assert isinstance(long, Captured)
        long.release()
        await asyncio.sleep(0)
        held = [await pool.capture(request(row, tokens=tokens)) for row, tokens in ((2, 20), (3, 5), (4, 5))]
        assert {type(one) for one in held} == {Captured}

    with_pool(servers.pool(), work)
    assert [len(servers.rows(index)) for index in (0, 1)] == [2, 3]
    assert servers.rows(0)[1] == str(request(2).rid)
    assert [str(request(row).rid) for row in (3, 4)] == servers.rows(1)[1:]


def test_a_row_cancelled_in_the_moment_it_gets_its_place_gives_it_back(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 1)

    async def work(pool: ServerPool) -> None:
        held = await pool.capture(request(0))
        assert isinstance(held, Captured)
        waiting = asyncio.create_task(pool.capture(request(1)))
        await asyncio.sleep(0.01)
        held.release()
        asyncio.get_running_loop().call_soon(waiting.cancel)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await stored(pool, 2) == 0

    with_pool(servers.pool(Limits(1, 1 << 20, 1 << 30)), work)
    assert str(request(1).rid) not in servers.rows(0)


def test_each_server_has_its_window_until_the_states_are_released(servers: Servers) -> None:
    async def work(pool: ServerPool) -> None:
        first = [await pool.capture(request(row)) for row in range(4)]
        waiting = [asyncio.create_task(pool.capture(request(row))) for row in range(4, 8)]
        await asyncio.sleep(0.05)
        assert [len(servers.rows(index)) for index in (0, 1)] == [2, 2]
        assert not any(task.done() for task in waiting)
        for states in first[:1]:
            assert isinstance(states, Captured)
            states.release()
            states.release()  # gives no second place back
        await until(lambda: sum(task.done() for task in waiting) == 1)
        await asyncio.sleep(0.05)
        assert sum(task.done() for task in waiting) == 1
        waiting[1].cancel()  # one that waits no more takes no place
        for states in first[1:]:
            await asyncio.to_thread(states.release)  # type: ignore[union-attr]  as the store's threads do
        await asyncio.gather(*waiting, return_exceptions=True)

    with_pool(servers.pool(Limits(2, 1 << 20, 1 << 30)), work)
    assert len(servers.asked()) == 7


@settings(max_examples=25, deadline=None)
@given(data=st.data(), limits=st.builds(Limits, st.integers(1, 4), st.integers(1, 40), st.integers(1, 9000)))
def test_no_server_has_more_than_its_window_and_every_row_is_asked_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, limits: Limits
) -> None:
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=1, max_size=25))
    servers = Servers(tmp_path_factory.mktemp("pool"), data.draw(st.integers(1, 3)))
    flying = [dict[int, int]() for _ in servers.each]

    async def work(pool: ServerPool) -> None:
        async def one(row: int, tokens: int) -> None:
            states = await pool.capture(request(row, tokens=tokens))
            assert isinstance(states, Captured)
            (index,) = (i for i in range(len(servers.each)) if str(request(row).rid) in servers.rows(i))
            now = flying[index]
            now[row] = tokens
            held = SPEC.record_bytes(sum(now.values()), sum(t - 1 for t in now.values()))
            assert len(now) == 1 or limits.hold(len(now), sum(now.values()), held)
            await asyncio.sleep(0)
            del now[row]
            states.release()

        await asyncio.gather(*(one(row, tokens) for row, tokens in enumerate(lengths)))

    with_pool(servers.pool(limits), work)
    assert sorted(servers.asked()) == sorted(str(request(row).rid) for row in range(len(lengths)))
    assert servers.left() == []


def test_a_row_that_one_server_fails_is_tried_on_the_other(servers: Servers) -> None:
    """However idle the failing one is: it answers at once, and would draw every row."""
    servers.each[0].reply = refusing("tokens-differ")

    async def work(pool: ServerPool) -> list[int]:
        return await asyncio.gather(*(stored(pool, row, attempts=2) for row in range(40)))

    attempts = with_pool(servers.pool(Limits(4, 1 << 20, 1 << 30)), work)
    assert set(attempts) == {0, 1}
    assert len(set(servers.asked())) == len(servers.asked())  # no id is used twice, wherever it is sent
    assert servers.said == []


def test_a_server_without_room_is_left_alone_for_a_while(servers: Servers) -> None:
    servers.each[0].reply = refusing("spool-full")

    async def work(pool: ServerPool) -> list[int]:
        return [await stored(pool, row) for row in range(60)]

    attempts = with_pool(servers.pool(), work)
    assert len(servers.rows(0)) < 15 < len(servers.rows(1))
    assert sum(attempts) == len(servers.rows(0))


def test_a_long_row_goes_to_the_server_that_admits_it(servers: Servers) -> None:
    servers.each[0].max_row_tokens = 10
    servers.each[0].restart()

    async def work(pool: ServerPool) -> Any:
        rows = [await pool.capture(request(row, tokens=50)) for row in range(4)]
        too_long = await pool.capture(request(9, tokens=2001))
        return rows, too_long

    rows, too_long = with_pool(servers.pool(), work)
    assert {type(row) for row in rows} == {Captured}
    assert servers.rows(0) == []
    assert (too_long.reason, too_long.retry) == ("row-too-long", Retry.NEVER)


# --- who is believed


def test_rows_of_a_server_that_dies_go_to_the_other_and_it_gets_rows_when_it_is_back(servers: Servers) -> None:
    dead, alive = servers.each

    async def work(pool: ServerPool) -> None:
        dead.answers = dead.probe_answers = away
        failed = await pool.capture(request(0))
        assert isinstance(failed, Failed)
        assert (failed.reason, failed.retry) == ("connection-lost", Retry.ATTEMPT)
        assert "http://host0:30000" in failed.detail
        before = len(servers.rows(0))
        assert [await stored(pool, row) for row in range(1, 10)] == [0] * 9
        assert len(servers.rows(0)) == before  # asked for nothing while it is away
        dead.answers = dead.probe_answers = lambda _: None
        await until(lambda: "http://host0:30000 has proven itself again" in servers.said)
        for row in range(10, 20):
            assert await stored(pool, row) == 0
        assert len(servers.rows(0)) > before

    with_pool(servers.pool(), work)
    assert len(alive.asked) > 0
    assert servers.said[0] == "http://host0:30000: connection-lost: no rows for it until it proves itself again"
    assert servers.left() == []


@pytest.mark.parametrize("kind", ["weights", "fingerprint", "layers", "no plugin", "key"])
def test_one_that_comes_back_as_another_gets_no_row_ever_again(kind: str, servers: Servers) -> None:
    other = servers.each[0]

    def change() -> None:
        match kind:
            case "weights":
                other.seed = 1
                other.restart()
            case "fingerprint":
                other.restart(replace(SPEC, model="0" * 32))
            case "layers":
                other.restart(replace(SPEC, layers=(0, 1, 2)))
            case "no plugin":
                other.answers = other.probe_answers = lambda _: reply_of(None)
            case _:
                other.api_key = "another"

    async def work(pool: ServerPool) -> None:
        assert [await stored(pool, row) for row in range(4)] == [0] * 4
        change()
        results = [await pool.capture(request(row)) for row in (4, 5)]
        assert sorted(type(result).__name__ for result in results) == ["Captured", "Failed"]
        await until(lambda: any("no further rows for http://host0:30000" in text for text in servers.said))
        before = len(servers.rows(0))
        assert [await stored(pool, row) for row in range(6, 20)] == [0] * 14
        assert len(servers.rows(0)) == before
        servers.each[1].answers = servers.each[1].probe_answers = away
        with pytest.raises(EngineError, match=r"no server is left.*host0:30000, http://host1:30000"):
            await stored(pool, 20)
            await stored(pool, 21)

    with_pool(servers.pool(restart_timeout_s=0), work)


def test_a_server_that_refuses_us_is_lost_though_a_proof_that_goes_on_succeeds(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 1)

    def answer(body: dict[str, Any]) -> httpx.Response:
        return away(body) if body["rid"] == str(request(0).rid) else httpx.Response(401)

    async def work(pool: ServerPool) -> None:
        servers.each[0].answers = answer
        failed = await asyncio.gather(*(pool.capture(request(row)) for row in (0, 1)))
        assert [one.reason for one in failed if isinstance(one, Failed)] == ["connection-lost", "server-lost"]
        await until(lambda: len(servers.each[0].asked) == 4 and not pool._proofs)  # two rows, two probes
        with pytest.raises(EngineError, match="no server is left"):
            await pool.capture(request(2))

    with_pool(servers.pool(), work)


@pytest.mark.parametrize("patience_s", [0.0, 0.5])
def test_when_none_is_left_the_run_ends_and_says_why(patience_s: float, servers: Servers) -> None:
    async def work(pool: ServerPool) -> list[Any]:
        for server in servers.each:
            server.answers = server.probe_answers = away
        return await asyncio.gather(*(stored(pool, row, 99) for row in range(8)), return_exceptions=True)

    ends = with_pool(servers.pool(restart_timeout_s=patience_s), work)
    assert {type(end) for end in ends} == {EngineError}
    for text in map(str, ends):
        assert "no server is left" in text
        assert text.count("http://host0:30000") > 1 < text.count("http://host1:30000")


def test_one_that_stays_away_long_may_come_back_all_the_same(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.extract.pool._AWAY_PAUSE_S", 0.02)

    async def work(pool: ServerPool) -> None:
        servers.each[0].answers = servers.each[0].probe_answers = away
        await stored(pool, 0)
        await until(lambda: any("stays away" in text for text in servers.said))
        assert await stored(pool, 1) == 0
        servers.each[0].answers = servers.each[0].probe_answers = lambda _: None
        await until(lambda: any("proven itself again" in text for text in servers.said))

    with_pool(servers.pool(restart_timeout_s=0), work)


def test_rows_wait_while_the_only_ones_left_are_being_proven(servers: Servers) -> None:
    async def work(pool: ServerPool) -> list[int]:
        for server in servers.each:
            server.answers = server.probe_answers = away
        failed = [await pool.capture(request(row)) for row in range(2)]
        assert {type(one) for one in failed} == {Failed}
        rows = [asyncio.create_task(stored(pool, row)) for row in range(2, 6)]
        await asyncio.sleep(0.1)
        assert not any(row.done() for row in rows)
        servers.each[1].answers = servers.each[1].probe_answers = lambda _: None
        return await asyncio.gather(*rows)

    assert with_pool(servers.pool(), work) == [0] * 4


def test_what_is_no_engines_fault_ends_the_run_as_itself(servers: Servers, tmp_path: Path) -> None:
    """The first probe's states cannot be read: no server can prove anything any more."""

    class Unreadable(EyasError):
        pass

    async def work(pool: ServerPool) -> None:
        def broken(*_: object) -> None:
            raise Unreadable("cannot read the first probe", tmp_path)

        for server in pool._servers:
            server.engine._proof.check = broken  # type: ignore[method-assign]
        servers.each[0].answers = away
        with pytest.raises(Unreadable):
            for row in range(10):
                await pool.capture(request(row))
                await asyncio.sleep(0.05)

    with_pool(servers.pool(), work)


def test_a_bug_of_an_engine_gives_its_place_back(servers: Servers) -> None:
    async def work(pool: ServerPool) -> None:
        def bug(_: dict[str, Any]) -> httpx.Response:
            raise ZeroDivisionError

        for server in servers.each:
            server.answers = bug
        for row in range(4):
            with contextlib.suppress(ZeroDivisionError):
                await pool.capture(request(row))
        for server in servers.each:
            server.answers = lambda _: None
        assert await stored(pool, 5) == 0

    with_pool(servers.pool(Limits(1, 1 << 20, 1 << 30)), work)


# --- the spools


def test_usage_and_stale_records_of_all(servers: Servers) -> None:
    async def work(pool: ServerPool) -> None:
        got = [await pool.capture(request(row)) for row in range(4)]
        assert all(isinstance(one, Captured) for one in got)
        sizes = [path.stat().st_size for server in servers.each for path in server.spool.glob("eyas.*")]
        assert len(sizes) == 4
        assert pool.spool_usage() == sum(sizes)
        assert pool.clean_stale(RUN, lambda session: session == SESSION) == 0
        assert pool.clean_stale(RUN, lambda _: False) == 4
        assert pool.spool_usage() == 0

    with_pool(servers.pool(), work)


def test_a_record_counts_only_in_the_spool_of_the_server_that_was_asked(servers: Servers) -> None:
    """The very record that is wanted, in the other server's spool, is nobody's."""

    async def work(pool: ServerPool) -> Failed | Captured:
        asked = servers.each[0]
        kept: list[bytes] = []
        asked.record = kept.append  # keeps the bytes, and writes no file
        task = asyncio.create_task(pool.capture(request(0)))
        await until(lambda: kept)
        (servers.each[1].spool / f"{request(0).rid}.safetensors").write_bytes(kept[0])
        return await task

    failed = with_pool(servers.pool(record_deadline_s=0.3), work)
    assert isinstance(failed, Failed)
    assert failed.reason == "record-late"


def test_a_refused_word_has_the_servers_name(servers: Servers) -> None:
    servers.each[0].reply = servers.each[1].reply = refusing("bad-request")
    failed = with_pool(servers.pool(), lambda pool: pool.capture(request(0)))
    assert failed == Failed("bad-request", "http://host0:30000", Retry.NEVER)
