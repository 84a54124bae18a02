"""What a person sees of a training run, and what the log keeps."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.acceptance import acceptance
from eyas.errors import ConfigError
from eyas.train.metrics import EvalFacts, Recorder, StepFacts
from eyas.train.view import TrainView


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def facts(step: int, **changes: Any) -> StepFacts:
    given: dict[str, Any] = {
        "loss": 4.0 / step, "norm": 0.5, "lr": 1e-4, "tokens": 1000, "seconds": 2.0, "wait_s": 0.5,
        "rows_K": (100, 80, 0), "right_K": (50, 20, 0),
    }  # fmt: skip
    return StepFacts(step=step, **{**given, **changes})


EVALUATED = EvalFacts(4, 30, 2.5, (0.5, 0.4), acceptance([100, 50], [50, 30]))


def view(terminal: bool = False, total: int | None = 10, done: int = 0) -> tuple[TrainView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
    return TrainView(console, total, done, clock), out, clock


def test_plain_lines_come_now_and_then_and_say_all() -> None:
    shown, out, clock = view()
    with shown:
        for step in range(1, 8):
            clock.now = 2.0 * step
            shown.step(facts(step))
    (line,) = out.getvalue().splitlines()
    for part in (
        "50.0%",
        "step 5/10",
        "500 tokens/s",
        "left 10s",
        "right 0.50 0.25 0.00",
        "lr 1.00e-04",
        "data wait 25%",
    ):
        assert part in line, (part, line)
    assert f"loss {sum(4 / s for s in range(1, 6)) / 5:.4f}" in line
    assert "accepted about 1.62" in line


def test_an_evaluation_is_a_line_of_its_own_and_stays() -> None:
    shown, out, clock = view()
    shown.evaluation(EVALUATED)
    found = EVALUATED.acceptance
    expected = (
        f"step 4: acceptance length 1.800 ({found.low:.3f} to {found.high:.3f}) on 30 rows, by position 0.50 0.60"
    )
    assert out.getvalue().startswith(expected)
    clock.now = 11.0
    shown.step(facts(5))
    assert "accepted 1.800 at step 4" in out.getvalue().splitlines()[-1]


def test_a_resumed_run_counts_its_progress_but_not_its_speed() -> None:
    shown, out, clock = view(total=100, done=50)
    clock.now = 11.0
    shown.step(facts(51))
    assert " 51.0%  step 51/100  speed -  left -" in out.getvalue()


def test_a_store_that_grows_has_no_end() -> None:
    shown, out, clock = view(total=None)
    clock.now = 11.0
    shown.step(facts(3))
    assert out.getvalue().startswith("step 3  ")
    assert "as long as the store grows" in out.getvalue()


def test_a_terminal_has_a_panel() -> None:
    shown, out, clock = view(terminal=True)
    with shown:
        for step in range(1, 4):
            clock.now = 2.0 * step
            shown.step(facts(step))
        shown.evaluation(EVALUATED)
    for part in ("train", "3/10", "tokens/s", "accept"):
        assert part in out.getvalue()


# --- the log ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in (folder / "events").iterdir() for line in path.read_text().splitlines()]


def test_several_steps_are_one_entry_of_their_means(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "s")
    recorder.steps([facts(1, loss=3.0), facts(2, loss=1.0, lr=2e-4, right_K=(100, 60, 0))])
    recorder.steps([])
    recorder.evaluation(EVALUATED)
    recorder.close()
    trained, evaluated = read(tmp_path)
    assert (trained["event"], trained["step"], trained["loss"], trained["lr"]) == ("train", 2, 2.0, 2e-4)
    assert (trained["tokens"], trained["tokens_per_s"], trained["wait_share"]) == (2000, 500.0, 0.25)
    assert (trained["rows"], trained["accuracy"]) == ([200, 160, 0], [0.75, 0.5, 0.0])
    assert (evaluated["event"], evaluated["accept_length"], evaluated["acceptance"]) == ("eval", 1.8, [0.5, 0.6])


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "s")
    recorder.note("x", loss=math.nan, norm=math.inf, step=1)
    recorder.close()
    (entry,) = read(tmp_path)
    assert (entry["loss"], entry["norm"], entry["step"]) == (None, None, 1)


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None, "s", board=True)
    recorder.steps([facts(1)])
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_draws_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, tuple[float, int]] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            drawn[name] = (value, step)

        def close(self) -> None:
            drawn["closed"] = (0.0, 0)

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    recorder = Recorder(tmp_path, "s", board=True)
    recorder.steps([facts(2)])
    recorder.evaluation(EVALUATED)
    recorder.close()
    assert drawn["train/loss"] == (2.0, 2)
    assert drawn["train/accuracy/1"] == (0.25, 2)
    assert drawn["eval/accept_length"] == (1.8, 4)
    assert "closed" in drawn


def test_tensorboard_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        Recorder(tmp_path, "s", board=True)
    assert "eyas[tensorboard]" in caught.value.hint
