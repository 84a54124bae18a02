"""The target seen from its checkpoint, without loading it: architecture, default layers, fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from eyas.capture.contract import CaptureSpec, default_layers
from eyas.capture.fingerprint import ARCHITECTURE_FIELDS, architecture_of, model_fingerprint, norm_key
from eyas.errors import ConfigError

_TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config")  # where multimodal wrappers keep the decoder
_SMALL_FILES: Final = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


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
        folder = Path(model) if Path(model).is_dir() else _download(model, weights)
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

    def fingerprint(self) -> str | None:
        """`model_fingerprint` of the checkpoint, reading its norm tensors only; None without safetensors.

        Raises:
            ConfigError: unreadable or incomplete weights.
        """
        files = _norm_files(self.dir, self.num_layers)
        if files is None:
            return None
        return model_fingerprint(self.architecture, norm_bytes(_read(self.dir, files), self.num_layers))

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


def _download(model: str, weights: bool) -> Path:
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError("no such folder or hub model", model, f"give a checkpoint's folder; {reason}") from error


def _text_config(folder: Path, trust_remote_code: bool) -> tuple[dict[str, Any], dict[str, int]]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no config.json", folder, "a checkpoint's folder in Hugging Face layout is needed") from None
    except (OSError, ValueError) as error:
        raise ConfigError("unreadable config.json", path, str(error)) from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json does not hold an object", path)
    text = next((raw[key] for key in _TEXT_SECTIONS if isinstance(raw.get(key), dict)), raw)
    if all(key in text for key in ARCHITECTURE_FIELDS):
        return text, architecture_of(text)
    # A checkpoint may leave out what its config class has as a default, or name it otherwise (n_embd).
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError("transformers cannot read the config", path, reason) from error
    return {**config.to_dict(), **text}, architecture_of(config)


def _norm_files(folder: Path, num_layers: int) -> dict[str, list[str]] | None:
    """Shard -> the names of the norm tensors in it; None when the folder has no safetensors weights at all."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("unreadable weight index", index, str(error)) from error
    elif (folder / _SINGLE).is_file():
        weight_map = dict.fromkeys(_names(folder / _SINGLE), _SINGLE)
    else:
        return None
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if norm_key(name, num_layers):
            files.setdefault(file, []).append(name)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and len(missing) == len(files):
        return None
    if missing:
        raise ConfigError("the checkpoint is incomplete", folder / missing[0], f"{len(missing)} shards are missing")
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError("unreadable weights", path, str(error)) from error


def _read(folder: Path, files: Mapping[str, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in files.items():
        try:
            with safe_open(folder / file, "pt") as shard:
                for name in names:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError("unreadable weights", folder / file, str(error)) from error
