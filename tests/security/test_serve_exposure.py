"""`eyas serve` listens where only this machine reaches it, unless told otherwise; then it says what that means."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.capture.settings import SETTINGS_ENV, ServerSettings
from eyas.cli import app
from eyas.serve import ServeCommand, serve_command


def command(*extra: str, **options: str) -> ServeCommand:
    return serve_command("nobody/nothing", layers=[1, 3], sglang_version="0.5.23", extra=extra, **options)  # type: ignore[arg-type]


def hosts(made: ServeCommand) -> list[str]:
    return [made.argv[at + 1] for at, argument in enumerate(made.argv) if argument == "--host"]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_loopback_is_said_not_left_to_a_default(version: str) -> None:
    made = serve_command("nobody/nothing", layers=[1, 3], sglang_version=version)
    assert hosts(made) == ["127.0.0.1"]
    assert made.warning == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_s_own_addresses_need_no_key(host: str) -> None:
    made = command(host=host)
    assert (hosts(made), made.warning) == ([host], "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu7.example.org", "", "localhost.example.org"])
def test_others_are_warned_of(host: str) -> None:
    made = command(host=host)
    assert hosts(made) == [host]
    assert "--api-key" in made.warning
    assert host in made.warning
    assert command("--api-key", "k", host=host).warning == ""
    assert command("--api-key=k", host=host).warning == ""


@pytest.mark.parametrize("said", [("--host", "0.0.0.0"), ("--host=0.0.0.0",)])
def test_a_host_among_sglang_s_own_flags_is_the_one_that_counts(said: tuple[str, ...]) -> None:
    made = command(*said)
    assert "127.0.0.1" not in made.argv
    assert "0.0.0.0" in made.warning


@pytest.mark.parametrize(("arguments", "warned"), [([], False), (["--host", "0.0.0.0"], True)])
def test_the_command_line(tmp_path: Path, arguments: list[str], warned: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 32}))
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *arguments, "--set", "serve.sglang_version=0.5.23"])
    assert result.exit_code == 0, result.output
    assert ("warning" in result.stderr) is warned
    assert f"--host {arguments[1] if arguments else '127.0.0.1'}" in result.stdout
    words = shlex.split(result.stdout)
    told = ServerSettings.from_env(next(word for word in words if word.startswith(SETTINGS_ENV)).partition("=")[2])
    assert told.mode == 0o600
    assert told.group is None
