"""One server through the client: addresses, keys, what it lists, and how usage is read."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from typing import Any

import pytest
from openai_server import MODEL, Act, OpenAIServer, running

from eyas.data.regenerate.budget import Usage
from eyas.data.regenerate.openai_client import Listing, OpenAIClient, Reply, Request, usage_of
from eyas.data.regenerate.openai_faults import Fault, ServerAway
from eyas.errors import ConfigError


def listed(server: OpenAIServer) -> Listing:
    async def ask() -> Listing:
        client = OpenAIClient(server.url)
        try:
            return await client.models()
        finally:
            await client.close()

    return asyncio.run(ask())


def asked(server: OpenAIServer, *prompts: str, timeout_s: float = 5.0) -> list[Reply | BaseException]:
    async def ask() -> list[Reply | BaseException]:
        client = OpenAIClient(server.url)
        try:
            requests = [
                Request({"model": MODEL, "messages": [{"role": "user", "content": text}]}, timeout_s)
                for text in prompts
            ]
            return await asyncio.gather(*map(client.ask, requests), return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://localhost:30000", "http://localhost:30000/v1"),
        ("http://localhost:30000/", "http://localhost:30000/v1"),
        ("http://localhost:30000/v1/", "http://localhost:30000/v1"),
        ("https://openrouter.ai/api/v1", "https://openrouter.ai/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(url: str, meant: str) -> None:
    assert OpenAIClient(url).url == meant


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "", "http://", "file:///etc/passwd"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server URL"):
        OpenAIClient(url)


def test_models_and_prices() -> None:
    entries = [
        MODEL,
        {"id": "b", "pricing": {"prompt": "0.0000015", "completion": 0.000002}},
        {"id": 5},
        {"id": "c", "pricing": {}},
    ]
    with running(OpenAIServer(models=entries)) as server:
        listing = listed(server)
    assert listing.names == (MODEL, "b", "c")
    assert listing.prices == {"b": (Decimal("0.0000015"), Decimal("0.000002"), Decimal(0))}


def test_nobody_there() -> None:
    with pytest.raises(ServerAway):
        listed(OpenAIServer(port=9))
    [away] = asked(OpenAIServer(port=9), "q")
    assert isinstance(away, ServerAway)


@pytest.mark.parametrize(
    ("found", "usage"),
    [
        (None, None),
        ({}, None),
        ({"prompt_tokens": 3}, Usage(3, 0)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": 0.00012345}, Usage(3, 4, Decimal("0.00012345"))),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": 1e-7}, Usage(3, 4, Decimal("1e-7"))),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": None}, Usage(3, 4)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": "nan"}, Usage(3, 4)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": True}, Usage(3, 4)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "cost": -1}, Usage(3, 4)),
        ({"prompt_tokens": -3, "completion_tokens": 4}, None),
        ({"prompt_tokens": "3", "completion_tokens": 4}, None),
        ({"prompt_tokens": True, "completion_tokens": 4}, None),
        ({"prompt_tokens": 3, "completion_tokens": None}, None),
    ],
)
def test_usage(found: dict[str, Any] | None, usage: Usage | None) -> None:
    assert usage_of(found) == usage


@pytest.mark.parametrize(
    "chunks",
    [
        (b"{not json",),
        (b"[]",),
        (b"\xff\xfe",),
        (b"[" * 100_000,),
        ({"choices": [{"delta": {"content": 5}}]},),
        ({"choices": {"0": {}}},),
        ({"object": "ping"},),
    ],
)
def test_streams_that_make_no_sense_are_malformed_never_a_crash(chunks: tuple[Any, ...]) -> None:
    with running(OpenAIServer(plan=lambda *_: Act(chunks=chunks))) as server:
        [fault] = asked(server, "q")
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.charged) == ("malformed-reply", True)


@pytest.mark.parametrize("act", [Act(pause_s=3), Act("murmur")])
def test_a_slow_stream_has_one_deadline_however_alive_it_keeps(act: Act) -> None:
    with running(OpenAIServer(plan=lambda *_: act)) as server:
        [fault] = asked(server, "q", timeout_s=0.3)
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.charged) == ("timeout", True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_costs_no_more_among_hundreds_in_flight(stream: bool) -> None:
    """httpx's own pool looks at every connection whenever a request begins or ends: tenfold at 400."""

    def cost_s(in_flight: int, requests: int) -> float:
        async def ask() -> float:
            client, gate = OpenAIClient(server.url), asyncio.Semaphore(in_flight)

            async def one(number: int) -> None:
                async with gate:
                    fields = {"model": MODEL, "messages": [{"role": "user", "content": f"{in_flight} {number}"}]}
                    await client.ask(Request(fields, 60.0, stream))

            began = time.thread_time()  # the server's thread is not counted
            await asyncio.gather(*map(one, range(requests)))
            spent = time.thread_time() - began
            await client.close()
            return spent / requests

        return asyncio.run(ask())

    with running(OpenAIServer(lambda body, before: Act(pause_s=0.2))) as server:
        cost_s(16, 32)  # imports
        few = min(cost_s(16, 64) for _ in range(2))
        many = min(cost_s(400, 800) for _ in range(2))
    assert many < 3 * few


@pytest.mark.parametrize(
    ("url", "through_proxy"),
    [
        ("https://api.example.com/v1", True),
        ("http://127.0.0.2:9", False),
        ("http://localhost:9", False),
    ],
)
def test_a_proxy_of_the_environment_is_for_the_web_alone(
    url: str, through_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    async def ask() -> None:
        listening = await asyncio.start_server(proxy, "127.0.0.1", 0)
        place = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, place)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        client = OpenAIClient(url)
        with pytest.raises((Fault, ServerAway)):
            async with asyncio.timeout(5):
                await client.ask(Request({"model": MODEL, "messages": []}, 2.0))
        await client.close()
        listening.close()

    asyncio.run(ask())
    assert bool(asked) == through_proxy
    assert all(line.startswith(b"CONNECT api.example.com:443") for line in asked)
