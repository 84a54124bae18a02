"""The whole catalogue, judged once."""

from __future__ import annotations

from pathlib import Path

import torch

from mutations.bench import Target0
from mutations.catalogue import CONTROLS, DOCUMENTS, OPEN, SHARDS, WIRE
from mutations.judge import Judged, judge_wire
from mutations.judge_store import judge_store


def judge_all(folder: Path) -> dict[str, Judged]:
    """Every mutation of the catalogue, by stage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forwards of forty tokens: more threads only wait for each other
    try:
        target = Target0(folder)
        wire = judge_wire(folder / "wire", target, WIRE, CONTROLS)
        return {"wire": wire} | judge_store(folder / "store", target, OPEN, SHARDS, DOCUMENTS)
    finally:
        torch.set_num_threads(threads)
