"""Ctrl-C and SIGTERM: who takes them, and who was told not to."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.signals import StopSignals, heeded
from sglang_cpu.models import tiny_llama


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def ignored(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    signal.signal(request.param, before)


@contextmanager
def sending(number: signal.Signals) -> Iterator[None]:
    """This process gets it a hundred times a second, and once at the least."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.01):
            os.kill(os.getpid(), number)

    os.kill(os.getpid(), number)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


def prepare(folder: Path) -> list[str]:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    (folder / "chats.jsonl").write_text(json.dumps({"conversations": chat}) + "\n")
    target = tiny_llama(folder / "model", hidden_size=64)
    return ["prepare", str(folder / "chats.jsonl"), "--target", str(target), "--out", str(folder / "out")]


def extract(folder: Path) -> list[str]:
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=1000)
    with CorpusWriter(folder / "corpus.parquet", meta) as writer:
        for row in range(20):
            writer.add(str(row), np.arange(row + 5), np.ones(row + 5, np.uint8))
    sets = ["extract.engine=fake", "store.reserve_bytes=0", "fake.delay_s=0.05", "extract.window_requests=4"]
    words = [word for setting in sets for word in ("--set", setting)]
    return ["extract", str(folder / "corpus.parquet"), str(folder / "store"), *words]


@pytest.mark.parametrize("verb", [prepare, extract])
def test_what_a_shell_made_ignored_stays_ignored(verb, ignored: signal.Signals, tmp_path: Path) -> None:
    """A script's background jobs begin so: Ctrl-C for the script's foreground job is none for them."""
    words = verb(tmp_path)
    with sending(ignored):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert signal.getsignal(ignored) is signal.SIG_IGN


def test_the_other_one_is_heeded(ignored: signal.Signals) -> None:
    other = signal.SIGTERM if ignored is signal.SIGINT else signal.SIGINT
    assert heeded() == (other,)
    with StopSignals() as signals:
        os.kill(os.getpid(), ignored)
        signals.check()
        heard: list[int] = []
        with signals.heard_by(lambda: heard.append(1)):
            os.kill(os.getpid(), other)
        assert heard == [1]
        with pytest.raises(KeyboardInterrupt):
            signals.check()


def test_nobody_listens_and_it_is_an_interrupt_that_is_not_forgotten() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with StopSignals() as signals:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                signals.check()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_takes_none() -> None:
    found: list[object] = []

    def look() -> None:
        with StopSignals():
            found.append(heeded())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [()]
