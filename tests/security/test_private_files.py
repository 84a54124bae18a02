"""Everything in spool and store is its owner's alone, whatever the umask; only the settings widen it."""

from __future__ import annotations

import ast
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eyas
from eyas.capture.contract import SPEC_FILE
from eyas.capture.folder import Trust, open_folder
from eyas.capture.spool import Spool
from eyas.data.outfolder import OutFolder
from eyas.errors import EngineError
from eyas.events import EventLog, is_open
from eyas.extract.inbox import Inbox
from eyas.store.documents import read_store_info
from eyas.store.files import create_new, lock_file, make_folder, tmp_of, write_atomic, write_new
from eyas.store.move import MoveState, move_shards
from eyas.store.writer import StoreWriter
from security.hostile import (
    HELLO,
    STRANGER,
    as_root,
    extract_fake,
    make_corpus,
    modes,
    recorder,
    rid,
    send,
    settings,
    umask,
    wait_for,
)
from spool_support import record_file

CODE = Path(eyas.__file__).parent
UMASKS = [
    0o000,
    0o022,
    0o277,
]  # root could do without any bit; a user's umask of 0777 would hide its own folders from it


@pytest.fixture(params=UMASKS, ids=oct)
def any_umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with umask(request.param):
        yield tmp_path


def private(root: Path) -> dict[str, str]:
    """What is not exactly 0700 or 0600; links have no mode of their own."""
    found = modes(root)
    return {
        name: mode
        for name, mode in found.items()
        if not (path := root / name).is_symlink() and mode != ("0o700" if path.is_dir() else "0o600")
    }


# --- store ------------------------------------------------------------------------------------------------------------


def test_a_finished_store(any_umask: Path) -> None:
    corpus = make_corpus(any_umask / "corpus.parquet")
    summary = extract_fake(corpus, any_umask / "store")
    assert summary.failed == 1
    store = any_umask / "store"
    assert private(store) == {}
    names = set(modes(store))
    shards = {name for name in names if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert {"store.json", "manifest.json", "events", *(name.replace("safetensors", "json") for name in shards)} < names
    assert any(name.startswith("events/") for name in names)


def test_a_store_that_is_open_reopened_and_moved(any_umask: Path) -> None:
    """Parts, journals and copies on another volume; their temporary names are taken by a watcher as they come."""
    store, other = any_umask / "store", any_umask / "other"
    other.mkdir()
    corpus = make_corpus(any_umask / "corpus.parquet")
    extract_fake(corpus, store)
    moved = move_shards(store, None, other)
    assert {move.state for move in moved} == {MoveState.MOVED}
    writer = _writer(store)
    assert any(writer.reopen_failed(shard) for shard in writer.plan.shards)
    assert any(name.endswith(".part") for name in modes(store))
    assert any(name.endswith(".journal") for name in modes(store))
    assert private(store) == {}
    assert {name: mode for name, mode in private(other).items() if name != "."} == {}


def _writer(store: Path) -> StoreWriter:
    return StoreWriter(store, read_store_info(store), {"engine": "fake"})


def test_no_file_is_made_with_a_mode_that_the_umask_must_narrow() -> None:
    """A file that is made wide and narrowed afterwards is open for a moment: each is made 0600, and by descriptor."""
    found = []
    for path in [
        *CODE.glob("capture/*.py"),
        *CODE.glob("store/*.py"),
        CODE / "events.py",
        CODE / "extract" / "inbox.py",
    ]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            arguments = [ast.unparse(argument) for argument in call.args]
            if name == "os.open" and len(arguments) > 2 and arguments[2] != "384":  # 0o600
                found.append((path.name, call.lineno, name))
            if name.endswith((".write_text", ".write_bytes", ".touch")):
                found.append((path.name, call.lineno, name))
            writes = name.endswith("open") and any(text[:2] in {"'w", "'a", "'x"} for text in arguments)
            if writes and name != "os.open" and not arguments[0].startswith("create_new("):
                found.append((path.name, call.lineno, name))
    assert found == []


def test_temporary_files_are_private_while_they_are_written(any_umask: Path) -> None:
    make_folder(any_umask / "a" / "store")
    os.close(create_new(tmp_of(any_umask / "a" / "store" / "x.json")))
    assert write_new(any_umask / "a" / "store" / "y.json", b"{}")
    lock = lock_file(any_umask / "a" / "store" / "z.part", create=True)
    assert lock is not None
    os.close(lock)
    assert private(any_umask / "a" / "store") == {}
    assert set(modes(any_umask / "a" / "store")) == {".", "x.json.tmp", "y.json", "z.part"}


def test_a_temporary_name_that_is_taken_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in (lambda at: at.symlink_to(victim), lambda at: at.hardlink_to(victim)):
        plant(tmp_of(tmp_path / "store.json"))
        write_atomic(tmp_path / "store.json", b"{}")
        assert victim.read_text() == "mine"
        assert (tmp_path / "store.json").read_bytes() == b"{}"


def test_an_existing_store_folder_keeps_its_mode_and_its_files_are_private(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o755)
    extract_fake(make_corpus(tmp_path / "corpus.parquet"), store)
    assert private(store) == {".": "0o755"}


def test_event_logs(any_umask: Path) -> None:
    log = EventLog(any_umask / "events" / "s.jsonl")
    log.emit("start")
    assert is_open(any_umask / "events" / "s.jsonl")
    log.close()
    assert private(any_umask / "events") == {}
    os.mkfifo(any_umask / "events" / "pipe.jsonl")
    assert not is_open(any_umask / "events" / "pipe.jsonl")  # and does not wait for a writer


def test_prepared_folders(any_umask: Path) -> None:
    with OutFolder(any_umask / "corpus") as out:
        assert modes(out.path)["."] == "0o700"


# --- spool ------------------------------------------------------------------------------------------------------------


def run_spool(folder: Path, **changes: object) -> Path:
    """A record, a failure note and spec.json, by a real recorder."""
    with recorder(folder, **changes) as to:
        to.spool.write_hello(HELLO.to_json())
        reply = send(to, rid(0))
        assert reply is not None
        assert reply.status == "accepted"
        wait_for(folder / f"{rid(0)}.safetensors")
        send(to, rid(1), fed=torch.zeros(5, dtype=torch.int64))
        wait_for(folder / f"{rid(1)}.failed")
    assert sorted(p.name for p in folder.iterdir()) == [f"{rid(0)}.safetensors", f"{rid(1)}.failed", SPEC_FILE]
    return folder


def test_a_spool(any_umask: Path) -> None:
    assert private(run_spool(any_umask / "spool")) == {}


def test_records_are_private_while_they_are_written(any_umask: Path) -> None:
    spool = Spool(settings(any_umask / "spool"))
    with record_file(spool, rid(0)):
        assert list(modes(any_umask / "spool")) == [".", f".{rid(0)}.tmp"]
        assert private(any_umask / "spool") == {}


@pytest.mark.parametrize(("mode", "folder"), [(0o640, "0o770"), (0o660, "0o770"), (0o600, "0o700")])
def test_the_settings_alone_widen_it(any_umask: Path, mode: int, folder: str) -> None:
    run_spool(any_umask / "spool", mode=mode, group=str(os.getegid()))
    found = modes(any_umask / "spool")
    assert found.pop(".") == folder
    assert set(found.values()) == {oct(mode)}


@pytest.mark.parametrize("wider", [0o755, 0o750, 0o770, 0o775])
def test_a_wider_spool_of_our_own_is_narrowed(tmp_path: Path, wider: int) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(wider)
    (folder / f"{rid(9)}.safetensors").touch(0o600)
    Spool(settings(folder))
    assert modes(folder)["."] == "0o700"


@pytest.mark.parametrize(("wider", "refused"), [(0o755, False), (0o775, True), (0o777, True), (0o1777, True)])
def test_a_folder_with_other_things_in_it_is_never_changed(tmp_path: Path, wider: int, refused: bool) -> None:
    """Somebody may name /dev/shm itself, or a home: its mode is not ours to set."""
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "precious").touch()
    folder.chmod(wider)
    if refused:
        with pytest.raises(PermissionError, match="may write there"):
            Spool(settings(folder))
    else:
        Spool(settings(folder))
    assert modes(folder)["."] == oct(wider)
    assert set(modes(folder)) == {".", "precious"}


def test_whose_folder_is_believed(tmp_path: Path) -> None:
    """The rule itself, with any user and group; `as_root` tests below see it on real folders."""

    def status(mode: int, user: int, group: int) -> os.stat_result:
        return os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, user, group, 0, 0, 0, 0))

    me = os.geteuid()
    nobody, named, grouped = Trust(), Trust(owners=frozenset({STRANGER})), Trust(groups=frozenset({77}))
    assert [nobody.problem(status(0o700, user, 1)) for user in (me, 0)] == ["", ""]
    assert nobody.problem(status(0o700, STRANGER, 77)) == f"belongs to user {STRANGER}"
    assert named.problem(status(0o700, STRANGER, 77)) == ""
    assert grouped.problem(status(0o770, STRANGER, 77)) == ""
    for trust in (nobody, named, grouped):
        for user in (me, 0, STRANGER):
            assert "anyone" in trust.problem(status(0o777, user, 77))
            assert "anyone" in trust.problem(status(0o1777, user, 77))


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A name in the world-writable folder where spools lie by default."""
    where = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = where / f"eyas-test-{os.getpid()}"
    yield folder
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_planted_link_is_refused_on_both_sides(shared_memory: Path, tmp_path: Path) -> None:
    victim = run_spool(tmp_path / "victim")
    (victim / f"{rid(0)}.tmp").write_text("mine")
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    shared_memory.symlink_to(victim)
    with pytest.raises(PermissionError, match="symbolic link"):
        Spool(settings(shared_memory))
    inbox = Inbox(shared_memory)
    with pytest.raises(EngineError, match="not to be trusted: it is a symbolic link"):
        inbox.hello()
    with pytest.raises(PermissionError):
        inbox.remove(rid(0))
    assert inbox.clean_stale("run00000", lambda _: False) == 0
    assert inbox.usage_bytes() == 0
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before


def test_a_link_that_leads_nowhere_is_not_followed_to_make_a_folder(shared_memory: Path, tmp_path: Path) -> None:
    shared_memory.symlink_to(tmp_path / "new")
    with pytest.raises(PermissionError, match="symbolic link"):
        Spool(settings(shared_memory))
    assert not (tmp_path / "new").exists()


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o777, 0o1777])
def test_a_folder_planted_by_another_user_is_refused_on_both_sides(shared_memory: Path, mode: int) -> None:
    shared_memory.mkdir()
    (shared_memory / SPEC_FILE).write_text(HELLO.to_json())
    os.chown(shared_memory, STRANGER, STRANGER)
    os.chown(shared_memory / SPEC_FILE, STRANGER, STRANGER)
    shared_memory.chmod(mode)
    for refusing in (lambda: Spool(settings(shared_memory)), lambda: open_folder(shared_memory, Trust())):
        with pytest.raises(PermissionError, match=str(STRANGER)) as refused:
            refusing()
        assert refused.value.errno == errno.EPERM
        assert str(shared_memory) in str(refused.value)
    with pytest.raises(PermissionError, match=rf"user {os.geteuid()}'s or root's.*serve\.spool_group"):
        Spool(settings(shared_memory))  # says what to do: the plugin repeats it to its client
    with pytest.raises(EngineError, match=r"not to be trusted: it belongs to user 12345.*spool_owner"):
        Inbox(shared_memory).hello()


@as_root
def test_a_server_of_another_user_whose_group_is_ours_is_read(tmp_path: Path) -> None:
    """What `serve.spool_mode: "660"` and `spool_group` are for; and `server.spool_owner` where no group is shared."""
    folder = run_spool(tmp_path / "spool", mode=0o660)
    for path in (folder, *folder.iterdir()):
        os.chown(path, STRANGER, 4242)
    with pytest.raises(EngineError, match="not to be trusted"):
        Inbox(folder).hello()
    named = Inbox(folder, str(STRANGER))
    assert named.hello() == HELLO
    assert named.owners == {0, os.geteuid(), STRANGER}
    os.chown(folder, STRANGER, os.getegid())
    grouped = Inbox(folder)
    assert grouped.hello() == HELLO
    grouped.remove(rid(0))
    assert not (folder / f"{rid(0)}.safetensors").exists()


@as_root
def test_a_folder_that_the_clients_user_made_for_a_server_in_a_container(tmp_path: Path) -> None:
    """Root there, a user of the host here: the way that the refusal names, the user's group, works."""
    folder = tmp_path / "spool"
    folder.mkdir()
    for mode in (0o755, 0o775):  # umask 022 and 002
        folder.chmod(mode)
        os.chown(folder, STRANGER, STRANGER)
        with pytest.raises(PermissionError, match="spool_group"):
            Spool(settings(folder))
        run_spool(folder, mode=0o660, group=str(STRANGER))
        for path in folder.iterdir():
            assert (path.stat().st_uid, path.stat().st_gid) == (0, STRANGER)
            assert path.stat().st_mode & 0o777 == 0o660
            path.unlink()


@as_root
def test_a_note_of_another_member_of_the_group_is_not_believed(tmp_path: Path) -> None:
    folder = run_spool(tmp_path / "spool", mode=0o660)
    os.chown(folder, STRANGER, os.getegid())
    os.chown(folder / SPEC_FILE, STRANGER + 1, os.getegid())
    with pytest.raises(EngineError, match=f"belongs to user {STRANGER + 1}"):
        Inbox(folder).hello()


def test_a_spool_that_is_swapped_while_the_server_runs_is_refused_by_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    with recorder(tmp_path / "spool") as to:
        send(to, rid(0))
        wait_for(tmp_path / "spool" / f"{rid(0)}.safetensors")
        (tmp_path / "spool").rename(tmp_path / "taken")
        (tmp_path / "spool").symlink_to(victim)
        reply = send(to, rid(1))
        assert reply is not None
    assert list(victim.iterdir()) == []
    (tmp_path / "spool").unlink()
    (tmp_path / "taken").rename(tmp_path / "spool")
    with recorder(tmp_path / "spool") as to:
        reply = send(to, rid(2))
        assert reply is not None
        assert reply.status == "accepted"
        wait_for(tmp_path / "spool" / f"{rid(2)}.safetensors")
