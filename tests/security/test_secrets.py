"""An API key is in the request's header and nowhere else: no argument, log, event, store or error text holds it."""

from __future__ import annotations

import asyncio
import io
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from extract.sglang_double import PluginServer
from eyas.cli import app
from eyas.config import Config, ServerConfig, load
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError, EyasError
from eyas.extract.build import Job, new_session, open_store
from eyas.extract.sglang import SGLangEngine
from eyas.extract.sglang_client import API_KEY_ENV, SGLangClient
from eyas.extract.worker import Worker
from eyas.serve import serve_command
from security.hostile import SPEC, make_corpus

KEY = "sk-SENTINEL-5c1a7e"
PASSWORD = "pw-SENTINEL-91b2"
SENTINEL = "SENTINEL"


@pytest.fixture
def key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_ENV, KEY)


def files_hold_no_secret(folder: Path) -> int:
    found = [path for path in folder.rglob("*") if path.is_file()]
    for path in found:
        assert SENTINEL.encode() not in path.read_bytes(), path
        assert SENTINEL not in path.name
    return len(found)


@pytest.mark.usefixtures("key_in_environment")
def test_a_run_with_every_kind_of_failure_keeps_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server even answers with the key that it was sent."""
    caplog.set_level(logging.DEBUG)
    corpus = Corpus.open(make_corpus(tmp_path / "corpus.parquet", rows=20))
    server = PluginServer(SPEC, tmp_path / "spool", url="http://user:" + PASSWORD + "@mock:30000", api_key=KEY)
    server.spool.chmod(0o700)
    answers = [
        lambda: httpx.Response(500, json={"error": {"message": "no"}}),
        lambda: httpx.Response(400, json={"detail": "bad"}),
        lambda: httpx.Response(200, text="<html>"),
        lambda: httpx.Response(429, text="queue is full"),
    ]
    sent = iter(range(10_000))

    def answer(_: dict[str, Any]) -> httpx.Response | None:
        number = next(sent)
        if number % 5 == 4:
            raise httpx.ReadError(f"Bearer {KEY}")  # what a transport's text may quote
        return answers[number % 5]() if number < 12 and number % 5 < 4 else None

    server.answers = answer
    notes: list[Any] = []

    async def scenario() -> None:
        engine = SGLangEngine(server.url, SPEC, server.config(), "run00000", "ses00000", transport=server.transport)
        info = await engine.start()
        cfg = load(overrides=["extract.attempts=2", "store.reserve_bytes=0"])
        job = Job(tmp_path / "corpus.parquet", tmp_path / "store", "m", (server.url,), cfg, new_session())
        writer = open_store(job, corpus, info)
        worker = Worker(
            corpus,
            writer,
            engine,
            info.spec,
            run="run00000",
            session="ses00000",
            cfg=cfg.extract,
            window_bytes=1 << 20,
            report=notes.append,
        )
        await worker.run()
        writer.write_manifest()
        await engine.close()

    asyncio.run(scenario())
    assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    assert any(note.failure for note in notes)
    assert SENTINEL not in repr(notes)
    assert SENTINEL not in caplog.text
    assert files_hold_no_secret(tmp_path) > 4


class _Echo(BaseHTTPRequestHandler):
    """Refuses everybody; the status is in the path's stead, as the test's server says."""

    status = 401

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://user:{PASSWORD}@127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("key_in_environment")
@pytest.mark.parametrize("status", [401, 404, 500])
def test_the_command_line_keeps_the_key(refusing: str, status: int, tmp_path: Path) -> None:
    _Echo.status = status
    make_corpus(tmp_path / "corpus.parquet")
    arguments = ["extract", str(tmp_path / "corpus.parquet"), str(tmp_path / "store"), "--server", refusing]
    for more in ([], ["--plan"], ["--set", f"server.api_key={KEY}"]):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code in (2, 3), result.output
        assert SENTINEL not in result.output
        assert SENTINEL not in repr(result.exception)
    files_hold_no_secret(tmp_path)


@pytest.mark.usefixtures("key_in_environment")
def test_settings_and_jobs_do_not_show_it() -> None:
    cfg = load(overrides=[f"server.api_key={KEY}"])
    job = Job(Path("c"), Path("s"), "m", ("http://x",), cfg, "ses00000")
    for text in (repr(cfg), str(cfg), repr(job), cfg.model_dump_json(), repr(cfg.model_dump())):
        assert SENTINEL not in text
    assert pickle.loads(pickle.dumps(job)).cfg.server.api_key.get_secret_value() == KEY  # workers get it, by a pipe


@pytest.mark.parametrize(
    "override", [f"server.api_key=[{KEY}]", f"server.api_keys={KEY}", f"server.api_key={{a: {KEY}}}"]
)
def test_a_key_in_the_wrong_place_is_not_repeated(override: str) -> None:
    try:
        cfg: Config | None = load(overrides=[override])
    except ConfigError as error:
        assert KEY not in str(error)
    else:
        assert cfg is not None
        assert KEY not in repr(cfg)


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}\r\nX: y", f"{KEY}\u2019", f"{KEY}\x00", f"{KEY}\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="API key") as refused:
        SGLangClient("http://mock:30000", ServerConfig(api_key=key))  # type: ignore[arg-type]
    assert SENTINEL not in str(refused.value)
    assert SENTINEL not in repr(refused.value.__cause__ or refused.value.__context__)


@pytest.mark.usefixtures("key_in_environment")
def test_worker_processes_get_no_secret_by_their_arguments(tmp_path: Path) -> None:
    """Whoever may list processes reads arguments; the environment and pipes are the owner's."""
    corpus = make_corpus(tmp_path / "corpus.parquet")
    command = [sys.executable, "-m", "eyas", "extract", str(corpus), str(tmp_path / "store"), "--workers", "2"]
    for setting in ("extract.engine=fake", "store.reserve_bytes=0", "fake.delay_s=0.1", "extract.window_requests=1"):
        command += ["--set", setting]
    (tmp_path / "eyas.yaml").write_text(f"server:\n  api_key: {KEY}\n")
    process = subprocess.Popen(
        [*command, "--config", str(tmp_path / "eyas.yaml")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seen: set[bytes] = set()
    try:
        while process.poll() is None:
            seen |= _arguments_below(process.pid)
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    process.wait()
    assert len(seen) >= 3, output  # the parent and its two workers
    assert all(SENTINEL.encode() not in arguments for arguments in seen)
    assert SENTINEL.encode() not in output
    (tmp_path / "eyas.yaml").unlink()
    files_hold_no_secret(tmp_path)


def _arguments_below(pid: int) -> set[bytes]:
    """Command lines of a process and its descendants, each with its process id so that workers count apart."""
    found: set[bytes] = set()
    try:
        found.add(str(pid).encode() + b" " + Path(f"/proc/{pid}/cmdline").read_bytes())
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= _arguments_below(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


@pytest.mark.usefixtures("key_in_environment")
def test_the_serve_command_holds_no_secret() -> None:
    command = serve_command("nobody/nothing", layers=[1, 3], sglang_version="0.5.23")
    assert SENTINEL not in command.shell()
    assert SENTINEL not in repr(command)


def test_errors_are_printed_without_the_url_s_password() -> None:
    console = Console(file=io.StringIO())
    for url in (f"http://user:{PASSWORD}@host:1", f"ftp://user:{PASSWORD}@host", f"http://user:{PASSWORD}@"):
        try:
            client = SGLangClient(url, ServerConfig())
        except EyasError as error:
            console.print(str(error))
        else:
            console.print(client.where)
            asyncio.run(client.close())
    assert SENTINEL not in console.file.getvalue()  # type: ignore[attr-defined]
