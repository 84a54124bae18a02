"""Layer ids in published configs, against what each server makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from eyas.errors import ConfigError
from eyas.train import layer_ids
from eyas.train.layer_ids import KEY, NESTED

N = 12
FAMILIES = ["llama", "qwen3", "gpt_oss", "deepseek_v3", "kimi_k2", "glm4_moe_lite"]
LAYERS = [layers for layers in itertools.combinations(range(N), 3) if layers[0] < 3]


def sglang(config: dict[str, Any], family: str) -> list[int]:
    """Layers whose *input* SGLang 0.5.23 captures; written after `set_eagle3_layers_to_capture` of its models."""
    ids = config.get(NESTED, {}).get(KEY)
    if ids is None:
        return [2, N // 2, N - 3]
    if family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite"):
        return [i + 1 for i in ids] if ids[0] == 1 else list(ids)
    if family == "gpt_oss" and max(ids) == N:
        return list(ids)
    return [i + 1 for i in ids]


def vllm(config: dict[str, Any], new_runner: bool) -> list[int]:
    """Layers before which vLLM takes the state: after k layers. Its new runner looks at the top level only."""
    ids = config.get(KEY)
    if not ids and not new_runner:
        ids = config.get(NESTED, {}).get(KEY)
    return list(ids) if ids else [2, N // 2, N - 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_server_reads_what_was_captured(family: str) -> None:
    """And so do we, for all layers and families; what cannot be said is refused."""
    refused = []
    for layers in LAYERS:
        try:
            config = layer_ids.to_config(layers, N, family)
        except ConfigError:
            refused.append(layers)
            continue
        inputs = [layer + 1 for layer in layers]
        assert sglang(config, family) == inputs, layers
        assert vllm(config, new_runner=False) == inputs, layers
        assert vllm(config, new_runner=True) == inputs, layers
        assert layer_ids.from_config(config, N, family) == layers
    adds = family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
    assert refused == ([layers for layers in LAYERS if layers[0] == 0] if adds else [])


def test_the_default_is_left_out() -> None:
    assert layer_ids.to_config((1, 5, 8), N, "llama") == {NESTED: {"use_aux_hidden_state": True}}
    assert layer_ids.from_config({}, N, "llama") == (1, 5, 8)


def test_a_small_target_has_no_default_to_leave_out() -> None:
    assert layer_ids.to_config((0, 1, 2), 4, "llama")[KEY] == [1, 2, 3]
    with pytest.raises(ConfigError, match="name them") as error:
        layer_ids.from_config({}, 4, "llama", "x/config.json")
    assert error.value.where == "x/config.json"


@pytest.mark.parametrize(
    ("config", "family", "layers"),
    [
        ({NESTED: {KEY: [1, 5, 8]}}, "llama", (1, 5, 8)),  # SpecForge's
        ({NESTED: {KEY: [2, 6, 9]}}, "deepseek_v3", (1, 5, 8)),
        ({NESTED: {KEY: [1, 5, 8]}}, "deepseek_v3", (1, 5, 8)),
        ({NESTED: {KEY: [4, 8, 12]}}, "gpt_oss", (3, 7, 11)),
        ({NESTED: {KEY: [3, 7, 11]}}, "gpt_oss", (3, 7, 11)),
        ({KEY: [2, 6, 9]}, "llama", (1, 5, 8)),  # speculators'
        ({KEY: None, NESTED: None}, "llama", (1, 5, 8)),
    ],
)
def test_peers_configs(config: dict[str, Any], family: str, layers: tuple[int, ...]) -> None:
    assert layer_ids.from_config(config, N, family) == layers


def test_two_places_that_mean_different_layers_are_refused() -> None:
    config = {NESTED: {KEY: [2, 6, 9]}, KEY: [2, 6, 9]}
    assert layer_ids.from_config(config, N, "deepseek_v3") == (1, 5, 8)
    with pytest.raises(ConfigError, match=r"SGLang would read layers \[2, 6, 9\] for this draft, and vLLM \[1, 5, 8\]"):
        layer_ids.from_config(config, N, "llama")
