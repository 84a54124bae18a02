"""A connection for each request in flight, for httpx.

httpx's own pool looks through its connections and its waiting requests whenever a request begins or ends, which with
hundreds in flight is most of a client's work (docs/adr/0015-one-request-a-row.md has figures). Who bounds the requests
himself needs no queue: a stack of idle connections does.
"""

from __future__ import annotations

import ssl
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

import httpcore
import httpx

#: What httpcore raises, in httpx's words.
ERRORS: Final[dict[type[Exception], type[httpx.TransportError]]] = {
    httpcore.TimeoutException: httpx.TimeoutException,
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.PoolTimeout: httpx.PoolTimeout,
    httpcore.NetworkError: httpx.NetworkError,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.ProtocolError: httpx.ProtocolError,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
    httpcore.UnsupportedProtocol: httpx.UnsupportedProtocol,
    httpcore.ProxyError: httpx.ProxyError,
}


class Connections(httpx.AsyncBaseTransport):
    """Carries requests, each over a connection of its own; idle ones are used again.

    Args:
        verify: whom to trust at https.
        keep_alive_s: an idle connection is not used again after this time: the server may be about to drop it.
    """

    def __init__(self, verify: ssl.SSLContext, keep_alive_s: float) -> None:
        self._verify, self._keep_alive_s = verify, keep_alive_s
        self._idle: deque[tuple[float, httpcore.AsyncHTTPConnection]] = deque()  # the latest one last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        connection = await self._take(asked.url.origin)
        try:
            answer = await connection.handle_async_request(asked)
        except BaseException as error:
            await connection.aclose()
            if (known := ERRORS.get(type(error))) is not None:  # type: ignore[arg-type]
                raise known(str(error), request=request) from error
            raise
        body = _Body(self, connection, answer)
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            _, connection = self._idle.pop()
            if connection.can_handle_request(origin) and connection.is_idle() and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(origin, self._verify, self._keep_alive_s)

    async def keep(self, connection: httpcore.AsyncHTTPConnection) -> None:
        """A connection whose response has ended; one that cannot be used again is closed."""
        now = time.monotonic()
        if connection.is_idle():
            self._idle.append((now, connection))
        else:
            await connection.aclose()
        while self._idle and now - self._idle[0][0] > self._keep_alive_s:
            await self._idle.popleft()[1].aclose()


class _Body(httpx.AsyncByteStream):
    """What follows the head of a response; its end gives the connection back."""

    def __init__(
        self, lent_by: Connections, connection: httpcore.AsyncHTTPConnection, answer: httpcore.Response
    ) -> None:
        self._lent_by, self._connection, self._answer, self._closed = lent_by, connection, answer, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What is left of it: openai reads a stream to its end in a second loop."""
        assert isinstance(self._answer.stream, AsyncIterable)
        try:
            async for part in self._answer.stream:
                yield part
        except Exception as error:
            if (known := ERRORS.get(type(error))) is not None:
                raise known(str(error)) from error
            raise

    async def aclose(self) -> None:
        if self._closed:
            return  # the connection may be another request's by now
        self._closed = True
        await self._answer.aclose()
        await self._lent_by.keep(self._connection)
