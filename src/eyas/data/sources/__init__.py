"""Inputs as the user names them -> rows: files, layouts, one at a time. The names below are the door."""

from __future__ import annotations

from eyas.data.rows import Raw
from eyas.data.sources.inputs import Input, open_sources, read_chats, read_rows
from eyas.data.sources.layouts import parse

__all__ = ["Input", "Raw", "open_sources", "parse", "read_chats", "read_rows"]
