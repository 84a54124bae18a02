"""An engine without a model: states made from (seed, token ids, position, layer), for tests and rehearsals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from eyas.capture.contract import CaptureSpec, field_hash, token_hash
from eyas.capture.encoding import STORED_DTYPES
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry

Faults = Callable[[CaptureRequest], Failed | None] | Mapping[int, Failed]

#: dtype -> (bits kept, bits set) of 64 random ones, so that every number is finite: sign and mantissa are random, the
#: exponent is one of 2^-7 .. 2^0. (Of fp8, also 0 and 2^-7 .. 2^-10: subnormal codes.)
_FINITE: Final = {
    "bf16": (0x83FF_83FF_83FF_83FF, 0x3C00_3C00_3C00_3C00),
    "f16": (0x9FFF_9FFF_9FFF_9FFF, 0x2000_2000_2000_2000),
    "f32": (0x83FF_FFFF_83FF_FFFF, 0x3C00_0000_3C00_0000),
    "fp8_e4m3": (0xBFBF_BFBF_BFBF_BFBF, 0),
}
_SCALE: Final = (0x80, 0x3B)  # the upper two bytes of a float32 of 2^-8


class FakeEngine:
    """Deterministic states: the same row has the same bytes whoever asks, two different rows never do.

    Args:
        spec: what to pretend to capture.
        seed: another seed, other states.
        delay_s: time one capture takes.
        faults: failures instead of states: by row number (every attempt fails), or decided for each request.
        max_row_tokens: longest row admitted.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        *,
        seed: int = 0,
        delay_s: float = 0.0,
        faults: Faults | None = None,
        max_row_tokens: int | None = None,
    ) -> None:
        self._spec = spec
        self._seed = seed
        self._delay_s = delay_s
        self._faults = faults
        self._max_row_tokens = max_row_tokens

    async def start(self) -> EngineInfo:
        return EngineInfo(self._spec, {"engine": "fake", "seed": str(self._seed)}, self._max_row_tokens)

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        await asyncio.sleep(self._delay_s)
        if (failure := self._fault(request)) is not None:
            return failure
        if not request.tokens:
            return Failed("empty-row", retry=Retry.NEVER)
        if self._max_row_tokens is not None and len(request.tokens) > self._max_row_tokens:
            detail = f"{len(request.tokens)} tokens, at most {self._max_row_tokens}"
            return Failed("row-too-long", detail, Retry.NEVER)
        aux, last = self._states(request)
        return Captured(
            _tensor(aux, self._spec.dtype), _tensor(last, self._spec.dtype), field_hash(aux), field_hash(last)
        )

    async def reprobe(self) -> None:
        """Nothing restarts here."""

    async def close(self) -> None:
        """Nothing to close."""

    def _fault(self, request: CaptureRequest) -> Failed | None:
        if self._faults is None:
            return None
        return self._faults(request) if callable(self._faults) else self._faults.get(request.rid.row)

    def _states(self, request: CaptureRequest) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """aux [T, A, bytes of a state] and last [L, bytes of a state]."""
        spec, rows = self._spec, len(request.tokens)
        row = int(token_hash(request.tokens), 16)
        aux = np.empty((rows, len(spec.layers), spec.last_bytes_per_position), dtype=np.uint8)
        for index, layer in enumerate(spec.layers):
            aux[:, index] = self._layer(row, layer, rows)
        # `last` is made for every position and then cut, so that a position's state does not depend on the others kept.
        every = self._layer(row, spec.num_layers, rows)
        runs = request.last_runs
        kept = [every[start:stop] for start, stop in zip(runs[0::2], runs[1::2], strict=True)]
        return aux, np.concatenate(kept) if kept else every[:0]

    def _layer(self, row: int, layer: int, rows: int) -> npt.NDArray[np.uint8]:
        """[T, bytes of a state] of finite numbers from one random stream."""
        size = rows * self._spec.last_bytes_per_position
        stream = np.random.SFC64(np.random.SeedSequence([self._seed, layer, row]))
        words: Any = stream.random_raw(-(-size // 8))  # the raw stream is what numpy promises never to change
        kept, set_ = _FINITE[self._spec.dtype]
        words &= np.uint64(kept)
        words |= np.uint64(set_)
        states = words.view(np.uint8)[:size].reshape(rows, -1)
        if self._spec.stored_dtype == "U8":
            states[:, -2] |= _SCALE[0]  # its mantissa stays random
            states[:, -1] = _SCALE[1]
        return states


def _tensor(data: npt.NDArray[np.uint8], dtype: str) -> torch.Tensor:
    return torch.from_numpy(data).view(STORED_DTYPES[dtype])
