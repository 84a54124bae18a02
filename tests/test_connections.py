from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpcore
import httpx
import pytest

from eyas.connections import ERRORS, Connections

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Listener:
    """An HTTP server of few words.

    Attributes:
        reply: what it writes for each request; empty closes the connection.
        gate: requests wait for it.
        connections: how many it has accepted, and those still open.
    """

    def __init__(self) -> None:
        self.reply = REPLY
        self.gate = asyncio.Event()
        self.gate.set()
        self.accepted = 0
        self.open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await self.gate.wait()
                if not self.reply:
                    break
                writer.write(self.reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


def with_listener(work: Callable[[Listener, httpx.AsyncClient], Awaitable[Any]], keep_alive_s: float = 30.0) -> Any:
    async def scenario() -> Any:
        listener = Listener()
        server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = Connections(httpx.create_ssl_context(), keep_alive_s)
        try:
            async with httpx.AsyncClient(transport=transport, base_url=url, timeout=5) as client:
                result = await work(listener, client)
            await none_open(listener)
            return result
        finally:
            server.close()

    return asyncio.run(scenario())


async def none_open(listener: Listener) -> None:
    async with asyncio.timeout(5):
        while listener.open:
            await asyncio.sleep(0.005)


def test_every_error_of_the_transport_has_httpx_word() -> None:
    raised = {
        kind
        for kind in vars(httpcore).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not httpcore.ConnectionNotAvailable
    }
    assert set(ERRORS) == raised
    assert all(theirs.__name__ == ours.__name__ for ours, theirs in ERRORS.items())


def test_one_connection_carries_requests_that_follow_each_other() -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        for _ in range(5):
            assert (await client.get("/")).text == "ok"
        assert listener.accepted == 1

    with_listener(work)


def test_requests_in_flight_have_connections_of_their_own_and_those_are_used_again() -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            listener.gate.clear()
            flying = [asyncio.create_task(client.get("/")) for _ in range(20)]
            async with asyncio.timeout(5):
                while listener.accepted < 20:
                    await asyncio.sleep(0.005)
            listener.gate.set()
            assert {(await one).text for one in flying} == {"ok"}
        assert listener.accepted == 20

    with_listener(work)


@pytest.mark.parametrize("kind", ["closed by the server", "too old"])
def test_a_connection_that_may_be_dead_is_not_used_again(kind: str) -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        await client.get("/")
        if kind == "closed by the server":
            for writer in listener.open:
                writer.close()
            await asyncio.sleep(0.05)
        assert (await client.get("/")).text == "ok"
        assert listener.accepted == 2

    with_listener(work, keep_alive_s=30.0 if kind == "closed by the server" else 0.0)


def test_a_reply_that_was_not_read_to_its_end_ends_its_connection() -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        listener.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\nstart"
        async with client.stream("GET", "/") as response:
            assert response.status_code == 200
        listener.reply = REPLY
        assert (await client.get("/")).text == "ok"
        assert listener.accepted == 2

    with_listener(work)


@pytest.mark.parametrize(
    ("reply", "error"),
    [(b"", httpx.RemoteProtocolError), (b"no HTTP\r\n\r\n", httpx.RemoteProtocolError), (REPLY[:-1], None)],
)
def test_errors_are_httpx_own_and_leave_nothing_open(reply: bytes, error: type[Exception] | None) -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        listener.reply = reply
        with pytest.raises(error or httpx.ReadTimeout):
            await client.get("/", timeout=0.2)
        listener.reply = REPLY
        assert (await client.get("/")).text == "ok"

    with_listener(work)


def test_nobody_there_is_a_connect_error() -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(transport=Connections(httpx.create_ssl_context(), 1.0)) as client:
            await client.get("http://127.0.0.1:9")

    with pytest.raises(httpx.ConnectError):
        asyncio.run(ask())


def test_a_cancelled_request_takes_its_connection_with_it() -> None:
    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        listener.gate.clear()
        flying = asyncio.create_task(client.get("/"))
        async with asyncio.timeout(5):
            while not listener.accepted:
                await asyncio.sleep(0.005)
        flying.cancel()
        await asyncio.wait([flying])
        listener.gate.set()
        assert (await client.get("/")).text == "ok"
        assert listener.accepted == 2

    with_listener(work)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_reply_may_be_read_in_several_loops_and_closed_twice(parts: int) -> None:
    """As openai does: it stops at a stream's last event, and reads what is behind it to give the connection back."""

    async def work(listener: Listener, client: httpx.AsyncClient) -> None:
        chunks = b"".join(b"4\r\npart\r\n" for _ in range(parts))
        listener.reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        for _ in range(3):
            reply = await client.send(client.build_request("GET", "/"), stream=True)
            body = reply.stream
            assert isinstance(body, httpx.AsyncByteStream)
            first = aiter(body)
            read = [await anext(first)]
            read += [part async for part in body]
            await body.aclose()
            await body.aclose()
            assert b"".join(read) == b"part" * parts
        flying = await asyncio.gather(*(client.get("/") for _ in range(2)))
        assert {reply.text for reply in flying} == {"part" * parts}
        assert listener.accepted == 2  # the one that was closed twice carried one of the two

    with_listener(work)
