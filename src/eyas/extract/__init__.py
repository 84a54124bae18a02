"""Where hidden states come from, and the run that stores them.

The adapters below bring heavy libraries (transformers, httpx), so each is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.extract.dumpdir.engine import DumpDirEngine
    from eyas.extract.fake import FakeEngine
    from eyas.extract.hf import HFEngine
    from eyas.extract.identity import check_tokenizer
    from eyas.extract.pool import ServerPool, open_servers
    from eyas.extract.sglang import SGLangEngine
    from eyas.target.checkpoint import Target

_HOME = {
    "DumpDirEngine": "eyas.extract.dumpdir.engine",
    "FakeEngine": "eyas.extract.fake",
    "HFEngine": "eyas.extract.hf",
    "SGLangEngine": "eyas.extract.sglang",
    "ServerPool": "eyas.extract.pool",
    "Target": "eyas.target.checkpoint",
    "check_tokenizer": "eyas.extract.identity",
    "open_servers": "eyas.extract.pool",
}

__all__ = [
    "DumpDirEngine",
    "FakeEngine",
    "HFEngine",
    "SGLangEngine",
    "ServerPool",
    "Target",
    "check_tokenizer",
    "open_servers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eyas.extract' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
