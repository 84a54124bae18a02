"""RoPE of the draft layer against transformers' own rotary module, and what is taken over from a target's config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.errors import ConfigError
from eyas.train.rope import Rope, RopeConfig, rotate

HEAD_DIM = 16
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, attention": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "attention_factor": 1.2,
    },
}
THETA = 50_000.0


def new_spelling(variant: str) -> dict[str, Any]:
    parameters = VARIANTS[variant] | {"rope_theta": THETA}
    return {"max_position_embeddings": 256, "rope_parameters": parameters}


def old_spelling(variant: str) -> dict[str, Any]:
    scaling = dict(VARIANTS[variant])
    scaling["type"] = scaling.pop("rope_type")
    return {"max_position_embeddings": 256, "rope_theta": THETA, "rope_scaling": scaling}


def reference(config: dict[str, Any]) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "head_dim": HEAD_DIM}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, **config))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("spelling", [new_spelling, old_spelling], ids=["rope_parameters", "rope_theta"])
@pytest.mark.parametrize("k", [0, 6])
def test_cosines_and_sines_are_transformers(variant: str, spelling: Any, k: int) -> None:
    config = spelling(variant)
    rope = Rope(RopeConfig.from_config(config), HEAD_DIM)
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 100, 7, 7, 249])
    expected_cos, expected_sin = reference(config)(torch.zeros(1), positions[None] + k)
    cos, sin = rope(positions + k)
    assert cos.shape == sin.shape == (10, HEAD_DIM // 2)
    torch.testing.assert_close(torch.cat((cos, cos), -1), expected_cos[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat((sin, sin), -1), expected_sin[0], rtol=0, atol=0)


def test_the_variants_differ() -> None:
    """Or else equality with transformers would say little."""
    found = {
        variant: Rope(RopeConfig.from_config(new_spelling(variant)), HEAD_DIM)(torch.tensor(50))[0]
        for variant in VARIANTS
        if variant != "dynamic"  # the same as the default within its length
    }
    values = list(found.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


@pytest.mark.parametrize("longest", [257, 1000])
def test_dynamic_beyond_its_length(longest: int) -> None:
    config = new_spelling("dynamic")
    positions = torch.arange(longest)
    expected, _ = reference(config)(torch.zeros(1), positions[None])
    cos, _ = Rope(RopeConfig.from_config(config), HEAD_DIM, longest)(positions)
    torch.testing.assert_close(torch.cat((cos, cos), -1), expected[0], rtol=0, atol=1e-5)
    assert not torch.equal(cos, Rope(RopeConfig.from_config(config), HEAD_DIM)(positions)[0])


def test_any_shape_of_positions() -> None:
    rope = Rope(RopeConfig(), HEAD_DIM)
    positions = torch.arange(12).view(3, 4)
    cos, sin = rope(positions)
    assert cos.shape == sin.shape == (3, 4, HEAD_DIM // 2)
    assert torch.equal(cos[2, 1], rope(torch.tensor(9))[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_are_rotated_as_llamas(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(), HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, HEAD_DIM, generator=generator, dtype=torch.float64) for heads in (4, 2))
    cos, sin = rope(torch.tensor([0, 3, 1, 900, 4]))
    wide_cos, wide_sin = (torch.cat((part, part), -1).double() for part in (cos, sin))
    expected = apply_rotary_pos_emb(q, k, wide_cos, wide_sin, unsqueeze_dim=1)
    for x, wanted in zip((q, k), expected, strict=True):
        turned = rotate(x.to(dtype), cos, sin)
        assert turned.dtype == dtype
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(turned.double(), wanted, rtol=tolerance, atol=tolerance)


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(RopeConfig(theta=100.0), HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, HEAD_DIM, generator=generator), torch.randn(1, 1, HEAD_DIM, generator=generator)

    def score(at: int, to: int) -> torch.Tensor:
        return (rotate(q, *rope(torch.tensor([at]))) * rotate(k, *rope(torch.tensor([to])))).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101))
    assert abs(float(score(3, 1) - score(3, 2))) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_frequencies_stay_as_they_are_when_a_model_is_cast(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(), HEAD_DIM)
    before = rope.inv_freq.clone()
    torch.nn.Sequential(rope, torch.nn.Linear(2, 2)).to(dtype)
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, before)


def test_frequencies_survive_being_built_without_memory() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Rope(RopeConfig(), HEAD_DIM), torch.nn.Linear(2, 2))
    model.to_empty(device="cpu")
    assert torch.equal(model[0].inv_freq, Rope(RopeConfig(), HEAD_DIM).inv_freq)
    assert "0.inv_freq" not in model.state_dict()


# --- what is taken over from configs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig("default", 10_000.0, 2048)),
        ({"rope_theta": 5e5, "max_position_embeddings": 99}, RopeConfig("default", 5e5, 99)),
        # Newer files may repeat theta beside the parameters, which go first.
        ({"rope_theta": 1.5, "rope_parameters": {"rope_theta": 7e4}}, RopeConfig("default", 7e4)),
        ({"rope_theta": 7e4, "rope_parameters": {"rope_type": "default"}}, RopeConfig("default", 7e4)),
        # Qwen2-VL: sections of images have no meaning for text.
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6}, RopeConfig(theta=1e6)),
        # Phi, GLM: a part of each head; a draft layer turns it whole.
        ({"partial_rotary_factor": 0.5, "rope_theta": 1e6}, RopeConfig(theta=1e6)),
        # Gemma 3 as transformers saves it.
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
            RopeConfig("linear", 1e6, options={"factor": 8.0}),
        ),
        # The original length may be left out, or stand outside.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 512},
            RopeConfig("yarn", 1e4, 512, {"factor": 2.0, "original_max_position_embeddings": 512}),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 128},
            RopeConfig("yarn", 1e4, 2048, {"factor": 2.0, "original_max_position_embeddings": 128}),
        ),
    ],
)
def test_a_targets_config_in_whatever_spelling(config: dict[str, Any], expected: RopeConfig) -> None:
    assert RopeConfig.from_config(config) == expected


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        ({"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, "no RoPE of kind 'longrope'"),
        ({"rope_type": "linear"}, "needs factor"),
        ({**LLAMA3, "low_freq_factor": None}, "needs low_freq_factor"),
        ({"rope_theta": 0.5}, "theta 0.5"),
    ],
)
def test_what_a_draft_cannot_have_is_refused(scaling: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        RopeConfig.from_config({"rope_parameters": scaling}, "some/config.json")
    assert error.value.where == "some/config.json"


def test_an_override_is_read_to_the_letter() -> None:
    target = {"max_position_embeddings": 777}
    assert RopeConfig.from_override({"rope_theta": 1e6}, target) == RopeConfig("default", 1e6, 777)
    found = RopeConfig.from_override({"rope_type": "linear", "factor": 2.0, "max_position_embeddings": 5}, target)
    assert found == RopeConfig("linear", 1e4, 5, {"factor": 2.0})
    with pytest.raises(ConfigError, match="has no option fcator"):
        RopeConfig.from_override({"rope_type": "linear", "factor": 2.0, "fcator": 3.0}, target)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_means_the_same_in_both_spellings(variant: str) -> None:
    """Read by transformers and by ourselves; `rope_parameters` alone is what new readers look at."""
    config = RopeConfig.from_config(new_spelling(variant))
    written = config.to_config()
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: written[key] for key in ("max_position_embeddings", "rope_parameters")}
    positions = torch.arange(200)
    expected = Rope(config, HEAD_DIM)(positions)
    for spelled in (written, old, new):
        assert RopeConfig.from_config(spelled) == config
        cos, sin = reference(spelled)(torch.zeros(1), positions[None])
        assert torch.equal(cos[0, :, : HEAD_DIM // 2], expected[0])
        assert torch.equal(sin[0, :, : HEAD_DIM // 2], expected[1])


def test_sglang_reads_the_attention_factor_under_another_name() -> None:
    """YaRNScalingRotaryEmbedding there: (0.1 ln factor + 1) * attn_factor."""
    config = RopeConfig.from_config(new_spelling("yarn, attention"))
    by_factor = Rope(RopeConfig("yarn", options={"factor": 32.0, "original_max_position_embeddings": 64}), 16).factor
    assert by_factor == pytest.approx(1.34657, abs=1e-5)
    assert config.to_config()["rope_parameters"]["attn_factor"] * by_factor == pytest.approx(1.2)
    assert "attn_factor" not in RopeConfig.from_config(new_spelling("yarn")).to_config()["rope_parameters"]


def test_dynamic_is_not_what_two_servers_agree_on() -> None:
    config = RopeConfig.from_config(new_spelling("dynamic"))
    assert config.portable() == RopeConfig("default", THETA, 256)
    others = [RopeConfig.from_config(new_spelling(variant)) for variant in VARIANTS if variant != "dynamic"]
    assert [other.portable() for other in others] == others
