"""Matrices with a row for each token, found in a checkpoint by name and read by row: input embeddings and `lm_head`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from eyas.capture.fingerprint import is_outside_layers
from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.weights import missing_files

HEADS: Final = ("lm_head", "embed_out", "output")  # Llama and most, GPT-NeoX, InternLM2
EMBEDDINGS: Final = ("embed_tokens", "wte", "tok_embeddings", "embed_in", "word_embeddings")
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


def input_embeddings(target: Target, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The target's input embeddings, unscaled; only the shard that holds them has to be there.

    Args:
        target: the checkpoint. Tied ones may hold the matrix under lm_head's name.
        rows: [R] token ids; only theirs are read, in this order. None reads all.

    Returns:
        [V, H] or [R, H] in the checkpoint's dtype, in memory of its own: the file is not kept mapped.

    Raises:
        ConfigError: the checkpoint has none, or they are quantised, of another shape, or their file is missing.
        ValueError: rows outside the vocabulary.
    """
    files = target.weight_map()
    name = find_tensor(files, EMBEDDINGS, target)
    if name is None and any(target.tie_flags()):
        name = find_tensor(files, HEADS, target)
    if name is None:
        hint = "name a complete checkpoint with --target" if files else "its safetensors files are needed here"
        raise ConfigError("the checkpoint has no input embeddings", target.dir, hint)
    matrix = check_token_matrix(read_present(target, [name], "the embeddings")[name], name, target)
    return matrix.clone() if rows is None else matrix[check_rows(rows, target.vocab_size)]


def find_tensor(names: Iterable[str], endings: Sequence[str], target: Target) -> str | None:
    """The one tensor outside the layers that is the weight of a module with one of these names; None for none.

    Raises:
        ConfigError: several are.
    """
    pattern = re.compile(rf"(?:^|\.)(?:{'|'.join(endings)})\.(?:weight|qweight|weight_packed)$")
    found = [name for name in names if pattern.search(name) and is_outside_layers(name)]
    if len(found) > 1:
        raise ConfigError("the checkpoint has several of one kind", target.dir, ", ".join(sorted(found)))
    return found[0] if found else None


def read_present(target: Target, names: Sequence[str], what: str) -> dict[str, torch.Tensor]:
    """`Target.tensors`, with the way to fetch a file that a hub's cache lacks; views of the mapped files.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    files = target.weight_map()
    absent = missing_files(target.dir, [files[name] for name in names])
    if absent and target.is_hub_model:
        hint = f"hf download {target.model} {' '.join(absent)}"
        raise ConfigError(f"the file with {what} is not downloaded", target.model, hint)
    return target.tensors(names)


def check_token_matrix(weight: torch.Tensor, name: str, target: Target) -> torch.Tensor:
    """The tensor, if it is a float for each token and unit of the hidden state.

    Raises:
        ConfigError: it is quantised or of another shape.
    """
    if weight.dtype not in _FLOATS:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(f"{name} is quantised ({dtype})", target.dir, "name a checkpoint in which it is not")
    wanted = (target.vocab_size, target.hidden_size)
    if tuple(weight.shape) != wanted:
        raise ConfigError(f"{name} is {list(weight.shape)}", target.dir, f"the config says {list(wanted)}")
    return weight


def check_rows(rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token ids as an index on the CPU.

    Raises:
        ValueError: one of them is outside the vocabulary.
    """
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < vocab_size):
        raise ValueError(f"token ids outside [0, {vocab_size})")
    return rows.to("cpu", torch.int64)
