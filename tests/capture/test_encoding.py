"""Quantised states: how far off they may be, and what must survive."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.capture.contract import DTYPES, CaptureSpec
from eyas.capture.encoding import STORED_DTYPES, decode, encode, encode_into, is_quantised, scales, stored_width

FP8 = "fp8_e4m3"
LARGEST, SMALLEST_SCALE, ROUNDING = 448.0, 2.0**-126, 2.0**-23
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
states = st.lists(numbers, min_size=1, max_size=40)


def spec(dtype: str, hidden_size: int = 8) -> CaptureSpec:
    return CaptureSpec((1, 3), "all", dtype, hidden_size, 11, 4, "0" * 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("floats", FLOATS)
def test_what_is_stored_has_the_shape_and_size_the_spec_says(dtype: str, floats: torch.dtype) -> None:
    agreed, aux = spec(dtype), torch.randn(5, 2, 8).to(floats)
    stored = encode(aux, dtype)
    assert tuple(stored.shape) == agreed.aux_shape(5)
    assert tuple(encode(aux[:, 0], dtype).shape) == agreed.last_shape(5)
    assert stored.is_contiguous() and stored.dtype == STORED_DTYPES[dtype]
    assert stored.nbytes == 5 * agreed.aux_bytes_per_token == agreed.record_bytes(5, 0)
    assert decode(stored, dtype, 8).shape == aux.shape


@pytest.mark.parametrize("dtype", [name for name in DTYPES if not is_quantised(name)])
def test_floats_are_cast_and_come_back_as_they_are(dtype: str) -> None:
    aux = torch.randn(3, 2, 8)
    stored = encode(aux, dtype)
    assert torch.equal(stored, aux.to(STORED_DTYPES[dtype]))
    assert decode(stored, dtype, 8).data_ptr() == stored.data_ptr(), "no copy of what needs none"
    assert decode(stored, dtype, 8, torch.float64).dtype == torch.float64


@settings(max_examples=50, deadline=None)
@given(state=states, floats=st.sampled_from(FLOATS))
def test_every_number_comes_back_within_half_a_step(state: list[float], floats: torch.dtype) -> None:
    given_ = torch.tensor(state, dtype=torch.float64).to(floats)
    if not given_.isfinite().all():
        return  # float16 has no such numbers
    stored = encode(given_, FP8)
    scale, back = scales(stored, FP8, len(state)).double(), decode(stored, FP8, len(state)).double()
    exact = given_.double()
    bound = torch.maximum(exact.abs() / 16, scale / 1024) + exact.abs() * 2 * ROUNDING
    # Far below the smallest scale even float32's own steps count.
    assert bool(((exact - back).abs() <= bound + 2.0**-149).all())


@settings(max_examples=50, deadline=None)
@given(state=states)
def test_the_scale_is_the_largest_number_over_448(state: list[float]) -> None:
    stored = encode(torch.tensor(state), FP8)
    largest = max(map(abs, state))
    assert scales(stored, FP8, len(state)).item() == max(torch.tensor(largest).div(LARGEST).item(), SMALLEST_SCALE)
    assert struct.unpack("<f", bytes(stored[-4:].tolist()))[0] == scales(stored, FP8, len(state)).item()


@settings(max_examples=50, deadline=None)
@given(state=states, more=st.floats(1, 1024, width=32))
def test_the_scale_grows_with_the_largest_number(state: list[float], more: float) -> None:
    def scale(values: torch.Tensor) -> float:
        return scales(encode(values, FP8), FP8, len(values)).item()

    small = torch.tensor(state).clamp(-1e30, 1e30)
    assert scale(small) <= scale(small * more) <= scale(torch.cat([small * more, (small * more)[:1] * 2]))


@settings(max_examples=50, deadline=None)
@given(exponent=st.integers(-100, 120), halvings=st.lists(st.integers(0, 13), min_size=1, max_size=20))
def test_halves_of_the_largest_number_are_exact(exponent: int, halvings: list[int]) -> None:
    """One mantissa serves every power of two, down to where codes become subnormal."""
    state = torch.tensor([2.0**exponent, *(2.0 ** (exponent - min(by, 14)) for by in halvings)])
    assert torch.allclose(decode(encode(state, FP8), FP8, len(state)), state, rtol=ROUNDING, atol=0)


@settings(max_examples=50, deadline=None)
@given(state=states)
def test_encoding_what_was_decoded_changes_no_code(state: list[float]) -> None:
    once = encode(torch.tensor(state).clamp(-1e38, 1e38), FP8)
    again = encode(decode(once, FP8, len(state)), FP8)
    assert torch.equal(once[:-4], again[:-4])


@settings(max_examples=50, deadline=None)
@given(state=states)
def test_no_finite_state_has_a_code_that_is_no_number(state: list[float]) -> None:
    codes = encode(torch.tensor(state), FP8)[:-4]
    assert not (codes & 0x7F == 0x7F).any()


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@settings(max_examples=50, deadline=None)
@given(state=states, at=st.integers(0, 39))
def test_one_number_that_is_not_finite_shows_in_its_scale_alone(
    floats: torch.dtype, bad: float, state: list[float], at: int
) -> None:
    rows = torch.tensor([state, state, state]).clamp(-60000, 60000).to(floats)
    rows[1, at % len(state)] = bad
    finite = scales(encode(rows, FP8), FP8, len(state)).isfinite().flatten().tolist()
    assert finite == [True, False, True]
    assert not decode(encode(rows, FP8), FP8, len(state))[1].isfinite().any()


def test_every_code_is_read_as_the_number_it_stands_for() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    meant = codes.view(torch.float8_e4m3fn).float()
    for scale in (SMALLEST_SCALE, 1.0, 1 / 3, 2.0**118):
        state = torch.cat([codes, torch.tensor([scale]).view(torch.uint8)])
        assert torch.equal(decode(state, FP8, len(codes)), meant * scale)
        assert torch.equal(decode(state, FP8, len(codes), torch.bfloat16), (meant * scale).bfloat16())


@pytest.mark.parametrize("floats", FLOATS)
def test_zeros_stay_zeros(floats: torch.dtype) -> None:
    stored = encode(torch.zeros(2, 3, 8, dtype=floats), FP8)
    assert torch.equal(decode(stored, FP8, 8), torch.zeros(2, 3, 8))
    assert scales(stored, FP8, 8).unique().tolist() == [SMALLEST_SCALE]


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-133, 2.0**-127, 448 * 2.0**-127, 448 * 2.0**-126, 2.0**-116])
def test_states_as_small_as_float32_goes_come_back_near(amax: float) -> None:
    state = torch.tensor([amax, -amax / 2, 0.0])
    back = decode(encode(state, FP8), FP8, 3)
    assert bool(((state.double() - back.double()).abs() <= max(amax / 16, 2.0**-136)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_are_encoded_into_a_part_of_a_larger_buffer(dtype: str) -> None:
    """A ring hands out runs of whole states at any byte of it."""
    aux, width = torch.randn(3, 2, 6), stored_width(dtype, 6)
    ring = torch.full((9, 2, width), 7, dtype=STORED_DTYPES[dtype])
    encode_into(ring[2:5], aux, dtype)
    assert torch.equal(ring[2:5], encode(aux, dtype))
    assert torch.equal(ring[:2], torch.full_like(ring[:2], 7)) and torch.equal(ring[5:], torch.full_like(ring[5:], 7))
    flat = torch.zeros(1 + ring[:3].numel(), dtype=STORED_DTYPES[dtype])[1:].view(3, 2, width)
    encode_into(flat, aux, dtype)
    assert torch.equal(decode(flat, dtype, 6), decode(encode(aux, dtype), dtype, 6))
    assert torch.equal(decode(flat[1:2, 1:2], dtype, 6), decode(flat, dtype, 6)[1:2, 1:2]), "one state, unaligned"


def test_states_are_read_where_they_lie() -> None:
    """An engine's outputs may be columns of something wider."""
    wide = torch.randn(4, 30)
    assert torch.equal(encode(wide[:, 5:21].view(4, 2, 8), FP8), encode(wide[:, 5:21].reshape(4, 2, 8).clone(), FP8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_encode_is_no_error(dtype: str) -> None:
    assert decode(encode(torch.zeros(0, 2, 8), dtype), dtype, 8).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_of_another_shape_or_dtype_is_refused(dtype: str) -> None:
    aux, width = torch.randn(3, 2, 8), stored_width(dtype, 8)
    right = STORED_DTYPES[dtype]
    for out in (
        torch.zeros(4, 2, width, dtype=right),
        torch.zeros(3, 2, width + 1, dtype=right),
        torch.zeros(6, width, dtype=right),
        torch.zeros(3, 2, width, dtype=torch.int64),
    ):
        with pytest.raises(ValueError, match="states"):
            encode_into(out, aux, dtype)
    with pytest.raises(ValueError, match="1, 2, 8"):  # would broadcast
        encode_into(torch.zeros(3, 2, width, dtype=right), aux[:1], dtype)
    with pytest.raises(ValueError, match="are no"):
        decode(torch.zeros(3, 2, width + 1, dtype=right), dtype, 8)
    with pytest.raises(ValueError, match="are no"):
        decode(torch.zeros(3, 2, width, dtype=torch.int64), dtype, 8)


def test_only_quantised_states_have_scales() -> None:
    with pytest.raises(ValueError, match="bf16 states have no scale"):
        scales(torch.zeros(2, 8, dtype=torch.bfloat16), "bf16", 8)


def test_another_dtype_is_another_agreement() -> None:
    assert len({spec(dtype).spec_id for dtype in DTYPES}) == len(DTYPES)
    assert spec(FP8, 4096).state_bytes == 4100
