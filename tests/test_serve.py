"""The command line that starts a capturing server."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.capture.settings import SETTINGS_ENV, ServerSettings
from eyas.errors import ConfigError
from eyas.serve import NEWEST_TESTED, ServeCommand, installed_sglang, serve_command


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_config(tmp_path / "model with space", num_hidden_layers=32)


def write_config(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def settings(command: ServeCommand) -> ServerSettings:
    return ServerSettings.from_env(command.env[SETTINGS_ENV])


def after(argv: tuple[str, ...], flag: str, count: int = 1) -> list[str]:
    at = argv.index(flag)
    return list(argv[at + 1 : at + 1 + count])


@pytest.mark.parametrize("version", ["0.5.23", "0.5.24", "0.6.0", "1.0.0", "v0.5.23", "0.5.23.post1", "0.5.23rc1"])
def test_newer_releases_keep_states_by_their_own_flags(model: str, version: str) -> None:
    argv = serve_command(model, sglang_version=version).argv
    assert "--enable-return-aux-hidden-states" in argv
    assert after(argv, "--speculative-algorithm") == ["DFLASH"]
    assert after(argv, "--return-aux-hidden-state-layer-ids", 3) == ["1", "15", "28"]
    assert "--enable-return-hidden-states" not in argv


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.22", "0.5.22.post3"])
def test_older_releases_leave_the_layers_to_the_plugin(model: str, version: str) -> None:
    command = serve_command(model, sglang_version=version)
    assert after(command.argv, "--return-hidden-states-mode") == ["full"]
    assert after(command.argv, "--cuda-graph-backend-prefill") == ["disabled"]
    assert "DFLASH" not in command.argv
    assert settings(command).layers == (1, 15, 28)


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9", "0.5.9", "main", ""])
def test_other_releases_are_refused(model: str, version: str) -> None:
    if not version:
        assert serve_command(model, sglang_version=version).argv  # empty: nothing said, the default holds
        return
    with pytest.raises(ConfigError) as error:
        serve_command(model, sglang_version=version)
    assert version in str(error.value)
    assert error.value.hint


def test_defaults(model: str) -> None:
    command = serve_command(model, port=31234)
    assert after(command.argv, "--port") == ["31234"]
    assert after(command.argv, "--model-path") == [model]
    assert settings(command) == ServerSettings(layers=(1, 15, 28), spool="/dev/shm/eyas-31234")
    if installed_sglang() is None:
        assert command.argv[0] == "python"
        assert command.argv == serve_command(model, port=31234, sglang_version=NEWEST_TESTED).argv
    assert list(command.env) == [SETTINGS_ENV]  # SGLANG_PLUGINS would switch other plugins off


def test_every_choice_reaches_the_plugin(model: str, tmp_path: Path) -> None:
    command = serve_command(
        model,
        layers=[0, 30],
        last="all",
        dtype="f32",
        spool=tmp_path / "spool",
        quota_bytes=123,
        mode=0o640,
        group="users",
        python="/opt/py thon",
        extra=["--tp-size", "2"],
    )
    assert settings(command) == ServerSettings((0, 30), str(tmp_path / "spool"), "all", "f32", 123, 0o640, "users")
    assert command.argv[0] == "/opt/py thon"
    assert command.argv[-2:] == ("--tp-size", "2")


def test_the_shell_line_runs_as_it_is_printed(tmp_path: Path) -> None:
    folder = write_config(tmp_path / 'it\'s $HOME; a "model"', num_hidden_layers=8)
    program = tmp_path / "program.py"
    program.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['EYAS_CAPTURE']]))")
    planned = serve_command(folder, extra=["--x", "a b"])
    command = ServeCommand((sys.executable, str(program), *planned.argv[1:]), planned.env)
    line = command.shell()
    assert "\n" not in line
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True)
    argv, environment = json.loads(done.stdout)
    assert tuple(argv) == planned.argv[1:]
    assert environment == planned.env[SETTINGS_ENV]
    assert shlex.split(line)[0].startswith(f"{SETTINGS_ENV}=")


def test_run_becomes_the_server(tmp_path: Path) -> None:
    code = (
        "import sys; from eyas.serve import ServeCommand; "
        "ServeCommand((sys.executable, '-c', 'import os; print(os.environ[\"EYAS_CAPTURE\"])'), "
        "{'EYAS_CAPTURE': 'here'}).run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "here\n"


def test_a_program_that_is_not_there_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match="cannot start the server"):
        ServeCommand(("/no/such/python",), {}).run()


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    folder = write_config(
        tmp_path / "vl", text_config={"num_hidden_layers": 61}, vision_config={"num_hidden_layers": 9}
    )
    assert settings(serve_command(folder)).layers == (1, 29, 57)


@pytest.mark.parametrize("depth", [1, 6])
def test_small_models_must_name_their_layers(tmp_path: Path, depth: int) -> None:
    folder = write_config(tmp_path / "small", num_hidden_layers=depth)
    with pytest.raises(ConfigError, match="name") as error:
        serve_command(folder)
    assert folder in str(error.value)
    if depth > 1:
        assert settings(serve_command(folder, layers=[0, 2])).layers == (0, 2)


@pytest.mark.parametrize("layers", [[3, 1], [1, 1], [-1, 2], [1, 32], [1, 31]])
def test_layers_that_cannot_be_captured_are_refused(model: str, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="layer"):
        serve_command(model, layers=layers)


def test_named_layers_need_no_config_here() -> None:
    command = serve_command("/models/on/another/machine", layers=[2, 5], sglang_version="0.5.23")
    assert after(command.argv, "--return-aux-hidden-state-layer-ids", 2) == ["2", "5"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"num_hidden_layers": "many"}', "{}"])
def test_an_unreadable_config_is_said_plainly(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        serve_command(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_folder_without_config_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        serve_command(str(tmp_path))


@pytest.mark.parametrize("bad", [{"last": "some"}, {"dtype": "int8"}, {"quota_bytes": 0}, {"port": 0}, {"port": 70000}])
def test_settings_out_of_range_are_refused(model: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        serve_command(model, **bad)


@pytest.mark.parametrize(
    ("architecture", "algorithm"),
    [("Qwen2ForCausalLM", "EAGLE3"), ("Glm4MoeForCausalLM", "EAGLE3"), ("LlamaForCausalLM", "DFLASH")],
)
def test_models_without_the_newer_setter_use_the_older_one(tmp_path: Path, architecture: str, algorithm: str) -> None:
    folder = write_config(tmp_path / "m", num_hidden_layers=28, architectures=[architecture])
    argv = serve_command(folder, sglang_version="0.5.23").argv
    assert after(argv, "--speculative-algorithm") == [algorithm]
    assert after(argv, "--return-aux-hidden-state-layer-ids", 3) == ["1", "13", "24"]
