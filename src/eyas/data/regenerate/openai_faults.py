"""Why there is no answer: each way a server or the way to it can fail, by name, and what is to be done. Pure.

RETRY   ask again: busy, broken, cut, empty         (in time, the row fails by that name)
ROW     this row fails: too long a prompt, refused
STOP    no row would fare better: a wrong key, model or address (`Fault.error` says so)
"""

from __future__ import annotations

import datetime
import math
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final

import httpx
import openai

from eyas.data.regenerate.budget import Usage
from eyas.errors import ConfigError, EngineError, EyasError, cause_of

LONGEST_RETRY_AFTER_S: Final = 600.0
_DETAIL_CHARS: Final = 300
_TOO_LONG: Final = (
    "is longer than the model",
    "exceeds the maximum allowed length",
    "maximum context length",
    "context_length_exceeded",
    "longer than the maximum model length",
    "too many tokens",
)
_BUSY: Final = (429, 502, 503, 504, 529)
_NO_MODEL: Final = ("model_not_found", "not a valid model", "model does not exist", "unknown model", "no such model")


class FaultKind(StrEnum):
    """What is to be done about a fault."""

    RETRY = "retry"
    ROW = "row"
    STOP = "stop"
    NO_STREAM_OPTIONS = "no-stream-options"  # ask again without them


class Fault(Exception):
    """One try of one request failed.

    Attributes:
        reason: short name, for counts: rate-limited, server-error, timeout, connection-lost, cut-stream, ...
        detail: for a person; never holds the key.
        retry_after_s: what the server asked for.
        usage: what the reply said it cost.
        charged: without usage: whether the server may charge for it all the same.
        busy: the server has too much to do, or what stands before it cannot reach it: others would meet the same.
        error: of a STOP, what the user is told.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        *,
        kind: FaultKind = FaultKind.RETRY,
        retry_after_s: float | None = None,
        usage: Usage | None = None,
        charged: bool = False,
        busy: bool = False,
        error: EyasError | None = None,
    ) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.kind = reason, detail, kind
        self.retry_after_s, self.usage, self.charged = retry_after_s, usage, charged
        self.busy, self.error = busy, error


class ServerAway(EngineError):
    """Nobody listens at the server's address: it may be restarting."""


def clean(text: str, key: str) -> str:
    """One short line without the key."""
    line = " ".join(text.split())
    return (line.replace(key, "<key>") if key else line)[:_DETAIL_CHARS]


def fault_of_status(
    status: int, body: object, headers: Mapping[str, str] | httpx.Headers, url: str, key: str = ""
) -> Fault:
    """What an HTTP error means; `body` is the reply as text or parsed."""
    code, message = _said(body)
    message = clean(message, key)
    detail = f"HTTP {status}: {message}" if message else f"HTTP {status}"
    text = f"{code} {message}".lower()
    if status in (408, 409, 425, 429) or status >= 500:
        reason = {408: "server-timeout", 409: "conflict", 425: "conflict", 429: "rate-limited"}.get(status)
        wait_s = retry_after(headers, datetime.datetime.now(datetime.UTC))
        return Fault(reason or "server-error", detail, retry_after_s=wait_s, busy=bool(wait_s) or status in _BUSY)
    if (error := _of_us(status, text, url, message)) is not None and not (status == 403 and _is_flagged(body)):
        return _stop(error, detail)
    if "stream_options" in text:
        return Fault("bad-request", detail, kind=FaultKind.NO_STREAM_OPTIONS)
    reason = "bad-request"
    if status == 403:
        reason = "moderated"
    elif status == 404:
        reason = "tools-unsupported"
    elif any(words in text for words in _TOO_LONG):
        reason = "prompt-too-long"
    return Fault(reason, detail, kind=FaultKind.ROW)


def _of_us(status: int, text: str, url: str, message: str) -> EyasError | None:
    """What the user is told of an HTTP error that every row would meet; None where it is about one row."""
    error: EyasError | None = None
    match status:
        case 401:
            hint = "its API key is read from the variable regenerate.api_key_env names, by default OPENAI_API_KEY"
            error = EngineError("the server refuses us (HTTP 401)", url, hint)
        case 402:
            error = EngineError("the account at the server has no credit left (HTTP 402)", url, message)
        case 403:
            error = EngineError("the server refuses us (HTTP 403)", url, message)
        case 404 if "support tool" in text:
            pass
        case 404 if "model" in text or "endpoints" in text:
            error = ConfigError("the server does not know the model", url, message)
        case 404 | 405:
            hint = "the base URL ends where /chat/completions begins, often in /v1"
            error = EngineError(f"no chat completions there (HTTP {status})", url, hint)
        case _ if status < 400:
            error = EngineError(f"the server sends us elsewhere (HTTP {status})", url, "give its address")
        case _ if any(words in text for words in _NO_MODEL):
            error = ConfigError("the server does not know the model", url, message)
    return error


def _stop(error: EyasError, detail: str) -> Fault:
    return Fault("stopped", detail, kind=FaultKind.STOP, error=error)


def fault_of_body(body: object, url: str = "", key: str = "", *, in_answer: bool) -> Fault:
    """What an error within a stream, or in a reply of status 200, means: its code is a status at times."""
    code, message = _said(body)
    if code.isdigit() and 400 <= int(code) < 600:
        fault = fault_of_status(int(code), body, {}, url, key)
        fault.charged = in_answer
        return fault
    return Fault("server-error", clean(message or code, key), charged=in_answer)


def fault_of_error(error: Exception, url: str, key: str, *, in_answer: bool = False) -> Fault:
    """What an error of the client that is not a status means."""
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) and error.__cause__ else error
    if (tls := cause_of(error, ssl.SSLError)) is not None:
        if isinstance(tls, ssl.SSLCertVerificationError):
            hint = "SSL_CERT_FILE names the authority that signed it"
            return _stop(EngineError("no trust in the server's certificate", url, hint), "")
        if isinstance(cause, httpx.ConnectError):
            return _stop(EngineError("no TLS with the server", url, "does it speak plain http?"), "")
    match cause:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            raise ServerAway("no server answers", url, clean(str(cause), key) or type(cause).__name__) from error
        case httpx.UnsupportedProtocol() | httpx.LocalProtocolError():
            return _stop(ConfigError("the request cannot be sent", url, type(cause).__name__), "")
        case httpx.TimeoutException() | openai.APITimeoutError():
            return Fault("timeout", type(cause).__name__, charged=True)
        case httpx.HTTPError() | httpx.StreamError() | openai.APIConnectionError():
            return Fault("cut-stream" if in_answer else "connection-lost", type(cause).__name__, charged=True)
        case openai.APIError():
            fault = fault_of_body(error.body, url, key, in_answer=True)  # pyright: ignore[reportAttributeAccessIssue]
            return fault if fault.detail else Fault(fault.reason, clean(str(error), key), charged=True)
        case _:
            return Fault("connection-lost", type(cause).__name__, charged=True)


def retry_after(headers: Mapping[str, str] | httpx.Headers, now: datetime.datetime) -> float | None:
    """Seconds that the server wants us to wait, named as seconds or as a date; at most LONGEST_RETRY_AFTER_S."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            wait_s = float(text) * unit_s
        except ValueError:
            try:
                at = parsedate_to_datetime(text)
            except (ValueError, OverflowError):
                continue
            wait_s = (at.replace(tzinfo=at.tzinfo or datetime.UTC) - now).total_seconds()
        if not math.isnan(wait_s):
            return min(max(wait_s, 0.0), LONGEST_RETRY_AFTER_S)
    return None


def _said(body: object) -> tuple[str, str]:
    """(code, message) of an error reply, whichever of the usual shapes it has."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail") or ""
            return str(inner.get("code") or ""), message if isinstance(message, str) else str(message)
        return "", str(inner)
    return "", body if isinstance(body, str) else ""


def _is_flagged(body: Any) -> bool:
    """A 403 about the text of one request, not about us."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    metadata = inner.get("metadata") if isinstance(inner, dict) else None
    return isinstance(metadata, dict) and bool(metadata.get("flagged_input") or metadata.get("reasons"))
