"""The target seen from its checkpoint, without loading it: architecture, default layers, fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig, PreTrainedConfig

from eyas.capture.contract import CaptureSpec, default_layers
from eyas.capture.fingerprint import ARCHITECTURE_FIELDS, architecture_of, model_fingerprint, norm_key
from eyas.disk import is_folder_there
from eyas.errors import ConfigError, first_line
from eyas.target.weights import missing_files, read_tensors, weight_map

_TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config")  # where multimodal wrappers keep the decoder
_EXPERTS: Final = ("n_routed_experts", "num_local_experts", "num_experts")  # config keys of models with a router
_SMALL_FILES: Final = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


@dataclass(frozen=True, slots=True)
class Target:
    """A target model's checkpoint.

    Attributes:
        model: what the user named: a folder or a hub id.
        dir: its folder.
        config: the text decoder's config.
        architecture: the fingerprinted fields of it.
        trust_remote_code: whether code that ships with the checkpoint may run.
    """

    model: str
    dir: Path
    config: Mapping[str, Any]
    architecture: Mapping[str, int]
    trust_remote_code: bool = False

    @classmethod
    def load(cls, model: str, *, trust_remote_code: bool = False, weights: bool = True) -> Target:
        """Find a checkpoint: a local folder, else a hub id, which is downloaded (or found in the hub's cache).

        Args:
            model: folder or hub id.
            trust_remote_code: allow the config's own code to run.
            weights: False downloads config and tokenizer of a hub id only; cached weights are still used.

        Raises:
            ConfigError: no such folder or hub id, or no usable config.json in it.
        """
        folder = find_folder(model, [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES)
        config, architecture = _text_config(folder, trust_remote_code)
        if missing := [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if architecture[key] < 1]:
            raise ConfigError(f"the config has no {missing[0]}", folder / "config.json", "is this a decoder model?")
        return cls(model, folder, config, architecture, trust_remote_code)

    @property
    def hidden_size(self) -> int:
        return self.architecture["hidden_size"]

    @property
    def num_layers(self) -> int:
        return self.architecture["num_hidden_layers"]

    @property
    def vocab_size(self) -> int:
        return self.architecture["vocab_size"]

    @property
    def is_hub_model(self) -> bool:
        """Whether the user named a hub id, whose files lie in the hub's cache."""
        return not is_folder_there(Path(self.model))

    @property
    def is_routed(self) -> bool:
        """Whether a router picks experts."""
        return any(self.config.get(key) for key in _EXPERTS)

    def fingerprint(self) -> str | None:
        """`model_fingerprint` of the checkpoint, reading its norm tensors only; None without safetensors.

        Raises:
            ConfigError: unreadable or incomplete weights.
        """
        if not (known := self.weight_map()):
            return None
        files = {name: file for name, file in known.items() if norm_key(name, self.num_layers)}
        if files and len(missing_files(self.dir, files.values())) == len(set(files.values())):
            return None
        return model_fingerprint(self.architecture, norm_bytes(read_tensors(self.dir, files), self.num_layers))

    def has_all_norms(self) -> bool:
        """Whether every file that `fingerprint` reads is here; a folder may hold but some shards of a large model."""
        files = [file for name, file in self.weight_map().items() if norm_key(name, self.num_layers)]
        return bool(files) and not missing_files(self.dir, files)

    def architectures(self) -> list[str]:
        """The class names that config.json gives, as a server reports them."""
        return [str(name) for name in read_config(self.dir).get("architectures") or ()]

    def text_config(self) -> PreTrainedConfig | None:
        """The text decoder's config as transformers understands it, defaults of its class included.

        None where transformers knows neither the model's type nor the architecture that the text section names.
        """
        try:
            config = AutoConfig.from_pretrained(self.dir, trust_remote_code=self.trust_remote_code)
            return config.get_text_config(decoder=True)
        except (OSError, ValueError, KeyError, AttributeError, ImportError):
            pass
        # A wrapper with code of its own (Kimi-K2.5) may hold a decoder that transformers has.
        for name in self.config.get("architectures") or ():
            kind = getattr(getattr(transformers, str(name), None), "config_class", None)
            if kind is not None:
                return kind.from_dict(dict(self.config))
        return None

    def full_config(self) -> Mapping[str, Any]:
        """`config` with the defaults of its class filled in, where transformers knows it."""
        known = self.text_config()
        return self.config if known is None else {**known.to_dict(), **self.config}

    def tie_flags(self) -> list[bool]:
        """Whether `lm_head` is tied to the embedding: the text config's word and the wrapper's, else their class's."""
        raw = read_config(self.dir)
        flags = [section["tie_word_embeddings"] for section in _sections(raw) if "tie_word_embeddings" in section]
        if not flags and (known := self.text_config()) is not None:
            flags = [known.tie_word_embeddings]
        return [bool(flag) for flag in flags]

    def weight_map(self) -> dict[str, str]:
        """Tensor name -> the safetensors file that holds it; empty where the folder has no such weights.

        Raises:
            ConfigError: an unreadable index or file.
        """
        return weight_map(self.dir)

    def tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors of the checkpoint by name, in the dtype they are stored in.

        Raises:
            ConfigError: no such tensor, or its file is missing or unreadable.
        """
        known = self.weight_map()
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"the checkpoint has no tensor {unknown[0]}", self.dir)
        return dict(read_tensors(self.dir, {name: known[name] for name in names}))

    def spec(self, layers: Iterable[int] | None = None, last: str = "loss", dtype: str = "bf16") -> CaptureSpec:
        """The agreement for capturing this target.

        Args:
            layers: 0-based decoder layers whose output is captured; None for the usual choice.
            last: `loss` or `all`.
            dtype: a key of contract.DTYPES.

        Returns:
            The spec; its `model` is empty where there are no weights to fingerprint, which an engine that knows the
            live model's fingerprint fills in and reports as unchecked.

        Raises:
            ConfigError: impossible layers, or none named for a model too small to have a usual choice.
        """
        try:
            chosen = default_layers(self.num_layers) if layers is None else tuple(layers)
            return CaptureSpec(
                chosen, last, dtype, self.hidden_size, self.vocab_size, self.num_layers, self.fingerprint() or ""
            )
        except ValueError as error:
            raise ConfigError(str(error), self.model, "set capture.layers, for example [1, 3, 5]") from error


def norm_bytes(parameters: Iterable[tuple[str, torch.Tensor]], num_layers: int) -> dict[str, bytes]:
    """The norm weights that `model_fingerprint` takes: canonical key -> little-endian bf16, rounded to nearest even.

    Raises:
        ValueError: two parameters claim the same key.
    """
    norms: dict[str, bytes] = {}
    for name, tensor in parameters:
        key = norm_key(name, num_layers)
        if key is None:
            continue
        if key in norms:
            raise ValueError(f"two norms are both {key}; the second is {name}")
        norms[key] = bytes(tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return norms


def find_folder(model: str, patterns: Sequence[str]) -> Path:
    """A folder as it is, else the hub's snapshot with the files that match, downloaded or found in the hub's cache.

    Raises:
        ConfigError: no such folder or hub id.
    """
    if is_folder_there(Path(model)):
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (HFValidationError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        hint = "give a checkpoint's folder, or OWNER/NAME on the hub"
        if not isinstance(error, HFValidationError):  # that one speaks to programmers
            hint += f"; {first_line(error)}"
        raise ConfigError("no such folder or hub model", model, hint) from error


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds.

    Raises:
        ConfigError: there is none, or it is unreadable or no object.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no config.json", folder, "a checkpoint's folder in Hugging Face layout is needed") from None
    except (OSError, ValueError) as error:
        raise ConfigError("unreadable config.json", path, str(error)) from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json does not hold an object", path)
    return raw


def _sections(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The text decoder's config, and the wrapper's around it where there is one."""
    text = [raw[key] for key in _TEXT_SECTIONS if isinstance(raw.get(key), dict)]
    return [*text[:1], raw]


def _text_config(folder: Path, trust_remote_code: bool) -> tuple[dict[str, Any], dict[str, int]]:
    text = _sections(read_config(folder))[0]
    if all(key in text for key in ARCHITECTURE_FIELDS):
        return text, architecture_of(text)
    # A checkpoint may leave out what its config class has as a default, or name it otherwise (n_embd).
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("transformers cannot read the config", folder / "config.json", first_line(error)) from error
    return {**config.to_dict(), **text}, architecture_of(config)
