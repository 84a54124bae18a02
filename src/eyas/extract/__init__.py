"""Where hidden states come from, and the run that stores them.

The adapters below bring heavy libraries (transformers, httpx), so each is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.extract.fake import FakeEngine
    from eyas.extract.hf import HFEngine
    from eyas.extract.identity import check_tokenizer
    from eyas.extract.sglang import SGLangEngine
    from eyas.extract.target import Target

_HOME = {
    "FakeEngine": "fake",
    "HFEngine": "hf",
    "SGLangEngine": "sglang",
    "Target": "target",
    "check_tokenizer": "identity",
}

__all__ = ["FakeEngine", "HFEngine", "SGLangEngine", "Target", "check_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eyas.extract' has no attribute {name!r}")
    return getattr(import_module(f"eyas.extract.{_HOME[name]}"), name)
