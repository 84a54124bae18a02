"""A drafter for servers: exported, checked, and the words that start a server with it.

run.py        export: a folder written whole or not at all
check.py      would SGLang and vLLM serve it as the drafter that was trained?
engines.py    their loaders' rules                   evidence.py  the drafter on every alternative input
record.py     what the folder was when it left       probe.py     texts, states and drafts that go with it
documents.py  texts to try it on                     replay.py    what it drafts on them
card.py       the model card                         launch.py    the servers' flags
"""

from __future__ import annotations

from eyas.export.check import check_draft
from eyas.export.findings import CheckReport, Finding, Verdict
from eyas.export.launch import Drafting, draft_flags
from eyas.export.run import ExportSummary, export_draft

__all__ = [
    "CheckReport",
    "Drafting",
    "ExportSummary",
    "Finding",
    "Verdict",
    "check_draft",
    "draft_flags",
    "export_draft",
]
