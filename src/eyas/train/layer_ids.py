"""How published checkpoints name the target's layers that a draft reads; one set of tensors, several numberings.

Here and in a store `aux_layers` are 0-based layers whose *output* is read: [L]. In config.json

    eagle_config.eagle_aux_hidden_state_layer_ids   SGLang reads this place only, and means the output of layer k: [L].
        Its DeepSeek classes (GLM's among them) add the 1 that leads from output to next input only where the first id
        is 1, and else take the ids as inputs: [L + 1]. Its gpt_oss takes ids as inputs only if the largest is N, which
        no output has.
    eagle_aux_hidden_state_layer_ids                vLLM reads this one first (its new model runner: alone), and means
        the state after k layers: [L + 1].

Left out, both take the inputs of layers 2, N // 2 and N - 3: the outputs 1, N // 2 - 1 and N - 4; but SGLang's
MiniMax-M3 takes one further, so that for it ids are always written.
Sources: SGLang 0.5.23 `set_eagle3_layers_to_capture` of each model and spec_aux_hidden_state.py; vLLM 0.32
gpu_model_runner.py, eagle3_utils.py, interfaces.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from eyas.capture.contract import default_layers
from eyas.errors import ConfigError

KEY: Final = "eagle_aux_hidden_state_layer_ids"
NESTED: Final = "eagle_config"
#: `model_type`s whose SGLang class adds 1 only where the first id is 1.
_ADDS_TO_ONE: Final = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
_DEFAULTS_TO_OUTPUTS: Final = ("minimax_m3", "minimax_m3_vl")  # SGLang adds 1 to its default there
_MIN_LAYERS: Final = 7  # below, the default layers collide


def sglang_ids(layers: Sequence[int], family: str) -> list[int]:
    """`aux_layers` as SGLang reads them for a target of this `model_type`.

    Raises:
        ConfigError: no ids mean these layers there.
    """
    if family not in _ADDS_TO_ONE or layers[0] == 1:
        return list(layers)
    if layers[0] == 0:
        hint = "SGLang takes ids that begin with 1 for outputs, for this family; capture other layers"
        raise ConfigError("no layer ids say that layer 0's output is read", f"{family}, layers {list(layers)}", hint)
    return [layer + 1 for layer in layers]


def layers_of_sglang(ids: Sequence[int], family: str, num_layers: int) -> list[int]:
    """`aux_layers` that SGLang reads these ids as."""
    inputs = (family in _ADDS_TO_ONE and ids[0] != 1) or (family == "gpt_oss" and max(ids) == num_layers)
    return [layer - 1 for layer in ids] if inputs else list(ids)


def default_of_servers(num_layers: int, family: str) -> tuple[int, ...] | None:
    """`aux_layers` that SGLang (vLLM: with an empty family) reads where no ids are named; None where they collide."""
    if num_layers < _MIN_LAYERS:
        return None
    further = family in _DEFAULTS_TO_OUTPUTS
    return tuple(layer + further for layer in default_layers(num_layers))


def to_config(layers: Sequence[int], num_layers: int, family: str) -> dict[str, Any]:
    """Keys of config.json for both servers; no ids where their default is meant.

    Raises:
        ConfigError: as `sglang_ids`.
    """
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if tuple(layers) == default_of_servers(num_layers, "") == default_of_servers(num_layers, family):
        return {NESTED: nested}
    return {NESTED: nested | {KEY: sglang_ids(layers, family)}, KEY: [layer + 1 for layer in layers]}


def from_config(config: Mapping[str, Any], num_layers: int, family: str, where: object = "") -> tuple[int, ...]:
    """`aux_layers` that a published config means.

    Raises:
        ConfigError: the two places mean different layers, or none is named and the target is too small for a default.
    """
    nested = (config.get(NESTED) or {}).get(KEY)
    top = config.get(KEY)
    found = [
        *([tuple(layers_of_sglang(nested, family, num_layers))] if nested else []),
        *([tuple(layer - 1 for layer in top)] if top else []),
    ]
    hint = "name the layers whose outputs it was trained on: train.draft.aux_layers"
    if len(set(found)) > 1:
        what = f"SGLang would read layers {list(found[0])} for this draft, and vLLM {list(found[1])}"
        raise ConfigError(what, where, hint)
    if found:
        return found[0]
    try:
        return default_layers(num_layers)
    except ValueError as error:
        raise ConfigError(str(error), where, hint) from error
