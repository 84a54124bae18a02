"""Which model is it? A digest that the live server and the checkpoint on disk both can compute.

Runs inside the inference server too: standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

_LAYER_NORM = re.compile(r"(?:^|\.)layers\.(\d+)\.([^.]*norm[^.]*\.weight)$")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_FINAL_NORM = re.compile(r"(?:^|\.)norm\.weight$")
_OTHER_TOWER = re.compile(
    r"(?:^|[._])(?:vis|img|image|audio|speech|mm_|multi_modal|connector|mtp|eh_proj|talker)|projector"
)


def norm_key(name: str, num_layers: int) -> str | None:
    """Canonical name of a text decoder's norm weight, the same in a checkpoint and in a live server; None for others.

    Only the final norm and the norms that are a decoder layer's own children count: those are replicated under tensor
    parallelism in every model, which norms inside attention are not (MiniMax-M2 shards its q_norm). Draft (MTP) layers
    stored beyond `num_layers`, and norms of vision or audio towers, do not count.
    """
    if _OTHER_TOWER.search(name):
        return None
    if match := _LAYER_NORM.search(name):
        return f"layers.{match[1]}.{match[2]}" if int(match[1]) < num_layers else None
    return "norm" if _FINAL_NORM.search(name) and not _IN_LAYER.search(name) else None


def is_outside_layers(name: str) -> bool:
    """Whether a tensor is the text decoder's, but of none of its layers: embedding, final norm or `lm_head`."""
    return not (_OTHER_TOWER.search(name) or _IN_LAYER.search(name))


def model_fingerprint(architecture: Mapping[str, int], norms: Mapping[str, bytes]) -> str:
    """32 hex digits that change with the architecture and with any full fine-tune.

    These norms are replicated under tensor parallelism, so every rank and the checkpoint see the same bytes. (A LoRA
    merge leaves norms alone: `eyas verify --against` is the check that sees it.)

    Args:
        architecture: the fields of `architecture_of`.
        norms: canonical key (`norm_key`) -> the weight's bytes as little-endian bf16.
    """
    digest = hashlib.sha256(json.dumps(dict(sorted(architecture.items())), separators=(",", ":")).encode())
    for key in sorted(norms):
        digest.update(f"\0{key}\0{len(norms[key])}\0".encode())
        digest.update(norms[key])
    return digest.hexdigest()[:32]


ARCHITECTURE_FIELDS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def architecture_of(config: Any) -> dict[str, int]:
    """The fingerprinted fields of a text config, given as a dict or an object with attributes."""
    get = config.get if isinstance(config, Mapping) else lambda key: getattr(config, key, None)
    return {key: int(get(key) or 0) for key in ARCHITECTURE_FIELDS}
