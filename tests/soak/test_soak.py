"""The soak itself: it can fail, it decides the same from one seed, and its small version passes on the real server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from rich.console import Console

import eyas
from eyas.capture.contract import CaptureSpec, RecordHeader, RequestId, runs_hash, token_hash
from eyas.config import load
from eyas.data.corpus import Corpus
from eyas.extract.engine import CaptureRequest, Failed
from eyas.extract.record import read_record
from eyas.store.check import finite_check
from eyas.store.shardfile import ShardIndex, read_index
from servers import require_sglang
from sglang_cpu.models import VOCAB_SIZE, tiny_llama
from soak.campaign import Settings, Soak, failures
from soak.chaos_server import LAYERS
from soak.corpora import make_corpus
from soak.decisions import CHUNK, RESTART_LIMIT, RESTARTS, Decisions
from soak.journal_watch import JournalWatch
from soak.record_mutations import MUTATIONS, Earlier, RecordFile, assemble
from soak.relay import DELAYED, DOUBLED, DROPPED, REFUSED_KINDS, Relay, RelayConfig, read_ledger
from soak.server_log import RunSends, ServerLog
from soak.truth import Evidence, Truth, Verdict, judge

ROWS, RUN = 60, "abcdefgh"
SPEC = CaptureSpec(LAYERS, "loss", "f32", 16, VOCAB_SIZE, 8, "0" * 32)


# --- the small version ------------------------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.slow
def test_five_hundred_requests_in_chaos(tmp_path: Path) -> None:
    require_sglang()
    settings = Settings(requests=500, seed=20260, minutes=10, out=tmp_path / "soak", restarts=2)
    summary = Soak(settings, Console()).run()
    print(json.dumps(summary, indent=1))
    assert failures(summary) == []
    assert json.loads((tmp_path / "soak" / "summary.json").read_text()) == summary
    details = summary["details"]
    assert summary["requests"] >= 500
    assert summary["rows"] >= 400
    assert summary["server_restarts"] == 2
    assert details["mutation_kinds"] >= 5
    assert details["faults_injected"] >= 1
    assert sum(details["foreign_requests"].values()) >= 50


# --- it can fail ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), hidden_size=64)


@pytest.fixture(scope="module")
def truth(target: Path) -> Truth:
    return Truth(target)


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    """A right store of several shards, captured by transformers in process."""
    folder = tmp_path_factory.mktemp("finished")
    corpus = make_corpus(
        folder / "corpus.parquet", ROWS, model=target, vocab_size=VOCAB_SIZE, chunk=CHUNK, longest=200, seed=3
    )
    settings = ["capture.dtype=f32", "capture.layers=[1, 3, 5]", "store.shard_bytes=1MB", "store.reserve_bytes=0"]
    cfg = load(overrides=[*settings, "extract.model_dtype=f32"])
    with open(os.devnull, "w") as nowhere:
        eyas.extract_states(corpus, folder / "store", cfg=cfg, console=Console(file=nowhere))
    return folder / "store", Corpus.open(corpus)


@pytest.fixture
def store(finished: tuple[Path, Corpus], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "store"))


def shards(store: Path) -> list[Path]:
    found = sorted(store.glob("shard-*.safetensors"))
    assert len(found) > 1
    return found


def index_of(path: Path) -> ShardIndex:
    with path.open("rb") as file:
        return read_index(file.fileno(), path)


def rids(rows: int = ROWS, session: str = "session0", attempt: int = 0) -> list[RequestId]:
    return [RequestId(RUN, session, row, attempt) for row in range(rows)]


def honest(store: Path) -> dict[str, dict[str, str]]:
    """The ledger of a way on which nothing happened to any record."""
    ledger: dict[str, dict[str, str]] = {}
    for path in shards(store):
        index = index_of(path)
        for at, hashes in enumerate(index.row_xxh3):
            aux, last = (f"{int(value):016x}" for value in hashes[2:])
            ledger[str(rids()[index.shard.start + at])] = {"kind": "", "aux": aux, "last": last}
    return ledger


def verdict_on(store: Path, finished: tuple[Path, Corpus], truth: Truth, **evidence: object) -> Verdict:
    return judge(store, finished[1], truth, Evidence(**{"sends": RunSends(rids()), **evidence}))  # pyright: ignore


def test_a_right_store_is_found_right(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    assert verdict_on(store, finished, truth, ledger=honest(store)) == Verdict(rows=ROWS)


def _write_state(path: Path, at: int, change: Callable[[np.ndarray], np.ndarray]) -> int:
    index = index_of(path)
    start, stop = index.span("aux", at)
    with path.open("r+b") as file:
        file.seek(start)
        states = np.frombuffer(file.read(stop - start), "<f4")
        file.seek(start)
        file.write(change(states.reshape(-1, 3, 64)).astype("<f4").tobytes())
    return index.shard.start + at


@pytest.mark.parametrize(
    "change",
    [
        lambda states: np.roll(states, 1, axis=0),
        lambda states: states[:, [1, 0, 2]],
        lambda states: states * 1.01,
        lambda states: np.full_like(states, np.nan),
    ],
    ids=["shifted", "layers permuted", "one per cent off", "not a number"],
)
def test_a_planted_wrong_row_is_counted_wrong(
    store: Path, finished: tuple[Path, Corpus], truth: Truth, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    path = shards(store)[1]
    at = int(np.argmax(np.diff(index_of(path).row_offsets)))
    row = _write_state(path, at, change)
    found = verdict_on(store, finished, truth)
    assert (list(found.wrong), found.rows) == ([row], ROWS - 1)


def test_another_prompts_tokens_are_counted_wrong(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    path = shards(store)[0]
    with path.open("r+b") as file:
        file.seek(index_of(path).layout.tensors["tokens"].start)
        file.write(b"\xff\x00\x00\x00")
    assert list(verdict_on(store, finished, truth).wrong) == [0]


def test_deleted_rows_are_counted_lost(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    gone = index_of(shards(store)[1]).shard
    shards(store)[1].unlink()
    assert list(verdict_on(store, finished, truth).lost) == list(range(gone.start, gone.stop))


def test_a_row_recorded_as_failed_is_counted_lost(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    path = shards(store)[0]
    with path.open("r+b") as file:
        file.seek(index_of(path).layout.tensors["row_status"].start + 2)
        file.write(b"\x02")
    assert list(verdict_on(store, finished, truth).lost) == [2]


def test_a_row_in_two_shards_is_counted_doubled(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    twice = index_of(shards(store)[1]).shard
    shutil.copy(shards(store)[1], store / "shard-00099.safetensors")
    assert list(verdict_on(store, finished, truth).doubled) == list(range(twice.start, twice.stop))


def test_a_row_asked_for_again_is_counted_doubled(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    stored_at = [({3, 4}, {"session0"})]
    sends = RunSends([*rids(), RequestId(RUN, "session1", 4, 0), RequestId(RUN, "session1", 5, 0)])
    assert list(verdict_on(store, finished, truth, sends=sends, stored_at=stored_at).doubled) == [4]


def test_a_row_journalled_twice_is_counted_doubled(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    watch = JournalWatch(store)
    journal = store / "shard-00000.journal"
    line = '0 {"row": %d, "aux": "%s", "last": "b"}\n'
    journal.write_text(line % (1, "a") + line % (2, "a"))
    watch.look()
    assert watch.doubled == set()
    journal.write_text(line % (1, "a") + line % (2, "other bytes") + line % (3, "a") + line % (3, "a"))
    watch.look()
    assert watch.doubled == {2, 3}
    found = verdict_on(store, finished, truth, journal_doubled=frozenset(watch.doubled))
    assert sorted(found.doubled) == [2, 3]


def test_rows_from_mutated_records_are_counted_undetected(
    store: Path, finished: tuple[Path, Corpus], truth: Truth
) -> None:
    ledger = honest(store)
    for row, kind in enumerate((*REFUSED_KINDS, DROPPED)):
        ledger[str(rids()[row])]["kind"] = kind
    ledger[str(rids()[-1])]["kind"], ledger[str(rids()[-2])]["kind"] = DELAYED, DOUBLED
    found = verdict_on(store, finished, truth, ledger=ledger)
    assert sorted(found.undetected) == list(range(len(REFUSED_KINDS) + 1))
    assert len(REFUSED_KINDS) < ROWS - 3


def test_a_mutated_record_that_was_asked_for_again_is_detected(
    store: Path, finished: tuple[Path, Corpus], truth: Truth
) -> None:
    ledger = honest(store)
    again = RequestId(RUN, "session0", 7, 1)
    ledger |= {str(rids()[7]): {"kind": "nan-in-aux"}, str(again): ledger[str(rids()[7])]}
    found = verdict_on(store, finished, truth, ledger=ledger, sends=RunSends([*rids(), again]))
    assert found == Verdict(rows=ROWS)


def test_states_of_another_delivery_are_counted_wrong(store: Path, finished: tuple[Path, Corpus], truth: Truth) -> None:
    ledger = honest(store)
    ledger[str(rids()[7])]["aux"] = "0" * 16
    del ledger[str(rids()[8])]
    assert sorted(verdict_on(store, finished, truth, ledger=ledger).wrong) == [7, 8]


@pytest.mark.parametrize("key", ["wrong_rows", "lost_rows", "doubled_rows", "undetected_mutations"])
def test_a_bad_count_fails_the_run(key: str) -> None:
    details = {"foreign_differences": 0, "unexpected": [], "complete": True}
    good = {"requests": 1, "wrong_rows": 0, "lost_rows": 0, "doubled_rows": 0, "undetected_mutations": 0}
    assert failures({**good, "details": details}) == []
    assert failures({**good, key: 1, "details": details}) == [f"{key}: 1"]
    assert failures({**good, "details": {**details, "foreign_differences": 2}}) == ["foreign_differences: 2"]
    assert failures({**good, "details": {**details, "complete": False}})


# --- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 500, 3000, 20_000, 100_000])
def test_decisions_follow_from_the_seed_and_keep_to_the_limit(requests: int) -> None:
    for seed in range(20):
        one, other = Decisions(seed, requests), Decisions(seed, requests)
        assert one.rounds() == other.rounds()
        assert [one.session(0, 0, n) for n in range(9)] == [other.session(0, 0, n) for n in range(9)]
        assert [one.weather(1, n) for n in range(9)] == [other.weather(1, n) for n in range(9)]
        assert [one.variant(n) for n in range(9)] == [other.variant(n) for n in range(9)]
        events = [event.kind for plan in one.rounds() for event in plan.events]
        assert sum(RESTARTS.get(kind, 0) for kind in events) <= RESTART_LIMIT
        if requests >= 20_000:
            assert set(RESTARTS) <= set(events)
    assert Decisions(1, requests).rounds() != Decisions(2, requests).rounds()


def record(row: int, rows: int, seed: int, session: str = "session0") -> tuple[CaptureRequest, RecordFile]:
    """A right record and the request that it answers."""
    rng = np.random.default_rng(seed)
    tokens, runs = rng.integers(0, VOCAB_SIZE, rows).tolist(), [0, rows - 1]
    aux, last = (rng.normal(size=shape).astype("<f4") for shape in ((rows, 3, 16), (rows - 1, 16)))
    rid = RequestId(RUN, session, row, 0)
    header = RecordHeader(
        rid=str(rid),
        spec_id=SPEC.spec_id,
        tokens=token_hash(tokens),
        rows=rows,
        positions=rows - 1,
        runs=f"{runs_hash(runs):016x}",
        chunks=[[0, 4], [4, rows]],
        aux="",
        last="",
    )
    return CaptureRequest(rid, tokens, runs), RecordFile.parse(assemble(header, aux, last, rehash=True))


def refusal(path: Path, request: CaptureRequest) -> str | None:
    """Why a client does not believe a record; None where it does."""
    result = read_record(path, request, SPEC)
    if isinstance(result, Failed):
        return result.reason
    parts = [part.contiguous().flatten().view(torch.uint8).numpy().tobytes() for part in result]
    return None if all(finite_check(SPEC)(memoryview(part)) for part in parts) else "not-finite"


def test_a_right_record_is_believed(tmp_path: Path) -> None:
    request, right = record(3, 9, 0)
    (path := tmp_path / "record").write_bytes(right.data)
    assert refusal(path, request) is None


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_mutation_is_one_that_can_be_seen(kind: str, tmp_path: Path) -> None:
    earlier = Earlier(record(4, 9, 1)[1].data, record(3, 9, 0, "session9")[1].data, record(5, 7, 2, "session9")[1].data)
    for seed in range(30):
        request, right = record(3, 9, seed)
        mutated = MUTATIONS[kind](right, earlier, Random(seed))
        assert mutated is not None
        assert mutated != right.data
        (path := tmp_path / "record").write_bytes(mutated)
        assert refusal(path, request), f"{kind} with seed {seed} was believed"


def test_the_relay_says_what_it_did(tmp_path: Path) -> None:
    server, client = tmp_path / "server", tmp_path / "client"
    server.mkdir()
    client.mkdir()
    control, ledger = tmp_path / "control", tmp_path / "ledger"
    now = [0.0]
    requests = [record(row, 9, row) for row in range(200)]
    (server / "spec.json").write_text("{}")
    control.write_text(json.dumps({"seed": "a", "mutate": 0.4, "drop": 0.1, "delay": 0.1, "double": 0.1}))
    config = RelayConfig(*map(str, (server, client, control, ledger)), neighbour="nextdoor")
    with Relay(config, clock=lambda: now[0]) as relay:
        for request, right in requests:
            (server / f"{request.rid}.safetensors").write_bytes(right.data)
            relay.step()
            now[0] += 0.01
        now[0] += 60
        relay.step()
    assert [path.name for path in server.iterdir()] == ["spec.json"]
    assert (client / "spec.json").exists()
    told = read_ledger(ledger)
    kinds = {entry["kind"] for entry in told.values()}
    assert len(told) == 200
    assert {"", "dropped", "delayed", "doubled", "two-records-swapped"} < kinds
    assert len(kinds) > 20
    for request, _ in requests:
        path, kind = client / f"{request.rid}.safetensors", told[str(request.rid)]["kind"]
        if kind == "dropped":
            assert not path.exists()
        elif kind == "damaged-failure-note":
            assert path.with_suffix(".failed").exists()
        else:
            assert (refusal(path, request) is None) == (kind in ("", "delayed", "doubled")), kind


def test_requests_are_counted_from_the_servers_log(tmp_path: Path) -> None:
    line = '[now] {"timestamp": "t", "event": "request.received", "rid": "%s", "obj": {"rid": "x"}}\n'
    path = tmp_path / "log"
    neighbours = ("user-1", "eyas.nextdoor.xxxxxxxx.00000001.00")
    path.write_text("".join(line % str(rid) for rid in (*rids(3), *neighbours)))
    late = line % str(RequestId(RUN, "session1", 1, 4))
    log = ServerLog(path, "nextdoor")
    log.read()
    with path.open("a") as file:
        file.write(late[:80])
        file.flush()
        log.read()
        file.write(late[80:])
    log.read()
    assert (log.own, log.other, log.sent(RUN)) == (4, 2, 4)
    assert log.run(RUN).last_of_rows()[1] == RequestId(RUN, "session1", 1, 4)
    assert log.run(RUN).sessions == {"session0", "session1"}
