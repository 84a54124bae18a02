"""`eyas prepare`: chat files -> a folder with a corpus and its accounts. The names below are the door."""

from __future__ import annotations

from eyas.data.prepare.pipeline import prepare
from eyas.data.prepare.report import PrepareReport

__all__ = ["PrepareReport", "prepare"]
