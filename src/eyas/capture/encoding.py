"""States as they are stored: cast, or quantised to 8 bits with a scale of their own. Pure, on any device.

`fp8_e4m3`: one state of H numbers becomes H + 4 bytes, its e4m3fn codes followed by its float32 scale (little endian):

    scale = max(amax / 448, 2**-126)        448 is the largest e4m3fn number, 2**-126 the smallest normal float32
    code  = round_to_nearest_even(x / scale)
    x'    = code * scale

- |x - x'| <= max(|x| / 16, scale / 1024) up to float32 rounding: half a step of 3 mantissa bits, or of the smallest
  subnormal.
- |x / scale| exceeds 448 by two float32 roundings at most, and everything below 464 rounds to 448: no clamp is needed.
- Inf or NaN anywhere in a state makes its scale Inf or NaN: whether a state is finite can be told from 4 bytes.
- Zeros, and states so small that amax / 448 is no normal float32, take the smallest scale; they come back as zero or as
  multiples of 2**-135, never as NaN.

Codes and scale lie together so that any run of tokens, layers or positions is one run of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from eyas.capture.contract import DTYPES, SCALE_BYTES

#: dtype name -> what its file bytes are as a torch dtype.
STORED_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "fp8_e4m3": torch.uint8,
}
_CODE: Final = torch.float8_e4m3fn
_LARGEST: Final = 448.0
_SMALLEST_SCALE: Final = 2.0**-126  # below, float32 loses digits and x / scale could leave the range of the codes


def is_quantised(dtype: str) -> bool:
    """Whether stored states are codes and scales rather than floats.

    Raises:
        KeyError: not a key of DTYPES.
    """
    return DTYPES[dtype][0] == "U8"


def stored_width(dtype: str, hidden_size: int) -> int:
    """Items of `STORED_DTYPES[dtype]` that one state of `hidden_size` numbers takes."""
    return hidden_size + SCALE_BYTES if is_quantised(dtype) else hidden_size


def encode(states: torch.Tensor, dtype: str) -> torch.Tensor:
    """States as they are stored, in a new contiguous tensor on the same device.

    Args:
        states: [..., H], any float dtype.
        dtype: a key of DTYPES.

    Returns:
        [..., stored_width] of `STORED_DTYPES[dtype]`.
    """
    shape = (*states.shape[:-1], stored_width(dtype, states.shape[-1]))
    out = torch.empty(shape, dtype=STORED_DTYPES[dtype], device=states.device)
    encode_into(out, states, dtype)
    return out


def encode_into(out_view: torch.Tensor, states: torch.Tensor, dtype: str) -> None:
    """Write states as they are stored into a tensor that exists; enqueues on the current stream, never waits.

    Args:
        out_view: [..., stored_width] of `STORED_DTYPES[dtype]`, same device; its last dimension is contiguous.
        states: [..., H], any float dtype.
        dtype: a key of DTYPES.

    Raises:
        ValueError: `out_view` is not of the shape and dtype that `states` take.
    """
    hidden_size = states.shape[-1]
    shape = (*states.shape[:-1], stored_width(dtype, hidden_size))
    if out_view.shape != shape or out_view.dtype != STORED_DTYPES[dtype]:
        raise ValueError(
            f"states {list(states.shape)} as {dtype} take {list(shape)} of {STORED_DTYPES[dtype]}, "
            f"got {list(out_view.shape)} of {out_view.dtype}"
        )
    if not is_quantised(dtype):
        out_view.copy_(states)
        return
    if states.numel() == 0:  # views of nothing have strides that cannot be viewed further
        return
    amax = torch.linalg.vector_norm(states, ord=float("inf"), dim=-1, keepdim=True)  # NaN wins, in one reduction
    scale = (amax.float() / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    torch.div(states, scale, out=out_view[..., :hidden_size].view(_CODE))  # in float32, rounded once
    out_view[..., hidden_size:].copy_(scale.view(torch.uint8))


def decode(stored: torch.Tensor, dtype: str, hidden_size: int, floats: torch.dtype | None = None) -> torch.Tensor:
    """States back from what is stored.

    Args:
        stored: [..., stored_width] of `STORED_DTYPES[dtype]`.
        dtype: a key of DTYPES.
        hidden_size: H.
        floats: dtype of the result; None: float32 for quantised states, otherwise the stored dtype, without a copy.

    Returns:
        [..., H].

    Raises:
        ValueError: `stored` is not of the width and dtype that states of H numbers have.
    """
    if stored.shape[-1:] != (stored_width(dtype, hidden_size),) or stored.dtype != STORED_DTYPES[dtype]:
        raise ValueError(f"{list(stored.shape)} of {stored.dtype} are no {dtype} states of {hidden_size} numbers")
    if not is_quantised(dtype):
        return stored if floats is None else stored.to(floats)
    codes, scale = stored[..., :hidden_size], scales(stored, dtype, hidden_size)
    if stored.device.type == "cpu":
        states = _halves(codes).to(torch.float32).mul_(scale * 256)
    else:
        states = codes.view(_CODE).to(torch.float32).mul_(scale)
    return states if floats is None else states.to(floats)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """1/256 of what e4m3fn codes stand for, as float16, which has the same bits with a wider exponent.

    Several times as fast on a CPU as torch's own conversion, which goes number by number, and as exact. (A code that is
    no number becomes 480: none is ever beside a finite scale.)
    """
    wide = codes.view(torch.int8).to(torch.int16)  # carries the sign into the upper byte
    return wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)


def scales(stored: torch.Tensor, dtype: str, hidden_size: int) -> torch.Tensor:
    """The scales of quantised states: [..., stored_width] -> [..., 1] float32, a copy.

    Raises:
        ValueError: the states of this dtype have none.
    """
    if not is_quantised(dtype):
        raise ValueError(f"{dtype} states have no scale")
    return stored[..., hidden_size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
