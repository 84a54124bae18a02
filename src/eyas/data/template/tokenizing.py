"""Texts -> token ids, many at once, by a tokenizer as it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_ANCHOR: Final = "\n"
_CACHED_WORDS: Final = 1 << 17  # the default, 10,000, is fewer than the words of a corpus; about 20 MB


class Tokenize:
    """A tokenizer's ids of texts that begin a row, and of texts that go on one.

    A tokenizer of the `tokenizers` library is called without the layer around it, which makes offsets, masks and
    Python lists nobody reads; any other by its own call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        methods = ("__call__", "_encode_plus")
        plain = all(getattr(type(tokenizer), m, 1) is getattr(PreTrainedTokenizerFast, m, 2) for m in methods)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None) if plain else None
        if resize := getattr(getattr(self._backend, "model", None), "_resize_cache", None):
            resize(_CACHED_WORDS)
        anchor, alone, both = self._ids([_ANCHOR, "Hi", _ANCHOR + "Hi"])
        # SentencePiece puts a space before a text: not before one that goes on another.
        self._anchor = anchor if both != anchor + alone and both[: len(anchor)] == anchor else None

    def __call__(self, texts: Sequence[str], goes_on: Sequence[bool]) -> list[list[int]]:
        """Ids of each text; `goes_on` says which of them continue another one."""
        if self._anchor is None:
            return self._ids(list(texts))
        ids = self._ids([_ANCHOR + text if on else text for text, on in zip(texts, goes_on, strict=True)])
        return [one[len(self._anchor) :] if on else one for one, on in zip(ids, goes_on, strict=True)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is None:
            call = self._tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
            return cast(list[list[int]], call["input_ids"])
        backend = self._backend
        # Left by other callers; templates write the BOS themselves.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hex digits of what decides the ids: the whole fast tokenizer, or the vocabulary of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = cast(str, backend.to_str())
        content = text[text.find('"added_tokens":') :]  # before it: truncation and padding, which callers set
    else:
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), added]
    special = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
    return digest([content, special])


def digest(value: Any) -> str:
    """32 hex digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
