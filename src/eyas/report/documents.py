"""JSON files that lie beside a run, as this page reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from eyas.capture.folder import read_limited
from eyas.capture.strictjson import loads

_MAX_DOCUMENT_BYTES: Final = 64 << 20


def read_document(path: Path) -> Any:
    """A JSON file. Raises ValueError or OSError."""
    return loads(read_limited(path, _MAX_DOCUMENT_BYTES)[0], _MAX_DOCUMENT_BYTES)
