"""Two servers share a run, and one of them is killed in its middle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.extract.runner import Summary, extract
from eyas.store.reader import StoreReader
from faults_support import (
    SERVER_FLAGS,
    Injector,
    Run,
    make_corpus,
    quiet,
    settings,
    some_lengths,
    wait_until,
)
from servers import Server, free_port, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROWS = 200


@dataclass
class SharedRun(Run):
    """`eyas extract` with several servers; `server` is the one whose spool must be empty at the end."""

    urls: list[str] = field(default_factory=list)

    def now(self, **kwargs: Any) -> Summary:
        run = {"cfg": self.cfg, "model": str(self.model), "server": self.urls, "console": quiet()}
        return extract(self.corpus, self.store, **run, **kwargs)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log().read_text().splitlines()]


@pytest.mark.parametrize("workers", [2])
def test_the_rows_of_a_killed_server_go_to_the_other(
    model: Path, injector: Injector, workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        lasting, mortal = _two_servers(model, folder, injector, stack)
        corpus = make_corpus(folder / "corpus.parquet", some_lengths(ROWS, seed=3), seed=3)
        spools = f"server.spools=[{lasting.spool}, {mortal.spool}]"
        cfg = settings(lasting, spools, "extract.window_requests=2", "store.shard_bytes=2MB")
        cfg = cfg.model_copy(update={"server": cfg.server.model_copy(update={"spool": None})})
        run = SharedRun(corpus, folder / "store", model, lasting, cfg, [lasting.url, mortal.url])
        with run.going(workers=workers) as going:
            with injector.injecting(record={"times": 2, "delay_s": 60}):
                wait_until(lambda: injector.counts()["record"] == 2, "no record of the mortal one was on its way")
                mortal.kill()
            summary = going.result()
        run.must_end_well(summary)
    retried = [event for event in run.events() if event["event"] == "row_retried"]
    assert len(retried) >= 2
    assert all(mortal.url in event["detail"] for event in retried)
    notes = [event["text"] for event in run.events() if event["event"] == "note"]
    assert any(mortal.url in note and "no rows for it" in note for note in notes)
    told = {text for entry in StoreReader(run.store).provenance for text in entry["servers"].split(", ")}
    assert told == {lasting.url, mortal.url}


def _two_servers(model: Path, folder: Path, injector: Injector, stack: ExitStack) -> tuple[Server, Server]:
    """The second is the one with faults. They start at the same time."""
    first = free_port()
    places: list[tuple[str, int, dict[str, str]]] = [("lasting", first, {}), ("mortal", first + 499, injector.env)]

    def start(place: tuple[str, int, dict[str, str]]) -> Server:
        name, port, env = place
        return stack.enter_context(sglang_server(model, folder / name, flags=SERVER_FLAGS, port=port, env=env))

    with ThreadPoolExecutor(2) as pool:
        lasting, mortal = pool.map(start, places)
    return lasting, mortal
