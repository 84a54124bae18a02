"""Stand-in for sgl_kernel: the one CPU kernel that text serving needs, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from standin import stand_in

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new KV slots, packed in `out_cache_loc`, into its row of the request table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


stand_in(__name__)
