from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas.data.outfolder import FILES, OutFolder
from eyas.errors import ConfigError, StoreError


def fill(folder: OutFolder, *names: str) -> None:
    for name in names:
        (folder.work / name).write_text(f"new {name}")


def content(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def test_everything_is_put_into_place_at_the_end(tmp_path: Path) -> None:
    with OutFolder(tmp_path / "deep" / "out") as folder:
        fill(folder, *FILES)
        assert content_names(folder.path) == {".prepare"}
        folder.publish()
    assert content(tmp_path / "deep" / "out") == {name: f"new {name}" for name in FILES}


def content_names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_files_of_an_earlier_run_go_and_others_stay(tmp_path: Path) -> None:
    for name in ("holdout.parquet", "corpus.parquet", "mine.txt"):
        (tmp_path / name).write_text("old")
    with OutFolder(tmp_path) as folder:
        fill(folder, "summary.json")
        folder.publish(keep=("corpus.parquet",))
    assert content(tmp_path) == {"corpus.parquet": "old", "mine.txt": "old", "summary.json": "new summary.json"}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "corpus.parquet").write_text("old")
    with pytest.raises(RuntimeError), OutFolder(tmp_path) as folder:
        fill(folder, *FILES)
        raise RuntimeError
    assert content(tmp_path) == {"corpus.parquet": "old"}
    with pytest.raises(RuntimeError), OutFolder(tmp_path / "a" / "b") as folder:
        raise RuntimeError
    assert not (tmp_path / "a").exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with OutFolder(tmp_path) as first:
        fill(first, "summary.json")
        with pytest.raises(ConfigError, match="another eyas prepare"), OutFolder(tmp_path):
            pass
        first.publish()
    assert content_names(tmp_path) == {"summary.json"}
    with OutFolder(tmp_path):
        pass


STEPS = [(Path, "mkdir"), (Path, "chmod"), (fcntl, "flock"), (shutil, "rmtree")]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_on_the_way_in_leaves_nothing(
    tmp_path: Path, owner: Any, step: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right behind each step: its handler runs once the call is over."""
    done, calls = getattr(owner, step), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = done(*args, **kwargs)
        calls.append(step)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        with contextlib.suppress(KeyboardInterrupt), OutFolder(tmp_path / "a" / "b"):
            pass
    assert calls
    assert list(tmp_path.iterdir()) == []
    with OutFolder(tmp_path / "a" / "b"):  # and no lock
        pass


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".prepare" / "shuffle").mkdir(parents=True)
    (tmp_path / ".prepare" / "shuffle" / "00").write_text("x")
    with OutFolder(tmp_path) as folder:
        assert list(folder.work.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_an_input_is_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / name)
    for one in (tmp_path / name, tmp_path / "x" / ".." / name, tmp_path / "link"):
        with pytest.raises(ConfigError, match="written over"):
            OutFolder(tmp_path, [str(one)])
    OutFolder(tmp_path, [str(tmp_path / "other.jsonl")])


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="this is a file"):
        OutFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="folder") as caught:
        OutFolder(tmp_path / "c.parquet")
    assert str(tmp_path / "c") in caught.value.hint
    with pytest.raises(ConfigError, match=r"not UTF-8: .*bad\\udcff"):
        OutFolder(tmp_path / "bad\udcff")
    with pytest.raises(StoreError, match="cannot write"), OutFolder(tmp_path / "file" / "out"):
        pass


@pytest.mark.parametrize("kind", ["long", "loop", "loop-below", "nul"])
def test_a_path_that_cannot_be_a_folder(tmp_path: Path, kind: str) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    paths = {"long": tmp_path / ("x" * 300), "loop": loop, "loop-below": loop / "below", "nul": tmp_path / "a\0b"}
    with pytest.raises(ConfigError):
        OutFolder(paths[kind])
