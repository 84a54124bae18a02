"""Named tensors of a checkpoint's safetensors files, one file or sharded, read without loading a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import ConfigError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file that holds it, by the index or the only file; empty where there are no safetensors weights.

    Raises:
        ConfigError: an unreadable index or file.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("unreadable weight index", index, str(error)) from error
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), SINGLE)
    return {}


def missing_files(folder: Path, files: Iterable[str]) -> list[str]:
    """Those of `files` that are not in the folder."""
    return sorted({file for file in files if not (folder / file).is_file()})


def read_tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, file after file.

    Args:
        folder: the checkpoint's.
        files: tensor name -> file, part of a `weight_map`.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    if missing := missing_files(folder, by_file):
        raise ConfigError("the checkpoint is incomplete", folder / missing[0], f"{len(missing)} shards are missing")
    for file, names in by_file.items():
        try:
            with safe_open(folder / file, "pt") as shard:
                for name in names:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError("unreadable weights", folder / file, str(error)) from error


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError("unreadable weights", path, str(error)) from error
