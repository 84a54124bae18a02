"""The text decoder inside a transformers model, however many wrappers are around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

_LAYER_LISTS: Final = ("layers", "h", "blocks")


def decoders(model: Any) -> Iterator[torch.nn.Module]:
    """Where the decoder may be: transformers' own answer, then inwards (wrappers nest a model in a model)."""
    module: Any = model.get_decoder()
    while isinstance(module, torch.nn.Module):
        yield module
        module = next((getattr(module, name) for name in ("language_model", "model") if hasattr(module, name)), None)


def layers_of(decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Its layers, by any of the names that transformers uses; none where this is no decoder yet."""
    lists = (getattr(decoder, name, None) for name in _LAYER_LISTS)
    return next((list(found) for found in lists if isinstance(found, torch.nn.ModuleList)), [])
