"""What a run's log says: places that mean the same from whatever folder it is read, and its sessions joined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.acceptance import Acceptance
from eyas.config import TrainConfig
from eyas.target.checkpoint import Target
from eyas.train.log import TrainEnd, TrainLog, read_train_log
from eyas.train.metrics import EvalFacts, Recorder, StepFacts, settings_told
from run_logs import eval_event, start_event, train_event, write_log


def target(model: str) -> Target:
    return Target(model, Path("/nowhere"), {}, {})


def test_places_are_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are surely folders, and those that are one here; an id of the hub stays."""
    for name in ("model", "head"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    places = {"store": Path("s"), "corpus": Path("../c"), "out": Path("o")}
    told = settings_told(TrainConfig(**places, init_from="head", lr=0.5), target("model"))
    assert [told[name] for name in ("store", "corpus", "out", "target", "init_from")] == [
        str(tmp_path / name) for name in ("s", "../c", "o", "model", "head")
    ]
    assert told["lr"] == 0.5
    told = settings_told(TrainConfig(target="typed", init_from="owner/head"), target("owner/name"))
    assert [told[name] for name in ("store", "out", "target", "init_from")] == [None, None, "owner/name", "owner/head"]


# --- read again -------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    """Nothing but the recorder writes these logs: its words are the reader's."""
    recorder = Recorder(tmp_path, "a")
    recorder.note("start", step=0, total=9, ranks=2, device="cpu", parameters=7, draft_vocab=5, settings={"lr": 0.5})
    recorder.steps([StepFacts(n, 2.0 * n, 0.25, 0.5, 30, 0.5, 0.25, (4, 2), (2, 1)) for n in (1, 2)])
    acceptance = Acceptance(rows=5, length=1.75, low=1.5, high=2.0, by_position=(0.5, 0.5))
    recorder.evaluation(EvalFacts(2, 3, 1.5, (0.5, 0.25), acceptance))
    recorder.note("end", step=2, tokens=60, accept_length=1.75, seconds=1.0)
    recorder.close()
    found = read_train_log(tmp_path)
    (entry,), (evaluated,) = found.steps, found.evals
    assert (entry.step, entry.loss, entry.norm, entry.lr, entry.accuracy) == (2, 3.0, 0.25, 0.5, (0.5, 0.5))
    assert (entry.tokens, entry.tokens_per_s, entry.wait_share) == (60, 60.0, 0.5)
    assert (evaluated.step, evaluated.rows, evaluated.loss) == (2, 3, 1.5)
    assert (evaluated.length, evaluated.low, evaluated.high, evaluated.acceptance) == (1.75, 1.5, 2.0, (0.5, 0.5))
    assert (found.settings, found.end, found.ended) == ({"lr": 0.5}, TrainEnd(2, 60), True)
    assert (found.total, found.ranks, found.device, found.parameters, found.draft_vocab) == (9, 2, "cpu", 7, 5)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b'{"t": 1, "event": "sta'])
def test_a_log_that_is_missing_empty_or_torn_at_once_tells_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        write_log(tmp_path, "a", [], tail=content)
    assert read_train_log(tmp_path) == TrainLog()


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    """Killed while it wrote: the step of the torn line was not told, and the session did not end."""
    torn = json.dumps(train_event(20)).encode()[:-9]
    write_log(tmp_path, "a", [start_event(), train_event(10)], tail=torn)
    found = read_train_log(tmp_path)
    assert ([entry.step for entry in found.steps], found.tokens, found.ended) == ([10], 512, False)


def test_a_run_that_went_on_after_its_end_has_the_earlier_one(tmp_path: Path) -> None:
    write_log(tmp_path, "a", [start_event(), train_event(10), {"t": 11, "event": "end", "step": 10, "tokens": 512}])
    write_log(tmp_path, "b", [start_event(10, 100, epochs=2), train_event(20, 100)])
    found = read_train_log(tmp_path)
    assert (found.ended, found.end, found.settings["epochs"]) == (False, TrainEnd(10, 512), 2)


def test_a_session_whose_start_was_lost_adds_what_no_other_tells(tmp_path: Path) -> None:
    write_log(tmp_path, "a", [start_event(), train_event(10, loss=1.0), eval_event(10)])
    write_log(tmp_path, "b", [train_event(10, 100, loss=2.0), train_event(20, 100, loss=2.0), eval_event(20, 100)])
    found = read_train_log(tmp_path)
    assert [(entry.step, entry.loss) for entry in found.steps] == [(10, 1.0), (20, 2.0)]
    assert [entry.step for entry in found.evals] == [10, 20]
    assert found.starts == [(0, 0)]


def test_a_resumed_run_counts_every_step_once(tmp_path: Path) -> None:
    """Killed at 40 after a checkpoint at 20: what followed was trained again, and its first time does not count."""
    first = [
        start_event(),
        eval_event(0),
        *(train_event(s, loss=1.0) for s in (10, 20, 30, 40)),
        eval_event(20),
        eval_event(40),
    ]
    second = [
        start_event(20, 1000),
        *(train_event(s, 1000, loss=2.0) for s in (30, 40, 50)),
        eval_event(40, 1000, accept_length=9.0),
    ]
    write_log(tmp_path, "a", first)
    write_log(tmp_path, "b", [*second, {"t": 2000, "event": "end", "step": 50, "tokens": 2560}])
    found = read_train_log(tmp_path)
    assert [(entry.step, entry.loss) for entry in found.steps] == [(10, 1), (20, 1), (30, 2), (40, 2), (50, 2)]
    assert [entry.step for entry in found.evals] == [0, 20, 40]
    assert found.evals[-1].length == 9.0
    assert found.tokens == 5 * 512
    assert [step for step, _ in found.starts] == [0, 20]
    assert (found.step, found.ended, found.end, found.versions["torch"]) == (50, True, TrainEnd(50, 2560), "2")
    assert found.seconds == 40 + 1000  # the night between them is not counted
    assert found.untrained is found.evals[0]
    assert found.best is found.evals[-1]


def test_a_run_without_its_end_says_so(tmp_path: Path) -> None:
    write_log(tmp_path, "a", [start_event(), train_event(10), {"t": 20, "event": "not_finite", "step": 11}])
    found = read_train_log(tmp_path)
    assert not found.ended
    assert found.faults == ["step 11: the loss or its gradient was no number"]
    assert (found.best, found.untrained) == (None, None)


def test_the_best_is_the_first_of_the_longest_after_the_start(tmp_path: Path) -> None:
    lengths = {0: 3.0, 10: 1.5, 20: 2.0, 30: 2.0, 40: None}
    write_log(tmp_path, "a", [start_event(), *(eval_event(s, accept_length=length) for s, length in lengths.items())])
    best = read_train_log(tmp_path).best
    assert best is not None and best.step == 20


def test_events_of_another_shape_are_gaps(tmp_path: Path) -> None:
    odd = train_event(10, loss=None, accuracy="none", lr="fast", wait_share=[1])
    write_log(
        tmp_path, "a", [start_event(), odd, {**train_event(20), "step": "x"}, eval_event(20, acceptance=[None, 0.5])]
    )
    found = read_train_log(tmp_path)
    (entry,) = found.steps
    assert (entry.loss, entry.accuracy, entry.lr, entry.wait_share) == (None, (), None, None)
    assert [one.acceptance for one in found.evals] == [(None, 0.5)]
