"""The record of an export in its own config.json: what the folder was when it left, so that later changes show.

    "eyas": {"aux_layers": [...], "target": FINGERPRINT, "vocab": {...},
             "export": {"format": 1, "spec_id": ..., "target": {...}, "tensors": ..., "probe": ..., "settings": ...}}

Its digests are xxh3-128: they show accidents and edits by hand, and are no signature. Whoever writes a folder can write
its record; what a drafter really is, the probe shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
import xxhash

from eyas.errors import IntegrityError
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import SECTION

EXPORT: Final = "export"
FORMAT: Final = 1
_SETTINGS: Final = "settings"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target as far as a checkpoint must fit it."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, target: Target, name: str) -> Self:
        """Of a target that is here."""
        family = str(target.config.get("model_type", ""))
        return cls(name, family, target.num_layers, target.hidden_size, target.vocab_size)

    def stand_in(self) -> Target:
        """A target without files, for what needs none."""
        config = {"model_type": self.model_type}
        architecture = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        return Target(self.name, Path("/nonexistent"), config, architecture)


@dataclass(frozen=True, slots=True)
class Record:
    """What an export knows of itself.

    Attributes:
        spec_id: of the capture that the drafter was trained on; empty where that is not known.
        target: what it drafts for.
        tensors: digest of names, dtypes, shapes and bytes of all tensors.
        probe: digest of the probe's file; empty where there is none.
        settings: digest of config.json but for this entry.
    """

    spec_id: str
    target: TargetFacts
    tensors: str
    probe: str
    settings: str

    @classmethod
    def of(cls, config: Mapping[str, Any], where: object) -> Self | None:
        """The record in a config.json; None where there is none.

        Raises:
            IntegrityError: it is there and broken.
        """
        section = config.get(SECTION)
        said = section.get(EXPORT) if isinstance(section, Mapping) else None
        if said is None:
            return None
        try:
            if said["format"] != FORMAT:
                raise ValueError(f"format {said['format']}, this is {FORMAT}")
            target = TargetFacts(**said["target"])
            record = cls(target=target, **{key: said[key] for key in ("spec_id", "tensors", "probe", _SETTINGS)})
            kinds = {**asdict(target), **asdict(record), "target": ""}
            sizes = ("num_layers", "hidden_size", "vocab_size")
            if any(not isinstance(value, int if key in sizes else str) for key, value in kinds.items()):
                raise ValueError("values of other types")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError("the record of the export is broken", where, f"{error}; export anew") from error
        return record


def with_record(
    config: Mapping[str, Any], *, spec_id: str, target: TargetFacts, tensors: str, probe: bytes | None
) -> dict[str, Any]:
    """A config.json with its record."""
    said = {
        "format": FORMAT,
        "spec_id": spec_id,
        "target": asdict(target),
        "tensors": tensors,
        "probe": digest_bytes(probe) if probe is not None else "",
    }
    sealed = {**config, SECTION: {**config[SECTION], EXPORT: said}}
    said[_SETTINGS] = settings_digest(sealed)
    return sealed


def settings_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config.json, whatever the order of its keys, but for the entry that holds it."""
    section = dict(config.get(SECTION) or {})
    section[EXPORT] = {key: value for key, value in (section.get(EXPORT) or {}).items() if key != _SETTINGS}
    text = json.dumps({**config, SECTION: section}, sort_keys=True, separators=(",", ":"))
    return digest_bytes(text.encode())


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of tensors by name, whatever file they are in."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def digest_bytes(data: bytes) -> str:
    """32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
