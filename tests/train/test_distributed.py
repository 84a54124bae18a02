"""Several ranks (gloo, two processes on this CPU): the numbers of one, and an end with a reason where one is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_runs import curve, driven, events, make_inputs

from eyas.errors import ConfigError, TrainError
from eyas.train.distributed import World, find_device, open_world


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, driven("two_ranks", make_inputs(tmp_path_factory.mktemp("inputs")), folder)


def said(folder: Path, name: str, rank: int) -> str:
    return Path(f"{folder / name}.rank-{rank}").read_text()


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_are_one_that_accumulates(runs: tuple[Path, dict[str, list[Any]]], mode: str) -> None:
    folder, codes = runs
    killed = [-9, -9] if mode == "fsdp" else []
    assert (codes["one"], codes[mode]) == ([0], [*killed, 0, 0]), said(folder, mode, 0) + said(folder, mode, 1)
    assert len(events(folder / mode, "start")) == (2 if killed else 1)
    one, two = (curve(folder / name) for name in ("one", mode))  # steps that two sessions took are alike to the bit
    assert len(one) > 5
    assert one.keys() == two.keys()
    for step, numbers in one.items():
        for mine, theirs in zip(numbers, two[step], strict=True):
            assert json.loads(mine) == pytest.approx(json.loads(theirs), rel=1e-7), step
    evaluated = [{event["step"]: event for event in events(folder / name, "eval")} for name in ("one", mode)]
    assert evaluated[0].keys() == evaluated[1].keys()
    for step, mine in evaluated[0].items():
        theirs = evaluated[1][step]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-7)
        assert mine["chains"] == theirs["chains"]
        assert mine["accept_length"] == pytest.approx(theirs["accept_length"])
    last = f"checkpoints/step-{max(one):08d}"
    for file in ("weights.safetensors", "optimizer.safetensors"):
        first, second = (load_file(folder / name / last / file) for name in ("one", mode))
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert torch.allclose(tensor, second[name], rtol=1e-6, atol=1e-9), name
    assert load_file(folder / mode / last / "rng.safetensors").keys() == {"cpu.0", "cpu.1"}


def test_a_killed_rank_ends_the_other_with_the_reason(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, codes = runs
    other, killed, seconds = codes["lost"]
    assert (other, killed) == (TrainError.exit_code, -9)
    assert seconds < 30
    assert "rank 1 is gone" in said(folder, "lost", 0)
    assert "the same command resumes" in said(folder, "lost", 0)


def test_a_rank_that_fails_tells_the_other_why(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, codes = runs
    assert codes["failing"] == [TrainError.exit_code, 5]
    assert "rank 1 ended" in said(folder, "failing", 0)
    assert "no store here" in said(folder, "failing", 0), "the root of it, not only that a connection broke"
    assert "no store here" in said(folder, "failing", 1)


# --- without others ---------------------------------------------------------------------------------------------------


def test_one_process_is_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.sum([1, 2.5]) == [1, 2.5]
        assert world.gather("x") == ["x"]


def test_an_environment_that_is_not_torchruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK") as caught, open_world("cpu"):
        pass
    assert "torchrun" in caught.value.hint


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match="did not meet") as caught, open_world("cpu", timeout_s=1.0):
        pass
    assert caught.value.where == "127.0.0.1:1"


@pytest.mark.parametrize("name", ["cuda:99", "no-such-device"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_device(name, 0)
    assert name.removeprefix("cuda:") in str(caught.value)


def test_what_one_rank_alone_cannot_do_is_raised_as_it_is() -> None:
    error = ConfigError("no", "here")
    with pytest.raises(ConfigError) as caught, World().main_first("try"):
        raise error
    assert caught.value is error
