"""What SGLang and vLLM make of a draft's config.json and of the names of its tensors, by the rules of their loaders.

Neither says much: SGLang passes over a name that it does not know, and both leave a parameter that no tensor reaches
as memory came. So their rules are written down here, and a checkpoint is held against them before a server is.

    SGLang   `midlayer` -> `layers.0`, `aux_norm_*` -> `fc_norm.*`; then NAME or model.NAME, else skipped. d2t alone
             makes it translate draft ids. Reads `eagle_config` for layer ids.
    vLLM     d2t -> draft_id_to_target_id, a parameter only where the two vocabularies differ in size; anything but
             lm_head gets `model.` before it, `midlayer.` -> `layers.0.`; a name without a parameter is an error, but
             for `.bias`. Reads the top level for layer ids; its older runner `eagle_config` where that has none.

Both keep layers as a set and hand their states on in ascending order, whatever order the ids are in.
Of the files in a folder both read those of the first kind that is there: *.safetensors (where there is an index, those
that it names), *.bin, *.pt.
Sources: llama_eagle3.py, spec_aux_hidden_state.py, loader.py and weight_utils.py of SGLang 0.5.17 and 0.5.23;
llama_eagle3.py, models/utils.py, interfaces.py, gpu_model_runner.py, eagle3_utils.py, default_loader.py and
weight_utils.py of vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from eyas.export.launch import Engine
from eyas.target.weights import INDEX, weight_map
from eyas.train.checkpoint_format import ARCHITECTURE
from eyas.train.layer_ids import KEY, NESTED, default_of_servers, layers_of_sglang

TITLES: Final[Mapping[Engine, str]] = {"sglang": "SGLang", "vllm": "vLLM"}
#: Releases whose loaders these rules were read from and tried with.
TESTED: Final[Mapping[Engine, str]] = {"sglang": "0.5.17 and 0.5.23", "vllm": "0.32"}

_COMPUTED: Final = re.compile(r"rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)")
_LEGACY: Final = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
_KINDS: Final = (".safetensors", ".bin", ".pt")
_NO_WEIGHTS: Final = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_CONSOLIDATED: Final = "consolidated"  # Mistral's files
_OLD_RUNNER, _NEW_RUNNER = "vLLM", "vLLM's new model runner"


def weight_files(engine: Engine, folder: Path) -> set[str]:
    """Files of a folder that an engine reads as weights, by `--load-format auto`.

    Args:
        engine: whose rules.
        folder: the checkpoint's.

    Raises:
        ConfigError: an unreadable index.
    """
    names = {path.name for path in folder.iterdir()}
    kind = next((kind for kind in _KINDS if any(name.endswith(kind) for name in names)), "")
    found = {name for name in names if kind and name.endswith(kind)}
    if kind != _KINDS[0]:
        return {name for name in found if not name.endswith(_NO_WEIGHTS)}
    consolidated = {name for name in found if name.startswith(_CONSOLIDATED)}
    if engine == "vllm" and consolidated:
        return consolidated
    if INDEX in names:
        return found & set(weight_map(folder).values())
    if engine == "sglang" and len(found) == 2 and consolidated == {f"{_CONSOLIDATED}.safetensors"}:
        return {name for name in found - consolidated if name.endswith("model.safetensors")} or found
    return found


@dataclass(slots=True)
class Loaded:
    """What a loader does with the tensors of a checkpoint.

    Attributes:
        missing: parameters, as a checkpoint names them, that no tensor reaches: they hold whatever memory held.
        skipped: tensors that are passed over without a word.
        refused: tensors that the server ends over.
    """

    missing: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def loads(engine: Engine, config: Mapping[str, Any], names: Iterable[str]) -> Loaded:
    """What an engine's loader does with tensors of these names under this config.

    Args:
        engine: whose rules.
        config: config.json, flat.
        names: of the checkpoint's tensors.
    """
    wanted, result = _parameters(engine, config), Loaded()
    optional, reached = {"embed_tokens.weight"}, set[str]()
    place = _place_in_sglang if engine == "sglang" else _place_in_vllm
    for name in names:
        if "t2d" in name or _COMPUTED.search(name):
            continue
        at = place(name)
        if at in wanted | optional:
            reached.add(at)
        elif engine == "sglang" or name.endswith(".bias"):
            result.skipped.append(name)
        else:
            result.refused.append(name)
    result.missing = sorted(wanted - reached)
    return result


def _parameters(engine: Engine, config: Mapping[str, Any]) -> set[str]:
    """Parameters, and maps, that a checkpoint must fill, with the layer as layers.0."""
    layer = "layers.0."
    names = {f"{layer}self_attn.{part}_proj.weight" for part in ("q", "k", "v", "o")}
    names |= {f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    names |= {f"{layer}{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    names |= {"fc.weight", "norm.weight", "lm_head.weight"}
    if config.get("fc_norm") or (engine == "sglang" and config.get("use_aux_norm")):
        names |= {f"fc_norm.{i}.weight" for i in range(_num_aux(config))}
    if config.get("draft_vocab_size") not in (None, config.get("vocab_size")):
        names.add("d2t")
    return names


def _num_aux(config: Mapping[str, Any]) -> int:
    said = config.get("num_aux_hidden_states")
    return int(said) if said is not None else len((config.get(NESTED) or {}).get(KEY) or (0, 0, 0))


def _place_in_sglang(name: str) -> str:
    for old, new in _LEGACY.items():
        name = name.replace(old, new)
    if "d2t" in name:
        return "d2t"
    return name if "lm_head" in name else name.removeprefix("model.")


def _place_in_vllm(name: str) -> str:
    if "d2t" in name:
        return name  # only where it is the whole name is there such a parameter
    return name if "lm_head" in name else name.replace("midlayer.", "layers.0.")


def shape_faults(engine: Engine, config: Mapping[str, Any]) -> list[str]:
    """Keys of a flat config.json by which this engine would build another model than is meant, or none."""
    title, faults = TITLES[engine], []
    classes = config.get("architectures")
    if classes != [ARCHITECTURE]:
        faults.append(f"architectures is {classes}: {title} finds the draft model by [{ARCHITECTURE}]")
    if config.get("draft_vocab_size") is None:
        faults.append(f"no draft_vocab_size: {title} would take the target's vocabulary")
    if config.get("tie_word_embeddings") is not False:
        faults.append(f"tie_word_embeddings is not false: {title} would use the embeddings for lm_head")
    if config.get("num_hidden_layers") != 1:
        faults.append(f"num_hidden_layers is {config.get('num_hidden_layers')}: {title} would build so many")
    return faults


def layers_read(
    engine: Engine, config: Mapping[str, Any], num_layers: int, family: str
) -> Mapping[str, tuple[int, ...] | None]:
    """Layers whose outputs an engine hands to this draft, by each of its ways to read the config.

    Args:
        engine: whose rules.
        config: config.json.
        num_layers: decoder layers of the target.
        family: the target's `model_type`.

    Returns:
        Name of the reader -> 0-based layers, ascending as their states are concatenated; None where the config names
        none and the target is too small for the default.
    """
    nested, top = (config.get(NESTED) or {}).get(KEY), config.get(KEY)
    default = default_of_servers(num_layers, family if engine == "sglang" else "")
    if engine == "sglang":
        return {"SGLang": _ascending(layers_of_sglang(nested, family, num_layers)) if nested else default}
    after = top or nested
    return {
        _OLD_RUNNER: _ascending([layer - 1 for layer in after]) if after else default,
        _NEW_RUNNER: _ascending([layer - 1 for layer in top]) if top else default,
    }


def _ascending(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(layers)))


def named_ids(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Place in config.json -> the layer ids written there."""
    nested, top = (config.get(NESTED) or {}).get(KEY), config.get(KEY)
    return {place: list(ids) for place, ids in ((f"{NESTED}.{KEY}", nested), (KEY, top)) if ids}
