"""What every HTTP client of an inference server needs: its URL, whom to trust, the key, and what its errors say."""

from __future__ import annotations

import os
import ssl
from typing import Any, Final

import httpx

from eyas.config import ServerConfig
from eyas.connections import Connections
from eyas.errors import ConfigError, EngineError, cause_of

API_KEY_ENV: Final = "EYAS_API_KEY"  # what the settings do not give
SHORT_TIMEOUT_S: Final = 15.0  # connecting, and questions that need no forward
_KEEP_ALIVE_S: Final = 2.0


def open_client(
    url: httpx.URL, where: str, cfg: ServerConfig, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """A client of one server, with what authorises it.

    Args:
        url: as the user gave it; its user and password are used where there is no key.
        where: base URL of the requests, without them.
        cfg: key and certificates.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: an unreadable certificate file, or a key that no header can carry.
    """
    # Compressed, a small reply could be a huge one.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    auth = httpx.BasicAuth(url.username, url.password) if url.username else None
    if key := api_key(cfg):
        headers["Authorization"], auth = f"Bearer {key}", None
    return httpx.AsyncClient(
        base_url=where,
        headers=headers,
        auth=auth,
        # The caller bounds how many there are. A server drops an idle connection after 5 s: be sure to be first.
        transport=transport or Connections(verification(cfg), _KEEP_ALIVE_S),
        trust_env=False,  # a proxy for the web must not swallow requests to a server in the next rack
    )


def server_url(url: str) -> httpx.URL:
    """Raises ConfigError for what is no http(s) URL."""
    hint = "for example http://localhost:30000"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError("not a server URL", hint=hint) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError("not a server URL", parsed.copy_with(username=None, password=None), hint)
    return parsed


def verification(cfg: ServerConfig) -> ssl.SSLContext:
    """Whom to trust at https. Raises ConfigError for an unreadable certificate file."""
    if not cfg.verify_tls:
        return httpx.create_ssl_context(verify=False)
    if cfg.ca_file is None:
        context = httpx.create_ssl_context()
        context.load_default_certs()  # httpx knows the web's authorities; a company's are the system's
        return context
    try:
        return ssl.create_default_context(cafile=str(cfg.ca_file))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError("unreadable certificate file", cfg.ca_file, reason) from error


def api_key(cfg: ServerConfig) -> str:
    """The key, empty where there is none. Raises ConfigError, which does not show it, if no header can carry it."""
    key = cfg.api_key.get_secret_value() if cfg.api_key is not None else os.environ.get(API_KEY_ENV, "")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        hint = f"check server.api_key or {API_KEY_ENV} for spaces, line ends and quotation marks"
        raise ConfigError("the API key holds a character that no HTTP header can carry", hint=hint)
    return key


def tls_fault(error: Exception, where: str) -> EngineError | None:
    """What is wrong with https, if that is why the transport failed."""
    match cause_of(error, ssl.SSLError):
        case None:
            return None
        case ssl.SSLCertVerificationError():
            hint = "set server.ca_file to the authority that signed it"
            return EngineError("no trust in the server's certificate", where, hint)
        case _:
            return EngineError("no TLS with the server", where, "does it speak plain http?")


def json_object(response: httpx.Response) -> dict[str, Any]:
    """A reply's JSON object; empty where it is none."""
    try:
        body = response.json()
    except (ValueError, RecursionError):  # not JSON, or nested without end
        return {}
    return body if isinstance(body, dict) else {}


def error_text(response: httpx.Response) -> str:
    """The text of an error reply, whichever of the server's three shapes it has; one short line."""
    body = json_object(response)
    error = body.get("error", body)
    found = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    text = str(found) if found else response.text
    return " ".join(text.split())[:300]
