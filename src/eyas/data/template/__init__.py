"""Rows -> token ids and loss mask, by the target's own tokenizer and template. The names below are the door."""

from __future__ import annotations

from eyas.data.template.encoder import Encoded, Template, fit
from eyas.data.template.mask import Rejected

__all__ = ["Encoded", "Rejected", "Template", "fit"]
