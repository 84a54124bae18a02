"""Whatever a header, a document or a reply claims: refused by name, at once, in little memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from extract.sglang_double import PluginServer
from eyas.capture.contract import CaptureSpec, RecordHeader, RequestId, ServerHello
from eyas.capture.settings import ServerSettings
from eyas.capture.strictjson import loads
from eyas.capture.tensorfile import MAX_HEADER_BYTES, layout, parse_header
from eyas.config import ServerConfig
from eyas.errors import EngineError, IntegrityError, StoreError
from eyas.extract.engine import CaptureRequest, Failed, Retry
from eyas.extract.inbox import Inbox
from eyas.extract.record import open_record
from eyas.extract.sglang import SGLangEngine
from eyas.extract.sglang_client import SGLangClient
from eyas.store.check import verify_store
from eyas.store.documents import journalled_rows, read_sidecar, read_store_info
from eyas.store.files import ShardPaths
from eyas.store.format import Sidecar, StoreInfo, shard_layout
from eyas.store.journal import MAX_LINE_BYTES, Session, decode_journal, encode_journal
from eyas.store.move import move_shards
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader
from eyas.store.shard_writer import ShardWriter
from eyas.store.shardfile import read_index
from security.hostile import SPEC, extract_fake, make_corpus, rid

REQUEST = CaptureRequest(RequestId("run00000", "sess0000", 0, 0), [0, 1, 2, 3, 4], [0, 2])
SHARD = "shard-00000"


@contextmanager
def thrifty(seconds: float = 2.0, megabytes: float = 8.0) -> Iterator[None]:
    """Fails where the block takes long or much memory."""
    tracemalloc.start()
    before = time.perf_counter()
    try:
        yield
    finally:
        took, (_, peak) = time.perf_counter() - before, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took < seconds
    assert peak < megabytes * 1e6


def header_file(path: Path, header: bytes, claimed: int | None = None, size: int = 0) -> Path:
    """A safetensors file of `size` bytes (sparse) whose header is said to be `claimed` bytes long."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header) if claimed is None else claimed) + header)
        file.truncate(max(size, file.tell()))
    return path


def tensors(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def tensor(shape: Any, offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# --- what a header may claim ------------------------------------------------------------------------------------------


CLAIMS = {
    "2^60": 1 << 60,
    "500 MB": 500_000_000,
    "2^64 - 1": (1 << 64) - 1,
    "2^63": 1 << 63,
    "just over": (1 << 20) + 1,
}


@pytest.mark.parametrize("claimed", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("size", [100, 1 << 40])
def test_header_lengths(tmp_path: Path, claimed: int, size: int) -> None:
    path = header_file(tmp_path / f"{SHARD}.safetensors", b"{}", claimed, size)
    with thrifty():
        record = open_record(path, REQUEST, SPEC)
        assert isinstance(record, Failed)
        assert record.reason == "record-damaged"
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(IntegrityError, match="not a shard of a store"):
            read_index(fd, path)
        os.close(fd)
        with pytest.raises(ValueError, match=r"at most|truncated"):
            parse_header(struct.pack("<Q", claimed) + bytes(50), size)


HEADERS: dict[str, bytes] = {
    "deep": b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000,
    "deep in a tensor": tensors(a=1)[:-2] + b"[" * 200_000,
    "no object": b"[]",
    "a number": b"7",
    "huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "huge dimension": tensors(a=tensor([10**30], [0, 4])),
    "2^63": tensors(a=tensor([2**63], [0, 4])),
    "2^64 / 4": tensors(a=tensor([2**62], [0, 4])),
    "product overflows": tensors(a=tensor([2**32, 2**32], [0, 4])),
    "product wraps to 1": tensors(a=tensor([2**32, 2**32, 1], [0, 4])),
    "a thousand dimensions": tensors(a=tensor([2**60] * 1000, [0, 4])),
    "negative": tensors(a=tensor([-1], [0, -4])),
    "two negatives": tensors(a=tensor([-1, -1], [0, 4])),
    "negative offsets": tensors(a=tensor([1], [-4, 0])),
    "bool": tensors(a=tensor([True], [0, 4])),
    "bool offset": tensors(a=tensor([1], [False, 4])),
    "float": tensors(a=tensor([1.0], [0, 4])),
    "float offset": tensors(a=tensor([1], [0.0, 4.0])),
    "NaN": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "Infinity": b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
    "1e999": b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
    "text": tensors(a=tensor("1", [0, 4])),
    "shape of texts": tensors(a=tensor(["1"], [0, 4])),
    "shape of null": tensors(a=tensor(None, [0, 4])),
    "shape of an object": tensors(a=tensor({"0": 1}, [0, 4])),
    "three offsets": tensors(a=tensor([1], [0, 4, 8])),
    "one offset": tensors(a=tensor([1], [0])),
    "no offsets": tensors(a={"dtype": "F32", "shape": [1]}),
    "more fields": tensors(a=tensor([1]) | {"x": 1}),
    "unknown dtype": tensors(a=tensor([1], dtype="F128")),
    "dtype of a list": tensors(a=tensor([1], dtype=["F32"])),
    "a tensor of a list": tensors(a=[1]),
    "metadata of a number": tensors(__metadata__=7),
    "metadata of numbers": tensors(__metadata__={"a": 7}),
    "metadata of null": tensors(__metadata__=None),
    "a key twice": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": '
    b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "a field twice": b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "overlap": tensors(a=tensor([1], [0, 4]), b=tensor([1], [0, 4])),
    "hole": tensors(a=tensor([1], [4, 8])),
    "backwards": tensors(a=tensor([1], [4, 0])),
    "no UTF-8": b'{"\xff": 1}',
    "half a surrogate": b'{"__metadata__": {"a": "\\ud800"}}',
    "NUL": b"\x00" * 100,
    "empty": b"",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers(tmp_path: Path, header: bytes) -> None:
    for size in (8 + len(header), 8 + len(header) + 4):
        path = header_file(tmp_path / f"{SHARD}.safetensors", header, size=size)
        with thrifty(megabytes=30):
            record = open_record(path, REQUEST, SPEC)
            assert isinstance(record, Failed)
            assert record.reason == "record-damaged"
            assert len(record.detail) < 2000
            fd = os.open(path, os.O_RDONLY)
            with pytest.raises(IntegrityError, match="not a shard of a store"):
                read_index(fd, path)
            os.close(fd)
            with pytest.raises(ValueError, match=r".+"):
                parse_header(path.read_bytes(), size)


def test_as_many_tensors_as_a_header_holds(tmp_path: Path) -> None:
    """Tens of millions would need a header of a gigabyte: that is not read, and as many as fit are fast."""
    entry = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    many = b"{" + b",".join(entry % n for n in range(15_000)) + b"}"
    assert len(many) < MAX_HEADER_BYTES
    with thrifty(seconds=5, megabytes=40):
        assert len(parse_header(struct.pack("<Q", len(many)) + many, 8 + len(many)).tensors) == 15_000
    more = b"{" + b",".join(entry % n for n in range(30_000)) + b"}"
    with thrifty(), pytest.raises(ValueError, match="at most"):
        parse_header(struct.pack("<Q", len(more)) + more, 8 + len(more))


def test_a_sparse_shard_of_terabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    spec = CaptureSpec((0,), "loss", "f32", 1, 10, 2, "0" * 32)
    planned = shard_layout(Shard(0, 0, 1, 2**31 - 1, 1000), spec, "c", "p")
    path = tmp_path / f"{SHARD}.safetensors"
    path.write_bytes(planned.header)
    os.truncate(path, planned.file_bytes)
    fd = os.open(path, os.O_RDONLY)
    with thrifty(), pytest.raises(IntegrityError, match=r"an index of \d+ bytes"):
        read_index(fd, path)
    os.close(fd)


@pytest.mark.parametrize("size", [10_000_000, 1 << 40])
def test_a_record_larger_than_its_row(tmp_path: Path, size: int) -> None:
    path = header_file(tmp_path / f"{rid(0)}.safetensors", b"{}", size=size)
    with thrifty():
        record = open_record(path, REQUEST, SPEC)
    assert isinstance(record, Failed)
    assert record.reason == "record-damaged"


# --- JSON by itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"a":' * 200_000,
        "9" * 5000,
        "-" + "9" * 5000,
        str(2**63),
        str(-(2**63) - 1),
        "NaN",
        "-Infinity",
        "1e999",
        '{"a": 1, "a": 1}',
        '[{"a": {"b": 1, "b": 2}}]',
        '"\\ud800"',
        '{"\\udfff": 1}',
        "",
        "{",
        "'a'",
        "\ufeff{}",
    ],
    ids=range(17),
)
def test_json_that_is_not_plain(text: str) -> None:
    for form in (text, text.encode()):
        with thrifty(megabytes=60), pytest.raises(ValueError, match=r".+") as refused:
            loads(form, 10_000_000)
        assert type(refused.value) is ValueError
        assert len(str(refused.value)) <= 300


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0.5, "\U0001f985", "\\ud83e", {"a": [None, True, {}]}])
def test_plain_json_is_read(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert loads(text.encode(), 100) == loads(text, 100) == value


def test_nothing_beyond_the_limit_is_parsed() -> None:
    text = "[" + "1," * 5_000_000 + "1]"
    with thrifty(seconds=0.2, megabytes=0.1), pytest.raises(ValueError, match="at most 100 are read"):
        loads(text, 100)


PARSERS: dict[str, Callable[[str], object]] = {
    "settings": ServerSettings.from_env,
    "hello": ServerHello.from_json,
    "record header": RecordHeader.from_json,
    "store.json": StoreInfo.from_json,
    "sidecar": Sidecar.from_json,
}


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
@pytest.mark.parametrize("text", ["[" * 60_000, "9" * 5000, "[]", "7", "null", '"x"', "", "NaN", '{"layers": [1e400]}'])
def test_documents_of_no_sense(parse: Callable[[str], object], text: str) -> None:
    with thrifty(), pytest.raises(ValueError, match=r".+"):
        parse(text)


@pytest.mark.parametrize("size", [2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_layers"])
def test_a_model_larger_than_any(key: str, size: int) -> None:
    with pytest.raises(ValueError, match="larger than any"):
        CaptureSpec.from_dict(SPEC.to_dict() | {key: size})


# --- documents on disk ------------------------------------------------------------------------------------------------


def sparse(path: Path, size: int = 1 << 40) -> Path:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, size)
    return path


def test_a_spec_json_of_a_terabyte(tmp_path: Path) -> None:
    sparse(tmp_path / "spec.json")
    with thrifty(), pytest.raises(EngineError, match="at most"):
        Inbox(tmp_path).hello()


def test_a_failure_note_of_a_terabyte_or_of_long_words(tmp_path: Path) -> None:
    def wait() -> Path | Failed:
        async def scenario() -> Path | Failed:
            inbox = Inbox(tmp_path)
            try:
                return await inbox.wait(rid(0), 5)
            finally:
                await inbox.close()

        return asyncio.run(scenario())

    sparse(tmp_path / f"{rid(0)}.failed")
    with thrifty():
        failed = wait()
    assert isinstance(failed, Failed)
    assert failed.reason == "record-damaged"
    (tmp_path / f"{rid(0)}.failed").write_text(json.dumps({"reason": "r" * 20_000, "detail": "d" * 20_000}))
    failed = wait()
    assert isinstance(failed, Failed)
    assert len(failed.reason) + len(failed.detail) < 3000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    extract_fake(make_corpus(folder / "corpus.parquet"), folder / "store")
    return folder / "store"


@pytest.mark.parametrize("name", ["store.json", f"{SHARD}.json", "manifest.json", f"{SHARD}.journal", f"{SHARD}.move"])
def test_documents_of_a_terabyte(store: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    (tmp_path / "other").mkdir()
    sparse(copy / name)
    acts: list[Callable[[], object]] = {
        "store.json": [lambda: read_store_info(copy), lambda: StoreReader(copy)],
        f"{SHARD}.json": [lambda: read_sidecar(copy / name), lambda: StoreReader(copy)],
        "manifest.json": [lambda: verify_store(copy)],
        f"{SHARD}.journal": [lambda: journalled_rows(ShardPaths(copy, SHARD))],
        f"{SHARD}.move": [lambda: move_shards(copy, None, tmp_path / "other")],
    }[name]
    for act in acts:
        with thrifty():
            if name == "manifest.json":
                assert [str(problem.kind) for problem in verify_store(copy).problems] == ["manifest"]
            else:
                with pytest.raises((IntegrityError, StoreError)):
                    act()


def test_journal_lines() -> None:
    whole = encode_journal([Session("p", "s", "c", [{"engine": "x"}])])

    def line(text: bytes) -> bytes:
        return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"

    for text in (
        b"[" * 500_000,
        b"9" * 5000,
        b'{"row": ' + b"9" * 5000 + b', "aux": "0", "last": "0"}',
        b'{"row": 1, "aux": "' + b"f" * (MAX_LINE_BYTES + 1) + b'", "last": "0"}',
        b'{"row": 1.5, "aux": "0000000000000000", "last": "0000000000000000"}',
        b'{"row": true, "aux": "0000000000000000", "last": "0000000000000000"}',
        b'{"row": -1, "aux": "0000000000000000", "last": "0000000000000000"}',
        b'{"row": 1e400, "aux": "0000000000000000", "last": "0000000000000000"}',
        b'{"row": 1, "aux": "-000000000000001", "last": "0000000000000000"}',
        b'{"row": 1, "aux": "0x00000000000001", "last": "0000000000000000"}',
        b'{"row": 1, "failed": ["x"], "detail": ""}',
        b'{"session": []}',
        b'{"session": {"plan": "p", "spec_id": "s", "corpus": "c", "provenance": [[["a", "b"]]]}}',
        b'{"session": {"plan": "p", "spec_id": "s", "corpus": "c", "provenance": [{"engine": 1}]}}',
        b"[]",
        b"7",
        b"null",
        b'"session"',
        b"\xff",
    ):
        with thrifty():
            journal = decode_journal(whole + line(text) + whole)
        assert journal.trusted_bytes == len(whole), text[:60]
        assert journal.damage
        assert len(journal.damage) <= 300


# --- replies over the wire --------------------------------------------------------------------------------------------


class Endless(httpx.AsyncByteStream):
    """A body that never ends, in pieces of `size` bytes, `pause_s` apart; counts what was taken."""

    def __init__(self, start: bytes, size: int, pause_s: float = 0.0) -> None:
        self.taken = 0
        self._start, self._piece, self._pause_s = start, b" " * size, pause_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._start
        for _ in itertools.count():
            await asyncio.sleep(self._pause_s)
            self.taken += len(self._piece)
            yield self._piece


def ask(stream: httpx.AsyncByteStream, status: int, what: str, **settings: Any) -> Any:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=stream)

    async def scenario() -> Any:
        client = SGLangClient("http://mock:30000", ServerConfig(**settings), httpx.MockTransport(handler))
        try:
            return await (client.identify() if what == "identify" else client.generate(REQUEST, SPEC.spec_id))
        finally:
            await client.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_reply_without_end_is_cut(status: int) -> None:
    stream = Endless(b'{"meta_info": ', 64 << 10)
    with thrifty(megabytes=10):
        failed = ask(stream, status, "generate")
    assert failed == Failed("reply-too-large", "more than 1048576 bytes", Retry.PROBE)
    assert stream.taken < 2 << 20


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_model_info_without_end_is_cut(status: int) -> None:
    stream = Endless(b'{"model_path": "', 64 << 10)
    with thrifty(megabytes=10), pytest.raises(EngineError, match=r"not an SGLang server.*more than 1048576 bytes"):
        ask(stream, status, "identify")
    assert stream.taken < 2 << 20


def test_a_reply_that_drips_is_late() -> None:
    """Each piece comes in time; the whole does not."""
    before = time.monotonic()
    failed = ask(Endless(b"{", 1, pause_s=0.02), 200, "generate", timeout_s=0.5)
    assert failed.reason == "reply-late"
    assert 0.4 < time.monotonic() - before < 5


@pytest.mark.parametrize(
    "body", [b"[" * 500_000, b'{"meta_info":' * 50_000, b"9" * 5000, b'{"meta_info": NaN}', b"\xff"]
)
def test_replies_of_no_sense(body: bytes) -> None:
    failed = ask(httpx.ByteStream(body), 200, "generate")
    assert isinstance(failed, Failed)
    assert failed.reason == "no-plugin-reply"
    with pytest.raises(EngineError, match="not an SGLang server"):
        ask(httpx.ByteStream(body), 200, "identify")


def test_no_compressed_reply_is_asked_for() -> None:
    """A kilobyte of it can be a megabyte."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Accept-Encoding"])
        return httpx.Response(404)

    async def scenario() -> None:
        client = SGLangClient("http://mock:30000", ServerConfig(), httpx.MockTransport(handler))
        with pytest.raises(EngineError):
            await client.identify()
        await client.close()

    asyncio.run(scenario())
    assert set(seen) == {"identity"}


def test_an_engine_survives_a_server_that_floods_it(tmp_path: Path) -> None:
    server = PluginServer(SPEC, tmp_path / "spool")
    server.spool.chmod(0o700)
    flood = Endless(b"{", 1 << 20)
    server.answers = lambda _: httpx.Response(200, stream=flood)

    async def scenario() -> Any:
        engine = SGLangEngine(server.url, SPEC, server.config(), "run00000", "ses00000", transport=server.transport)
        await engine.start()
        try:
            return await engine.capture(REQUEST)
        finally:
            await engine.close()

    assert asyncio.run(scenario()).reason == "reply-too-large"


def test_long_words_of_a_server_are_cut_before_they_are_journalled(store: Path) -> None:
    kept: list[Any] = []

    class Recording(ShardWriter):
        def __init__(self) -> None:
            pass

        def _claim(self, row: int) -> Any:
            return None

        def _record(self, entry: Any) -> None:
            kept.append(entry)

        def _land(self, row: int) -> None:
            pass

    Recording().fail(0, "r" * 100_000, "d" * 100_000)
    assert len(kept[0].reason) + len(kept[0].detail) <= 2000


def test_limits_hold_where_memory_is_short(tmp_path: Path) -> None:
    """A process that may not have more than 3 GB of address space reads all of these and lives."""
    header_file(tmp_path / "a.safetensors", b"{}", 1 << 60, 1 << 42)
    sparse(tmp_path / "spec.json", 1 << 42)
    script = f"""
import os, resource
from eyas.capture.folder import read_limited
from eyas.capture.tensorfile import parse_header
from eyas.store.shardfile import read_index
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for act in (
    lambda: read_limited({str(tmp_path / "spec.json")!r}, 1 << 16),
    lambda: read_index(os.open({str(tmp_path / "a.safetensors")!r}, os.O_RDONLY), "a"),
):
    try:
        act()
    except MemoryError:
        raise
    except Exception as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["ValueError", "IntegrityError"], done.stderr


def test_a_layout_of_ours_is_read_back() -> None:
    made = layout([("a", "F32", (2, 3)), ("b", "U8", (0,))], {"x": "y"})
    assert parse_header(made.header, made.file_bytes) == made
