"""Links in the spool: whoever may write there can point a name anywhere, and nothing of ours must go through it.

The victim is a file outside the spool. It must never be written, read into a record, given another mode, or removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas.capture.contract import SPEC_FILE, Refusal, RequestId
from eyas.capture.folder import create, publish, read_limited
from eyas.capture.spool import Spool
from eyas.capture.spool_files import write_at
from eyas.errors import EngineError
from eyas.extract.engine import CaptureRequest, Failed
from eyas.extract.inbox import Inbox
from eyas.extract.record import open_record
from security.hostile import HELLO, SPEC, STRANGER, as_root, recorder, rid, send, settings, wait_for
from spool_support import record_file

RACE_S = float(os.environ.get("EYAS_RACE_S", "2"))
SECRET = b"the victim's own words"
REQUEST = CaptureRequest(RequestId("run00000", "sess0000", 0, 0), [0, 1, 2, 3, 4], [0, 2])
Plant = Callable[[Path, Path], None]
PLANTS: dict[str, Plant] = {
    "symlink": lambda at, victim: at.symlink_to(victim),
    "hardlink": lambda at, victim: at.hardlink_to(victim),
    "dangling": lambda at, victim: at.symlink_to(victim.with_name("new")),
    "folder-link": lambda at, victim: at.symlink_to(victim.parent),
    "pipe": lambda at, _: os.mkfifo(at),
}
plants = pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)


class Victim:
    """A file whose every attribute is remembered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(SECRET)
        path.chmod(0o640)
        self._status = self._look()

    def _look(self) -> tuple[int, int, int, int, int]:
        status = self.path.stat()
        return status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns

    def check(self) -> None:
        assert self.path.read_bytes() == SECRET
        assert self._look() == self._status
        assert not self.path.with_name("new").exists()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    (tmp_path / "outside").mkdir()
    made = Victim(tmp_path / "outside" / "victim")
    yield made
    made.check()


# --- the server's side ------------------------------------------------------------------------------------------------


@plants
@pytest.mark.parametrize("name", [f".{rid(0)}.tmp", f"{rid(0)}.safetensors", f"{rid(0)}.failed", SPEC_FILE])
def test_what_was_planted_under_our_names_is_replaced(plant: Plant, name: str, victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    plant(folder / name, victim.path)
    spool = Spool(settings(folder, mode=0o644))
    spool.write_hello(HELLO.to_json())
    with record_file(spool, rid(0)) as descriptor:
        write_at(descriptor, b"record", 0)
    spool.fail(rid(0), Refusal.WRITE_FAILED, "x")
    victim.check()
    for own in (f"{rid(0)}.safetensors", f"{rid(0)}.failed", SPEC_FILE):
        assert (folder / own).is_file()
        assert not (folder / own).is_symlink()
        assert (folder / own).stat().st_ino != victim.path.stat().st_ino
    assert not (folder / f".{rid(0)}.tmp").exists()


@plants
def test_a_file_exchanged_between_creation_and_rename_is_not_published(
    plant: Plant, victim: Victim, tmp_path: Path
) -> None:
    """The race itself, made certain: the temporary name points elsewhere when the record is finished."""
    spool = Spool(settings(tmp_path / "spool"))
    with pytest.raises(OSError, match="another file came under its temporary name"):  # noqa: SIM117
        with record_file(spool, rid(0)) as descriptor:
            write_at(descriptor, b"record", 0)
            (tmp_path / "spool" / f".{rid(0)}.tmp").unlink()
            plant(tmp_path / "spool" / f".{rid(0)}.tmp", victim.path)
    assert list((tmp_path / "spool").iterdir()) == []
    assert spool.used_bytes == 0


@plants
def test_orphans_are_links_not_what_they_lead_to(plant: Plant, victim: Victim, tmp_path: Path) -> None:
    spool = Spool(settings(tmp_path / "spool", orphan_age_s=-1000.0))
    for name in (f".{rid(0)}.tmp", f"{rid(1)}.safetensors", f"{rid(2)}.failed"):
        plant(tmp_path / "spool" / name, victim.path)
    assert len(spool.remove_orphans()) == 3
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_sparse_file_counts_but_a_link_does_not_count_as_what_it_leads_to(victim: Victim, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    (folder / f"{rid(0)}.safetensors").symlink_to(huge)
    assert Spool(settings(folder)).used_bytes < 1000
    victim.check()


def test_somebody_who_keeps_making_our_file_is_a_failed_write(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "name").mkdir()  # cannot be unlinked
    with pytest.raises(OSError, match="directory"):
        create(folder, "name", 0o600)
    os.close(folder)


# --- true races -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hostile(*acts: Callable[[], None]) -> Iterator[None]:
    """Threads that each repeat an act for as long as the block lasts."""
    done = threading.Event()

    def work(act: Callable[[], None]) -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                act()

    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_keeps_swapping_links_into_our_names(victim: Victim, tmp_path: Path) -> None:
    spool = Spool(settings(tmp_path / "spool", quota_bytes=1 << 40))
    names = (f".{rid(0)}.tmp", f"{rid(0)}.safetensors", SPEC_FILE)
    folder = tmp_path / "spool"

    def swap(make: Callable[[Path], None]) -> Callable[[], None]:
        def act() -> None:
            for name in names:
                made = folder / f"evil-{threading.get_ident()}"
                made.unlink(missing_ok=True)
                make(made)
                made.replace(folder / name)

        return act

    inbox = Inbox(folder)
    written = refused = 0
    with hostile(swap(lambda at: at.symlink_to(victim.path)), swap(lambda at: at.hardlink_to(victim.path))):
        deadline = time.monotonic() + RACE_S
        while time.monotonic() < deadline:
            try:
                with record_file(spool, rid(0)) as descriptor:
                    write_at(descriptor, b"record" * 50, 0)
                written += 1
            except OSError:
                refused += 1
            with contextlib.suppress(OSError):
                spool.write_hello(HELLO.to_json())
            with contextlib.suppress(EngineError):
                assert inbox.hello() == HELLO
            got = open_record(folder / f"{rid(0)}.safetensors", REQUEST, SPEC)
            assert isinstance(got, Failed)
            inbox.abandon(rid(0))
            spool.remove_orphans()
    assert written
    assert refused
    victim.check()


def test_a_thread_that_keeps_swapping_the_folder_itself(victim: Victim, tmp_path: Path) -> None:
    """Whoever may write to the parent: the folder's name leads to the victim's folder half of the time."""
    folder, away, link = tmp_path / "spool", tmp_path / "away", tmp_path / "link"
    spool = Spool(settings(folder))
    outside = victim.path.parent
    tempting = outside / f"{rid(0)}.safetensors"
    tempting.write_bytes(b"not to be removed")

    def swap() -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
        folder.rename(away)
        link.rename(folder)
        folder.unlink()
        away.rename(folder)

    inbox, refused = Inbox(folder), 0
    with hostile(swap):
        deadline = time.monotonic() + RACE_S
        while time.monotonic() < deadline:
            try:
                with record_file(spool, rid(1)) as descriptor:
                    write_at(descriptor, b"x", 0)
            except OSError:
                refused += 1
            for act in (lambda: inbox.remove(rid(0)), lambda: inbox.remove(rid(1)), spool.remove_orphans):
                with contextlib.suppress(OSError):
                    act()
            inbox.clean_stale("run00000", lambda _: False)
    assert refused
    assert sorted(path.name for path in outside.iterdir()) == sorted([tempting.name, victim.path.name])
    assert tempting.read_bytes() == b"not to be removed"


# --- the client's side ------------------------------------------------------------------------------------------------


@plants
def test_the_client_reads_through_no_link(plant: Plant, victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    for name in (SPEC_FILE, f"{rid(0)}.safetensors", f"{rid(1)}.failed"):
        plant(folder / name, victim.path)
    inbox = Inbox(folder)
    with pytest.raises(EngineError):
        inbox.hello()

    async def wait() -> tuple[Path | Failed, Path | Failed]:
        try:
            return await inbox.wait(rid(0), 5), await inbox.wait(rid(1), 5)
        finally:
            await inbox.close()

    path, note = asyncio.run(wait())
    assert isinstance(path, Path)
    record = open_record(path, REQUEST, SPEC)
    assert isinstance(record, Failed)
    assert isinstance(note, Failed)
    for failed in (record, note):
        assert failed.reason in {"record-unreadable", "record-damaged"}
        assert SECRET.decode() not in failed.detail
    inbox.remove(rid(0))
    assert inbox.clean_stale("run00000", lambda _: False) == 0  # the note went with its failure
    assert [path.name for path in folder.iterdir()] == [SPEC_FILE]


@as_root
def test_a_record_of_another_user_is_not_believed(tmp_path: Path) -> None:
    """A member of the spool's group can exchange a file, but not give it the server's owner."""
    with recorder(tmp_path, mode=0o660) as to:
        to.spool.write_hello(HELLO.to_json())
        send(to, rid(0))
        path = wait_for(tmp_path / f"{rid(0)}.safetensors")
    inbox = Inbox(tmp_path)
    assert inbox.hello() == HELLO
    assert not isinstance(open_record(path, REQUEST, SPEC, owners=inbox.owners), Failed)
    os.chown(path, STRANGER, -1)
    failed = open_record(path, REQUEST, SPEC, owners=inbox.owners)
    assert failed == Failed("record-foreign", f"the file belongs to user {STRANGER}")


def test_owners_are_asked_for_each_file(tmp_path: Path) -> None:
    """Without another user: a file of ours, where only somebody else's are believed."""
    with recorder(tmp_path) as to:
        send(to, rid(0))
        path = wait_for(tmp_path / f"{rid(0)}.safetensors")
    failed = open_record(path, REQUEST, SPEC, owners=frozenset({STRANGER}))
    assert isinstance(failed, Failed)
    assert failed.reason == "record-foreign"
    with pytest.raises(PermissionError, match="belongs to user"):
        read_limited(path, 1 << 20, owners=frozenset({STRANGER}))


def test_a_record_read_before_it_was_looked_at_again_is_published(tmp_path: Path) -> None:
    """A client may fetch and remove a record between its rename and our look at it."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    descriptor = create(folder, "tmp", 0o600)
    with hostile((tmp_path / "final").unlink):
        for _ in range(200):
            publish(folder, descriptor, "tmp", "final")
            os.close(descriptor)
            descriptor = create(folder, "tmp", 0o600)
    os.close(descriptor)
    os.close(folder)
