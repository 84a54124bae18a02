"""What a run's log says of places: the same from whatever folder it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.config import TrainConfig
from eyas.target.checkpoint import Target
from eyas.train.metrics import settings_told


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
