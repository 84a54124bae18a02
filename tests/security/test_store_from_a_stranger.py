"""A store may have been made by anybody: what it names or links to is not written, removed, or waited for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EyasError, IntegrityError, StoreError
from eyas.extract.forecast import last_rate
from eyas.store.check import ProblemKind, verify_store
from eyas.store.documents import describe_store, journalled_rows, read_sidecar, read_store_info, write_manifest
from eyas.store.files import ShardPaths
from eyas.store.format import MANIFEST_FILE, STORE_FILE
from eyas.store.move import MoveState, move_shards
from eyas.store.reader import StoreReader
from security.hostile import extract_fake, make_corpus

SECRET = b"the victim's own words" * 100
SHARD = "shard-00000"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("finished") / "store"
    extract_fake(corpus, store)
    return store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "store", symlinks=True))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "victim"
    path.write_bytes(SECRET)
    path.chmod(0o640)
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_bytes() == SECRET
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)


# --- the note of an interrupted move --------------------------------------------------------------------------------


def note(store: Path, text: Any) -> None:
    (store / f"{SHARD}.move").write_text(text if isinstance(text, str) else json.dumps(text))


def moved(store: Path, to: Path) -> Any:
    to.mkdir(exist_ok=True)
    return move_shards(store, [f"{SHARD}.safetensors"], to)


@pytest.mark.parametrize("name", ["victim", f"{SHARD}.safetensors"])
def test_a_note_removes_nothing_but_a_copy_of_this_shard(store: Path, victim: Path, tmp_path: Path, name: str) -> None:
    target = victim.with_name(name)
    if target != victim:
        shutil.copy2(victim, target)
    note(store, {"remove": str(target)})
    with pytest.raises(IntegrityError, match=r"note of an interrupted move|names .* no copy of this shard"):
        moved(store, tmp_path / "other")
    assert target.read_bytes() == SECRET


def test_a_note_does_not_remove_another_shard(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy2(store / "shard-00001.safetensors", elsewhere / f"{SHARD}.safetensors")
    note(store, {"remove": str(elsewhere / f"{SHARD}.safetensors")})
    with pytest.raises(IntegrityError, match="no copy of this shard"):
        moved(store, tmp_path / "other")
    assert (elsewhere / f"{SHARD}.safetensors").exists()


def test_a_note_removes_the_copy_it_was_written_for(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy2(store / f"{SHARD}.safetensors", elsewhere)
    note(store, {"remove": str(elsewhere / f"{SHARD}.safetensors")})
    assert [move.state for move in moved(store, tmp_path / "other")] == [MoveState.MOVED]
    assert list(elsewhere.iterdir()) == []
    assert not (store / f"{SHARD}.move").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        {"remove": 7},
        {"remove": None},
        {"remove": ["/x"]},
        {"remove": "../../x"},
        {"remove": f"../{SHARD}.safetensors"},
        {"remove": ""},
        {"other": 1},
        "[" * 100_000,
        '{"remove": "' + "a" * 100_000 + '"}',
    ],
    ids=range(12),
)
def test_a_note_that_makes_no_sense_is_an_error_of_ours(store: Path, tmp_path: Path, text: Any) -> None:
    note(store, text)
    with pytest.raises(IntegrityError, match=r"note of an interrupted move"):
        moved(store, tmp_path / "other")


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symlink", "hardlink"])
@pytest.mark.parametrize("content", [SECRET, b""], ids=["full", "empty"])
def test_an_open_shard_that_is_a_link_is_not_written_through(
    corpus: Path, store: Path, tmp_path: Path, kind: str, content: bytes
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(content)
    for path in store.glob(f"{SHARD}.*"):
        path.unlink()
    part = store / f"{SHARD}.safetensors.part"
    part.symlink_to(victim) if kind == "symlink" else part.hardlink_to(victim)
    with pytest.raises(StoreError, match="an open shard is a link to another file"):
        extract_fake(corpus, store)
    assert victim.read_bytes() == content


def test_a_moved_shard_that_was_reopened_is_written_where_it_lies(corpus: Path, store: Path, tmp_path: Path) -> None:
    """The one use of such a link."""
    other = tmp_path / "other"
    other.mkdir()
    move_shards(store, None, other)
    assert extract_fake(corpus, store, "fake.failing_rows=[]", retry_failed=True).failed == 0
    assert all(path.is_symlink() for path in store.glob("*.safetensors"))
    assert verify_store(store).problems == ()


@pytest.mark.parametrize("name", [f"{SHARD}.json", f"{SHARD}.journal", STORE_FILE, MANIFEST_FILE])
def test_documents_are_replaced_not_written_through(corpus: Path, store: Path, victim: Path, name: str) -> None:
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(victim)
    believed = name in {STORE_FILE, f"{SHARD}.json"}
    with pytest.raises(EyasError) if believed else contextlib.nullcontext():
        write_manifest(store)
        extract_fake(corpus, store, retry_failed=True)


def test_a_shard_that_is_a_link_is_read_only_if_it_is_that_shard(store: Path, victim: Path) -> None:
    shard = store / f"{SHARD}.safetensors"
    shard.unlink()
    shard.symlink_to(victim)
    with pytest.raises(IntegrityError, match="bytes, not"):
        StoreReader(store)
    kinds = {problem.kind for problem in verify_store(store).problems}
    assert ProblemKind.STRUCTURE in kinds


def test_a_name_planted_on_the_other_volume_is_refused(store: Path, tmp_path: Path) -> None:
    """A right copy behind a link may be exchanged once it was checked."""
    other, mine = tmp_path / "other", tmp_path / "mine"
    other.mkdir()
    shutil.copy2(store / f"{SHARD}.safetensors", mine)
    (other / f"{SHARD}.safetensors").symlink_to(mine)
    with pytest.raises(StoreError, match="another file of this name is there"):
        moved(store, other)
    assert not (store / f"{SHARD}.safetensors").is_symlink()


def test_a_temporary_name_planted_on_the_other_volume_is_not_written_through(
    store: Path, victim: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{SHARD}.safetensors.tmp").symlink_to(victim)
    assert [move.state for move in moved(store, other)] == [MoveState.MOVED]
    assert verify_store(store).problems == ()


# --- names in documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["/etc/passwd", "../../victim", "a\x00b", "https://example.org/x", "x" * 100_000])
@pytest.mark.parametrize("key", ["name", "corpus", "plan", "spec_id"])
def test_names_in_a_sidecar_lead_nowhere(store: Path, victim: Path, tmp_path: Path, key: str, value: str) -> None:
    path = store / f"{SHARD}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    problems = verify_store(store).problems
    assert {problem.kind for problem in problems if problem.shard == f"{SHARD}.safetensors"} == {ProblemKind.SIDECAR}
    write_manifest(store)
    assert read_sidecar(path) is not None
    StoreReader(store)


@pytest.mark.parametrize("value", ["/etc/passwd", "../../victim", "", "a\x00b"])
def test_what_a_store_says_of_its_corpus_is_no_path(store: Path, victim: Path, value: str) -> None:
    path = store / STORE_FILE
    data = json.loads(path.read_text())
    data["corpus"] |= {"digest": value, "tokenizer": value, "path": value}
    path.write_text(json.dumps(data))
    describe_store(store)
    assert not verify_store(store).ok


@pytest.mark.parametrize("name", [f"../{SHARD}.safetensors", "/etc/passwd", "store.json", "", ".", f"{SHARD}.json"])
def test_only_planned_shards_are_moved(store: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(EyasError, match="not a shard of this store"):
        move_shards(store, [name], tmp_path / "other")


# --- files that are no files ------------------------------------------------------------------------------------------


def promptly(act: Callable[[], object]) -> list[BaseException]:
    """What an act raises; it must end."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for a writer of the pipe"
    return raised


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name", [STORE_FILE, MANIFEST_FILE, f"{SHARD}.json", f"{SHARD}.safetensors", f"{SHARD}.journal", f"{SHARD}.move"]
)
def test_a_pipe_a_folder_or_a_device_is_an_error_of_ours(
    store: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (store / name).unlink(missing_ok=True)
    make(store / name)
    acts = [
        lambda: StoreReader(store)[0],
        lambda: verify_store(store),
        lambda: describe_store(store),
        lambda: journalled_rows(ShardPaths(store, SHARD)),
        lambda: write_manifest(store),
        lambda: moved(store, tmp_path / "other"),
        lambda: read_store_info(store),
    ]
    raised = [error for act in acts for error in promptly(act)]
    assert all(isinstance(error, EyasError) for error in raised), raised
    assert raised or name == MANIFEST_FILE


def test_event_logs_that_are_no_logs_are_passed_over(store: Path) -> None:
    events = store / "events"
    os.mkfifo(events / "pipe.jsonl")
    (events / "dir.jsonl").mkdir()
    (events / "zero.jsonl").symlink_to("/dev/zero")
    lines = ["[" * 100_000, "9" * 5000, '{"t": "x", "tokens_per_s": [1]}', '{"t": 1e999, "tokens_per_s": 5}', "{}"]
    (events / "mad.jsonl").write_text("\n".join(lines))
    assert promptly(lambda: last_rate(store)) == []
    assert last_rate(store) != 5
    (events / "later.jsonl").write_text('{"t": 8e9, "tokens_per_s": 7}\n{"t": 9e9, "tokens_per_s": 6.5}\n{"t": 9e9')
    assert last_rate(store) == 6.5
