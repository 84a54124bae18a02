"""What a run's log says: the evaluation whose weights were published, and which store and corpus were its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.export.source import InTraining, find_run, read_run

DIGEST, OTHER = "a" * 64, "b" * 64


def log(folder: Path, name: str, *events: dict[str, Any] | str) -> Path:
    """A session's log; sessions begin in the order of their names."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    told = {"t": float(ord(name))}
    lines = [event if isinstance(event, str) else json.dumps(told | event) for event in events]
    (folder / "events" / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def start(step: int = 0, version: str = "1.2", **settings: Any) -> dict[str, Any]:
    return {"event": "start", "step": step, "settings": settings, "versions": {"eyas": version, "torch": "2"}}


def evaluation(step: Any, length: Any, **more: Any) -> dict[str, Any]:
    low_high = {"accept_length_low": 1.0, "accept_length_high": 3.0}
    return {"event": "eval", "step": step, "accept_length": length, **low_high, "acceptance": [0.5, 0.25], **more}


@pytest.mark.parametrize(
    ("lengths", "best"),
    [
        ([(0, 9.0), (10, 1.5), (20, 1.7)], 20),  # what nobody trained is not published
        ([(10, 1.7), (20, 1.7), (30, 1.2)], 10),  # the first of equals, as training keeps it
        ([(0, 9.0)], None),
        ([(10, None), (20, "1.9"), (30, True), (40, float("nan")), (50, 1.1)], 50),
        ([("x", 3.0), (None, 3.0)], None),
    ],
)
def test_the_evaluation_that_was_published(
    lengths: Sequence[tuple[Any, Any]], best: int | None, tmp_path: Path
) -> None:
    facts = read_run(log(tmp_path, "a", start(), *(evaluation(*pair) for pair in lengths)))
    assert (facts.evaluation and facts.evaluation.step) == best


def test_evaluations_that_were_taken_again_count_as_the_second_time(tmp_path: Path) -> None:
    """The first session was killed at 40, and its last checkpoint was of step 20."""
    log(tmp_path, "a", start(), evaluation(10, 1.2), evaluation(20, 1.4), evaluation(30, 1.9), evaluation(40, 1.8))
    log(tmp_path, "b", start(20, "1.3", lr=1), evaluation(20, 1.6), evaluation(30, 1.5), '{"event": "eval", "st')
    facts = read_run(tmp_path)
    assert facts.evaluation == InTraining(30, 1.5, 1.0, 3.0, (0.5, 0.25))
    assert (facts.version, facts.settings) == ("1.3", {"lr": 1})


def test_logs_of_strangers(tmp_path: Path) -> None:
    odd = evaluation(5, 1.5, accept_length_low=None, accept_length_high="x", acceptance={"a": 1})
    lines = [
        "[]",
        "3",
        '{"t": 1, "event": 5}',
        '{"t": 1, "event": "start", "step": "x", "settings": 3, "versions": []}',
    ]
    facts = read_run(log(tmp_path, "a", *lines, odd, {"event": "end", "step": "x", "tokens": [1]}))
    assert facts.evaluation == InTraining(5, 1.5, None, None, ())
    assert (facts.steps, facts.tokens, facts.settings, facts.version, facts.target) == (0, 0, {}, "", None)


def of_corpus(run: Path, digest: str) -> Path:
    (run / "draft").mkdir()
    (run / "draft" / "config.json").write_text(json.dumps({"eyas": {"vocab": {"corpus_digest": digest}}}))
    return run


def test_places_of_another_run_are_not_its_own(
    store: Path, corpus: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs of older versions say them as they were typed, in another folder."""
    digest = json.loads((store / "store.json").read_text())["corpus"]["digest"]
    monkeypatch.chdir(store.parent)
    typed: dict[str, Any] = {"store": store.name, "corpus": corpus.name}
    whole: dict[str, Any] = {"store": str(store), "corpus": str(corpus)}
    for at, (places, known, is_own) in enumerate(
        [
            (typed, digest, True),
            (typed, OTHER, False),
            (typed, "", False),
            (whole, digest, True),
            (whole, OTHER, False),  # another corpus was put there since
            (whole, "", True),
        ]
    ):
        facts = read_run(of_corpus(log(tmp_path / str(at), "a", start(**places)), known))
        assert facts.store == (Path(places["store"]) if is_own else None)
        assert facts.data.get("digest") == (digest if is_own else None)
        assert bool(facts.spec_id) == is_own
        assert facts.target == (str(target) if is_own else None)


def test_places_that_nobody_may_look_at(tmp_path: Path) -> None:
    long = "n" * 300
    run = of_corpus(log(tmp_path / "run", "a", start(store=f"/{long}", corpus=long)), DIGEST)
    facts = read_run(run)
    assert (facts.store, facts.target) == (None, None)
    assert find_run(tmp_path / "run") == (str(run / "draft"), run)
    assert find_run(run / "draft") == (str(run / "draft"), run)
    assert find_run(long) == (long, None)
    assert find_run("owner/name") == ("owner/name", None)
