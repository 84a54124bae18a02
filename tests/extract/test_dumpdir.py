"""The engine over dump folders: what it refuses at the start, what a row is refused for, what it leaves alone."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_emulator import DumpServer, Faults
from rich.console import Console
from typer.testing import CliRunner

from eyas.capture.contract import RequestId, field_hash
from eyas.cli import app
from eyas.config import load
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.errors import ConfigError, EngineError
from eyas.extract.dumpdir.engine import DumpDirEngine
from eyas.extract.engine import Captured, CaptureRequest, Engine, EngineInfo, Failed
from eyas.extract.runner import extract, plan
from eyas.store.reader import StoreReader
from eyas.target.checkpoint import Target
from eyas.verify import verify
from sglang_cpu.models import VOCAB_SIZE, tiny_llama

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama", layers=4, hidden_size=64)


def engine_for(server: DumpServer, *more: str) -> DumpDirEngine:
    given = [f"dumpdir.folder={server.dumps}", "dumpdir.last=post-norm", "server.record_deadline_s=0.5"]
    cfg = load(overrides=[*given, "server.restart_timeout_s=10", *more])
    target = Target.load(str(server.model))
    spec = target.spec(cfg.capture.layers or LAYERS, "loss", "f32")
    return DumpDirEngine(server.url, target, spec, cfg.dumpdir, cfg.server, "run00000", "ses00000")


def row(number: int, length: int, runs: list[int] | None = None) -> CaptureRequest:
    tokens = np.random.default_rng(number).integers(6, VOCAB_SIZE, length).tolist()
    return CaptureRequest(RequestId("run00000", "ses00000", number, 0), tokens, [0, length] if runs is None else runs)


def started(engine: Engine, work: Callable[[EngineInfo], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        try:
            return await work(await engine.start())
        finally:
            await engine.close()

    return asyncio.run(scenario())


def captured(server: DumpServer, *requests: CaptureRequest, more: tuple[str, ...] = ()) -> list[Captured | Failed]:
    engine = engine_for(server, *more)

    async def work(_: EngineInfo) -> list[Captured | Failed]:
        server.faults, server.log_probs = after.faults, after.log_probs
        return await asyncio.gather(*(engine.capture(request) for request in requests))

    after = dataclasses.replace(server)  # the probe meets a healthy server, the rows this one
    server.faults = Faults()
    return started(engine, work)


def check(server: DumpServer, asked: CaptureRequest, got: Captured | Failed) -> None:
    assert isinstance(got, Captured), got
    aux, last = server.truth(asked.tokens)
    kept = [p for a, b in zip(asked.last_runs[0::2], asked.last_runs[1::2], strict=True) for p in range(a, b)]
    torch.testing.assert_close(got.aux, aux, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.last, last[kept], rtol=1e-4, atol=1e-5)
    for states, digest in ((got.aux, got.aux_xxh3), (got.last, got.last_xxh3)):
        assert field_hash(states.contiguous().view(torch.uint8).numpy()) == digest


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        ({"pre_norm": True}, (), "--last pre-norm"),
        ({}, ("dumpdir.last=pre-norm",), "--last post-norm"),
        ({"shift": 1}, (), "one row too many at the start"),
        ({"shift": -1}, (), "the first row is missing"),
        ({"layers": (0, 1)}, (), "3 layers of hidden size 64"),
        ({}, ("dumpdir.aux_file=aux.pt:aux",), "has no aux"),
        ({}, ("dumpdir.num_tokens=meta.json:rows",), "has no rows"),
        ({}, ("dumpdir.done=finished",), "tokens, but no new finished; are dumpdir.done"),
        ({}, ("dumpdir.last_file=hidden.pt",), "no hidden.pt yet"),
        ({}, ("dumpdir.pattern=dump_*",), "no dump of its token count came"),
        ({"log_probs": False}, (), "--set dumpdir.check=count"),
        ({"faults": Faults(dropped=1.0)}, (), "no dump of its token count came"),
        ({"faults": Faults(done_early=1.0)}, (), "marker must come last"),
    ],
)
def test_what_is_wrong_is_told_at_the_start(
    model: Path, tmp_path: Path, changes: dict[str, Any], more: tuple[str, ...], told: str
) -> None:
    with DumpServer(model, tmp_path / "dumps", **{"layers": LAYERS, **changes}) as server:
        with pytest.raises(EngineError) as caught:
            started(engine_for(server, *more), lambda _: asyncio.sleep(0))
        assert told in str(caught.value)


def test_another_target_is_told_at_the_start(model: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", layers=4, hidden_size=64, seed=5)
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        server.model = other
        with pytest.raises(EngineError, match="do not give the server's log-probabilities"):
            started(engine_for(server), lambda _: asyncio.sleep(0))


def test_a_server_of_a_smaller_vocabulary_is_told_and_lives(model: Path, tmp_path: Path) -> None:
    """SGLang dies of a token id that its model does not have."""
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        engine = engine_for(server)
        engine._spec = dataclasses.replace(engine._spec, vocab_size=16 * engine._spec.vocab_size)
        with pytest.raises(EngineError, match=r"the server runs another model.*its vocabulary is smaller"):
            started(engine, lambda _: asyncio.sleep(0))
        assert server.outside == 0


def test_a_checkpoint_without_its_head_is_told_at_the_start(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        engine = engine_for(server)
        (moved := tmp_path / "no-head").mkdir()
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                (moved / file.name).write_bytes(file.read_bytes())
        engine._target = dataclasses.replace(engine._target, dir=moved)
        with pytest.raises(ConfigError, match=r"no lm_head.*dumpdir.check=count"):
            started(engine, lambda _: asyncio.sleep(0))


def test_one_folder_has_one_reader(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:

        async def second(_: EngineInfo) -> None:
            other = engine_for(server)
            try:
                with pytest.raises(EngineError, match="another extraction reads this dump folder"):
                    await other.start()
            finally:
                await other.close()

        started(engine_for(server), second)
        started(engine_for(server), lambda _: asyncio.sleep(0))  # the lock goes with its holder


def test_no_folder_is_told(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        server.dumps = tmp_path / "elsewhere"
        with pytest.raises(EngineError, match="cannot read the dump folder"):
            started(engine_for(server), lambda _: asyncio.sleep(0))


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("chunk", [0, 16])
def test_rows_are_right_and_their_dumps_removed(model: Path, tmp_path: Path, pre_norm: bool, chunk: int) -> None:
    more = ("dumpdir.last=pre-norm",) if pre_norm else ()
    more += ("dumpdir.aux_file=aux_*.pt", "dumpdir.last_file=last_*.pt") if chunk else ()
    with DumpServer(model, tmp_path / "dumps", LAYERS, pre_norm=pre_norm, chunk=chunk) as server:
        server.leave(3, [40, 7, 1])
        requests = [row(1, 40), row(2, 40, [3, 9, 20, 40]), row(3, 1), row(4, 33, []), row(5, 200)]
        results = captured(server, *requests, more=more)
        for asked, got in zip(requests, results, strict=True):
            check(server, asked, got)
            assert isinstance(got, Captured)
            got.release()
            got.release()
        # Dumps that were there before have been neither read nor removed, though the server wrote over some names.
        left = sorted(path.name for path in server.dumps.iterdir())
        assert set(left) <= {"req_0", "req_1", "req_2"}


def test_others_dumps_stay(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=Faults(foreign=1.0, probes=1.0), counter=10) as server:
        server.leave(2, [24])
        before = {path: path.stat().st_mtime_ns for path in server.dumps.rglob("*.pt")}
        (got,) = captured(server, row(1, 64))
        check(server, row(1, 64), got)
        assert isinstance(got, Captured)
        got.release()
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert len(list(server.dumps.glob("req_1?"))) == 2  # the foreign one and the health probe


def test_nothing_is_removed_where_told_so(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        (got,) = captured(server, row(1, 20), more=("dumpdir.remove=false",))
        assert isinstance(got, Captured)
        got.release()
        assert len(list(server.dumps.iterdir())) == 2


def test_two_dumps_of_one_length_are_refused_and_asked_again_alone(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=Faults(twin=1.0), seed=2) as server:
        engine = engine_for(server)

        async def work(_: EngineInfo) -> list[Captured | Failed]:
            return [await engine.capture(dataclasses.replace(asked, rid=asked.rid._replace(attempt=n))) for n in (0, 1)]

        asked = row(1, 30)
        first, again = started(engine, work)
        # A foreign dump that is complete before ours begins is told apart at once; one beside ours is not taken.
        results = [first, again]
        assert all(isinstance(got, Captured) or got.reason == "ambiguous-dump" for got in results)
        for got in results:
            if isinstance(got, Captured):
                check(server, asked, got)
        assert isinstance(again, Captured)


def test_a_foreign_dump_alone_is_refused_by_its_content(model: Path, tmp_path: Path) -> None:
    faults = Faults(twin=1.0, dropped=1.0)
    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=faults) as server:
        (got,) = captured(server, row(1, 30))
        assert isinstance(got, Failed)
        assert got.reason == "content-differs"
        assert "nats" in got.detail


def test_by_count_alone_a_foreign_dump_passes(model: Path, tmp_path: Path) -> None:
    """Why the content is compared: without that, and with our own dump lost, the foreign one is taken."""
    faults = Faults(twin=1.0, dropped=1.0)
    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=faults) as server:
        asked = row(1, 30)
        (got,) = captured(server, asked, more=("dumpdir.check=count",))
        assert isinstance(got, Captured)
        assert not torch.allclose(got.aux, server.truth(asked.tokens)[0], atol=1e-3)


def test_by_count_alone_a_length_that_is_owed_a_dump_is_refused(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, log_probs=False, faults=Faults(dropped=1.0)) as server:
        engine = engine_for(server, "dumpdir.check=count")
        server.faults = Faults()

        async def work(info: EngineInfo) -> list[Captured | Failed]:
            assert "count only" in info.provenance["identity"]
            server.faults = Faults(dropped=1.0)
            lost = await engine.capture(row(1, 30))
            server.faults = Faults()
            return [lost, *[await engine.capture(asked) for asked in (row(2, 30), row(3, 31), row(1, 30))]]

        lost, other, third, same = started(engine, work)
        assert [got.reason for got in (lost, other)] == ["dump-late", "late-dump-possible"]
        check(server, row(3, 31), third)
        check(server, row(1, 30), same)


@pytest.mark.parametrize("changed", [0, 20, 39], ids=["first token", "in the middle", "last token"])
def test_a_late_dump_is_not_taken_for_a_row_that_is_nearly_the_same(model: Path, tmp_path: Path, changed: int) -> None:
    """Its content would pass: within the tolerance (a wide one here), rows that are alike give the same evidence."""
    asked = row(1, 40)
    tokens = [*asked.tokens]
    tokens[changed] += 1 if tokens[changed] < VOCAB_SIZE - 1 else -1
    nearly = dataclasses.replace(row(2, 40), tokens=tokens)
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        engine = engine_for(server, "dumpdir.tolerance=3.0")

        async def work(_: EngineInfo) -> list[Captured | Failed]:
            server.faults = Faults(reordered=1.0)  # held back until another dump is written
            late = await engine.capture(asked)
            server.faults = Faults(dropped=1.0, probes=1.0)
            return [late, await engine.capture(nearly)]

        late, taken = started(engine, work)
        assert [got.reason for got in (late, taken)] == ["dump-late", "late-dump-possible"]


def test_what_differs_clearly_is_taken_though_a_dump_of_its_length_is_owed(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        engine = engine_for(server)

        async def work(_: EngineInfo) -> list[Captured | Failed]:
            server.faults = Faults(dropped=1.0)
            lost = await engine.capture(row(1, 30))
            server.faults = Faults()
            return [lost, *[await engine.capture(asked) for asked in (row(2, 30), row(1, 30), row(3, 30))]]

        lost, *rest = started(engine, work)
        assert lost.reason == "dump-late"
        for number, got in zip((2, 1, 3), rest, strict=True):
            check(server, row(number, 30), got)


def test_rows_with_the_last_id_of_the_vocabulary_are_taken(model: Path, tmp_path: Path) -> None:
    """A server names it 0 beside its log-probability."""
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        for length, at in ((1, 0), (30, 29), (30, 20), (30, 13), (30, 0)):
            asked = row(1, length)
            asked.tokens[at] = VOCAB_SIZE - 1
            (got,) = captured(server, asked)
            assert isinstance(got, Captured), f"{got}, the id at {at} of {length}"
            check(server, asked, got)


def test_rows_without_log_probabilities_are_refused(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, log_probs=False) as server:
        engine = engine_for(server)
        server.log_probs = True

        async def work(_: EngineInfo) -> Captured | Failed:
            server.log_probs = False
            return await engine.capture(row(1, 30))

        got = started(engine, work)
        assert (got.reason, server.served) == ("no-logprobs", 2)


def test_what_cannot_be_sent_is_not(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        bad = dataclasses.replace(row(2, 3), tokens=[1, VOCAB_SIZE, 2])
        empty, outside = captured(server, row(1, 0, []), bad)
        assert isinstance(empty, Failed)
        assert isinstance(outside, Failed)
        assert (empty.reason, outside.reason, server.served) == ("empty-row", "bad-token", 1)


def test_rows_of_different_lengths_are_in_flight_together(model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, prefill_s=0.2) as server:
        for lengths, most in (([20, 21, 22, 23], 4), ([20] * 4, 1)):
            requests = [row(n, length) for n, length in enumerate(lengths)]
            server.most_at_once = 0
            for asked, got in zip(
                requests, captured(server, *requests, more=("server.record_deadline_s=5",)), strict=True
            ):
                check(server, asked, got)
            assert server.most_at_once == most


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "corpus.parquet"
    meta = CorpusMeta(model=str(model), tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)
    with CorpusWriter(path, meta) as writer:
        for number, length in enumerate((9, 12, 12, 30)):
            writer.add(str(number), np.array(row(number, length).tokens), np.ones(length, np.uint8))
    return path


def command(*args: object) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["extract", *map(str, args)])
    assert "Traceback" not in done.output
    return done.exit_code, done.output


FLAGS = {"--server": "http://127.0.0.1:9", "--dump-dir": "/dumps", "--layers": "0,1,2", "--last": "pre-norm"}


@pytest.mark.parametrize("left_out", ["--server", "--layers", "--last"])
def test_what_a_dump_does_not_say_must_be_given(corpus: Path, tmp_path: Path, left_out: str) -> None:
    given = [text for flag, value in FLAGS.items() if flag != left_out for text in (flag, value)]
    code, output = command(corpus, tmp_path / "s", *given)
    assert (code, f"add {left_out}" in output) == (2, True), output
    assert not (tmp_path / "s").exists()


def test_several_workers_are_refused(corpus: Path, tmp_path: Path) -> None:
    code, output = command(corpus, tmp_path / "s", *[x for pair in FLAGS.items() for x in pair], "--workers", 2)
    assert (code, "one worker alone" in output) == (2, True), output
    assert not (tmp_path / "s").exists()


def test_dumps_of_another_engine_are_refused(corpus: Path, tmp_path: Path) -> None:
    code, output = command(corpus, tmp_path / "s", "--dump-dir", tmp_path, "--set", "extract.engine=hf")
    assert (code, "reads no dumps" in output) == (2, True), output


def test_a_plan_needs_no_server(corpus: Path, model: Path, tmp_path: Path) -> None:
    cfg = load(overrides=[f"dumpdir.folder={tmp_path}", "dumpdir.last=pre-norm", "capture.layers=[0, 1, 2]"])
    assert plan(corpus, tmp_path / "s", cfg=cfg, model=str(model)).rows == 4
    assert not (tmp_path / "s").exists()


def test_the_command_stores_what_verify_accepts(corpus: Path, model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, pre_norm=True, faults=Faults(warmups=2)) as server:
        given = FLAGS | {"--server": server.url, "--dump-dir": server.dumps}
        flags = [text for pair in given.items() for text in pair]
        code, output = command(corpus, tmp_path / "s", *flags, "--set", "store.reserve_bytes=0")
        assert (code, "4 of 4 stored" in output) == (0, True), output
    # The server's states are from before the norm; those in the store are not.
    report = verify(tmp_path / "s", corpus=corpus, against=str(model), sample=0, console=Console(file=io.StringIO()))
    report.check()
    (provenance,) = StoreReader(tmp_path / "s").provenance
    assert provenance["engine"] == "dumpdir"
    assert "pre-norm" in provenance["dumped"]
    assert "log-probabilities" in provenance["identity"]


@pytest.mark.parametrize("wrong", ["dumpdir.folder=nowhere", "dumpdir.last=pre-norm", "capture.layers=[0, 1]"])
def test_settings_that_do_not_prove_themselves_leave_no_store(
    wrong: str, corpus: Path, model: Path, tmp_path: Path
) -> None:
    """It would be one made for them, and stand in the way of the right ones."""
    with DumpServer(model, tmp_path / "dumps", LAYERS) as server:
        right = [f"dumpdir.folder={server.dumps}", "dumpdir.last=post-norm", "capture.layers=[0, 1, 2]"]
        cfg = load(overrides=[*right, "server.record_deadline_s=2", "store.reserve_bytes=0", wrong])
        console = Console(file=io.StringIO())
        with pytest.raises(EngineError) as caught:
            extract(corpus, tmp_path / "s", cfg=cfg, model=str(model), server=server.url, console=console)
        assert "resumes" not in caught.value.hint
        assert not (tmp_path / "s").exists()


def test_a_restart_in_the_midst_is_outlived(corpus: Path, model: Path, tmp_path: Path) -> None:
    with DumpServer(model, tmp_path / "dumps", LAYERS, faults=Faults(restarts=(3,), warmups=1)) as server:
        cfg = load(
            overrides=[
                f"dumpdir.folder={server.dumps}",
                "dumpdir.last=post-norm",
                "capture.layers=[0, 1, 2]",
                "server.record_deadline_s=2",
                "store.reserve_bytes=0",
            ]
        )
        console = Console(file=io.StringIO())
        done = extract(corpus, tmp_path / "s", cfg=cfg, model=str(model), server=server.url, console=console)
        assert (done.rows_done, done.failed) == (4, 0)
        assert done.retries >= 1
