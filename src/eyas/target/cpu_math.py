"""PyTorch's elementwise functions on a CPU, made safe to call from several threads."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

#: What forwards and log-probabilities call, of the functions that PyTorch takes from MKL.
_FUNCTIONS: Final = (
    *(torch.cos, torch.sin, torch.tanh, torch.erf),
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt),
)


@cache
def settle() -> None:
    """Call each once on one number, which no thread shares; further calls do nothing.

    MKL chooses its implementation at a function's first call. Where that is made by several threads at once, one of
    them may compute its part with 11 bits (pytorch/pytorch issue 188792): 7 of 24,000 processes had a first `cos` or
    `sin` that was off by up to 4e-4, none of 24,000 after this. A first row would be stored, or compared, that far off.
    """
    one = torch.ones(1)
    for function in _FUNCTIONS:
        function(one)
