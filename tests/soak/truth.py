"""The truth about a finished store: every row recomputed by transformers, and held against what was asked and seen.

wrong       a stored row whose tokens, mask, positions or states are not the right ones, or whose states are not
            those of the record that was delivered for it
lost        a row that no shard holds as good once the last session is over
doubled     a row that two shards hold, that was journalled twice, or that was asked for again once it was stored
undetected  a row that was stored from a record that had been mutated
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from eyas.capture.contract import CaptureSpec, RequestId, field_hash
from eyas.compare import TOLERANCE, distance
from eyas.data.corpus import Corpus, CorpusRow
from eyas.errors import IntegrityError
from eyas.positions import kept_positions
from eyas.store.format import RowStatus
from eyas.store.shardfile import ShardIndex, read_index
from eyas.target import cpu_math
from soak.relay import DROPPED, REFUSED_KINDS
from soak.server_log import RunSends

_BATCH: Final = 64
_TOLERANCE: Final = TOLERANCE["f32"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of a store's extraction.

    Attributes:
        sends: its requests, as the server received them.
        ledger: what became of each record on its way, by request id; None where nothing was between.
        journal_doubled: rows that were journalled twice.
        stored_at: rows stored after each session, and the sessions seen until then.
    """

    sends: RunSends
    ledger: Mapping[str, Mapping[str, str]] | None = None
    journal_doubled: frozenset[int] = frozenset()
    stored_at: Sequence[tuple[set[int], set[str]]] = ()


@dataclass(slots=True)
class Verdict:
    """What was found: `rows` good and right ones, and by row number what is wrong with the others."""

    rows: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    doubled: dict[int, str] = field(default_factory=dict)
    undetected: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One good row of a shard file, as its bytes are."""

    shard: str
    row: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    aux: np.ndarray
    last: np.ndarray


class Truth:
    """The target in transformers, float32."""

    def __init__(self, model: Path) -> None:
        cpu_math.settle()
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._decoder = network.eval().model

    def states(
        self, rows: Sequence[Sequence[int] | np.ndarray], layers: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each row its outputs of `layers` [T, A, H] and its states after the final norm [T, H]."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for start in range(0, len(rows), _BATCH):
            batch = by_length[start : start + _BATCH]
            ids = torch.zeros((len(batch), max(len(rows[index]) for index in batch)), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for at, index in enumerate(batch):  # padding behind: no token of a causal model sees it
                ids[at, : len(rows[index])] = torch.tensor(np.asarray(rows[index]), dtype=torch.long)
                mask[at, : len(rows[index])] = 1
            with torch.no_grad():
                out = self._decoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
            aux = torch.stack([out.hidden_states[layer + 1] for layer in layers], dim=2)
            for at, index in enumerate(batch):
                length = len(rows[index])
                found[index] = aux[at, :length].clone(), out.last_hidden_state[at, :length].clone()
        return [found[index] for index in range(len(rows))]


def judge(store: Path, corpus: Corpus, truth: Truth, evidence: Evidence) -> Verdict:
    """Look at every row of a store's shard files, those included that belong to no plan."""
    verdict = Verdict()
    good: dict[int, list[StoredRow]] = {}
    failed: dict[int, str] = {}
    for row in _stored_rows(store, failed):
        good.setdefault(row.row, []).append(row)
    for row in range(len(corpus)):
        if row not in good:
            verdict.lost[row] = failed.get(row, "in no shard")
    for number in sorted(good.keys() - set(range(len(corpus)))):
        verdict.wrong[number] = "the corpus has no such row"
    _judge_values([row for rows in good.values() for row in rows], corpus, truth, _layers(store), verdict)
    _judge_origin(good, evidence, verdict)
    _judge_doubles(good, evidence, verdict)
    verdict.rows = len(good.keys() - verdict.wrong.keys())
    return verdict


def _layers(store: Path) -> tuple[int, ...]:
    for path in sorted(store.glob("shard-*.safetensors")):
        with path.open("rb") as file:
            return read_index(file.fileno(), path).spec.layers
    return ()


def _stored_rows(store: Path, failed: dict[int, str]) -> Iterator[StoredRow]:
    """Good rows of all shard files; into `failed` goes why others are not."""
    for path in sorted(store.glob("shard-*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            index = read_index(descriptor, path)
            for at in range(index.shard.rows):
                number = index.shard.start + at
                if index.row_status[at] == RowStatus.OK:
                    yield _stored_row(descriptor, index, at, path.name)
                else:
                    failed[number] = f"recorded as failed in {path.name}"
        except IntegrityError as error:
            failed.update(_unreadable(path, str(error)))
        finally:
            os.close(descriptor)


def _unreadable(path: Path, why: str) -> dict[int, str]:
    """Nothing is known of the rows of a damaged file: those that are nowhere else are lost."""
    print(f"{path}: {why}")
    return {}


def _stored_row(descriptor: int, index: ShardIndex, at: int, name: str) -> StoredRow:
    spec: CaptureSpec = index.spec
    start, stop = index.row_offsets[at : at + 2]
    kept = slice(*index.last_offsets[at : at + 2])
    parts = []
    for part, shape in (("aux", (-1, len(spec.layers), spec.hidden_size)), ("last", (-1, spec.hidden_size))):
        begin, end = index.span(part, at)
        parts.append(np.frombuffer(os.pread(descriptor, end - begin, begin), "<f4").reshape(shape))
    return StoredRow(
        name,
        index.shard.start + at,
        index.tokens[start:stop],
        index.loss_mask[start:stop],
        index.last_index[kept] - start,
        *parts,
    )


def _judge_values(
    rows: Sequence[StoredRow], corpus: Corpus, truth: Truth, layers: Sequence[int], verdict: Verdict
) -> None:
    known: dict[int, CorpusRow] = {row.index: row for row in corpus.rows()}
    rows = [row for row in rows if row.row in known]
    same, compared = [], []
    for stored in rows:
        if problem := _other_contents(stored, known[stored.row]):
            verdict.wrong[stored.row] = f"{stored.shard}: {problem}"
        else:
            same.append(stored)
    for stored, (aux, last) in zip(same, truth.states([known[row.row].tokens for row in same], layers), strict=True):
        mine = [*torch.from_numpy(stored.aux.copy()).unbind(1), torch.from_numpy(stored.last.copy())]
        compared.append((mine, [*aux.unbind(1), last[torch.from_numpy(stored.positions.copy()).long()]]))
    if not compared or _all_near(compared):
        return
    for stored, (mine, theirs) in zip(same, compared, strict=True):
        if problem := _difference(mine, theirs):
            verdict.wrong[stored.row] = f"{stored.shard}: {problem}"


def _other_contents(stored: StoredRow, asked: CorpusRow) -> str:
    for name, mine, theirs in (
        ("tokens", stored.tokens, asked.tokens),
        ("mask", stored.loss_mask, asked.loss_mask),
        ("positions", stored.positions, kept_positions(asked.loss_mask, "loss")),
    ):
        if not np.array_equal(mine, theirs):
            return f"{name} are not the corpus's"
    return ""


def _all_near(compared: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> bool:
    """Whether every token of every row is as near as half of them must be: then each row is within the tolerance."""
    for state in range(len(compared[0][0])):
        mine, theirs = (torch.cat([pair[side][state] for pair in compared]) for side in (0, 1))
        if not distance(mine, theirs).worst <= _TOLERANCE.median:  # never where there is a NaN
            return False
    return True


def _difference(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str:
    for name, one, other in zip([*(f"state {n}" for n in range(len(mine) - 1)), "last"], mine, theirs, strict=True):
        away = distance(one, other)
        if not away.within(_TOLERANCE):
            return f"{name} is off by {away.median:.1e} in the median, {away.worst:.1e} at worst"
    return ""


def _judge_origin(good: Mapping[int, Sequence[StoredRow]], evidence: Evidence, verdict: Verdict) -> None:
    """From which record a row came, and what had been done to that on its way."""
    if evidence.ledger is None:
        return
    accepted = evidence.sends.last_of_rows()
    for number, rows in good.items():
        rid = accepted.get(number)
        entry = evidence.ledger.get(str(rid)) if rid else None
        if entry is None:
            verdict.wrong.setdefault(number, f"stored, and no record of {rid} was ever delivered")
        elif entry["kind"] in (*REFUSED_KINDS, DROPPED):
            verdict.undetected[number] = f"{rid}: {entry['kind']}"
        elif any(_hashes(row) != (entry["aux"], entry["last"]) for row in rows):
            verdict.wrong.setdefault(number, f"the states are not those of the record delivered as {rid}")


def _hashes(row: StoredRow) -> tuple[str, str]:
    aux, last = (f"{field_hash(np.ascontiguousarray(part).tobytes()):016x}" for part in (row.aux, row.last))
    return aux, last


def _judge_doubles(good: Mapping[int, Sequence[StoredRow]], evidence: Evidence, verdict: Verdict) -> None:
    for number, rows in good.items():
        if len(rows) > 1:
            verdict.doubled[number] = f"in {', '.join(row.shard for row in rows)}"
    for number in evidence.journal_doubled:
        verdict.doubled.setdefault(number, "journalled twice")
    for number, rid in _asked_again(evidence.sends.sends, evidence.stored_at):
        verdict.doubled.setdefault(number, f"asked for again as {rid} after it was stored")


def _asked_again(
    sends: Sequence[RequestId], stored_at: Iterable[tuple[set[int], set[str]]]
) -> Iterator[tuple[int, RequestId]]:
    """Requests by later sessions for rows that an earlier one had stored."""
    for stored, sessions in stored_at:
        for rid in sends:
            if rid.row in stored and rid.session not in sessions:
                yield rid.row, rid
