"""The loaders' rules: which names each server finds, misses, skips and ends over; which layers it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ConfigError
from eyas.export.engines import layers_read, loads, shape_faults, weight_files
from eyas.export.launch import Drafting, Engine, draft_flags
from eyas.train.layer_ids import KEY, NESTED

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 300,
    "draft_vocab_size": 64,
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
    "num_aux_hidden_states": 3,
}
LAYER = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"),
]
OUTSIDE = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
NAMES = [*(f"midlayer.{name}" for name in LAYER), *OUTSIDE]


def outcome(names: list[str], **changes: Any) -> list[tuple[list[str], list[str], list[str]]]:
    """(missing, skipped, refused) of SGLang and of vLLM."""
    found = [loads(engine, CONFIG | changes, names) for engine in ("sglang", "vllm")]
    return [(one.missing, one.skipped, one.refused) for one in found]


FINE: tuple[list[str], list[str], list[str]] = ([], [], [])


def test_names_that_both_take() -> None:
    assert outcome(NAMES) == [FINE, FINE]
    assert outcome([name.replace("midlayer", "layers.0") for name in NAMES]) == [FINE, FINE]
    assert outcome([*NAMES, "embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq"]) == [FINE, FINE]
    assert outcome(NAMES[:-2], draft_vocab_size=300) == [FINE, FINE]


def test_names_that_one_takes() -> None:
    with_prefix = [f"model.{name}" if name.startswith("midlayer") else name for name in NAMES]
    sglang, vllm = outcome(with_prefix)
    assert sglang == FINE
    assert len(vllm[0]) == len(vllm[2]) == len(LAYER)
    norms = [*NAMES, *(f"aux_norm_{at}.weight" for at in ("low", "mid", "high"))]
    sglang, vllm = outcome(norms, fc_norm=True)
    assert sglang == FINE
    assert vllm[0] == [f"fc_norm.{i}.weight" for i in range(3)]
    # The older key builds these norms in SGLang alone.
    sglang, vllm = outcome([*NAMES, *(f"fc_norm.{i}.weight" for i in range(3))], use_aux_norm=True)
    assert (sglang, len(vllm[2])) == (FINE, 3)


def test_a_lost_rename() -> None:
    """SGLang serves it at 0 %, without a word."""
    sglang, vllm = outcome([name.replace("midlayer", "mid_layer") for name in NAMES])
    assert (len(sglang[0]), len(sglang[1]), sglang[2]) == (len(LAYER), len(LAYER), [])
    assert (len(vllm[0]), vllm[1], len(vllm[2])) == (len(LAYER), [], len(LAYER))


def test_maps() -> None:
    assert [one[0] for one in outcome(NAMES[:-2])] == [["d2t"], ["d2t"]]
    biased = [*NAMES, "midlayer.self_attn.o_proj.bias"]
    assert [one[1] for one in outcome(biased)] == [["midlayer.self_attn.o_proj.bias"]] * 2
    assert outcome([*NAMES[:-2], "model.d2t"])[0] == FINE
    assert outcome([*NAMES[:-2], "model.d2t"])[1] == (["d2t"], [], ["model.d2t"])


def test_configs_that_build_another_model() -> None:
    assert shape_faults("sglang", CONFIG) == shape_faults("vllm", CONFIG) == []
    for change in (
        {"architectures": ["LlamaForCausalLM"]},
        {"draft_vocab_size": None},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 2},
    ):
        assert len(shape_faults("sglang", CONFIG | change)) == 1


@pytest.mark.parametrize(
    ("config", "family", "sglang", "old", "new"),
    [
        ({}, "llama", (1, 5, 8), (1, 5, 8), (1, 5, 8)),
        ({}, "minimax_m3_vl", (2, 6, 9), (1, 5, 8), (1, 5, 8)),
        ({NESTED: {KEY: [2, 6, 9]}, KEY: [3, 7, 10]}, "llama", (2, 6, 9), (2, 6, 9), (2, 6, 9)),
        ({NESTED: {KEY: [2, 6, 9]}}, "llama", (2, 6, 9), (1, 5, 8), (1, 5, 8)),  # SpecForge's: vLLM is one off
        ({NESTED: {KEY: [2, 4, 9]}}, "llama", (2, 4, 9), (1, 3, 8), (1, 5, 8)),  # and its new runner elsewhere
        ({KEY: [3, 7, 10]}, "llama", (1, 5, 8), (2, 6, 9), (2, 6, 9)),
        ({NESTED: {KEY: [9, 6, 2]}, KEY: [10, 7, 3]}, "llama", (2, 6, 9), (2, 6, 9), (2, 6, 9)),
        ({NESTED: {KEY: [3, 7, 10]}, KEY: [3, 7, 10]}, "deepseek_v3", (2, 6, 9), (2, 6, 9), (2, 6, 9)),
        ({NESTED: {KEY: [1, 5, 8]}, KEY: [2, 6, 9]}, "deepseek_v3", (1, 5, 8), (1, 5, 8), (1, 5, 8)),
        ({NESTED: {KEY: [4, 8, 12]}, KEY: [4, 8, 12]}, "gpt_oss", (3, 7, 11), (3, 7, 11), (3, 7, 11)),
    ],
)
def test_layers_that_are_read(
    config: dict[str, Any], family: str, sglang: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> None:
    assert list(layers_read("sglang", config, 12, family).values()) == [sglang]
    assert list(layers_read("vllm", config, 12, family).values()) == [old, new]


def test_a_small_target_has_no_default() -> None:
    assert list(layers_read("sglang", {}, 4, "llama").values()) == [None]


# --- the files --------------------------------------------------------------------------------------------------------

INDEXED = ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors")


@pytest.mark.parametrize(
    ("files", "sglang", "vllm"),
    [
        (("model.safetensors", "config.json", "a.txt"), {"model.safetensors"}, {"model.safetensors"}),
        (("model.safetensors", "b.safetensors"), {"model.safetensors", "b.safetensors"}, None),
        (("model.safetensors", "pytorch_model.bin", "a.pt"), {"model.safetensors"}, None),
        ((*INDEXED, "backup.safetensors", "a.bin"), {"model-1.safetensors", "model-2.safetensors"}, None),
        (("pytorch_model.bin", "training_args.bin", "optimizer.bin", "a.pt"), {"pytorch_model.bin"}, None),
        (("model.pt", "optimizer.pt", "scheduler.pt", "scaler.pt"), {"model.pt"}, None),
        (("model.safetensors", "consolidated.safetensors"), {"model.safetensors"}, {"consolidated.safetensors"}),
        (("config.json",), set(), None),
    ],
)
def test_files_that_are_read(files: tuple[str, ...], sglang: set[str], vllm: set[str] | None, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    if INDEXED[0] in files:
        (tmp_path / INDEXED[0]).write_text(json.dumps({"weight_map": shards}))
    assert weight_files("sglang", tmp_path) == sglang
    assert weight_files("vllm", tmp_path) == (sglang if vllm is None else vllm)


# --- the flags --------------------------------------------------------------------------------------------------------


def test_flags_of_chains() -> None:
    assert draft_flags("sglang", "D", Drafting()) == (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "D"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    )
    said = '{"method": "eagle3", "model": "D", "num_speculative_tokens": 5}'
    assert draft_flags("vllm", "D", Drafting(5)) == ("--speculative-config", said)


def test_flags_of_trees() -> None:
    assert draft_flags("sglang", "D", Drafting(3, 4))[-1] == "13"
    assert draft_flags("sglang", "D", Drafting(3, 4, 16))[-1] == "16"
    assert draft_flags("sglang", "D", Drafting(3, 2))[-1] == "11"  # the whole tree: 1 + 2 + 4 + 4
    with pytest.raises(ConfigError, match="vLLM drafts chains"):
        draft_flags("vllm", "D", Drafting(3, 4))
    with pytest.raises(ConfigError, match="more than there are"):
        draft_flags("sglang", "D", Drafting(2, 2, 8))


@pytest.mark.parametrize("steps", range(1, 17))
@pytest.mark.parametrize("topk", [1, 2, 3, 32])
def test_the_default_number_of_tokens_is_never_refused(steps: int, topk: int) -> None:
    assert draft_flags("sglang", "D", Drafting(steps, topk))[-1] == str(Drafting(steps, topk).verified)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_chain_has_its_own_number_of_tokens(engine: Engine) -> None:
    """Another one would be passed over without a word."""
    assert draft_flags(engine, "D", Drafting(3, 1, 4)) == draft_flags(engine, "D", Drafting(3))
    for tokens in (2, 3, 5, 16):
        with pytest.raises(ConfigError, match=f"a chain of 3 steps verifies 4 tokens, not {tokens}"):
            draft_flags(engine, "D", Drafting(3, 1, tokens))
