"""What a server's model and arguments tell, as they are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from eyas.capture.contract import CaptureSpec
from eyas.capture.fingerprint import architecture_of, model_fingerprint, norm_key
from eyas.capture.hostcopy import host_bytes
from eyas.capture.settings import ServerSettings


def spec_of(model: Any, text_config: Any, settings: ServerSettings) -> CaptureSpec:
    """The agreement, from the model as it is in memory. Raises ValueError for layers it does not have."""
    layers = int(text_config.num_hidden_layers)
    norms: dict[str, bytes] = {}
    for name, parameter in model.named_parameters():
        if key := norm_key(name, layers):
            host = parameter.detach().to(torch.bfloat16).cpu().contiguous()
            norms[key] = bytes(host_bytes(host))
    return CaptureSpec(
        layers=settings.layers,
        last=settings.last,
        dtype=settings.dtype,
        hidden_size=int(text_config.hidden_size),
        vocab_size=int(text_config.vocab_size),
        num_layers=layers,
        model=model_fingerprint(architecture_of(text_config), norms),
    )


def check_layers(model: Any, layers: Iterable[int]) -> bool:
    """Compare the model's own list of layers to keep with ours.

    SGLang keeps the *input* of each layer in `layers_to_capture`; the output of layer i is the input of layer i + 1.

    Returns:
        False where the model does not show such a list.

    Raises:
        ValueError: the server keeps other layers than the settings name.
    """
    want = {layer + 1 for layer in layers}
    for module in model.modules():
        kept = getattr(module, "layers_to_capture", None)
        if isinstance(kept, list | tuple | set | frozenset) and kept:
            if set(kept) != want:
                outputs = sorted(int(layer) - 1 for layer in kept)
                raise ValueError(f"the server keeps the outputs of layers {outputs}, EYAS_CAPTURE names {list(layers)}")
            return True
    return False


def forward_tokens(server_args: Any, max_req_input_len: int) -> int:
    """Most prompt tokens of one forward: what chunked prefill allows, or else one whole prompt at least."""
    chunk = int(getattr(server_args, "chunked_prefill_size", 0) or 0)
    if chunk > 0:
        return chunk
    return max(int(getattr(server_args, "max_prefill_tokens", 0) or 0), max_req_input_len)
