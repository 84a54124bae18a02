"""Checkpoints: whole or not at all, of this run or refused by name, and what they put back is what was there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.train import state as state_module
from eyas.train.distributed import World
from eyas.train.optimizer import gradient_norm, make_adamw, step_clipped
from eyas.train.state import FORMAT, OPTIMIZER, RNG, STATE, WEIGHTS, Checkpoints, Progress, superfluous

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95)}
IDENTITY = {"store": "abc", "ranks": 1}


def net(seed: int = 0, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, width, bias=False), nn.LayerNorm(width), nn.Linear(width, 2))
    return module, make_adamw(module, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of some steps on random data from the global generator."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(torch.randn(8, 4)) - 1).pow(2).mean()
        loss.backward()
        step_clipped(optimizer, gradient_norm(module.parameters()), 0.5)
        losses.append(float(loss.detach()))
    return losses


def checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    settings, identity = changes.pop("settings", SETTINGS), changes.pop("identity", IDENTITY)
    return Checkpoints(folder, settings, identity, **changes)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of one checkpoint."""
    module, optimizer = net()
    train(module, optimizer, 3)
    progress = Progress(3, 9, 300, {"epoch": 1, "at": [1, 2]}, metric=1.5, best=1.5, best_step=3)
    return checkpoints(tmp_path / "checkpoints").save(module, optimizer, progress, World())


def load(path: Path, **changes: Any) -> Progress:
    module, optimizer = net(9)
    return checkpoints(path.parent, **changes).load(path, module, optimizer, World())


def test_what_is_put_back_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    module, optimizer = net()
    train(module, optimizer, 4)
    path = checkpoints(tmp_path).save(module, optimizer, Progress(4, data={"epoch": 0}), World())
    expected = train(module, optimizer, 5)
    other, other_optimizer = net(7)
    torch.manual_seed(123)
    progress = checkpoints(tmp_path).load(path, other, other_optimizer, World())
    assert (progress.step, progress.data) == (4, {"epoch": 0})
    assert train(other, other_optimizer, 5) == expected
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_progress_comes_back_as_it_was(saved: Path) -> None:
    assert load(saved) == Progress(3, 9, 300, {"epoch": 1, "at": [1, 2]}, metric=1.5, best=1.5, best_step=3)


def test_the_files_are_plain_tensors_under_published_names(saved: Path) -> None:
    module, _ = net()
    assert load_file(saved / WEIGHTS).keys() == module.state_dict().keys()
    moments = load_file(saved / OPTIMIZER)
    assert {name.split(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert load_file(saved / RNG).keys() == {"cpu.0"}
    assert (saved.stat().st_mode & 0o777, saved.parent.stat().st_mode & 0o777) == (0o700, 0o700)


def test_killed_at_every_file_operation_of_a_save(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("state_crash_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path / "c")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *killed, finished = json.loads(done.stdout)
    assert len(killed) > 15
    assert [steps for steps, _ in itertools.groupby(killed)] == [[1, 2], [1, 2, 3], [1, 3]], "old, new, tidied"
    assert finished == [1, 3]


# --- torn, damaged, foreign -------------------------------------------------------------------------------------------

FILES = (WEIGHTS, OPTIMIZER, RNG, STATE)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module, optimizer = net()
    train(module, optimizer, 1)
    folder = tmp_path_factory.mktemp("pristine")
    return checkpoints(folder).save(module, optimizer, Progress(1), World())


@given(
    name=st.sampled_from((WEIGHTS, OPTIMIZER, RNG)),
    where=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(["flip", "cut", "grow", "remove"]),
)
def test_a_damaged_tensor_file_is_refused_by_name(pristine: Path, name: str, where: float, kind: str) -> None:
    path, data = pristine / name, (pristine / name).read_bytes()
    at = int(where * len(data))
    damaged = {
        "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "cut": data[:at],
        "grow": data + b"\0",
        "remove": None,
    }[kind]
    try:
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"damaged|torn") as caught:
            load(pristine)
        assert str(pristine) in caught.value.where
        assert "remove it" in caught.value.hint
    finally:
        path.write_bytes(data)
    assert load(pristine).step == 1


@given(where=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["cut", "remove", "text"]))
def test_a_torn_state_document_is_refused_by_name(pristine: Path, where: float, kind: str) -> None:
    path, data = pristine / STATE, (pristine / STATE).read_bytes()
    try:
        if kind == "remove":
            path.unlink()
        else:
            path.write_bytes(data[: int(where * (len(data) - 3))] if kind == "cut" else b'{"format": 1}')
        with pytest.raises(IntegrityError, match="torn") as caught:
            load(pristine)
        assert caught.value.where == str(pristine)
    finally:
        path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / STATE).read_text())
    change(document)
    (path / STATE).write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=FORMAT + 1),
        lambda d: d.pop("settings"),
        lambda d: d.update(identity=[]),
        lambda d: d["files"].pop(RNG),
        lambda d: d["files"].update({"more.safetensors": {}}),
        lambda d: d["progress"].update(unknown=1),
        lambda d: d.update(progress=3),
    ],
)
def test_a_document_of_another_kind_is_refused(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(saved, change)
    with pytest.raises(IntegrityError) as caught:
        load(saved)
    assert caught.value.where == str(saved)


def test_other_settings_are_named(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr was 0\.01, is 0\.02") as caught:
        load(saved, settings={**SETTINGS, "lr": 2e-2})
    assert "betas" not in caught.value.what
    assert "--out" in caught.value.hint
    assert load(saved, settings={**SETTINGS, "betas": [0.9, 0.95]}).step == 3, "a list and a tuple are one thing"


def test_another_store_is_named(saved: Path) -> None:
    with pytest.raises(ConfigError, match="store was abc, is def"):
        load(saved, identity={**IDENTITY, "store": "def"})


def test_another_drafter_is_refused(saved: Path) -> None:
    module, optimizer = net(width=6)
    with pytest.raises(ConfigError, match="another drafter"):
        checkpoints(saved.parent).load(saved, module, optimizer, World())


def test_a_damaged_one_names_the_one_to_resume_from(tmp_path: Path) -> None:
    module, optimizer = net()
    for step in (1, 2):
        path = checkpoints(tmp_path).save(module, optimizer, Progress(step), World())
    (path / WEIGHTS).write_bytes(b"")
    with pytest.raises(IntegrityError) as caught:
        load(path)
    assert "resume at step 1" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk full"),
        (SafetensorError("I/O error: No space left on device"), "cannot write the checkpoint"),
    ],
)
def test_a_full_disk_is_said_and_leaves_nothing(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    module, optimizer = net()
    monkeypatch.setattr(state_module, "save_file", full)
    with pytest.raises(StoreError, match=said):
        checkpoints(tmp_path).save(module, optimizer, Progress(1), World())
    assert list(tmp_path.iterdir()) == []


# --- which are kept ---------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 99), st.none() | st.floats(1, 8), max_size=9), st.integers(1, 4))
def test_the_last_ones_and_the_best_are_kept(metrics: dict[int, float | None], keep: int) -> None:
    kept = metrics.keys() - set(superfluous(metrics, keep))
    assert set(sorted(metrics)[-keep:]) <= kept
    measured = {step: metric for step, metric in metrics.items() if metric is not None}
    if measured:
        best = max(measured.values())
        assert min(step for step, metric in measured.items() if metric == best) in kept
    assert len(kept) <= keep + 1


def test_saving_tidies(tmp_path: Path) -> None:
    module, optimizer = net()
    made = checkpoints(tmp_path, keep_last=2)
    for step, metric in ((1, 1.2), (2, 1.9), (3, 1.4), (4, None), (5, 1.5)):
        made.save(module, optimizer, Progress(step, metric=metric), World())
    assert made.steps() == [2, 4, 5]
    assert (made.best(), made.latest()) == (made.path(2), made.path(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (2, 4, 5)]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    made = checkpoints(tmp_path / "none")
    assert (made.latest(), made.best(), made.steps()) == (None, None, [])
