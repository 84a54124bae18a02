"""Files that grow: whatever a killed writer leaves, whole lines stay and half lines go."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.regenerate.answer_files import AppendFile, good_lines, json_line, open_sealed, sealed_line
from eyas.errors import IntegrityError, StoreError

ENTRIES: list[dict[str, Any]] = [{"n": i, "text": "ü\u2028\n" * i} for i in range(5)]


def read_back(path: Path) -> list[dict[str, Any]]:
    file = AppendFile(path)
    try:
        return [entry for _, entry in good_lines(file, open_sealed, "hint")]
    finally:
        file.close()


@given(st.integers(0, 200), st.binary(max_size=30).filter(lambda tail: b"\n" not in tail))
def test_a_file_cut_anywhere_keeps_its_whole_lines_and_grows_on(cut: int, tail: bytes) -> None:
    data = b"".join(map(sealed_line, ENTRIES))
    whole = data[: min(cut, len(data))].count(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.journal"
        path.write_bytes(data[:cut] + tail)
        assert read_back(path) == ENTRIES[:whole]
        file = AppendFile(path)
        file.append(sealed_line({"n": "new"}))
        file.close()
        assert read_back(path) == [*ENTRIES[:whole], {"n": "new"}]


def test_damage_with_good_lines_behind_it_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "f"
    lines = [sealed_line(entry) for entry in ENTRIES]
    data = bytearray(b"".join(lines))
    data[len(lines[0]) + 25] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="line 2 is damaged"):
        read_back(path)
    assert path.read_bytes() == data


def test_zeros_at_the_end_are_what_a_power_loss_leaves(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(sealed_line(ENTRIES[0]) + bytes(100) + b"\n" + bytes(50))
    assert read_back(path) == ENTRIES[:1]


def test_many_waiters_share_an_fsync_and_all_is_durable(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "f")

    async def write(number: int) -> None:
        file.append(json_line({"n": number}))
        await file.synced()

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*(write(n) for n in range(50))), 20)

    asyncio.run(all_of_them())
    file.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "f").read_text().splitlines()] == list(range(50))


def test_a_lock_is_had_by_one_and_moves_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = AppendFile(path, lock=True)
    file.append(b"one\n")
    for _ in range(2):
        with pytest.raises(StoreError, match="another process"):
            AppendFile(path, lock=True)
        file.replace([b"two\n", b"three\n"])  # another file of that name: still locked
    assert path.read_bytes() == b"two\nthree\n"
    file.append(b"four\n")
    file.close()
    AppendFile(path, lock=True).close()
    assert path.read_bytes() == b"two\nthree\nfour\n"
    assert os.listdir(tmp_path) == ["f"]  # noqa: PTH208


def test_a_replacement_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "f")
    file.append(b"one\n")

    def lines() -> Any:
        yield b"two\n"
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="disk full"):
        file.replace(lines())
    file.append(b"more\n")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"one\nmore\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot write"):
        AppendFile(tmp_path / "file" / "f")
