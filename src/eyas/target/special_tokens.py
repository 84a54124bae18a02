"""Token ids with a meaning of their own, by the checkpoint's small files; no tokenizer is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids below the model's vocabulary size.

    Attributes:
        ends: what the target ends with: `eos_token_id` of config and generation config, and the tokenizer's own.
        added: all that were added to the tokenizer's vocabulary: turns, tools, thoughts, and much that nobody emits.
    """

    ends: frozenset[int]
    added: frozenset[int]

    @classmethod
    def of(cls, target: Target) -> SpecialTokens:
        """Reads config.json, generation_config.json, tokenizer.json and tokenizer_config.json, each where it is there.

        Raises:
            ConfigError: one of them is no JSON object.
        """
        names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        config, generation, tokenizer, settings = (_read(target.dir / name) for name in names)
        ids = dict(_added(tokenizer, settings))
        ends = {*_ids(target.config.get("eos_token_id")), *_ids(config.get("eos_token_id"))}
        ends |= set(_ids(generation.get("eos_token_id")))
        own = settings.get("eos_token")
        own = own.get("content") if isinstance(own, Mapping) else own
        if own in ids:
            ends.add(ids[own])
        known = range(target.vocab_size)
        return cls(frozenset(i for i in ends if i in known), frozenset(i for i in ids.values() if i in known))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"unreadable {path.name}", path, str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} does not hold an object", path)
    return data


def _ids(value: Any) -> list[int]:
    """`eos_token_id` is a number, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _added(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Text and id of the added tokens, by the two places where they are listed."""
    for text_id, token in (settings.get("added_tokens_decoder") or {}).items():
        if str(text_id).isdecimal() and isinstance(token, Mapping):
            yield str(token.get("content")), int(text_id)
    for token in tokenizer.get("added_tokens") or ():
        yield str(token["content"]), int(token["id"])
