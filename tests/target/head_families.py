"""Tiny targets whose final norm, `lm_head` or logits differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from tiny_models import MODELS, llama

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "Cohere": {"logit_scale": 0.3},  # LayerNorm without bias
    "Gemma2": {"final_logit_softcapping": 5.0},  # (1 + w)
    "GPTNeoX": {},  # LayerNorm with bias, embed_out
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},  # transformer.ln_f, tied to wte
    "Granite": {"logits_scaling": 8.0},
    "HyperCLOVAX": {"logits_scaling": 0.25},  # Granite's key, the other way round
    "Phi": {},  # lm_head with a bias, final_layernorm
    "Qwen2": {"tie_word_embeddings": True},
}


def _made(family: str) -> PreTrainedModel:
    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **_OPTIONS[family]})
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name or "ln_" in name:
            parameter.data.normal_(0.9, 0.3)  # fresh ones are all ones or zeros, which would hide a mistake
    return model


FAMILIES: Final[dict[str, Callable[[], PreTrainedModel]]] = {
    **MODELS,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    **{family: lambda family=family: _made(family) for family in _OPTIONS},
}
