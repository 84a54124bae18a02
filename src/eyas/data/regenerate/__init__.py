"""`eyas regenerate`: answers by the target itself, from any OpenAI-compatible server. The names below are the door."""

from __future__ import annotations

from eyas.data.regenerate.job import regenerate
from eyas.data.regenerate.report import RegenerateReport

__all__ = ["RegenerateReport", "regenerate"]
