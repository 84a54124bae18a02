"""The plugin fails at each step of its own, in a running server: rows are tried again and right, others notice nothing.

One server, whose faults are switched by a control file (see `eyas_fault_injection`); before it one that fails to start.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.errors import EngineError
from faults_support import SERVER_FLAGS, Injector, Neighbours, Run, make_corpus, settings, some_lengths, wait_until
from servers import Server, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROWS = 20
#: Steps of one forward, chunk or record, in order of their happening.
FORWARD = ("sweep", "own-shares", "share", "assemble", "reserve", "take-rows", "snapshot", "reply", "answer")
OUTPUT = ("stream-output",)
WRITERS = ("host-copy", "record", "hash", "header", "record-create", "record-write", "record-rename")
#: What must fail too before these are reached.
AFTER_A_FAILURE = {"failure-call": "record", "failure-note": "record-write"}
#: A refusal is the worst that these can cost; the run goes on though they fail at every call.
HARMLESS = ("sweep", "orphans")


@pytest.fixture(scope="module")
def server(model: Path, injector: Injector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sglang_server(model, tmp_path_factory.mktemp("injected"), flags=SERVER_FLAGS, env=injector.env) as running:
        yield running


def run_of(server: Server, model: Path, folder: Path, *overrides: str, rows: int = ROWS) -> Run:
    corpus = make_corpus(folder / "corpus.parquet", some_lengths(rows, seed=8, longest=180), seed=8)
    cfg = settings(server, "extract.window_requests=2", "extract.attempts=10", *overrides)
    return Run(corpus, folder / "store", model, server, cfg)


def test_a_plugin_that_fails_to_start(model: Path, injector: Injector, tmp_path: Path) -> None:
    """The server serves its users and captures nothing; the client says so and writes nothing."""
    injector.write(hello={"rate": 1})
    with sglang_server(model, tmp_path / "failing", flags=SERVER_FLAGS, env=injector.env) as server:
        run = run_of(server, model, tmp_path)
        with (
            Neighbours(server).around(),
            pytest.raises(EngineError, match="the plugin refuses the probe: plugin-error") as caught,
        ):
            run.now()
    injector.write()
    assert caught.value.exit_code == 3
    assert not run.store.exists()
    assert injector.counts()["hello"] > 0


@pytest.mark.parametrize("step", [*FORWARD, *OUTPUT, *WRITERS, *AFTER_A_FAILURE])
def test_a_step_that_fails_costs_attempts_and_no_row(
    step: str, server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    run, before = run_of(server, model, tmp_path, "server.record_deadline_s=2"), injector.counts()
    faults = {step: {"times": 2}}
    if step in AFTER_A_FAILURE:
        faults |= {AFTER_A_FAILURE[step]: {"times": 2}}
    with neighbours.around(2), run.going() as going, injector.injecting(**faults):
        wait_until(lambda: injector.counts()[step] - before[step] == 2 or going.done(), "the step was never reached")
        going.exception()
    summary = going.result()
    assert injector.counts()[step] - before[step] == 2
    if step not in HARMLESS:
        assert summary.retries > 0
    run.must_end_well(summary)


@pytest.mark.parametrize("step", ["own-shares", "assemble", "stream-output", "record-write"])
def test_a_step_that_always_fails_ends_the_run_and_the_server_lives(
    step: str, server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    """From the middle of the run on; what was stored stays, and the same command finishes it once all is well."""
    run = run_of(server, model, tmp_path, rows=40)
    with neighbours.around(2), run.going() as going, injector.injecting(**{step: {"rate": 1}}):
        with pytest.raises(EngineError) as caught:
            going.result()
        assert "resumes" in caught.value.hint
    assert 0 < run.rows_stored() < 40
    run.must_end_well(run.now())


def test_steps_that_are_harmless_may_always_fail(
    server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    run = run_of(server, model, tmp_path, rows=40)
    with neighbours.around(2), injector.injecting(**{step: {"rate": 1} for step in HARMLESS}):
        summary = run.now()
        wait_until(lambda: injector.counts()["orphans"] > 0, "nobody tidied the spool")
    assert injector.counts()["sweep"] > 0
    run.must_end_well(summary)


def test_every_step_fails_now_and_then(
    server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    """All at random in one long run, started again where it ends."""
    run = run_of(server, model, tmp_path, "server.record_deadline_s=2", "extract.attempts=30", rows=40)
    steps = (*FORWARD, *OUTPUT, *WRITERS, *AFTER_A_FAILURE, "orphans")
    with neighbours.around(2):
        with injector.injecting(**{step: {"rate": 0.02} for step in steps}):
            for _ in range(10):
                try:
                    run.now()
                except EngineError as error:
                    assert "resumes" in error.hint or "probe" in error.what or "plugin" in error.what, error
                else:
                    break
        summary = run.now()
    run.must_end_well(summary)


def test_a_record_that_comes_after_its_deadline_is_neither_used_nor_left(
    server: Server, model: Path, injector: Injector, neighbours: Neighbours, tmp_path: Path
) -> None:
    run, before = run_of(server, model, tmp_path, "server.record_deadline_s=2"), injector.counts()
    with neighbours.around(2), run.going() as going, injector.injecting(record={"times": 1, "delay_s": 3}):
        going.exception()
    summary = going.result()
    assert injector.counts()["record"] - before["record"] == 1
    assert summary.retries > 0
    run.must_end_well(summary)


def test_other_users_wait_no_longer_while_the_plugin_fails(
    server: Server, model: Path, injector: Injector, tmp_path: Path
) -> None:
    """Beside the same extraction, with a fault in every forward and record, and without."""

    def median_s(*, failing: bool) -> float:
        users = Neighbours(server)
        run = run_of(server, model, tmp_path / str(failing), "extract.on_failure=continue", rows=40)
        faults = (
            {"take-rows": {"rate": 0.3}, "record-write": {"rate": 0.3}, "snapshot": {"rate": 0.3}} if failing else {}
        )
        with users.around(2), injector.injecting(**faults):
            for _ in range(3):
                try:
                    run.now()
                except EngineError:
                    continue
                break
        return statistics.median(users.seconds)

    for name in ("False", "True"):
        (tmp_path / name).mkdir()
    assert median_s(failing=True) < 3 * median_s(failing=False) + 0.1


def test_faults_are_logged_once_a_kind(server: Server) -> None:
    """The last test: hundreds of failures later, the log of the forward thread tells each kind once."""
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if "(logged once)" in line]
    assert lines
    assert len(lines) == len({line.partition("eyas: ")[2] for line in lines})
