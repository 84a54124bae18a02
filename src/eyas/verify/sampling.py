"""Which rows are looked at, and how precise their states can be."""

from __future__ import annotations

from typing import Final

import numpy as np

from eyas.store.reader import StoreReader

NAME_THE_MODEL: Final = "name the model that the store was captured from: a folder or hub id"
TORCH_NAMES: Final = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def sample_rows(rows: int, sample: int) -> list[int]:
    """`sample` row numbers spread evenly over `rows`; all of them for 0."""
    if sample in (0, rows) or sample > rows:
        return list(range(rows))
    return sorted(set(np.linspace(0, rows - 1, sample).round().astype(int).tolist()))


def coarsest_dtype(reader: StoreReader) -> str:
    """The dtype that bounds what can be asked of the states: stored in, or computed in by any engine that wrote."""
    ran = {TORCH_NAMES.get(provenance.get("dtype", "")) for provenance in reader.provenance}
    return coarsest(reader.spec.dtype, *(dtype for dtype in ran if dtype))


def coarsest(*dtypes: str) -> str:
    """The one of fp8_e4m3, bf16, f16 and f32 that keeps the fewest bits."""
    return next(dtype for dtype in ("fp8_e4m3", "bf16", "f16", "f32") if dtype in dtypes)
