"""Looking for what may not be looked at."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.disk import is_file_there, is_folder_there, is_there

LOOKS = {"exists": is_there, "is_file": is_file_there, "is_dir": is_folder_there}


def test_what_is_there_is_told_by_kind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [look(tmp_path / "file") for look in LOOKS.values()] == [True, True, False]
    assert [look(tmp_path) for look in LOOKS.values()] == [True, False, True]
    assert not any(look(tmp_path / "none") for look in LOOKS.values())


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_name_that_no_disk_could_hold_is_not_there(look: Callable[[Path], bool], tmp_path: Path) -> None:
    assert not look(tmp_path / ("n" * 300))


@pytest.mark.parametrize(("name", "look"), LOOKS.items(), ids=LOOKS)
def test_what_is_behind_a_closed_folder_is_not_there(
    name: str, look: Callable[[Path], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, name, closed)
    assert not look(tmp_path)
