"""HTTP with an SGLang server: one place where its answers and our transport's errors become ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import httpx

from eyas.capture.contract import LAST_PARAM, REPLY_KEY, SPEC_PARAM, CaptureReply, Refusal
from eyas.config import ServerConfig
from eyas.errors import EngineError
from eyas.extract.engine import CaptureRequest, Failed, Retry
from eyas.extract.http import API_KEY_ENV, SHORT_TIMEOUT_S, error_text, json_object, open_client, server_url, tls_fault

DUPLICATE_RID: Final = "duplicate-rid"
OTHER_VOCABULARY: Final = "other-vocabulary"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_SMALL_BYTES: Final = 1 << 20  # a reply with one token and the plugin's word, the model's info
_LARGE_BYTES: Final = 256 << 20  # log-probabilities of the longest prompts
_INFO_PATHS: Final = ("/model_info", "/get_model_info")  # the newer name first; older releases know only the second
_SETTINGS_PATHS: Final = ("/server_info", "/get_server_info")
_TOO_LONG: Final = ("is longer than the model", "exceeds the maximum allowed length", "maximum context length")
_DUPLICATE: Final = "Duplicate request ID"
_BIAS: Final = "logit_bias must"
_QUEUE_FULL: Final = "queue is full"
_ROWS_FAULT: Final = (400, 413, 422)


class ServerAway(EngineError):
    """The server does not answer, or not yet: it may be restarting."""


class ReplyTooLarge(httpx.RequestError):
    """More bytes than such a reply can have; the rest was not read."""


class SGLangClient:
    """Requests to one server.

    Args:
        url: its base URL; user and password in it are used and never shown.
        cfg: key, certificates and patience.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: not an http(s) URL, or an unreadable certificate file.
    """

    def __init__(self, url: str, cfg: ServerConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        parsed = server_url(url)
        self.where = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        self.port = parsed.port or (443 if parsed.scheme == "https" else 80)
        host = "localhost" if parsed.host in _LOOPBACK else parsed.host.lower()
        self.address = (host, self.port, parsed.path.rstrip("/"))
        self._timeout_s = cfg.timeout_s
        self._http = open_client(parsed, self.where, cfg, transport)

    async def identify(self) -> dict[str, Any]:
        """The server's model info.

        Raises:
            ServerAway: nobody answers, or a server that is not ready.
            EngineError: not an SGLang server, not authorised, or no trust in its certificate.
        """
        for path in _INFO_PATHS:
            try:
                response = await self._ask("GET", path, _SMALL_BYTES, within_s=SHORT_TIMEOUT_S)
            except httpx.RequestError as error:
                raise self.unreachable(error) from error
            self._check_authorised(response)
            if response.status_code >= 500:
                raise ServerAway("the server is not ready", self.where, f"it answers HTTP {response.status_code}")
            info = json_object(response) if response.status_code == 200 else {}
            if "model_path" in info:
                return info
        raise EngineError(
            "not an SGLang server", self.where, "its base URL is needed, such as http://localhost:30000: is this it?"
        )

    async def settings(self) -> dict[str, Any]:
        """The server's flags and version as it tells them; empty where it does not.

        Raises:
            EngineError: nobody answers, not authorised, or no trust in its certificate.
        """
        for path in _SETTINGS_PATHS:
            try:
                response = await self._ask("GET", path, _LARGE_BYTES, within_s=SHORT_TIMEOUT_S)
            except httpx.RequestError as error:
                raise self.unreachable(error) from error
            self._check_authorised(response)
            if response.status_code == 200 and (found := json_object(response)):
                return found
        return {}

    async def generate(self, request: CaptureRequest, spec_id: str) -> CaptureReply | Failed:
        """Have the server prefill one row: the plugin's word on it, or by name why there is none.

        Raises:
            EngineError: not authorised.
        """
        body = prefill_body(request)
        body["sampling_params"]["custom_params"] = {SPEC_PARAM: spec_id, LAST_PARAM: request.last_runs}
        answer = await self.post(body, _SMALL_BYTES)
        return answer if isinstance(answer, Failed) else read_reply(answer)

    async def post(self, body: dict[str, Any], limit: int = _LARGE_BYTES) -> dict[str, Any] | Failed:
        """Send one request to /generate: the reply of at most `limit` bytes, or by name why there is none.

        Raises:
            EngineError: not authorised.
        """
        try:
            content = json.dumps(body, separators=(",", ":"))
            response = await self._ask("POST", "/generate", limit, within_s=self._timeout_s, content=content)
        except ReplyTooLarge as error:
            return Failed("reply-too-large", str(error), Retry.PROBE)
        except httpx.TimeoutException as error:
            return Failed("reply-late", type(error).__name__, Retry.PROBE)
        except httpx.RequestError as error:  # a body that cannot be decoded is no TransportError
            return Failed("connection-lost", self._scrub(error), Retry.PROBE)
        self._check_authorised(response)
        if response.status_code != 200:
            return http_failure(response.status_code, error_text(response))
        return json_object(response)

    async def _ask(
        self, method: str, path: str, limit: int, *, within_s: float, content: str | None = None
    ) -> httpx.Response:
        """One exchange, bounded in time and size whatever the other side sends.

        Raises:
            ReplyTooLarge: more than `limit` bytes. httpx.RequestError: the transport.
        """
        body = bytearray()
        timeout = httpx.Timeout(within_s, connect=SHORT_TIMEOUT_S, pool=None)
        try:
            # httpx waits so long for each piece; a server that drips must not hold us for ever.
            async with (
                asyncio.timeout(within_s),
                self._http.stream(method, path, content=content, timeout=timeout) as response,
            ):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > limit:
                        raise ReplyTooLarge(f"more than {limit} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout("the reply did not end in time") from error
        return httpx.Response(response.status_code, content=bytes(body))

    async def close(self) -> None:
        await self._http.aclose()

    def unreachable(self, error: httpx.RequestError) -> EngineError:
        """Why the transport failed, for a person."""
        if (fault := tls_fault(error, self.where)) is not None:
            return fault
        if isinstance(error, ReplyTooLarge):
            return EngineError("not an SGLang server", self.where, f"its answer has {error}")
        if isinstance(error, httpx.TimeoutException):
            return ServerAway("the server does not answer", self.where, f"waited {SHORT_TIMEOUT_S:.0f} s")
        if isinstance(error, httpx.ConnectError):
            hint = "is the URL right, and the server running? `eyas serve MODEL` starts one"
            return ServerAway("no server", self.where, hint)
        return ServerAway("the connection broke", self.where, self._scrub(error))

    def _check_authorised(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            hint = f"put the server's API key into the environment variable {API_KEY_ENV}"
            raise EngineError(f"the server refuses us (HTTP {response.status_code})", self.where, hint)

    @staticmethod
    def _scrub(error: Exception) -> str:
        """The error's kind only: a transport's text may quote the URL or headers."""
        return type(error).__name__


def prefill_body(request: CaptureRequest) -> dict[str, Any]:
    """What /generate needs to prefill one row and answer with one token."""
    rid = str(request.rid)
    return {
        "rid": rid,
        "input_ids": request.tokens,
        # Another key, another branch of the radix cache: no prefix is taken from an earlier row.
        "extra_key": rid,
        # With 0 new tokens the reply carries no extras.
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }


def vocabulary_guard(vocab_size: int) -> dict[str, Any]:
    """Sampling parameters by which a server of a smaller vocabulary refuses a request.

    SGLang does not look whether token ids are in the vocabulary: a server of another model would die of them. It does
    look whether biases are. This one is 0, which changes nothing.
    """
    return {"logit_bias": {str(vocab_size - 1): 0.0}}


def http_failure(status: int, message: str) -> Failed:
    """What an HTTP error of /generate means for the row."""
    detail = f"HTTP {status}: {message}" if message else f"HTTP {status}"
    if any(text in message for text in _TOO_LONG):
        return Failed("row-too-long", detail, Retry.NEVER)
    if _DUPLICATE in message:
        return Failed(DUPLICATE_RID, detail)
    if status == 429 or _QUEUE_FULL in message:
        return Failed("server-busy", detail, Retry.WAIT)
    if status in _ROWS_FAULT and _BIAS in message:
        return Failed(OTHER_VOCABULARY, f"its vocabulary is smaller: {detail}", Retry.NEVER)
    if status in _ROWS_FAULT:
        return Failed("bad-request", detail, Retry.NEVER)
    # Anything else is not about the row: a server or gateway in trouble, or by now a stranger at that address.
    return Failed("server-error", detail, Retry.PROBE)


def read_reply(body: dict[str, Any]) -> CaptureReply | Failed:
    """The plugin's word in a reply of /generate; without it nothing may be stored."""
    meta = body.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    words = meta.get(REPLY_KEY)
    word = next((word for word in words if isinstance(word, dict)), None) if isinstance(words, list) else None
    if word is not None:
        try:
            return CaptureReply.from_dict(word)
        except ValueError as error:
            return Failed("bad-reply", str(error), Retry.PROBE)
    return aborted(meta) or Failed("no-plugin-reply", "the reply says nothing of the capture", Retry.PROBE)


def aborted(meta: dict[str, Any]) -> Failed | None:
    """What it means for the row when its reply says that the server broke off; None when it does not."""
    finish = meta.get("finish_reason")
    if not (isinstance(finish, dict) and finish.get("type") == "abort"):
        return None
    message = str(finish.get("message", ""))
    if any(text in message for text in _TOO_LONG):
        return Failed("row-too-long", message, Retry.NEVER)
    return Failed(str(Refusal.ABORTED), message, Retry.PROBE)


def is_echo(returned: Sequence[int], sent: Sequence[int], vocab_size: int) -> bool:
    """Whether the token ids beside a reply's log-probabilities are the prompt's.

    The last id of the vocabulary comes back as 0: SGLang clips what may be an image's hash. Its value is its own.
    """
    return len(returned) == len(sent) and all(
        back == token or (back == 0 and token == vocab_size - 1) for back, token in zip(returned, sent, strict=True)
    )
