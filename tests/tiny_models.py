"""Tiny targets of the real architectures, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, "num_key_value_heads": 2, **changes})).eval()


def qwen3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "num_key_value_heads": 2, "head_dim": 8, **changes})).eval()


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(2)
    sizes = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_SIZES, **sizes, **changes})).eval()


def gemma3(**changes: Any) -> PreTrainedModel:
    """A multimodal wrapper: vision tower and projector beside the text decoder."""
    torch.manual_seed(3)
    config = Gemma3Config(
        text_config={**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 512, **changes},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config).eval()


MODELS: Final[dict[str, Callable[..., PreTrainedModel]]] = {
    "llama": llama,
    "qwen3": qwen3,
    "deepseek_v3": deepseek_v3,
    "gemma3": gemma3,
}
