"""HTTP with a server that answers prompts: its replies as they come, its errors in our words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from eyas.config import ServerConfig
from eyas.errors import EngineError
from eyas.extract.http import API_KEY_ENV, SHORT_TIMEOUT_S, error_text, open_client, server_url, tls_fault


class Http:
    """Requests to one server, its errors in our words.

    Args:
        url: base URL; user and password in it are used and never shown. A path of `/v1` at its end is left out.
        cfg: key, certificates and patience.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: not an http(s) URL, or an unreadable certificate file.
    """

    def __init__(self, url: str, cfg: ServerConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        parsed = server_url(url)
        shown = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        self.where = shown.removesuffix("/v1")
        self._timeout_s = cfg.timeout_s
        self._http = open_client(parsed, self.where, cfg, transport)

    async def get(self, path: str) -> httpx.Response:
        """One short question.

        Raises:
            EngineError: nobody answers, not authorised, or a server in trouble.
        """
        try:
            async with asyncio.timeout(SHORT_TIMEOUT_S):
                response = await self._http.get(path, timeout=SHORT_TIMEOUT_S)
        except (httpx.RequestError, TimeoutError) as error:
            raise self._unreachable(error) from error
        self._check(response)
        if response.status_code >= 500:
            raise EngineError(f"the server is in trouble (HTTP {response.status_code})", self.where)
        return response

    async def stream(self, path: str, body: Mapping[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        """One request whose reply comes as server-sent events, each a JSON object that `take` is called with.

        Raises:
            EngineError: it is refused or broken off, or does not end in time.
        """
        content = json.dumps(body, separators=(",", ":"))
        timeout = httpx.Timeout(self._timeout_s, connect=SHORT_TIMEOUT_S)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", path, content=content, timeout=timeout) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    self._check(response)
                    what = f"the server refuses a prompt (HTTP {response.status_code})"
                    raise EngineError(what, self.where, error_text(response))
                done = False
                async for line in response.aiter_lines():  # to its end: only then the connection can be used again
                    data = line.removeprefix("data:").strip()
                    done = done or data == "[DONE]"
                    if not done and line.startswith("data:"):
                        take(self._event(data))
        except TimeoutError as error:
            hint = f"server.timeout_s is {self._timeout_s:g}"
            raise EngineError("an answer did not end in time", self.where, hint) from error
        except httpx.RequestError as error:
            raise self._unreachable(error, "the server broke off an answer") from error
        if not done:
            raise EngineError("the server broke off an answer", self.where, "its reply ends without a last word")

    async def close(self) -> None:
        await self._http.aclose()

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError("the server's answer is not JSON", self.where) from error
        if not isinstance(event, dict):
            raise EngineError("the server's answer is not an object", self.where)
        if fault := event.get("error"):
            text = fault.get("message", "") if isinstance(fault, dict) else fault
            raise EngineError("the server broke off an answer", self.where, " ".join(str(text).split())[:300])
        return event

    def _check(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            hint = f"put the server's API key into the environment variable {API_KEY_ENV}"
            raise EngineError(f"the server refuses us (HTTP {response.status_code})", self.where, hint)

    def _unreachable(self, error: Exception, broken: str = "the connection broke") -> EngineError:
        if (fault := tls_fault(error, self.where)) is not None:
            return fault
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            hint = "is the URL right, and the server running? `eyas serve --draft DRAFT` starts one"
            return EngineError("no server", self.where, hint)
        if isinstance(error, httpx.TimeoutException | TimeoutError):
            return EngineError("the server does not answer", self.where, f"waited {SHORT_TIMEOUT_S:.0f} s")
        return EngineError(broken, self.where, type(error).__name__)  # its text may quote the URL or headers
