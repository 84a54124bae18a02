from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sglang_double import reply_of

from eyas.capture.contract import CaptureReply, RequestId
from eyas.config import ServerConfig
from eyas.errors import ConfigError, EngineError
from eyas.extract.engine import CaptureRequest, Failed, Retry
from eyas.extract.sglang_client import ServerAway, SGLangClient, http_failure, read_reply

REQUEST = CaptureRequest(RequestId("run00000", "ses00000", 3, 1), [7, 8, 9], [0, 2])
WORD = CaptureReply("accepted", "0" * 32, "1" * 32, 3)
Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler | None = None, url: str = "http://mock:30000", **settings: Any) -> SGLangClient:
    transport = httpx.MockTransport(handler) if handler else None
    return SGLangClient(url, ServerConfig(**settings), transport)


def identify(subject: SGLangClient) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        try:
            return await subject.identify()
        finally:
            await subject.close()

    return asyncio.run(ask())


def generate(subject: SGLangClient) -> CaptureReply | Failed:
    async def ask() -> CaptureReply | Failed:
        try:
            return await subject.generate(REQUEST, "0" * 32)
        finally:
            await subject.close()

    return asyncio.run(ask())


def raising(error: Exception) -> Handler:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.fixture
def closed_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- who is there


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_both_names_of_the_info_are_known(path: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"model_path": "m"}) if request.url.path == path else httpx.Response(404)

    assert identify(client(handler)) == {"model_path": "m"}


def test_a_base_path_is_kept() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/llm/model_info"
        return httpx.Response(200, json={"model_path": "m"})

    identify(client(handler, "http://mock/llm/"))


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"object": "list"}),
    ],
)
def test_another_server_is_named(response: httpx.Response) -> None:
    with pytest.raises(EngineError, match="not an SGLang server: http://mock:30000"):
        identify(client(lambda _: response))


def test_nobody_there_is_named(closed_port: int) -> None:
    with pytest.raises(
        ServerAway, match=r"no server: http://127.0.0.1:\d+ \(is the URL right, and the server running\?"
    ):
        identify(client(url=f"http://127.0.0.1:{closed_port}"))


def test_unknown_host_is_named() -> None:
    with pytest.raises(ServerAway, match="no server"):
        identify(client(url="http://no-such-host.invalid:30000"))


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_loads_is_away(status: int) -> None:
    with pytest.raises(ServerAway, match="not ready"):
        identify(client(lambda _: httpx.Response(status)))


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (httpx.ConnectTimeout("t"), "does not answer"),
        (httpx.ReadTimeout("t"), "does not answer"),
        (httpx.ReadError("r"), "connection broke"),
        (httpx.RemoteProtocolError("r"), "connection broke"),
        (httpx.DecodingError("gzip"), "connection broke"),
    ],
)
def test_transport_errors_are_named(error: Exception, what: str) -> None:
    with pytest.raises(ServerAway, match=what):
        identify(client(raising(error)))


def test_certificate_without_trust_is_named() -> None:
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.__cause__ = ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED")
    with pytest.raises(EngineError, match=r"no trust in the server's certificate.*ca_file") as caught:
        identify(client(raising(error), "https://mock"))
    assert not isinstance(caught.value, ServerAway)


def test_https_to_a_plain_server_is_named() -> None:
    async def scenario() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        subject = client(url=f"https://127.0.0.1:{port}")
        async with server:
            with pytest.raises(EngineError, match="no TLS with the server"):
                await subject.identify()
            await subject.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "system", "trusted"),
    [({}, False, False), ({}, True, True), ({"ca_file": ...}, False, True), ({"verify_tls": False}, False, True)],
)
def test_certificates_are_trusted_as_the_settings_say(
    settings: dict[str, Any], system: bool, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    if system:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    given: Any = {name: certificate if value is ... else value for name, value in settings.items()}

    async def scenario() -> dict[str, Any]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"model_path": "m"}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            writer.close()

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        subject = client(url=f"https://localhost:{server.sockets[0].getsockname()[1]}", **given)
        async with server:
            try:
                return await subject.identify()
            finally:
                await subject.close()

    if trusted:
        assert asyncio.run(scenario()) == {"model_path": "m"}
    else:
        with pytest.raises(EngineError, match="no trust"):
            asyncio.run(scenario())


# --- secrets


@pytest.mark.parametrize("status", [401, 403])
def test_refused_key_is_named_and_never_shown(status: int) -> None:
    key = "very-secret-key"
    for ask in (identify, generate):
        with pytest.raises(EngineError, match="EYAS_API_KEY") as error:
            ask(client(lambda _: httpx.Response(status), api_key=key))
        assert key not in str(error.value)


def test_key_from_settings_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization", ""))
        return httpx.Response(200, json={"model_path": "m"})

    identify(client(handler))
    monkeypatch.setenv("EYAS_API_KEY", "from-environment")
    identify(client(handler))
    identify(client(handler, api_key="from-settings"))
    identify(client(handler, "http://user:word@mock", api_key="from-settings"))
    assert seen == ["", "Bearer from-environment", "Bearer from-settings", "Bearer from-settings"]


def test_user_and_password_in_the_url_are_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"].startswith("Basic ")
        return httpx.Response(404)

    caplog.set_level("DEBUG")
    subject = client(handler, "http://user:pass-word@mock:30000/x")
    assert subject.where == "http://mock:30000/x"
    with pytest.raises(EngineError) as error:
        identify(subject)
    for text in (str(error.value), repr(error.value), caplog.text):
        assert "pass-word" not in text
        assert "user" not in text


def test_proxies_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setenv("HTTP_PROXY", "not a proxy at all")
    with pytest.raises(ServerAway, match="no server"):
        identify(client(url=f"http://127.0.0.1:{closed_port}"))


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host", "http://", "http://[::1", "/path"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server URL"):
        client(url=url)


def test_unreadable_certificate_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "not.pem").write_text("nothing")
    for name in ("not.pem", "missing.pem"):
        with pytest.raises(ConfigError, match="unreadable certificate file"):
            client(url="https://mock", ca_file=tmp_path / name)


@pytest.mark.parametrize(("url", "port"), [("http://h", 80), ("https://h", 443), ("http://h:31000/x", 31000)])
def test_port(url: str, port: int) -> None:
    assert client(url=url).port == port


# --- a row


def test_the_request_carries_the_identity() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/generate")
        assert request.headers["Content-Type"] == "application/json"
        bodies.append(json.loads(request.content))
        return reply_of(WORD.to_dict())

    assert generate(client(handler)) == WORD
    assert bodies == [
        {
            "rid": "eyas.run00000.ses00000.00000003.01",
            "input_ids": [7, 8, 9],
            "extra_key": "eyas.run00000.ses00000.00000003.01",
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": 0,
                "custom_params": {"eyas_spec": "0" * 32, "eyas_last": [0, 2]},
            },
        }
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ReadTimeout("t"), "reply-late"),
        (httpx.ConnectError("refused"), "connection-lost"),
        (httpx.ReadError("reset"), "connection-lost"),
        (httpx.RemoteProtocolError("disconnected"), "connection-lost"),
        (httpx.WriteError("pipe"), "connection-lost"),
        (httpx.DecodingError("gzip"), "connection-lost"),
    ],
)
def test_a_lost_connection_asks_for_a_probe(error: Exception, reason: str) -> None:
    failed = generate(client(raising(error)))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, Retry.PROBE)


TOO_LONG = [
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens). Use a shorter input or enable it.",
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5001.",
]


@pytest.mark.parametrize(
    ("status", "message", "reason", "retry"),
    [
        *((400, message, "row-too-long", Retry.NEVER) for message in TOO_LONG),
        (400, "Duplicate request ID detected: eyas.x", "duplicate-rid", Retry.ATTEMPT),
        (400, "something else", "bad-request", Retry.NEVER),
        (413, "", "bad-request", Retry.NEVER),
        *((status, "", "server-error", Retry.PROBE) for status in (302, 307, 404, 405, 408, 499)),
        (422, "field", "bad-request", Retry.NEVER),
        (429, "", "server-busy", Retry.WAIT),
        (503, "The request queue is full.", "server-busy", Retry.WAIT),
        (503, "Service unavailable", "server-error", Retry.PROBE),
        (500, "", "server-error", Retry.PROBE),
        (502, "<html>bad gateway</html>", "server-error", Retry.PROBE),
    ],
)
def test_http_errors_have_names(status: int, message: str, reason: str, retry: Retry) -> None:
    failed = http_failure(status, message)
    assert (failed.reason, failed.retry) == (reason, retry)
    assert str(status) in failed.detail


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": TOO_LONG[0]}},
        {"error": TOO_LONG[0]},
        {"detail": TOO_LONG[0]},
        {"message": TOO_LONG[0], "object": "error"},
        {"error": {"message": TOO_LONG[0] + "\n" * 50 + "x" * 5000}},
    ],
)
def test_the_message_is_found_in_every_shape_of_error(body: dict[str, Any]) -> None:
    failed = generate(client(lambda _: httpx.Response(400, json=body)))
    assert isinstance(failed, Failed)
    assert failed.reason == "row-too-long"
    assert "\n" not in failed.detail
    assert len(failed.detail) < 400


def aborted(message: str) -> dict[str, Any]:
    return {"meta_info": {"finish_reason": {"type": "abort", "message": message}}}


@pytest.mark.parametrize(
    ("body", "reason", "retry"),
    [
        ({}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": None}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": {"finish_reason": {"type": "length"}}}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": {"eyas": [None]}}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": {"eyas": []}}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": {"eyas": "accepted"}}, "no-plugin-reply", Retry.PROBE),
        ({"meta_info": {"eyas": [{"status": "accepted"}]}}, "bad-reply", Retry.PROBE),
        ({"meta_info": {"eyas": [{**WORD.to_dict(), "new": 1}]}}, "bad-reply", Retry.PROBE),
        (aborted("Abort in waiting queue"), "aborted", Retry.PROBE),
        (aborted(TOO_LONG[1]), "row-too-long", Retry.NEVER),
    ],
)
def test_a_reply_without_the_plugins_word_is_a_failure(body: dict[str, Any], reason: str, retry: Retry) -> None:
    failed = read_reply(body)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, retry)


def test_a_reply_that_is_not_json_is_a_failure() -> None:
    failed = generate(client(lambda _: httpx.Response(200, text="<html>")))
    assert isinstance(failed, Failed)
    assert failed.reason == "no-plugin-reply"


def test_the_plugins_word_is_read() -> None:
    assert read_reply({"meta_info": {"eyas": [WORD.to_dict()]}}) == WORD
    assert read_reply({"meta_info": {"eyas": [None, WORD.to_dict()]}}) == WORD
