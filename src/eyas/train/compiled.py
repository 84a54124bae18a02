"""torch.compile, used on the functions whose sizes differ from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config

_VARIANTS: Final = 64
#: An analysis that only chooses tiles; torch 2.11's fails on sizes that differ from call to call (an assertion).
_INDUCTOR: Final[dict[str, str | int | bool | Callable[..., Any]]] = {"triton.coalesce_tiling_analysis": False}

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def ready(function: Callable[_Given, _Result], compile_with: bool | str) -> Callable[_Given, _Result]:
    """The function, or that compiled as one graph.

    Args:
        function: of tensors.
        compile_with: False, True for torch's own compiler, or the name of another backend.
    """
    if not compile_with:
        return function
    # A step is compiled apart for the first two steps, with and without gradients, and for lone rows or blocks.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    # Sizes and offsets that are equal by chance in the first batch are none that must be equal in the next.
    fx_config.use_duck_shape = False
    if isinstance(compile_with, str):
        return torch.compile(function, fullgraph=True, backend=compile_with)
    return torch.compile(function, fullgraph=True, options=_INDUCTOR)


def grows(tensor: Tensor, dim: int = 0) -> Tensor:
    """The tensor, after telling the compiler that this size differs from call to call: it need not find out first."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor
