from __future__ import annotations

from pathlib import Path

import pytest

from eyas.config import Config, load
from eyas.errors import ConfigError


def test_defaults_need_no_file() -> None:
    assert load() == Config()


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("extract: {attempts: 5, window_requests: 8}\nstore: {shard_bytes: 64MiB}\n")
    cfg = load(path, ["extract.attempts=7", "capture.layers=[1, 2, 3]"])
    assert (cfg.extract.attempts, cfg.extract.window_requests) == (7, 8)
    assert cfg.store.shard_bytes == 64 << 20
    assert cfg.capture.layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("extract.atempts=5", "did you mean extract.attempts?"),
        ("extrct.attempts=5", "did you mean extract?"),
        ("store.shard_byte=5", "did you mean store.shard_bytes?"),
        ("extract.zzzzzz=5", "known: extract.engine"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[override])
    assert "unknown config key" in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_key_without_its_section_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("window_requests: 3\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "extract.window_requests" in caught.value.hint
    assert str(path) in caught.value.where


@pytest.mark.parametrize("text", ["extract.attempts", "attempts=3", "=3", ".=3", "extract.=3"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not an override"):
        load(overrides=[text])


@pytest.mark.parametrize(
    "text", ["extract.attempts=many", "extract.attempts=0", "store.shard_bytes=-1", "capture.dtype=fp4", "extract=3"]
)
def test_a_bad_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load(overrides=[text])


@pytest.mark.parametrize("content", [b"- a list", b"extract: 3", b"\xff\xfe", b"extract: {", b"extract: [1]"])
def test_a_bad_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(path) in caught.value.where


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.yaml")


def test_the_api_key_never_shows() -> None:
    cfg = load(overrides=["server.api_key=hunter2"])
    assert "hunter2" not in repr(cfg)
    assert "hunter2" not in str(cfg.model_dump())
    assert "hunter2" not in cfg.model_dump_json()


@pytest.mark.parametrize(
    ("text", "layers"), [("1,2", (1, 2)), ("[1, 2]", (1, 2)), ("3", (3,)), ("'1 2'", (1, 2)), ("null", None)]
)
def test_layers_may_be_written_as_people_do(text: str, layers: tuple[int, ...] | None) -> None:
    assert load(overrides=[f"capture.layers={text}"]).capture.layers == layers


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1_000", 1000), ("1.5 kib", 1536)]
)
def test_sizes(text: str, size: int) -> None:
    assert load(overrides=[f"store.shard_bytes={text}"]).store.shard_bytes == size


@pytest.mark.parametrize("text", ["10foo", "lots", "GiB", "-1GiB"])
def test_a_bad_size_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2GiB|greater than 0"):
        load(overrides=[f"store.shard_bytes={text}"])


def test_text_is_taken_as_typed() -> None:
    """YAML would read 0660 as the number 432."""
    assert load(overrides=["serve.spool_mode=0660"]).serve.spool_mode == "0660"
    assert load(overrides=["server.api_key=123"]).server.api_key is not None


def test_an_empty_section_is_an_empty_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("serve:\n#  quota_bytes: 1GiB\n")
    assert load(path, ["serve.python=python3"]).serve.python == "python3"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture.layers", "a,b"),
        ("dumpdir.last", "none"),
        ("serve.quota_bytes", "12XB"),
        ("serve.spool_mode", "777"),
        ("serve.spool_mode", "rw-"),
        ("regenerate.max_cost", "-1"),
    ],
)
def test_a_bad_value_is_told_where_it_was_said(key: str, value: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    (path := tmp_path / "run.yaml").write_text(f"{section}: {{{name}: '{value}'}}\n")
    (other := tmp_path / "other.yaml").write_text("extract: {attempts: 3}\n")
    said = {
        str(path): lambda: load(path),
        f"--set {key}={value}": lambda: load(other, ["extract.attempts=2", f"{key}={value}"]),
        f"--flag {value}": lambda: load(other, ["extract.attempts=2"], {"--flag": (key, value), "--no": (key, None)}),
    }
    for where, asked in said.items():
        with pytest.raises(ConfigError) as caught:
            asked()
        assert caught.value.where == where
        assert key in caught.value.what
        assert "Value error" not in caught.value.what


def test_a_flag_wins_over_the_file_and_what_is_set(tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text("capture: {layers: [1]}\n")
    assert load(path, ["capture.layers=[2]"], {"--layers": ("capture.layers", "3,4")}).capture.layers == (3, 4)
