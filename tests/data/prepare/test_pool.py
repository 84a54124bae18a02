from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from eyas.config import PrepareConfig
from eyas.data.prepare import pool as pool_module
from eyas.data.prepare.encode import EncodedChunk, EncodeSettings
from eyas.data.prepare.pool import CHUNK_ROWS, Chunk, Team, chunks_of, encode_chunks
from eyas.data.sources import Input, open_sources
from eyas.data.template import Template
from eyas.errors import ConfigError, EyasError


@pytest.fixture(scope="module")
def settings(smollm2_dir: Path) -> EncodeSettings:
    return EncodeSettings(str(smollm2_dir), PrepareConfig(dedupe="prompt", holdout=0.1))


@pytest.fixture(scope="module")
def template(settings: EncodeSettings) -> Template:
    return settings.load_template()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Input]:
    """Rows of every outcome, in several chunks and files."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("a", "b"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(2_600):
                messages = [{"role": "user", "content": f"Question {i}?"}]
                if i % 5:
                    messages.append({"role": "assistant", "content": f"Answer {name} {i}." if i % 7 else " "})
                file.write(json.dumps({"messages": messages} if i % 11 else {"x": i}) + "\n")
    return open_sources([folder])


Found = Iterator[tuple[Chunk, EncodedChunk]]


def encoded(inputs: list[Input], settings: EncodeSettings, template: Template, team: Team) -> Found:
    return encode_chunks(chunks_of(inputs), settings, template, team)


def digest(found: Iterable[tuple[Chunk, EncodedChunk]]) -> list[object]:
    return [
        (
            chunk.raws[0],
            len(chunk.raws),
            chunk.inputs,
            one.outcomes,
            one.tokens.tobytes(),
            one.loss_mask.tobytes(),
            one.renamed,
        )
        for chunk, one in found
    ]


def test_chunks_are_bounded_and_hold_every_row_once(inputs: list[Input]) -> None:
    chunks = list(chunks_of(inputs))
    assert max(len(chunk.raws) for chunk in chunks) == CHUNK_ROWS
    assert [raw for chunk in chunks for raw in chunk.raws] == [raw for one in inputs for raw in one.rows_raw()]
    assert {number for chunk in chunks for number in chunk.inputs} == {0, 1}
    assert {0, 1} in [set(chunk.inputs) for chunk in chunks], "small files share a chunk"


def test_long_rows_make_short_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 400_000}) + "\n" for _ in range(10)))
    assert [len(chunk.raws) for chunk in chunks_of(open_sources([path]))] == [3, 3, 3, 1]


@pytest.mark.slow
def test_what_comes_out_does_not_depend_on_the_processes(
    inputs: list[Input], settings: EncodeSettings, template: Template
) -> None:
    here = digest(encoded(inputs, settings, template, Team(settings, 1)))
    assert len(here) > 8
    with Team(settings, 2, small_bytes=40_000) as team:  # the first chunk here, the others there
        assert digest(encoded(inputs, settings, template, team)) == here
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_small_inputs_are_encoded_here(inputs: list[Input], settings: EncodeSettings, template: Template) -> None:
    with Team(settings, 8) as team:
        team.start_for(1_000)
        assert len(list(encoded(inputs, settings, template, team))) > 8
        assert not team.started


@pytest.mark.slow
def test_a_worker_that_dies_is_one_clear_error(
    inputs: list[Input], settings: EncodeSettings, template: Template
) -> None:
    with Team(settings, 2, small_bytes=0) as team:
        team.start()
        stream = encoded(inputs, settings, template, team)
        next(stream)
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(EyasError, match="a worker process died") as caught:
            list(stream)
    assert "memory" in caught.value.hint
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_an_error_in_a_worker_is_raised_here(inputs: list[Input], settings: EncodeSettings, template: Template) -> None:
    with Team(EncodeSettings("no/such-model", PrepareConfig()), 1, small_bytes=0) as team:
        team.start()
        with pytest.raises(ConfigError, match="no/such-model"):
            list(encoded(inputs, settings, template, team))
    with Team(EncodeSettings(template.model, PrepareConfig(template_options={"x": 1})), 1) as team:
        team.start()
        with pytest.raises(ConfigError, match="changed while it was read"):
            list(encoded(inputs, settings, template, team))


def test_there_is_at_least_one_core() -> None:
    assert pool_module.cores() >= 1
