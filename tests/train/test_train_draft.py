"""The draft's shape by its target's config, its parameters, and the parts that the objective is made of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.train.draft import Eagle3Config, Eagle3Draft, RMSNorm, embedding_half, hidden_half
from eyas.train.rope import RopeConfig
from tiny_models import deepseek_v3, gemma3, llama, qwen3

SHAPE: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "vocab_size": 50,
    "draft_vocab_size": 20,
    "target_hidden_size": 10,
    "aux_layers": (1, 3, 5),
}


def config(**changes: Any) -> Eagle3Config:
    return Eagle3Config(**(SHAPE | changes))


def draft(seed: int = 0, **changes: Any) -> Eagle3Draft:
    shape = config(**changes)
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return Eagle3Draft(shape, embeddings, generator)


def saved(folder: Path, model: Any, **changes: Any) -> Target:
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Target.load(str(folder))


# --- the shape --------------------------------------------------------------------------------------------------------


def test_smollm2s_draft(smollm2_dir: Path) -> None:
    target = Target.load(str(smollm2_dir))
    assert Eagle3Config.from_target(target, draft_vocab_size=16_384) == Eagle3Config(
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49_152,
        draft_vocab_size=16_384,
        target_hidden_size=576,
        aux_layers=(1, 14, 26),
        rope=RopeConfig("default", 100_000.0, 8192),
        rms_norm_eps=1e-5,
    )


def test_llama_31s_draft(tmp_path: Path) -> None:
    """Its config.json as published, in the old spelling."""
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_scaling": scaling,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = Eagle3Config.from_target(Target.load(str(tmp_path)), draft_vocab_size=32_000)
    options = {key: value for key, value in scaling.items() if key != "rope_type"}
    assert found.rope == RopeConfig("llama3", 5e5, 131072, options)
    assert (found.q_size, found.kv_size, found.aux_size, found.aux_layers) == (4096, 1024, 12288, (1, 15, 28))
    with torch.device("meta"):
        built = Eagle3Draft(found, torch.empty(128256, 4096))
    layer = 4096 * (2 * (4096 + 1024 + 1024) + 4096) + 3 * 4096 * 14336 + 3 * 4096
    assert built.num_parameters == 12288 * 4096 + layer + 4096 + 32_000 * 4096


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, (4, 2, 8)),
        (qwen3, (4, 2, 8)),
        (gemma3, None),
        (deepseek_v3, (1, 1, 128)),  # latent attention: heads of a Llama layer's usual size
    ],
)
def test_other_families(make: Any, expected: tuple[int, int, int] | None, tmp_path: Path) -> None:
    target = saved(tmp_path, make())
    found = Eagle3Config.from_target(target, aux_layers=[0, 1, 2])
    if expected is not None:
        assert (found.num_heads, found.num_kv_heads, found.head_dim) == expected
    assert found.hidden_size == found.target_hidden_size == target.hidden_size
    assert found.draft_vocab_size == found.vocab_size == target.vocab_size
    assert found.hidden_act == "silu"


def test_latent_attention_at_its_real_size(tmp_path: Path) -> None:
    target = saved(tmp_path, deepseek_v3(), hidden_size=7168, num_attention_heads=128, num_key_value_heads=128)
    found = Eagle3Config.from_target(target, aux_layers=[0, 1, 2])
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (56, 7, 128)


def test_a_target_with_dynamic_rope_has_a_draft_that_servers_agree_on(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 777.0}
    target = saved(tmp_path, llama(), rope_parameters=parameters)
    assert Eagle3Config.from_target(target, aux_layers=[0, 1, 2]).rope == RopeConfig("default", 777.0, 512)


def test_overrides(tmp_path: Path) -> None:
    target = saved(tmp_path, llama())
    found = Eagle3Config.from_target(
        target,
        aux_layers=[0, 2],
        intermediate_size=100,
        num_kv_heads=1,
        rms_norm_eps=1,
        fc_norm=True,
        rope={"rope_theta": 3e6},
        head_dim=None,
    )
    assert (found.aux_layers, found.intermediate_size, found.num_kv_heads, found.fc_norm) == ((0, 2), 100, 1, True)
    assert (found.head_dim, found.rms_norm_eps) == (8, 1.0)
    assert found.rope == RopeConfig("default", 3e6, 512)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"intermediat_size": 9}, "did you mean intermediate_size"),
        ({"zzz": 9}, "known: hidden_size"),
        ({"intermediate_size": "9"}, "it must be int"),
        ({"intermediate_size": True}, "it must be int"),
        ({"fc_norm": 1}, "it must be bool"),
        ({"aux_layers": [0, True]}, "aux_layers"),
        ({"rope": {"rope_typ": "linear"}}, "has no option rope_typ"),
        ({"rope": "linear"}, "it must be RopeConfig"),
        ({"hidden_act": "gelu"}, "silu only"),
    ],
)
def test_a_wrong_override_is_named(overrides: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        Eagle3Config.from_target(saved(tmp_path, llama()), **({"aux_layers": [0, 1, 2]} | overrides))


def test_layers_of_a_small_target_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name them"):
        Eagle3Config.from_target(saved(tmp_path, llama()))


def test_a_size_that_the_config_does_not_tell(tmp_path: Path) -> None:
    target = saved(tmp_path, llama(), intermediate_size=None, model_type="nobody_knows")
    with pytest.raises(ConfigError, match="does not tell the draft's intermediate_size"):
        Eagle3Config.from_target(target, aux_layers=[0, 1, 2])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_kv_heads": 3}, "cannot share"),
        ({"head_dim": 5}, "odd"),
        ({"draft_vocab_size": 51}, "51 in one of 50"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"hidden_size": 8.0}, r"hidden_size is 8\.0"),
        ({"num_heads": "4"}, "num_heads is '4'"),
        ({"aux_layers": ()}, "whole numbers"),
        ({"aux_layers": ("1", "2")}, "whole numbers"),
        ({"aux_layers": (3, 1)}, "ascending"),
        ({"aux_layers": (-1, 1)}, "ascending"),
        # SGLang leaves out `fc` for states as wide as the draft's own.
        ({"aux_layers": (2,), "target_hidden_size": 8}, "as wide as"),
        ({"aux_layers": (2, 3), "target_hidden_size": 4}, "as wide as"),
    ],
)
def test_a_shape_that_cannot_be(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config(**changes)


# --- the parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fc_norm", [False, True])
def test_names_and_shapes_are_the_published_ones(fc_norm: bool) -> None:
    expected = {
        "fc.weight": (8, 30),
        "midlayer.self_attn.q_proj.weight": (24, 16),
        "midlayer.self_attn.k_proj.weight": (12, 16),
        "midlayer.self_attn.v_proj.weight": (12, 16),
        "midlayer.self_attn.o_proj.weight": (8, 24),
        "midlayer.mlp.gate_proj.weight": (12, 8),
        "midlayer.mlp.up_proj.weight": (12, 8),
        "midlayer.mlp.down_proj.weight": (8, 12),
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.post_attention_layernorm.weight": (8,),
        "norm.weight": (8,),
        "lm_head.weight": (20, 8),
    }
    if fc_norm:
        expected |= {f"fc_norm.{i}.weight": (10,) for i in range(3)}
    built = draft(fc_norm=fc_norm)
    assert {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()} == expected
    assert dict(built.named_parameters()).keys() == expected.keys()  # the embeddings are not trained
    assert built.num_parameters == sum(math.prod(shape) for shape in expected.values())


def test_the_same_generator_gives_the_same_weights_whatever_else_was_drawn() -> None:
    first = draft(3).state_dict()
    torch.manual_seed(99)
    again, other = draft(3).state_dict(), draft(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_initial_weights_keep_the_size_of_what_they_read() -> None:
    built = draft(
        hidden_size=96, intermediate_size=160, head_dim=24, target_hidden_size=64, vocab_size=600, draft_vocab_size=500
    )
    for name, parameter in built.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        gain = float(parameter.detach().pow(2).mean()) * parameter.shape[1]
        wanted = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert gain == pytest.approx(wanted, rel=0.06), name
        assert abs(float(parameter.detach().mean())) < 0.02, name


def test_embeddings_are_taken_as_they_are() -> None:
    embeddings = torch.randn(50, 8, dtype=torch.bfloat16)
    built = Eagle3Draft(config(), embeddings)
    assert built.embed_tokens.data_ptr() == embeddings.data_ptr()
    assert not built.embed_tokens.requires_grad
    with pytest.raises(ConfigError, match=r"embed_tokens is \[50, 9\], not \[50, 8\]"):
        Eagle3Draft(config(), torch.zeros(50, 9))


def test_halves_are_views_that_make_up_the_product() -> None:
    """The embedding comes first, as both servers join them."""
    weight = draft().midlayer.self_attn.q_proj.weight
    embedded, hidden = torch.randn(7, 8), torch.randn(7, 8)
    whole = torch.cat((embedded, hidden), -1) @ weight.T
    parts = embedded @ embedding_half(weight).T + hidden @ hidden_half(weight).T
    torch.testing.assert_close(parts, whole)
    assert embedding_half(weight).data_ptr() == weight.data_ptr()
    assert hidden_half(weight).untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    parts.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


# --- the parts --------------------------------------------------------------------------------------------------------


def test_norm_is_llamas_and_computed_in_float32() -> None:
    x = torch.randn(5, 64) * 30
    ours, theirs = RMSNorm(64, 1e-5), LlamaRMSNorm(64, 1e-5)
    weight = torch.randn(64)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    torch.testing.assert_close(ours(x), theirs(x))
    small = x.bfloat16()
    assert ours(small).dtype == torch.bfloat16
    wide = small.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(ours(small).double(), exact, rtol=2**-8, atol=0)  # rounded once, at the end
    assert ours.double()(wide).dtype == torch.float64
    torch.testing.assert_close(ours(wide), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_fuse(fc_norm: bool) -> None:
    built = draft(fc_norm=fc_norm).double()
    aux = torch.randn(3, 4, 30, dtype=torch.float64)
    parts = list(aux.split(10, dim=-1))
    if built.fc_norm is not None:
        for i, norm in enumerate(built.fc_norm):
            norm.weight.data.uniform_(0.5, 2.0)
            parts[i] = parts[i] * (parts[i].pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    torch.testing.assert_close(built.fuse(aux), torch.cat(parts, -1) @ built.fc.weight.T)


def test_embed() -> None:
    built = draft()
    built.midlayer.input_layernorm.weight.data.uniform_(0.5, 2.0)
    tokens = torch.tensor([[0, 49], [7, 7]])
    torch.testing.assert_close(built.embed(tokens), built.midlayer.input_layernorm(built.embed_tokens[tokens]))


def test_mlp_is_swiglu() -> None:
    mlp = draft().midlayer.mlp
    x = torch.randn(3, 8)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate * gate.sigmoid() * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_over_smollm2s_own_embeddings(smollm2_dir: Path) -> None:
    target = Target.load(str(smollm2_dir))
    shape = Eagle3Config.from_target(target, draft_vocab_size=256)
    built = Eagle3Draft(shape, input_embeddings(target), torch.Generator().manual_seed(0))
    embedded = built.embed(torch.tensor([2, 100, 49_151]))
    assert embedded.dtype == torch.bfloat16
    torch.testing.assert_close(embedded.float().pow(2).mean(-1), torch.ones(3), atol=0.05, rtol=0)
