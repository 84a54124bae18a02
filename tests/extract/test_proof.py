"""The first probe's states tell a model from another of the same fingerprint, in this run and in the next ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.errors import EngineError, StoreError
from eyas.extract.proof import PROOF_FILE, SAME_MODEL, Proof, distance

SPEC = "a" * 32


def states(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(seed))


def noisy(seed: int, share: float) -> torch.Tensor:
    return states(seed) + share * states(seed + 1000)


@pytest.mark.parametrize("kept", [True, False])
def test_the_same_model_with_noise_passes_and_another_does_not(tmp_path: Path, kept: bool) -> None:
    proof = Proof(tmp_path / PROOF_FILE if kept else None)
    proof.check(states(0), SPEC, "here")
    proof.check(noisy(0, 0.05), SPEC, "here")
    proof.check(states(0).to(torch.bfloat16), SPEC, "here")
    for other in (states(1), states(0).flip(-1), states(0)[:, :2], torch.full((4, 3, 32), torch.nan), noisy(0, 0.5)):
        with pytest.raises(EngineError, match="another model") as caught:
            proof.check(other, SPEC, "here")
        assert caught.value.where == "here"
    assert (tmp_path / PROOF_FILE).exists() == kept


def test_the_next_run_remembers_and_the_first_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / PROOF_FILE
    Proof(path).check(states(0), SPEC, "here")
    before = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(EngineError) as caught:
        Proof(path).check(states(1), SPEC, "here")
    Proof(path).check(noisy(0, 0.1), SPEC, "here")
    assert path.read_bytes() == before
    assert str(path) in caught.value.hint  # a model in another precision, say: it is for the user to decide
    assert [file.name for file in tmp_path.iterdir()] == [PROOF_FILE]


def test_a_folder_that_comes_later_gets_the_first_probe(tmp_path: Path) -> None:
    """A run probes its server before it makes the store."""
    path = tmp_path / "later" / PROOF_FILE
    proof = Proof(path)
    proof.check(states(0), SPEC, "here")
    path.parent.mkdir()
    proof.check(noisy(0, 0.05), SPEC, "here")
    with pytest.raises(EngineError):
        Proof(path).check(states(1), SPEC, "here")


def test_another_spec_is_not_another_model(tmp_path: Path) -> None:
    """Other layers' states are others: that is for whoever compares the specs to say."""
    path = tmp_path / PROOF_FILE
    Proof(path).check(states(0), SPEC, "here")
    before = path.read_bytes()
    for other in (states(1), states(0)[:, :2]):
        Proof(path).check(other, "b" * 32, "here")
    assert path.read_bytes() == before
    with pytest.raises(EngineError):
        Proof(path).check(states(1), SPEC, "here")


@pytest.mark.parametrize("damaged", [b"", b"{}", b"x" * 100, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_damaged_one_is_named(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / PROOF_FILE).write_bytes(damaged)
    with pytest.raises(StoreError, match="first probe"):
        Proof(tmp_path / PROOF_FILE).check(states(0), SPEC, "here")


def test_a_massive_activation_does_not_hide_the_rest() -> None:
    """The first token's states are often a hundred times larger than all others."""
    mine, other = states(0), states(1)
    mine[0, :, 0] = other[0, :, 0] = 1e4
    assert distance(other, mine) > SAME_MODEL
