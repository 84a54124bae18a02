"""Every parser on anything, and on valid input changed a little: its documented error or a value, nothing else ever.

EYAS_FUZZ_EXAMPLES sets the examples for each test (see `mutants`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from extract.sglang_double import record_bytes
from eyas.capture.contract import (
    DTYPES,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    RequestId,
    ServerHello,
    check_runs,
    count_of,
    field_hash,
    runs_hash,
    runs_of,
    token_hash,
)
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import parse_name
from eyas.capture.strictjson import loads
from eyas.capture.tensorfile import ITEM_SIZE, layout, parse_header
from eyas.errors import EngineError, IntegrityError, StoreError
from eyas.extract.engine import Captured, CaptureRequest, Failed
from eyas.extract.inbox import Inbox
from eyas.extract.record import open_record, tensors_of
from eyas.extract.sglang_client import read_reply
from eyas.store.check import verify_store
from eyas.store.documents import describe_store, read_sidecar, read_store_info
from eyas.store.files import ShardPaths
from eyas.store.format import Sidecar, StoreInfo
from eyas.store.journal import (
    Journal,
    RowFailed,
    RowOk,
    Session,
    decode_journal,
    encode_journal,
    merged_provenance,
    row_line,
)
from eyas.store.plan import make_plan
from eyas.store.reader import StoreReader
from eyas.store.shardfile import read_index
from security.hostile import HELLO, SPEC, extract_fake, make_corpus, recorder, rid, send, settings, wait_for
from security.mutants import ANY_JSON, FUZZ, NASTY, changed_bytes, changed_document, changed_json

SHARD = "shard-00000"
TOKENS, RUNS = [0, 1, 2, 3, 4], [0, 2]
REQUEST = CaptureRequest(RequestId("run00000", "sess0000", 0, 0), TOKENS, RUNS)
AUX, LAST = torch.ones(5, 2, 8), torch.ones(2, 8)
HEADER = RecordHeader(
    rid=rid(0),
    spec_id=SPEC.spec_id,
    tokens=token_hash(TOKENS),
    rows=5,
    positions=2,
    runs=f"{runs_hash(RUNS):016x}",
    chunks=[[0, 5]],
    aux=f"{field_hash(AUX.numpy()):016x}",
    last=f"{field_hash(LAST.numpy()):016x}",
)
RECORD = record_bytes(HEADER, AUX, LAST, "f32")
SETTINGS = settings(Path("/dev/shm/eyas-30000"))
REPLY = CaptureReply("accepted", SPEC.spec_id, token_hash(TOKENS), 5)
PLAN = make_plan([3, 4, 5, 6], [1, 2, 3, 4], SPEC, 2000)
STORE = StoreInfo(SPEC, {"digest": "c" * 32, "rows": 4}, 2000, PLAN)
SIDECAR = Sidecar(
    "shard-00000.safetensors", (0, 4), 18, 10, 5000, SPEC.spec_id, "c", "p", 7, {1: "aborted"}, [{"a": "b"}]
)
JOURNAL = encode_journal(
    [Session("p", "s", "c", [{"engine": "x"}], {0: RowOk(0, 1, 2), 3: RowFailed(3, "aborted", "why")})]
)


def only(error: type[Exception] | tuple[type[Exception], ...], parse: Callable[[], Any]) -> Any:
    """What a parser returns, or None where it raised its documented error; any other exception fails the test."""
    try:
        return parse()
    except error:
        return None


# --- texts ------------------------------------------------------------------------------------------------------------

DOCUMENTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "settings": (ServerSettings.from_env, SETTINGS.to_env()),
    "hello": (ServerHello.from_json, HELLO.to_json()),
    "record header": (RecordHeader.from_json, HEADER.to_json()),
    "store.json": (StoreInfo.from_json, STORE.to_json()),
    "sidecar": (Sidecar.from_json, SIDECAR.to_json()),
}


@pytest.mark.parametrize(("parse", "valid"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents(parse: Callable[[str], Any], valid: str) -> None:
    @FUZZ
    @given(changed_document(json.loads(valid), valid))
    def fuzz(data: bytes) -> None:
        for text in (data, data.decode("latin-1"), data.decode("utf-8", "replace")):
            made = only(ValueError, lambda text=text: parse(text))
            if made is not None:  # it is whole: what it writes is read back as itself
                again = made.to_env() if isinstance(made, ServerSettings) else made.to_json()
                assert parse(again) == made

    fuzz()


@FUZZ
@given(changed_json(SPEC.to_dict()))
def test_specs(data: Any) -> None:
    spec = only(ValueError, lambda: CaptureSpec.from_dict(data))
    if spec is not None:
        assert CaptureSpec.from_dict(spec.to_dict()) == spec
        assert len(spec.spec_id) == 32
        assert spec.record_bytes(10, 5) > 0


@FUZZ
@given(changed_json(REPLY.to_dict()))
def test_replies(data: Any) -> None:
    reply = only(ValueError, lambda: CaptureReply.from_dict(data))
    assert reply is None or reply.to_dict() == reply.to_dict() | data  # `reason` and `detail` may be left out


@FUZZ
@given(
    changed_json({"text": "", "meta_info": {"id": "x", "finish_reason": {"type": "abort"}, "eyas": [REPLY.to_dict()]}})
)
def test_whole_replies(body: Any) -> None:
    if isinstance(body, dict):
        assert isinstance(read_reply(body), CaptureReply | Failed)


@FUZZ
@given(st.text(max_size=60) | changed_bytes(rid(7).encode()).map(lambda data: data.decode("latin-1")))
def test_request_ids(text: str) -> None:
    parsed = RequestId.parse(text)
    assert parsed is None or str(parsed) == text
    for name in (text, f"{text}.safetensors", f".{text}.tmp", f"{text}.failed"):
        found = parse_name(name)
        assert found is None or (RequestId.parse(found[0]) and "/" not in name and name.endswith(found[1]))


@FUZZ
@given(st.lists(st.integers(0, 12) | NASTY, max_size=10), st.integers(0, 10))
def test_runs(runs: list[Any], tokens: int) -> None:
    with contextlib.suppress(ValueError):
        check_runs(runs, tokens)
        positions = [p for start, stop in zip(runs[0::2], runs[1::2], strict=True) for p in range(start, stop)]
        assert positions == sorted(set(positions))
        assert count_of(runs) == len(positions)
        assert all(0 <= position < tokens for position in positions)
        runs_hash(runs)


@FUZZ
@given(ANY_JSON)
def test_the_strict_reader_reads_what_it_can_write(value: Any) -> None:
    text = only(ValueError, lambda: json.dumps(value, allow_nan=False))
    if text is not None and (made := only(ValueError, lambda: loads(text, 1 << 20))) is not None:
        assert json.dumps(made, ensure_ascii=False).encode()
        assert loads(json.dumps(made), 1 << 20) == made


# --- journal ----------------------------------------------------------------------------------------------------------


def with_checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


LINES = [line.partition(b" ")[2] for line in JOURNAL.splitlines()]


@FUZZ
@given(
    changed_bytes(JOURNAL)
    | st.binary(max_size=300)
    | st.lists(
        st.sampled_from(LINES).flatmap(lambda line: changed_document(json.loads(line), line.decode())), max_size=5
    ).map(lambda lines: with_checksum(LINES[0]) + b"".join(with_checksum(line) for line in lines))
)
def test_journals(data: bytes) -> None:
    journal = decode_journal(data)
    assert isinstance(journal, Journal)
    assert 0 <= journal.trusted_bytes <= len(data)
    merged_provenance(journal.sessions)
    again = encode_journal(journal.sessions)
    assert decode_journal(again).damage == ""
    rows = [row for session in journal.sessions for row in session.rows]
    assert len(rows) == len(set(rows))


@FUZZ
@given(
    st.lists(
        st.builds(RowOk, st.integers(0, 99), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
        | st.builds(RowFailed, st.integers(0, 99), st.text(max_size=20), st.text(max_size=20)),
        max_size=12,
        unique_by=lambda entry: entry.row,
    )
)
def test_journals_are_read_back(entries: list[RowOk | RowFailed]) -> None:
    session = Session("p", "s", "c", [{"engine": "x"}], {entry.row: entry for entry in entries})
    whole = encode_journal([session])
    assert decode_journal(whole) == Journal([session], len(whole))
    cut = whole[:-1]
    assert len(decode_journal(cut).sessions) == (1 if entries else 0)
    assert all(row_line(entry) in whole for entry in entries)


# --- safetensors, records, shards -------------------------------------------------------------------------------------

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@FUZZ
@given(
    st.lists(
        st.tuples(st.text(max_size=6), st.sampled_from(sorted(ITEM_SIZE)), _SHAPES),
        max_size=5,
        unique_by=lambda t: t[0],
    ),
    st.dictionaries(st.text(max_size=6), st.text(max_size=10), max_size=3),
)
def test_headers_are_read_back(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    if any(name == "__metadata__" for name, _, _ in tensors):
        return
    made = layout(tensors, metadata)
    assert parse_header(made.header, made.file_bytes) == made
    with pytest.raises(ValueError, match=r"."):
        parse_header(made.header, made.file_bytes + 1)
    with pytest.raises(ValueError, match=r"."):
        parse_header(made.header[:-1], made.file_bytes)


def framed(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


_LENGTH = int.from_bytes(RECORD[:8], "little")
_ENTRIES = json.loads(RECORD[8 : 8 + _LENGTH])
_STATES = RECORD[8 + _LENGTH :]


def with_header(header: bytes) -> bytes:
    entries = {**_ENTRIES, "__metadata__": {"eyas": header.decode("latin-1")}}
    return framed(json.dumps(entries).encode(), _STATES)


RECORDS = st.one_of(
    changed_bytes(RECORD),
    changed_document(_ENTRIES).map(lambda text: framed(text, _STATES)),
    changed_document(json.loads(HEADER.to_json()), HEADER.to_json()).map(with_header),
    st.binary(max_size=100),
    st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=100)).map(lambda p: p[0].to_bytes(8, "little") + p[1]),
)


@FUZZ
@given(RECORDS)
def test_records(data: bytes) -> None:
    only(ValueError, lambda: parse_header(data, len(data)))
    path = Path(_folder(), f"{rid(0)}.safetensors")
    path.write_bytes(data)
    got = open_record(path, REQUEST, SPEC)
    if isinstance(got, Captured):  # then every claim holds, and the bytes are the states' or fail their checksum later
        tensors = tensors_of(got)
        if isinstance(tensors, Failed):
            assert tensors.reason == "checksum-differs"
        else:
            assert [tuple(tensor.shape) for tensor in tensors] == [(5, 2, 8), (2, 8)]
        header = RecordHeader.from_json(parse_header(data, len(data)).metadata["eyas"])
        assert (header.rid, header.tokens, header.runs) == (HEADER.rid, HEADER.tokens, HEADER.runs)
    else:
        assert len(got.detail) < 20_000


def test_the_valid_record_is_opened(tmp_path: Path) -> None:
    with recorder(tmp_path) as to:
        send(to, rid(0))
        path = wait_for(tmp_path / f"{rid(0)}.safetensors")
    for data in (path.read_bytes(), RECORD):
        path.write_bytes(data)
        assert isinstance(open_record(path, REQUEST, SPEC), Captured)
    assert DTYPES["f32"] == ("F32", 4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    extract_fake(make_corpus(folder / "corpus.parquet", rows=12), folder / "store")
    return folder / "store"


_FOLDERS: list[str] = []


def _folder() -> str:
    """One folder for all examples of this process."""
    if not _FOLDERS:
        _FOLDERS.append(tempfile.mkdtemp(prefix="eyas-fuzz-"))
    return _FOLDERS[0]


@pytest.fixture(scope="module", autouse=True)
def _cleaned() -> Any:
    yield
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop())


def test_shards(store: Path) -> None:
    whole = (store / f"{SHARD}.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    path = Path(_folder(), f"{SHARD}.safetensors")

    @FUZZ
    @given(
        changed_bytes(whole)
        | changed_bytes(whole[: 8 + length]).map(lambda head: head + whole[8 + length :])
        | changed_document(entries).map(lambda text: framed(text, whole[8 + length :]))
    )
    def fuzz(data: bytes) -> None:
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            only(IntegrityError, lambda: read_index(fd, path))
        finally:
            os.close(fd)

    fuzz()


@pytest.mark.parametrize("name", ["store.json", f"{SHARD}.json", "manifest.json", f"{SHARD}.safetensors"])
def test_whole_stores(store: Path, name: str) -> None:
    """Everything that reads a store, on one with a changed document: errors of ours only."""
    whole = (store / name).read_bytes()
    text = whole.decode("latin-1")
    copied = Path(_folder(), f"store-{name}")
    shutil.copytree(store, copied)
    valid = changed_bytes(whole) if name.endswith(".safetensors") else changed_document(json.loads(text), text)

    @FUZZ
    @given(valid)
    def fuzz(data: bytes) -> None:
        (copied / name).write_bytes(data)
        only(StoreError, lambda: read_store_info(copied))
        only(IntegrityError, lambda: read_sidecar(ShardPaths(copied, SHARD).sidecar))
        only(StoreError, lambda: verify_store(copied))
        only((StoreError, IntegrityError), lambda: describe_store(copied))
        reader = only((StoreError, IntegrityError), lambda: StoreReader(copied))
        if reader is not None:
            only((StoreError, IntegrityError), lambda: list(reader))

    fuzz()


# --- what the client reads in the spool -------------------------------------------------------------------------------


@FUZZ
@given(changed_document(json.loads(HELLO.to_json()), HELLO.to_json()))
def test_spec_files(data: bytes) -> None:
    folder = Path(_folder(), "spool")
    folder.mkdir(exist_ok=True, mode=0o700)
    (folder / "spec.json").write_bytes(data)
    hello = only(EngineError, lambda: Inbox(folder).hello())
    assert hello is None or isinstance(hello, ServerHello)


@FUZZ
@given(changed_document({"reason": "write-failed", "detail": "disk full"}))
def test_failure_notes(data: bytes) -> None:
    folder = Path(_folder(), "notes")
    folder.mkdir(exist_ok=True, mode=0o700)
    (folder / f"{rid(0)}.failed").write_bytes(data)
    failed = Inbox(folder)._failure(rid(0))
    assert isinstance(failed, Failed)
    assert len(failed.reason) + len(failed.detail) < 4000
    assert not (folder / f"{rid(0)}.failed").exists()


# --- valid ones -------------------------------------------------------------------------------------------------------


@FUZZ
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(sorted).map(tuple),
    st.sampled_from(["loss", "all"]),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 2**20),
    st.integers(1, 2**20),
)
def test_agreements_are_read_back(layers: tuple[int, ...], last: str, dtype: str, hidden: int, vocab: int) -> None:
    spec = CaptureSpec(layers, last, dtype, hidden, vocab, 31, "a" * 32)
    assert CaptureSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    hello = ServerHello(spec.to_dict(), spec.spec_id, {"host": "h\u00e9"}, 5, 6)
    assert ServerHello.from_json(hello.to_json()) == hello
    told = ServerSettings(layers, "/spool", last, dtype, 7, 0o660, "group", 5)
    assert ServerSettings.from_env(told.to_env()) == told


@FUZZ
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=20), st.integers(500, 20_000))
def test_plans_and_sidecars_are_read_back(rows: list[tuple[int, int]], shard_bytes: int) -> None:
    tokens = [max(pair) for pair in rows]
    plan = make_plan(tokens, [pair[1] for pair in rows], SPEC, shard_bytes)
    info = StoreInfo(SPEC, {"digest": "d", "share": 0.5, "name": "\U0001f985"}, shard_bytes, plan)
    assert StoreInfo.from_json(info.to_json()) == info
    for shard in plan.shards:
        failed = dict.fromkeys(range(shard.start, shard.stop, 2), "aborted")
        sidecar = Sidecar(shard.name, (shard.start, shard.stop), shard.tokens, 1, 2, "s", "c", "p", 2**64 - 1, failed)
        assert Sidecar.from_json(sidecar.to_json()) == sidecar


@FUZZ
@given(st.lists(st.integers(0, 50), max_size=30, unique=True).map(sorted))
def test_runs_are_valid_and_count(positions: list[int]) -> None:
    runs = runs_of(positions)
    check_runs(runs, 51)
    assert count_of(runs) == len(positions)
