"""Imported by the process that servers are forked from: they fork their own processes too, where SGLang spawns them.

A spawned process would import all of SGLang again. What a process is and does is the same.
"""

from __future__ import annotations

import multiprocessing

_choose = multiprocessing.set_start_method


def _fork(_: str | None, force: bool = False) -> None:
    _choose("fork", force=force)


multiprocessing.set_start_method = _fork
