"""Quota, publication and orphans in a real folder."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.assembler import Refused
from eyas.capture.contract import SPEC_FILE, Refusal, RequestId
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Quota, Spool, parse_name
from eyas.capture.spool_files import write_at
from spool_support import record_file


def rid(row: int) -> str:
    return str(RequestId("run00000", "sess0000", row, 0))


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def spool(folder: Path, *, shares: int = 1, clock: Clock | None = None, **changes: Any) -> Spool:
    settings = ServerSettings(layers=(1,), spool=str(folder), **{"quota_bytes": 100, **changes})
    return Spool(settings, shares=shares, clock=clock or Clock())


def publish(to: Spool, row: int, data: bytes) -> Path:
    assert to.reserve(rid(row), len(data)) is None
    with record_file(to, rid(row)) as descriptor:
        write_at(descriptor, data, 0)
    return to.folder / f"{rid(row)}.safetensors"


def reason(refused: Refused | None) -> Refusal:
    assert refused is not None
    assert refused.detail
    return refused.reason


def test_a_record_appears_whole_and_only_by_rename(tmp_path: Path) -> None:
    to = spool(tmp_path)
    assert to.reserve(rid(0), 4) is None
    with record_file(to, rid(0)) as descriptor:
        write_at(descriptor, b"whole", 0)
        assert [path.name for path in tmp_path.iterdir()] == [f".{rid(0)}.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{rid(0)}.safetensors"]
    assert (tmp_path / f"{rid(0)}.safetensors").read_bytes() == b"whole"


def test_a_failed_write_leaves_nothing_and_frees_its_room(tmp_path: Path) -> None:
    to = spool(tmp_path)
    assert to.reserve(rid(0), 90) is None
    with pytest.raises(OSError, match="disk"), record_file(to, rid(0)):
        raise OSError("disk")
    assert list(tmp_path.iterdir()) == []
    assert to.used_bytes == 0


def test_over_quota_is_back_pressure_until_a_client_cleans_up(tmp_path: Path) -> None:
    clock = Clock()
    to = spool(tmp_path, clock=clock)
    first = publish(to, 0, bytes(60))
    assert reason(to.reserve(rid(1), 41)) is Refusal.SPOOL_FULL
    first.unlink()
    clock.now_s += 1
    assert to.reserve(rid(1), 41) is None
    assert to.used_bytes == 41


def test_reservations_count_before_anything_is_written(tmp_path: Path) -> None:
    to = spool(tmp_path)
    assert to.reserve(rid(0), 60) is None
    assert reason(to.reserve(rid(1), 60)) is Refusal.SPOOL_FULL
    to.release(rid(0))
    assert to.reserve(rid(1), 60) is None
    assert to.reserve(rid(1), 30) is None  # the same request begun anew
    assert to.used_bytes == 30


def test_a_row_larger_than_the_quota_can_never_come(tmp_path: Path) -> None:
    assert reason(spool(tmp_path).reserve(rid(0), 101)) is Refusal.ROW_TOO_LARGE
    assert reason(spool(tmp_path, shares=2).reserve(rid(0), 51)) is Refusal.ROW_TOO_LARGE


def test_records_of_an_earlier_life_count_and_stay(tmp_path: Path) -> None:
    (tmp_path / f"{rid(7)}.safetensors").write_bytes(bytes(80))
    (tmp_path / "notes.txt").write_bytes(bytes(500))
    clock = Clock()
    to = spool(tmp_path, clock=clock)
    assert to.used_bytes == 80
    assert reason(to.reserve(rid(0), 30)) is Refusal.SPOOL_FULL
    (tmp_path / f"{rid(7)}.safetensors").unlink()
    clock.now_s += 1
    assert to.reserve(rid(0), 30) is None


def test_orphans_go_by_age_and_foreign_files_never(tmp_path: Path) -> None:
    clock = Clock()
    to = spool(tmp_path, clock=clock, orphan_age_s=100.0, quota_bytes=1000)
    old = [f"{rid(0)}.safetensors", f"{rid(1)}.failed", f".{rid(2)}.tmp"]
    foreign = [SPEC_FILE, "x.safetensors", f"{rid(3)}.txt", f"{rid(4)}.tmp", f".{rid(5)}.safetensors"]
    for name in [*old, *foreign]:
        (tmp_path / name).write_text("x")
    assert to.remove_orphans() == []
    clock.now_s += 101
    assert sorted(to.remove_orphans()) == sorted(old)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)


def test_a_record_being_written_is_not_an_orphan(tmp_path: Path) -> None:
    clock = Clock()
    to = spool(tmp_path, clock=clock, orphan_age_s=1.0)
    assert to.reserve(rid(0), 1) is None
    with record_file(to, rid(0)) as descriptor:
        write_at(descriptor, b"x", 0)
        clock.now_s += 100
        assert to.remove_orphans() == []
    assert (tmp_path / f"{rid(0)}.safetensors").exists()


def test_a_loss_after_acceptance_is_said_by_name(tmp_path: Path) -> None:
    to = spool(tmp_path)
    assert to.reserve(rid(0), 50) is None
    to.fail(rid(0), Refusal.WRITE_FAILED, "no room")
    assert json.loads((tmp_path / f"{rid(0)}.failed").read_text()) == {"reason": "write-failed", "detail": "no room"}
    assert to.used_bytes == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{rid(0)}.failed"]


def test_a_vanished_folder_is_named_and_does_not_raise(tmp_path: Path) -> None:
    to = spool(tmp_path / "spool")
    (tmp_path / "spool").rmdir()
    assert reason(to.reserve(rid(0), 5)) is Refusal.WRITE_FAILED
    to.fail(rid(0), Refusal.WRITE_FAILED, "gone")
    to.remove_orphans()
    assert not (tmp_path / "spool").exists()
    (tmp_path / "spool").mkdir()
    assert to.reserve(rid(0), 5) is None


def test_a_full_disk_is_named_at_once_after_the_first_failure(tmp_path: Path) -> None:
    to = spool(tmp_path, quota_bytes=1 << 62)
    assert to.reserve(rid(0), 1 << 61) is None
    to.fail(rid(0), Refusal.WRITE_FAILED, "full")
    assert reason(to.reserve(rid(1), 1 << 61)) is Refusal.WRITE_FAILED
    publish(to, 2, b"small")
    assert to.reserve(rid(1), 1 << 61) is None  # a write went well again


def test_a_torn_record_goes_before_its_time(tmp_path: Path) -> None:
    """Its writer died with its server; it takes room that nobody else would give back."""
    torn, record = tmp_path / f".{rid(0)}.tmp", tmp_path / f"{rid(1)}.safetensors"
    torn.write_bytes(bytes(60))
    record.write_bytes(bytes(20))
    clock = Clock()
    to = spool(tmp_path, clock=clock)
    assert reason(to.reserve(rid(2), 50)) is Refusal.SPOOL_FULL
    assert to.remove_orphans() == []  # just made: its lock may be about to come
    clock.now_s += 3
    assert to.remove_orphans() == [torn.name]
    assert to.reserve(rid(2), 50) is None
    assert record.exists()


def test_a_record_that_another_process_writes_is_not_torn(tmp_path: Path) -> None:
    """Another rank's, which has reserved its room elsewhere and whose next chunk may take its time."""
    clock = Clock()
    to, rank = spool(tmp_path, clock=clock), spool(tmp_path, clock=clock)
    file = rank.files.record(rid(0))
    clock.now_s += 1000
    assert to.remove_orphans() == []
    os.close(file.descriptor)  # as at its end
    assert to.remove_orphans() == [f".{rid(0)}.tmp"]


def test_a_failure_that_cannot_be_told_leaves_no_file(tmp_path: Path) -> None:
    to = spool(tmp_path)
    (tmp_path / f"{rid(0)}.failed").mkdir()  # the rename fails, as on a full disk the write does
    to.fail(rid(0), Refusal.WRITE_FAILED, "no room")
    assert [path.name for path in tmp_path.iterdir()] == [f"{rid(0)}.failed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
@pytest.mark.parametrize(
    ("owner", "mode", "group", "refused"),
    [
        (12345, 0o777, None, "12345"),
        (12345, 0o700, None, "12345"),
        (12345, 0o777, "4242", "anyone"),
        (12345, 0o770, "4242", None),  # the operator named its group
        (0, 0o777, None, "anyone"),
        (0, 0o755, None, None),
    ],
)
def test_a_folder_laid_out_by_a_stranger_is_refused(
    tmp_path: Path, owner: int, mode: int, group: str | None, refused: str | None
) -> None:
    """In shared memory anyone can be there first, and swap records in a folder that is theirs."""
    folder = tmp_path / "spool"
    folder.mkdir()
    os.chown(folder, owner, 4242)
    folder.chmod(mode)
    changes = {"group": group, "mode": 0o660} if group else {}
    if refused:
        with pytest.raises(PermissionError, match=refused):
            spool(folder, **changes)
    else:
        publish(spool(folder, **changes), 0, b"x")


@pytest.mark.parametrize(("mode", "folder_mode"), [(0o600, 0o700), (0o640, 0o770), (0o660, 0o770), (0o644, 0o775)])
def test_modes_hold_whatever_the_umask(tmp_path: Path, mode: int, folder_mode: int) -> None:
    before = os.umask(0o077)
    try:
        to = spool(tmp_path / "a" / "spool", mode=mode)
        record = publish(to, 0, b"x")
        to.write_hello("{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(record.stat().st_mode) == mode
    assert stat.S_IMODE((to.folder / SPEC_FILE).stat().st_mode) == mode
    assert stat.S_IMODE(to.folder.stat().st_mode) == folder_mode


def test_group_by_number_and_an_unknown_name(tmp_path: Path) -> None:
    record = publish(spool(tmp_path / "a", group=str(os.getgid())), 0, b"x")
    assert record.stat().st_gid == os.getgid()
    with pytest.raises(KeyError):
        spool(tmp_path / "b", group="no-such-group-here")


def test_threads_write_their_own_records(tmp_path: Path) -> None:
    to = spool(tmp_path, quota_bytes=10_000)
    threads = [threading.Thread(target=publish, args=(to, row, bytes([row]) * 100)) for row in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert to.used_bytes == 1600
    assert {(tmp_path / f"{rid(row)}.safetensors").read_bytes()[0] for row in range(16)} == set(range(16))


@given(st.text(max_size=60))
def test_only_exact_names_are_ours(name: str) -> None:
    assert parse_name(name) is None
    assert parse_name(f"{rid(1)}{name}") is None or name in (".safetensors", ".failed")


@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "release", "publish", "remove"]), st.integers(0, 4), st.integers(1, 40))
    )
)
def test_used_is_always_the_sum_and_never_over_the_limit(steps: list[tuple[str, int, int]]) -> None:
    quota, reserved, files = Quota(100), dict[str, int](), dict[str, int]()
    for verb, row, size in steps:
        key = rid(row)
        match verb:
            case "reserve":
                if quota.reserve(key, size):
                    reserved[key] = size
                else:
                    reserved.pop(key, None)
            case "release":
                quota.release(key)
                reserved.pop(key, None)
            case "publish" if key in reserved:
                quota.publish(key, key)
                files[key] = reserved.pop(key)
            case "remove":
                files.pop(key, None)
                quota.retain(set(files))
        assert quota.used == sum(reserved.values()) + sum(files.values())
        assert quota.used <= 100
