"""One OpenAI-compatible server: the one place where its streams become answers, and its errors and the client's ours.

Half an answer is never taken for a whole one, streamed or not: it has no finish_reason, or is no JSON.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import httpx
import openai
from openai import AsyncOpenAI, AsyncStream

from eyas.connections import Connections
from eyas.data.regenerate.budget import Usage
from eyas.data.regenerate.openai_faults import Fault, FaultKind, ServerAway, clean, fault_of_error, fault_of_status
from eyas.data.regenerate.openai_stream import StreamedAnswer
from eyas.data.rows import Message
from eyas.errors import ConfigError, EngineError

_CONNECT_S: Final = 15.0
_LIST_S: Final = 30.0
_USAGE_S: Final = 10.0  # how long a finished answer waits for the usage that some servers send after it
_KEEP_ALIVE_S: Final = 2.0  # servers drop idle connections after 5 s: be sure to be first
_KEY_CHARS: Final = 16  # a shorter "key" is a word that answers may hold
_NO_KEY: Final = "EMPTY"  # what servers without keys are given; the client wants one


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the fields of the request, `messages` among them, and the longest wait in seconds."""

    fields: Mapping[str, Any]
    timeout_s: float
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    message: Message
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a server lists: names of models, and dollars for a token of the prompt and the answer, and for a request."""

    names: tuple[str, ...] = ()
    prices: Mapping[str, tuple[Decimal, Decimal, Decimal]] | None = None


class OpenAIClient:
    """Requests to one server.

    Args:
        url: base URL; without a path, `/v1` is meant.
        key: bearer token; empty for a server without keys. It appears in no error.

    Raises:
        ConfigError: not an http(s) URL, one that holds a password or a query, or a key that no header can carry.
    """

    def __init__(self, url: str, key: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        parsed = _parsed(url)
        self.url = str(parsed).rstrip("/")
        self._key = key
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("the API key holds characters that a key cannot have", hint="see regenerate.api_key_env")
        self._usage_on_request = True
        # A proxy for the web must not swallow requests to the next rack.
        proxied = not _is_near(parsed.host) and not {parsed.scheme, "all"}.isdisjoint(urllib.request.getproxies())
        if transport is None and not proxied:
            transport = Connections(httpx.create_ssl_context(), _KEEP_ALIVE_S)
        http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            # The caller bounds what is in flight.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=proxied,
            follow_redirects=False,  # a key is for the server it was given for
            transport=transport,
        )
        self._client = AsyncOpenAI(
            base_url=self.url,
            api_key=key or _NO_KEY,
            max_retries=0,
            http_client=http,  # pyright: ignore[reportArgumentType]  both generations of httpx are taken
        )

    async def close(self) -> None:
        await self._client.close()

    async def models(self) -> Listing:
        """What the server lists; nothing where it has no list.

        Raises:
            ServerAway: nobody answers.
            EngineError: it refuses us, or cannot be trusted.
        """
        try:
            async with asyncio.timeout(_LIST_S):
                body = await self._client.get("/models", cast_to=object)
        except TimeoutError as error:
            raise ServerAway(self.url, "no answer") from error
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._of_status(error).error or EngineError("the server refuses us", self.url) from None
            if error.status_code >= 500:
                raise ServerAway(self.url, f"HTTP {error.status_code}") from error
            return Listing()
        except (openai.APIError, httpx.HTTPError) as error:
            fault = fault_of_error(error, self.url, self._key)
            if fault.error is not None:
                raise fault.error from error
            raise ServerAway(self.url, fault.detail) from error
        except ValueError:
            return Listing()
        return _listing(body)

    async def ask(self, request: Request) -> Reply:
        """One answer, whole and not empty.

        Raises:
            ServerAway: nobody listens there; nothing was asked.
            Fault: why there is none, by name, and what is known of its cost.
            EyasError: what no other row would fare better with.
        """
        answer, with_options = StreamedAnswer(), self._usage_on_request
        try:
            await self._stream(request, answer)
        except Fault as fault:
            if fault.kind is FaultKind.NO_STREAM_OPTIONS and with_options:
                self._usage_on_request = False
                return await self.ask(request)
            fault.detail = clean(fault.detail, self._key)
            if fault.error is not None:
                fault.error.where, fault.error.hint = self.url, clean(fault.error.hint, self._key)
                raise fault.error from None  # the server's own text may quote the key
            raise
        usage = usage_of(answer.usage)
        message = answer.message(usage)
        if len(self._key) >= _KEY_CHARS and any(self._key in text for text in answer.texts()):
            raise Fault("malformed-reply", "the answer holds the API key", usage=usage, charged=True)
        return Reply(message, usage)

    async def _stream(self, request: Request, answer: StreamedAnswer) -> None:
        fields = {**request.fields, "stream": request.stream}
        if request.stream and self._usage_on_request:
            fields["stream_options"] = {"include_usage": True}
        clock = asyncio.get_running_loop().time
        deadline = clock() + request.timeout_s
        try:
            async with asyncio.timeout_at(deadline) as patience:
                stream = await self._client.post(
                    "/chat/completions", body=fields, cast_to=object, stream=True, stream_cls=AsyncStream[object]
                )
                try:
                    if "json" in stream.response.headers.get("content-type", ""):  # whole, asked for or not
                        answer.take(json.loads(await stream.response.aread()))
                    else:
                        async for chunk in stream:
                            answer.take(chunk)
                            if answer.finish_reason:
                                patience.reschedule(min(deadline, clock() + _USAGE_S))
                finally:
                    await stream.close()
        except TimeoutError as error:
            if not answer.finish_reason:
                raise Fault("timeout", f"no whole answer in {request.timeout_s:g} s", charged=True) from error
        except openai.APIStatusError as error:
            raise self._of_status(error) from None  # the server's own text may quote the key
        except (openai.APIError, httpx.HTTPError, httpx.StreamError) as error:
            if not answer.finish_reason:  # what breaks after the answer's end takes nothing from it
                raise fault_of_error(error, self.url, self._key, in_answer=answer.began) from error
        except (ValueError, RecursionError) as error:
            raise Fault("malformed-reply", str(error), charged=True) from error

    def _of_status(self, error: openai.APIStatusError) -> Fault:
        return fault_of_status(error.status_code, error.body, error.response.headers, self.url, self._key)


def usage_of(found: Mapping[str, Any] | None) -> Usage | None:
    """Tokens and dollars as a reply states them; None when it does not."""
    if found is None:
        return None
    counts = [found.get("prompt_tokens"), found.get("completion_tokens", 0)]
    if not all(type(count) is int and count >= 0 for count in counts):
        return None
    cost = _decimal(found.get("cost"))
    return Usage(counts[0], counts[1], cost)


def _decimal(value: object) -> Decimal | None:
    """A sum of money that makes sense, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and amount >= 0 else None


def _listing(body: object) -> Listing:
    entries = body.get("data") if isinstance(body, dict) else None
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names, prices = [], {}
    for entry in entries:
        if not isinstance(name := entry.get("id"), str):
            continue
        names.append(name)
        found = entry.get("pricing")
        if isinstance(found, dict):
            prompt, completion = _decimal(found.get("prompt")), _decimal(found.get("completion"))
            if prompt is not None and completion is not None:
                prices[name] = (prompt, completion, _decimal(found.get("request")) or Decimal(0))
    return Listing(tuple(names), prices)


def _parsed(url: str) -> httpx.URL:
    hint = "for example http://localhost:30000/v1"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError("not a server URL", hint=hint) from error
    plain = parsed.copy_with(username=None, password=None, query=None, fragment=None)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError("not a server URL", plain, hint)
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ConfigError("a server URL holds no password and no query", plain, "keys are read from the environment")
    return plain.copy_with(path="/v1") if plain.path in ("", "/") else plain


def _is_near(host: str) -> bool:
    """A machine of one's own network, by its name or address."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host
