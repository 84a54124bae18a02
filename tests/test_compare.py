from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.compare import TOLERANCE, Tolerance, distance, is_informative, rejects, tolerance_for


def states(rows: int = 50, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_equal_states_are_at_distance_zero_and_an_empty_pair_too() -> None:
    assert distance(states(), states()) == distance(states()[:0], states()[:0]).__class__(
        0.0, 0.0, 0.0, pytest.approx(1), 0.0
    )
    assert distance(states()[:0], states()[:0]).worst == 0.0


def test_rounding_to_bf16_is_within_its_own_tolerance_and_outside_f32s() -> None:
    rounded = distance(states().to(torch.bfloat16), states())
    assert rounded.within(TOLERANCE["bf16"])
    assert not rounded.within(TOLERANCE["f32"])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "wrong", ["another row", "shifted by one", "one token", "zeros", "half the layer", "NaN", "Inf"]
)
def test_every_kind_of_wrong_is_outside_every_tolerance(dtype: str, wrong: str) -> None:
    right, bad = states(40), states(40)
    match wrong:
        case "another row":
            bad = states(40, seed=1)
        case "shifted by one":
            bad = right.roll(1, 0)
        case "one token":
            bad[17] = states(1, seed=2)[0]
        case "zeros":
            bad[:] = 0
        case "half the layer":
            bad[:, 32:] = states(40, seed=3)[:, 32:]
        case "NaN":
            bad[3, 3] = float("nan")
        case "Inf":
            bad[3, 3] = float("inf")
    assert not distance(bad, right, TOLERANCE[dtype].strays).within(TOLERANCE[dtype])


def test_massive_activations_do_not_hide_a_wrong_layer() -> None:
    right, wrong = states(10), states(10, seed=1)
    right[:, 5] = wrong[:, 5] = 5000.0
    assert distance(wrong, right).median > 0.5
    assert (wrong - right).norm() / right.norm() < 0.01  # what a plain relative error would have said


@given(st.integers(1, 200), st.floats(0, 0.5))
def test_strays_are_a_share_rounded_down(rows: int, share: float) -> None:
    right = states(rows)
    for count in {int(share * rows), int(share * rows) + 1}:
        bad = right.clone()
        bad[:count] += 10
        allowed = count <= int(share * rows)
        assert distance(bad[:rows], right, share).bounded < 0.1 or not allowed
        if count <= rows and not allowed:
            assert distance(bad, right, share).bounded > 0.1


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("rows", [400, 4000])
def test_strays_are_scattered_and_a_wrong_chunk_is_not_one_of_them(rows: int, routed: bool) -> None:
    """As many wrong tokens, within the share that may stray: here and there they pass, in one stretch they do not."""
    tolerance = tolerance_for("bf16", routed)
    count = max(20, int(tolerance.strays * rows * 0.9))
    if count > tolerance.strays * rows:
        return
    right = states(rows)
    for wrong, fits in ((torch.linspace(0, rows - 1, count).long(), True), (torch.arange(count) + 100, False)):
        bad = right.clone()
        bad[wrong] = states(count, seed=1)
        assert distance(bad, right, tolerance.strays).within(tolerance) is fits


def test_only_half_precision_of_a_routed_model_has_more_strays() -> None:
    assert tolerance_for("f32", routed=True) == TOLERANCE["f32"]
    assert tolerance_for("bf16", routed=False) == TOLERANCE["bf16"]
    assert tolerance_for("bf16", routed=True).strays > TOLERANCE["bf16"].strays


def test_a_control_is_rejected_only_when_it_is_far() -> None:
    tolerance = Tolerance(0.01, 0.1)
    right = distance(states() * 1.001, states())
    assert rejects(distance(states(seed=1), states()), right, tolerance)
    assert not rejects(right, right, tolerance)
    assert not is_informative(states() * 1.001, states(), tolerance)
    assert is_informative(states(seed=1), states(), tolerance)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        distance(states(3), states(4))
