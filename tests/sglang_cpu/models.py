"""Tiny random targets, built by transformers from a seed: a Llama, and a DeepSeek-V3 (MLA and MoE).

Weights are drawn wide enough that each layer rewrites a good part of the residual stream: neighbouring layers then
differ by far more than any numerical error, so a capture that is off by one layer cannot pass.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 1024
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _save_tokenizer(folder: Path) -> None:
    """Byte-level vocabulary with the four special tokens the chat template uses: any text round-trips."""
    special = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)


def _save(model: PreTrainedModel, folder: Path, **config_extras: object) -> Path:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all-ones norms would make every tiny model's fingerprint the same
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    if config_extras:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config_extras, indent=2))
    _save_tokenizer(folder)
    return folder


def tiny_llama(folder: Path, *, layers: int = 8, hidden_size: int = 256, seed: int = 0) -> Path:
    """A Llama of 8 layers with grouped-query attention, float32; returns `folder`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden_size // 8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
        dtype="float32",
    )
    return _save(LlamaForCausalLM(config).float(), folder)


def tiny_deepseek_v3(folder: Path, *, layers: int = 7, seed: int = 1) -> Path:
    """A DeepSeek-V3 of 7 layers, the architecture of Kimi-K2.5: MLA, one dense layer, then MoE; returns `folder`."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB_SIZE,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
        dtype="float32",
    )
    # SGLang reads these from config.json as DeepSeek's own releases state them; transformers no longer writes them.
    extras = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return _save(DeepseekV3ForCausalLM(config).float(), folder, **extras)
