"""An evaluation that comes after another one: which counts it goes on with, and which files it leaves alone."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_evaluate_run import measured, questions

from evaluate.conftest import PROMPT, QUIET, Tiny
from eyas.config import EvaluateConfig, load
from eyas.data.corpus import Corpus, CorpusWriter
from eyas.errors import ConfigError, Interrupted
from eyas.evaluate.head import Head
from eyas.evaluate.results import read_evaluation
from eyas.evaluate.run import Evaluated, evaluate
from eyas.extract.runner import extract
from eyas.store import reader as store_reader

__all__ = ["questions"]

ROWS = 6


class World:
    """A target, a drafter and a place for results, free to be changed.

    Attributes: model, draft: copies. out: where files go.
    """

    def __init__(self, tiny: Tiny, root: Path) -> None:
        self.model, self.draft, self.out = root / "model", root / "draft", root / "out"
        shutil.copytree(tiny.model, self.model)
        shutil.copytree(tiny.run / "draft", self.draft)

    def stop(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        """Ctrl-C when the second prompt goes to disk."""
        synced: list[int] = []

        def interrupted(_fd: int) -> None:
            synced.append(1)
            if len(synced) == 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(Interrupted, match="stopped, 1 of"):
            patched.setattr(os, "fsync", interrupted)
            self.run(**settings)

    def run(self, draft: str = "", out: Path | None = None, **settings: Any) -> tuple[Evaluated, str]:
        """What was measured, and what was said."""
        words = io.StringIO()
        given = {"target": str(self.model), "device": "cpu", "max_new_tokens": 12, "out": out or self.out, **settings}
        return evaluate(draft or self.draft, EvaluateConfig(**given), console=Console(file=words)), words.getvalue()


@pytest.fixture
def world(tiny: Tiny, tmp_path: Path) -> World:
    return World(tiny, tmp_path)


@pytest.fixture(scope="module")
def stores(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores of the same prompts; the answers of the second are others, as long as those of the first."""
    corpus, made = Corpus.open(tiny.corpus), []
    for number in range(2):
        root = tmp_path_factory.mktemp("answers")
        with CorpusWriter(root / "corpus.parquet", corpus.meta) as writer:
            for row in corpus.rows(0, ROWS):
                tokens = row.tokens.copy()
                tokens[PROMPT + 1 :] = tokens[PROMPT + 1 :][:: -1 if number else 1]
                writer.add(row.id, tokens, row.loss_mask, source=row.source)
        words = ["extract.engine=hf", "store.reserve_bytes=0", "store.shard_bytes=80KB", "capture.dtype=f32"]
        extract(root / "corpus.parquet", root / "store", cfg=load(overrides=words), console=QUIET)
        made.append(root / "store")
    return made


# --- a stopped one ----------------------------------------------------------------------------------------------------


def _other_weights(world: World) -> None:
    path = world.draft / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = -tensors["fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def _edited(world: World) -> None:
    path = world.draft / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"norm_output": not config.get("norm_output", False)}))


def _other_template(world: World) -> None:
    path = world.model / "chat_template.jinja"
    path.write_text(path.read_text().replace("</s>", "</s></s>"))


@pytest.mark.parametrize("change", [None, _other_weights, _edited, _other_template])
def test_a_stopped_evaluation_goes_on_only_with_what_it_began_with(
    change: Callable[[World], None] | None, world: World, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop(monkeypatch, questions=questions)
    if change is not None:
        change(world)
    again, said = world.run(questions=questions)
    assert ("goes on: 2 of 3 are done" in said) == (change is None)
    fresh, _ = world.run(questions=questions, out=world.out / "fresh")
    assert again.evaluation.results == fresh.evaluation.results


def test_drafters_of_a_hub_are_told_apart(world: World, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and by the weights that lie under a name."""
    other = world.draft.with_name("other")
    shutil.copytree(world.draft, other)
    snapshots = {"me/one": world.draft, "me/two": other}

    def download(name: str, **_: object) -> str:
        return str(snapshots[name])

    monkeypatch.setattr("eyas.target.checkpoint.snapshot_download", download)
    world.stop(monkeypatch, draft="me/one", questions=questions)
    two, said = world.run("me/two", questions=questions)
    assert "goes on" not in said
    assert two.evaluation.head_digest == Head.find(str(other)).digest() != ""
    world.stop(monkeypatch, draft="me/one", questions=questions)
    _other_weights(world)
    one, said = world.run("me/one", questions=questions)
    assert "goes on" not in said
    assert one.evaluation.head_digest != two.evaluation.head_digest
    assert one.path != two.path, "one drafter's file replaced another's"


def test_a_store_of_other_answers_is_counted_anew(
    world: World, stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop(monkeypatch, store=stores[0])
    again, said = world.run(store=stores[1])
    assert "goes on" not in said
    fresh, _ = world.run(store=stores[1], out=world.out / "fresh")
    assert again.evaluation.results == fresh.evaluation.results
    whole, _ = world.run(store=stores[0], out=world.out / "first")
    assert whole.evaluation.prompts_digest == again.evaluation.prompts_digest
    assert whole.evaluation.results != again.evaluation.results, "the test sees nothing"


def test_a_corpus_that_is_named_later_gives_categories(
    world: World, stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop(monkeypatch, store=stores[0])
    again, _ = world.run(store=stores[0], corpus=stores[0].with_name("corpus.parquet"))
    assert [one.category for one in again.evaluation.results] == ["all", "even", "odd"]
    assert sum(one.prompts for one in again.evaluation.results[1:]) == ROWS


# --- files that are there ---------------------------------------------------------------------------------------------


def test_a_result_of_something_else_is_not_replaced(world: World, questions: Path) -> None:
    first, _ = world.run(questions=questions, limit=1)
    kept = first.path.read_bytes()
    shutil.copytree(world.draft, world.draft.with_name("renamed"))
    shutil.copytree(world.model, world.model.with_name("elsewhere"))
    found = [
        world.run(questions=questions, limit=1, max_new_tokens=11)[0],
        world.run(questions=questions, limit=2)[0],
        world.run(str(world.draft.with_name("renamed")), questions=questions, limit=1)[0],
        world.run(questions=questions, limit=1, target=str(world.model.with_name("elsewhere")))[0],
    ]
    _other_weights(world)
    found.append(world.run(questions=questions, limit=1)[0])
    assert first.path.read_bytes() == kept
    paths = {one.path for one in found}
    assert len(paths | {first.path}) == 1 + len(found)
    for one in found:
        assert one.path.stem.startswith(first.path.stem + "-")
        assert read_evaluation(one.path)["sampling"] == one.evaluation.sampling
    assert not list(world.out.glob("*.partial"))


def test_a_result_of_the_same_is_replaced_and_so_is_a_file_that_is_none(world: World, questions: Path) -> None:
    first, _ = world.run(questions=questions, limit=1)
    for text in (first.path.read_text(), "{"):
        first.path.write_text(text)
        again, _ = world.run(questions=questions, limit=1)
        assert again.path == first.path
        assert read_evaluation(again.path)["results"]
    other, _ = world.run(questions=questions, limit=1, max_new_tokens=11)
    assert world.run(questions=questions, limit=1, max_new_tokens=11)[0].path == other.path
    assert len(list(world.out.iterdir())) == 2


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_runs_corpus_is_not_taken_for_that_of_any_store(tiny: Tiny, stores: list[Path], tmp_path: Path) -> None:
    done = measured(tiny, tmp_path, store=stores[1])
    assert [one.category for one in done.evaluation.results] == ["all", "none"]
    assert done.evaluation.results[0].prompts == ROWS
    with pytest.raises(ConfigError, match="the store is of corpus"):
        measured(tiny, tmp_path, store=stores[1], corpus=tiny.corpus)


def test_states_are_read_of_the_rows_that_are_walked_only(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing tokens needs none: of a quantised store each would be dequantised."""
    decoded: list[int] = []

    def decode(stored: torch.Tensor, *others: Any) -> torch.Tensor:
        decoded.append(len(stored))
        return inner(stored, *others)

    inner = store_reader.decode
    monkeypatch.setattr(store_reader, "decode", decode)
    assert measured(tiny, tmp_path, store=tiny.store, limit=2).evaluation.results[0].prompts == 2
    assert len(decoded) == 2 * 2  # layers, and the state after the last norm
