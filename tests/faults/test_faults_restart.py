"""The server dies and comes back, as itself or as another one, in the middle of a run.

One port, one spool; six servers after each other, each of which the run of the one before meets in its place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import EngineError
from eyas.verify import verify
from faults_support import (
    SERVER_FLAGS,
    Injector,
    Neighbours,
    Run,
    make_corpus,
    quiet,
    settings,
    some_lengths,
    wait_until,
)
from servers import Server, free_port, sglang_server
from sglang_cpu.models import tiny_llama

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROWS = 150


class Place:
    """A port and a spool, where one server follows another."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._folder, self._env, self._port = folder, env, free_port()
        self._stack = ExitStack()

    def start(self, model: Path, **settings: Any) -> Server:
        """A server in this place, once the one before is gone."""
        self.clear()
        context = sglang_server(model, self._folder, flags=SERVER_FLAGS, env=self._env, port=self._port, **settings)
        return self._stack.enter_context(context)

    def clear(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights under the same architecture and the very same norms: its fingerprint is the same."""
    return tiny_llama(tmp_path_factory.mktemp("twin"), seed=1)


@pytest.fixture(scope="module")
def place(injector: Injector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"), injector.env)
    yield made
    made.clear()


def run_of(server: Server, model: Path, folder: Path, *overrides: str) -> Run:
    corpus = make_corpus(folder / "corpus.parquet", some_lengths(ROWS, seed=9), seed=9)
    cfg = settings(server, "extract.window_requests=2", "store.shard_bytes=2MB", *overrides)
    return Run(corpus, folder / "store", model, server, cfg)


def must_end_with(run: Run, change: Callable[[], Server], what: str) -> Server:
    """In the middle of the run another server takes its server's place: the run ends and says why."""
    with run.going() as going:
        wait_until(lambda: going.done() or list(run.store.glob("shard-*.json")), "no shard was ever complete")
        changed = change()
        with pytest.raises(EngineError, match=what) as caught:
            going.result()
    assert caught.value.exit_code == 3
    assert "resumes" in caught.value.hint
    assert 0 < run.rows_stored() < ROWS
    report = verify(run.store, corpus=run.corpus, against=str(run.model), sample=0, console=quiet())
    assert report.comparison is not None
    assert report.comparison.mismatches == []
    return changed


def test_a_server_is_killed_and_comes_back_as_itself_and_as_others(
    place: Place, model: Path, twin: Path, injector: Injector, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = [tmp_path_factory.mktemp(f"run{number}") for number in range(5)]

    # SIGKILL, with two records promised and not written; the same server comes back, and the run goes on by itself.
    server = place.start(model)
    run = run_of(server, model, folders[0])
    with run.going() as going:
        with injector.injecting(record={"times": 2, "delay_s": 60}):
            wait_until(lambda: injector.counts()["record"] == 2, "no record was on its way")
            server.kill()
        server = place.start(model)
    summary = going.result()
    assert summary.retries > 0
    run.must_end_well(summary)
    with Neighbours(server).around(2):
        pass

    # SIGTERM; another model, which the fingerprint cannot tell from it, takes its place.
    mine = run_of(server, model, folders[1])

    def another_model() -> Server:
        os.kill(server.pid, signal.SIGTERM)
        return place.start(twin)

    server = must_end_with(mine, another_model, "the server serves another model")

    # Other layers, other dtype and positions: each after a run that began well with the server before.
    other_layers = [0, 2, 5]
    theirs = run_of(server, twin, folders[2])
    server = must_end_with(theirs, lambda: place.start(model, layers=other_layers), "the server captures other layers")
    layered = run_of(server, model, folders[3], "capture.layers=[0, 2, 5]")
    server = must_end_with(
        layered,
        lambda: place.start(model, layers=other_layers, dtype="bfloat16", last="all"),
        "the server captures with other settings",
    )
    with pytest.raises(EngineError, match="the server captures other layers"):
        mine.now()

    # The right one is back: the same command goes on where it was.
    place.start(model)
    before = mine.rows_stored()
    resumed = mine.now()
    assert resumed.rows_now <= ROWS - before
    mine.must_end_well(resumed)
