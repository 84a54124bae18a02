"""The published checkpoint of a draft: config.json and model.safetensors, as SGLang and vLLM load them.

    config.json        a Llama config of one layer; draft_vocab_size, target_hidden_size, num_aux_hidden_states,
                       fc_norm, norm_output; RoPE in both spellings; layer ids as in `layer_ids`; and under "eyas" what
                       it was made with, which servers do not read
    model.safetensors  the state of `Eagle3Draft` (midlayer.* and so on), d2t int64 [Vd], t2d bool [V]; embed_tokens
                       only where the draft's are not the target's

A full vocabulary has no maps: vLLM has no place for them then, and both servers take draft ids for the target's.
Read are also `layers.0.*` and `model.*` names, the older names of fc_norm, the layout of speculators, sharded files and
pytorch_model.bin. SGLang skips a name that it does not know, and vLLM drafts wrong ids without d2t, both without a
word; here a name too many or too few is an error.
Sources: SGLang 0.5.23 and vLLM 0.32, llama_eagle3.py of each.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eyas.disk import fsync_dir
from eyas.errors import ConfigError, StoreError, first_line
from eyas.store.files import disk_errors
from eyas.target.checkpoint import Target, find_folder, read_config
from eyas.target.embeddings import input_embeddings
from eyas.target.weights import SINGLE, read_tensors, weight_map
from eyas.train import layer_ids
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.rope import RopeConfig
from eyas.train.vocab import DraftVocab, known_facts

CONFIG_FILE: Final = "config.json"
PICKLED: Final = "pytorch_model.bin"
ARCHITECTURE: Final = "LlamaForCausalLMEagle3"
SECTION: Final = "eyas"  # of config.json: what no server reads
_EMBEDDING: Final = "embed_tokens.weight"
FILES: Final = (CONFIG_FILE, "*.safetensors", "*.safetensors.index.json", PICKLED)
_DTYPES: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
#: Names by which the same tensors are known elsewhere.
_RENAMES: Final = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^layers\.0\."), "midlayer."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
_COMPUTED: Final = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # from the config, by everybody
#: Settings that change the step -> the values that change nothing.
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_hidden_layers": (1,),
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "tie_word_embeddings": (False,),
    "use_aux_hidden_state": (True,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
}


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft as published.

    Attributes:
        folder: where it was read.
        config: its shape.
        vocab: its draft vocabulary; knows its corpus if eyas made it.
        tensors: the state of `Eagle3Draft`, in the dtype stored.
        embed_tokens: [V, H] where the checkpoint has its own.
    """

    folder: Path
    config: Eagle3Config
    vocab: DraftVocab
    tensors: Mapping[str, torch.Tensor]
    embed_tokens: torch.Tensor | None = None

    @classmethod
    def load(cls, model: str | Path, target: Target, aux_layers: tuple[int, ...] | None = None) -> Self:
        """Read a checkpoint, eyas' own or a peer's: a folder or a hub id.

        Args:
            model: folder or hub id.
            target: the model it drafts for.
            aux_layers: the layers that it reads, where its config cannot be believed.

        Raises:
            ConfigError: no such checkpoint; a name or shape too many, too few or wrong; a step that is not this one;
                or it is for another target.
        """
        folder = find_folder(str(model), FILES)
        raw = read_config(folder)
        where = folder / CONFIG_FILE
        try:
            config = config_from_json(raw, target, where, aux_layers)
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # anybody may have written it
            raise ConfigError("the draft's config holds values of other types", where, first_line(error)) from error
        tensors = canonical(stored_tensors(folder), folder)
        maps = {name: tensors.pop(name, None) for name in ("d2t", "t2d", _EMBEDDING)}
        _check_tensors(config, tensors, folder)
        facts = _section(raw)
        vocab = _vocab(config, maps["d2t"], maps["t2d"], known_facts(facts.get("vocab") or {}), folder)
        known = facts.get("target")
        if known and (mine := target.fingerprint()) and known != mine:
            raise ConfigError("the draft was trained for another target", folder, f"{known} is not {mine}")
        return cls(folder, config, vocab, tensors, maps[_EMBEDDING])

    def build(self, target: Target, dtype: torch.dtype = torch.float32) -> Eagle3Draft:
        """A model with these weights, in `dtype`, over the target's embeddings.

        Raises:
            ConfigError: its own embeddings are as wide as the target's and yet differ: SGLang would draft with the
                target's and vLLM with its own. Or the target's cannot be read.
        """
        own, config = self.embed_tokens, self.config
        if own is not None and tuple(own.shape) != (config.vocab_size, config.hidden_size):
            raise ConfigError(f"{_EMBEDDING} is {list(own.shape)}", self.folder)
        if config.hidden_size != config.target_hidden_size:
            if own is None:
                raise ConfigError("a draft of another width than its target needs its own embeddings", self.folder)
            embeddings = own
        else:
            embeddings = input_embeddings(target)
            if own is not None and not torch.equal(embeddings.to(own.dtype), own):
                hint = "servers disagree on which of the two counts; remove embed_tokens from the checkpoint"
                raise ConfigError("the draft's embeddings are not the target's", self.folder, hint)
        draft = Eagle3Draft(config, embeddings).to(dtype)
        draft.embed_tokens = embeddings  # not cast with the parameters
        draft.load_state_dict({name: tensor.to(dtype) for name, tensor in self.tensors.items()})
        return draft


def save_checkpoint(
    folder: Path,
    config: Eagle3Config,
    tensors: Mapping[str, torch.Tensor],
    vocab: DraftVocab,
    target: Target,
    *,
    dtype: torch.dtype = torch.bfloat16,
    embed_tokens: torch.Tensor | None = None,
) -> None:
    """Write a checkpoint that servers load, in place of any in the folder; half of one is never loadable.

    Args:
        folder: made if it is not there.
        config: the draft's shape.
        tensors: the state of `Eagle3Draft`, whole and on any device.
        vocab: the draft vocabulary.
        target: the model it drafts for.
        dtype: of the weights.
        embed_tokens: [V, H], where the draft's are not the target's.

    Raises:
        ConfigError: tensors, vocabulary or layers do not fit.
        StoreError: the disk.
    """
    _check_tensors(config, tensors, folder)
    if (len(vocab), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
        what = f"a vocabulary of {len(vocab)} in {vocab.vocab_size} for a draft of {config.draft_vocab_size}"
        raise ConfigError(what, folder)
    if embed_tokens is None and config.hidden_size != config.target_hidden_size:
        raise ConfigError("a draft of another width than its target needs its own embeddings", folder)
    text = json.dumps(config_to_json(config, vocab, target, dtype), indent=2) + "\n"
    out = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    if embed_tokens is not None:
        out[_EMBEDDING] = embed_tokens.detach().to("cpu", dtype, copy=True).contiguous()
    if not vocab.is_full:
        out |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Without its config no checkpoint is one: the old one goes first, the new one comes last.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        note = folder / f"{CONFIG_FILE}.tmp"
        note.write_text(text, encoding="utf-8")
        part = folder / f"{SINGLE}.tmp"
        try:
            save_file(out, part, metadata={"format": "pt"})
        except SafetensorError as error:  # its own for a disk that is full, too
            part.unlink(missing_ok=True)
            raise StoreError("cannot write the checkpoint", part, first_line(error)) from error
        part.chmod(note.stat().st_mode)  # safetensors writes for the owner alone; a server may run as another user
        _publish(part, folder / SINGLE)
        _publish(note, folder / CONFIG_FILE)


def _publish(part: Path, path: Path) -> None:
    """To disk, then under its name."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    fsync_dir(path.parent)


def config_to_json(config: Eagle3Config, vocab: DraftVocab, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json holds.

    Raises:
        ConfigError: the layers cannot be named for SGLang.
    """
    family = str(target.config.get("model_type", ""))
    ends = {key: target.config[key] for key in ("bos_token_id", "eos_token_id") if key in target.config}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **config.rope.to_config(),
        **ends,
        "dtype": _DTYPES[dtype],
        "torch_dtype": _DTYPES[dtype],
        **layer_ids.to_config(config.aux_layers, target.num_layers, family),
        SECTION: {"aux_layers": list(config.aux_layers), "vocab": vocab.made_for, "target": target.fingerprint() or ""},
    }


def config_from_json(
    raw: Mapping[str, Any], target: Target, where: object = "", aux_layers: tuple[int, ...] | None = None
) -> Eagle3Config:
    """The shape that a published config describes, with the servers' defaults for what it leaves out.

    Args:
        raw: config.json, flat or in the layout of speculators.
        target: the model it drafts for.
        where: named in errors.
        aux_layers: instead of the layers it names.

    Raises:
        ConfigError: a draft of another kind or for another target, or sizes missing.
    """
    nested = raw.get("transformer_layer_config")
    layer: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    # vLLM's default where speculators' own field is missing; in flat configs it is the other way round.
    speculators = {"norm_before_residual": True} if "speculators_model_type" in raw else {}
    eagle = raw.get(layer_ids.NESTED) or {}
    _refuse_other_steps({**(layer.get("rope_parameters") or {}), **layer, **speculators, **raw, **eagle}, where)
    heads, hidden = layer.get("num_attention_heads"), layer.get("hidden_size")
    if not (heads and hidden and layer.get("intermediate_size") and layer.get("vocab_size")):
        raise ConfigError("the draft's config lacks sizes", where, "is this an EAGLE-3 draft model?")
    if layer["vocab_size"] != target.vocab_size:
        raise ConfigError(f"a draft for {layer['vocab_size']} tokens, the target has {target.vocab_size}", where)
    target_hidden = raw.get("target_hidden_size") or hidden
    if target_hidden != target.hidden_size:
        raise ConfigError(f"a draft for states of {target_hidden}, the target has {target.hidden_size}", where)
    layers = tuple(aux_layers or ())
    if not layers:
        layers = layer_ids.from_config(raw, target.num_layers, str(target.config.get("model_type", "")), where)
        trained = tuple(_section(raw).get("aux_layers") or layers)
        if trained != layers:
            what = f"trained on layers {list(trained)}, but its ids mean {list(layers)}"
            raise ConfigError(what, where, "the ids were changed by hand: publish it anew with eyas export")
    if (count := raw.get("num_aux_hidden_states")) not in (None, len(layers)):
        raise ConfigError(f"a draft of {count} layer outputs, but layers {list(layers)}", where)
    rope = RopeConfig.from_config(layer, where)
    try:
        return Eagle3Config(
            hidden_size=hidden,
            intermediate_size=layer["intermediate_size"],
            num_heads=heads,
            num_kv_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or hidden // heads,
            vocab_size=layer["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
            target_hidden_size=target_hidden,
            aux_layers=layers,
            rope=rope,
            rms_norm_eps=float(layer.get("rms_norm_eps") or 1e-6),
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            norm_output=bool(raw.get("norm_output")),
            hidden_act=layer.get("hidden_act") or "silu",
        )
    except ConfigError as error:
        raise ConfigError(error.what, where, error.hint) from error


def canonical(tensors: Mapping[str, torch.Tensor], where: object = "") -> dict[str, torch.Tensor]:
    """Tensors under the names of `Eagle3Draft`, whatever their checkpoint calls them.

    Raises:
        ConfigError: two are the same one.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, text in _RENAMES:
            new = pattern.sub(text, new)
        if _COMPUTED.search(new):
            continue
        if new in found:
            raise ConfigError(f"the checkpoint has {new} twice", where, f"the second time as {name}")
        found[new] = tensor
    return found


def expected_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the state of an `Eagle3Draft`."""
    with torch.device("meta"):
        draft = Eagle3Draft(config, torch.empty(config.vocab_size, config.hidden_size))
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def _refuse_other_steps(settings: Mapping[str, Any], where: object) -> None:
    for key, plain in _PLAIN.items():
        value = settings.get(key)
        if value is not None and value not in plain:
            raise ConfigError(f"a draft of another kind: {key} = {str(value)[:60]}", where, "it cannot be trained here")


def _check_tensors(config: Eagle3Config, tensors: Mapping[str, torch.Tensor], where: object) -> None:
    """Raises ConfigError unless every tensor is there, as it must be, and no other."""
    wanted = expected_tensors(config)
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise ConfigError(f"the checkpoint has {unknown[0]}, which no such draft has", where, ", ".join(unknown[1:8]))
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ConfigError(f"the checkpoint has no {missing[0]}", where, ", ".join(missing[1:8]))
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{name} is {list(tensors[name].shape)}, not {list(shape)}", where)
        if not tensors[name].is_floating_point() or tensors[name].element_size() < 2:
            raise ConfigError(f"{name} is {tensors[name].dtype}", where, "a draft in bf16, f16 or f32 is needed")


def _vocab(
    config: Eagle3Config,
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
    made_for: Mapping[str, Any],
    where: object,
) -> DraftVocab:
    size, whole = config.draft_vocab_size, config.vocab_size
    if d2t is None:
        if size != whole:
            hint = f"{size} of {whole} tokens without a map; servers would draft wrong ids"
            raise ConfigError("the checkpoint has no d2t", where, hint)
        return DraftVocab(torch.arange(whole), whole, **made_for)
    if tuple(d2t.shape) != (size,) or (t2d is not None and tuple(t2d.shape) != (whole,)):
        shapes = f"d2t {list(d2t.shape)}, t2d {None if t2d is None else list(t2d.shape)}"
        raise ConfigError(f"maps of other sizes than the config says: {shapes}", where, f"[{size}] and [{whole}]")
    return DraftVocab.from_maps(d2t, t2d, whole, where, **made_for)


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    section = raw.get(SECTION)
    return section if isinstance(section, Mapping) else {}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint under the name it is stored by, mapped where the format can be.

    Raises:
        ConfigError: there are none, or they cannot be read without running code.
    """
    if files := weight_map(folder):
        return dict(read_tensors(folder, files))
    path = folder / PICKLED
    if not path.is_file():
        raise ConfigError("no weights", folder, f"{SINGLE} is expected")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError("unreadable weights", path, first_line(error)) from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise ConfigError("unreadable weights", path, "not a state dict")
    return loaded
