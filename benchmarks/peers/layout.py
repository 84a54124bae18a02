"""Rows of an Eyas store in a peer's own files: written once by several processes, found again when complete."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas import Corpus, StoreReader
from eyas.store.reader import StoreRow

#: Writes one row as file `number` of `folder`.
WriteRow = Callable[[Path, int, StoreRow], None]

_DONE = "layout.json"  # written last: a folder without it is incomplete
_ROWS_A_TASK = 32


@dataclass(frozen=True)
class Layout:
    """What lies in `folder`: N rows, file n of row n.

    Attributes:
        folder: of the peer's files.
        layers: decoder layers, from 0, whose outputs are in them, shallow to deep.
        tokens, trained: [N] tokens of each row, and those with loss.
    """

    folder: Path
    layers: list[int]
    tokens: list[int]
    trained: list[int]


def lay_out(
    store: Path, corpus: Path, numbers: Sequence[int] | None, folder: Path, write: WriteRow, processes: int
) -> Layout:
    """The layout in `folder`, written unless exactly this one is complete there.

    Args:
        store: its `last` covers every token.
        corpus: that the store was made of.
        numbers: corpus rows to take, in this order; None takes all good rows.
        folder: replaced where it holds anything else.
        write: a function at the top of a module, since other processes call it.
        processes: that write.

    Raises:
        ValueError: the store is of another corpus, keeps `last` for trained tokens only, or lacks one of `numbers`.
    """
    reader = StoreReader(store)
    if reader.info.corpus["digest"] != Corpus.open(corpus).digest:
        raise ValueError(f"{store} is of another corpus than {corpus}")
    if reader.spec.last != "all":
        raise ValueError(f"{store} keeps last for trained tokens only: extract it with capture.last=all")
    known = {reader[i].row: i for i in range(len(reader))}
    missing = sorted(set(numbers or ()) - known.keys())
    if missing:
        raise ValueError(f"{store} has no states of rows {missing[:5]} ({len(missing)} of {len(numbers or ())})")
    wanted = list(known) if numbers is None else list(numbers)
    identity = {
        "writer": f"{write.__module__.rpartition('.')[2]}.{write.__qualname__}",
        "spec_id": reader.spec.spec_id,
        "corpus": reader.info.corpus["digest"],
        "rows": wanted,
    }
    layers = list(reader.spec.layers)
    found = _complete(folder, identity, layers)
    if found is not None:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    counts = _write_all(store, [known[row] for row in wanted], folder, write, processes)
    tokens, trained = [n for n, _ in counts], [n for _, n in counts]
    (folder / _DONE).write_text(json.dumps(identity | {"tokens": tokens, "trained": trained}))
    return Layout(folder, layers, tokens, trained)


def _complete(folder: Path, identity: dict[str, Any], layers: list[int]) -> Layout | None:
    done = folder / _DONE
    if not done.is_file():
        return None
    held = json.loads(done.read_text())
    if {name: held.get(name) for name in identity} != identity:
        return None
    return Layout(folder, layers, held["tokens"], held["trained"])


def _write_all(store: Path, indices: list[int], folder: Path, write: WriteRow, processes: int) -> list[tuple[int, int]]:
    """(tokens, trained tokens) of each of the reader's rows `indices`, written as files 0, 1, ..."""
    jobs = list(enumerate(indices))
    tasks = [jobs[first : first + _ROWS_A_TASK] for first in range(0, len(jobs), _ROWS_A_TASK)]
    job = functools.partial(_write_some, store, folder, write)
    if processes < 2:
        return [count for task in tasks for count in job(task)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [count for counts in pool.map(job, tasks) for count in counts]


@functools.lru_cache(maxsize=1)
def _reader(store: Path) -> StoreReader:
    return StoreReader(store, dtype=torch.bfloat16)


def _write_some(store: Path, folder: Path, write: WriteRow, task: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    counts = []
    for number, index in task:
        row = _reader(store)[index]
        write(folder, number, row)
        counts.append((len(row.tokens), int(row.loss_mask.sum())))
    return counts


def read_counts(folder: Path) -> list[int]:
    """Tokens of each row of a complete layout."""
    return json.loads((folder / _DONE).read_text())["tokens"]


def read_numbers(path: Path | None) -> list[int] | None:
    """Row numbers of a file, one a line; None without a file."""
    return None if path is None else [int(line) for line in path.read_text().split()]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def mean_tokens(layout: Layout) -> float:
    """Of a row."""
    return float(np.mean(layout.tokens))
