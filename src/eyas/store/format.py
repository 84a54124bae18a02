"""The store's file formats as pure functions and values: no file, no socket. docs/store-format.md has the bytes.

shard-00042.safetensors         states and tokens of corpus rows [start, stop)
shard-00042.json                Sidecar: what the finished shard holds
shard-00042.safetensors.part    the shard while open, with shard-00042.journal
store.json                      StoreInfo: what the store is for
manifest.json                   all sidecars and their totals
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.capture.contract import CaptureSpec, field_hash
from eyas.capture.strictjson import loads, shown
from eyas.capture.tensorfile import Layout, layout
from eyas.store.journal import Provenance, Session, digest_field, int_field, provenance_field, text_field
from eyas.store.plan import MAX_SHARD_TOKENS, Plan, Shard, planned_bytes

FORMAT: Final = "eyas-store"
FORMAT_VERSION: Final = 1
FIELDS: Final = ("tokens", "loss_mask", "aux", "last")  # columns of row_xxh3
STORE_FILE: Final = "store.json"
MANIFEST_FILE: Final = "manifest.json"
_COLUMNS: Final = ["start", "stop", "tokens", "positions"]  # of the shards in store.json


class RowStatus(IntEnum):
    """Values of `row_status`. A finished shard has no pending row."""

    PENDING = 0
    OK = 1
    FAILED = 2


class RowContents(NamedTuple):
    """What the corpus knows of a row before extraction.

    Attributes:
        tokens: [t] int32 token ids.
        loss_mask: [t] uint8, 1 where the token is trained.
        last_positions: [l] int32, where `last` is kept, ascending, relative to the row.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    last_positions: npt.NDArray[np.int32]


#: Gives the contents of a shard's rows, in order. Plain tuples will do.
Contents = Callable[[Shard], Iterable[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]]


# --- shard ------------------------------------------------------------------------------------------------------------


def shard_layout(shard: Shard, spec: CaptureSpec, corpus_digest: str, plan_digest: str) -> Layout:
    """Where every byte of a shard lies. R rows, T tokens, L kept positions, A layers, H hidden size."""
    rows, tokens, positions = shard.rows, shard.tokens, shard.positions
    # `aux` and `last` must stay neighbours: everything outside the two is hashed as the shard's index.
    tensors = [
        ("row_offsets", "I64", (rows + 1,)),
        ("row_xxh3", "U64", (rows, len(FIELDS))),
        ("last_index", "I32", (positions,)),
        ("tokens", "I32", (tokens,)),
        ("aux", spec.stored_dtype, spec.aux_shape(tokens)),
        ("last", spec.stored_dtype, spec.last_shape(positions)),
        ("loss_mask", "U8", (tokens,)),
        ("row_status", "U8", (rows,)),
    ]
    metadata = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "spec": json.dumps(spec.to_dict(), sort_keys=True, separators=(",", ":")),
        "spec_id": spec.spec_id,
        "corpus": corpus_digest,
        "plan": plan_digest,
        "shard": str(shard.index),
        "rows": f"{shard.start}:{shard.stop}",
        "fields": ",".join(FIELDS),
    }
    return layout(tensors, metadata)


@dataclass(frozen=True, slots=True)
class KnownTensors:
    """The corpus's part of a shard.

    Attributes:
        row_offsets: [R + 1] int64, first token of each row.
        last_offsets: [R + 1] int64, first kept position of each row (not stored: it follows from the others).
        last_index: [L] int32, kept positions within the shard's T.
        tokens: [T] int32. loss_mask: [T] uint8.
        xxh3: [R, 2] uint64, hashes of each row's tokens and loss_mask.
    """

    row_offsets: npt.NDArray[np.int64]
    last_offsets: npt.NDArray[np.int64]
    last_index: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    xxh3: npt.NDArray[np.uint64]


def pack_contents(shard: Shard, rows: Iterable[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]) -> KnownTensors:
    """Concatenate the rows of a shard.

    Raises:
        ValueError: the rows are not the ones the plan was made for.
    """
    packed = [
        (
            np.ascontiguousarray(t, dtype="<i4"),
            np.ascontiguousarray(m, dtype="u1"),
            np.ascontiguousarray(p, dtype="<i4"),
        )
        for t, m, p in rows
    ]
    row_offsets = np.cumsum([0, *(len(t) for t, _, _ in packed)], dtype="<i8")
    last_offsets = np.cumsum([0, *(len(p) for _, _, p in packed)], dtype="<i8")
    found = (len(packed), int(row_offsets[-1]), int(last_offsets[-1]))
    if found != (shard.rows, shard.tokens, shard.positions):
        raise ValueError(
            f"rows, tokens, positions are {found}, planned were {(shard.rows, shard.tokens, shard.positions)}"
        )
    lengths = np.diff(row_offsets)
    within = np.concatenate([p for _, _, p in packed])  # positions of all rows, each relative to its own
    of_row = np.repeat(np.arange(len(packed)), np.diff(last_offsets))
    wrong = (within < 0) | (within >= lengths[of_row])
    wrong[1:] |= (np.diff(within) <= 0) & (np.diff(of_row) == 0)
    masked = np.array([len(m) for _, m, _ in packed]) == lengths
    if wrong.any() or not masked.all():
        first = min([*of_row[wrong].tolist(), *np.flatnonzero(~masked).tolist()])
        raise ValueError(
            f"row {shard.start + first}: loss mask or kept positions do not fit its {lengths[first]} tokens"
        )
    return KnownTensors(
        row_offsets,
        last_offsets,
        (within + row_offsets[of_row]).astype("<i4"),
        np.concatenate([t for t, _, _ in packed]),
        np.concatenate([m for _, m, _ in packed]),
        np.array([[field_hash(t), field_hash(m)] for t, m, _ in packed], dtype="<u8").reshape(-1, 2),
    )


# --- JSON documents ---------------------------------------------------------------------------------------------------


def _document(head: Mapping[str, Any], table_name: str, table: Sequence[Any]) -> str:
    """JSON that is pleasant to read and to diff: one line per entry of its one long table."""
    text = json.dumps(dict(head), indent=1, ensure_ascii=False)[: -len("\n}")]
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in table)
    body = f"[\n  {lines}\n ]" if table else "[]"
    return f'{text},\n "{table_name}": {body}\n}}\n'


def _load(text: str | bytes, kind: str) -> dict[str, Any]:
    data = loads(text, len(text))  # whoever read the file has bounded it
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("kind") != kind:
        raise ValueError(f"not a {kind} of an {FORMAT}")
    if data.get("version") != FORMAT_VERSION:
        raise ValueError(f"format version {shown(data.get('version'))}, this is version {FORMAT_VERSION}")
    return data


def _head(kind: str) -> dict[str, Any]:
    return {"format": FORMAT, "kind": kind, "version": FORMAT_VERSION}


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """`store.json`: what the store is for. Written once; a run that differs is refused.

    Attributes:
        corpus: holds "digest", and whatever the corpus says of itself (tokenizer and template hashes, rows, tokens).
        shard_bytes: largest shard.
        plan: the shards, so that a store can be checked without its corpus.
    """

    spec: CaptureSpec
    corpus: dict[str, Any]
    shard_bytes: int
    plan: Plan

    def to_json(self) -> str:
        head = _head("store") | {
            "spec_id": self.spec.spec_id,
            "spec": self.spec.to_dict(),
            "corpus": self.corpus,
            "shard_bytes": self.shard_bytes,
            "plan": self.plan.digest,
            "total_bytes": self.plan.total_bytes,
            "columns": _COLUMNS,
        }
        return _document(head, "shards", [[s.start, s.stop, s.tokens, s.positions] for s in self.plan.shards])

    @classmethod
    def from_json(cls, text: str | bytes) -> StoreInfo:
        """Raises ValueError for anything but what `to_json` writes."""
        data = _load(text, "store")
        try:
            spec = CaptureSpec.from_dict(data["spec"])
            if spec.spec_id != data["spec_id"]:
                raise ValueError("spec_id is not the hash of the spec")
            plan = Plan(_shards(data["shards"]), text_field(data["plan"]), int_field(data["total_bytes"]))
            if data["columns"] != _COLUMNS:
                raise ValueError(f"the shards' columns are not {_COLUMNS}")
            if plan.total_bytes != planned_bytes(plan.shards, spec):
                raise ValueError("total_bytes is not that of the shards")
            text_field(data["corpus"]["digest"])
            return cls(spec, dict(data["corpus"]), int_field(data["shard_bytes"]), plan)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or ill-typed: {error!r}") from error

    def session(self, provenance: Sequence[Provenance]) -> Session:
        """A journal's session for rows of this store, none yet."""
        return Session(self.plan.digest, self.spec.spec_id, self.corpus["digest"], list(provenance))

    def owns(self, session: Session) -> bool:
        """Whether a journal's session wrote rows of this very store."""
        mine = (self.plan.digest, self.spec.spec_id, self.corpus["digest"])
        return (session.plan, session.spec_id, session.corpus) == mine

    def layout(self, shard: Shard) -> Layout:
        return shard_layout(shard, self.spec, self.corpus["digest"], self.plan.digest)

    def differences(self, other: StoreInfo) -> list[str]:
        """Human-readable `field: mine != theirs`, empty when one store can serve both."""
        found = [f"spec {text}" for text in self.spec.differences(other.spec)]
        mine, theirs = (json.loads(json.dumps(info.corpus)) for info in (self, other))
        found += [
            f"corpus {key}: {mine.get(key)} != {theirs.get(key)}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        if self.shard_bytes != other.shard_bytes:
            found.append(f"shard_bytes: {self.shard_bytes} != {other.shard_bytes}")
        if not found and self.plan.digest != other.plan.digest:
            found.append(f"plan: {self.plan.digest} != {other.plan.digest}")
        return found


def _shards(table: list[Any]) -> tuple[Shard, ...]:
    """The planned shards, whose rows follow one another. Raises ValueError."""
    shards = tuple(Shard(index, *(int_field(number) for number in row)) for index, row in enumerate(table))
    edge = 0
    for shard in shards:
        if shard.start != edge or shard.stop <= edge or max(shard.tokens, shard.positions) > MAX_SHARD_TOKENS:
            raise ValueError(f"{shard.stem} of rows {shard.start} to {shard.stop} is in no plan")
        edge = shard.stop
    if not shards:
        raise ValueError("no shard is planned")
    return shards


@dataclass(frozen=True, slots=True)
class Sidecar:
    """`shard-NNNNN.json`: what a finished shard holds. Nothing in it depends on when or in what order rows came.

    Attributes:
        rows: corpus rows [start, stop).
        bytes: the shard file's size.
        failed: reason by corpus row number.
        spec_id, corpus, plan: as in the shard's own metadata.
        index_xxh3: xxh3-64 of every byte of the file outside `aux` and `last`; `row_xxh3` within covers those.
        provenance: the distinct engines that wrote rows.
    """

    name: str
    rows: tuple[int, int]
    tokens: int
    positions: int
    bytes: int
    spec_id: str
    corpus: str
    plan: str
    index_xxh3: int
    failed: dict[int, str] = field(default_factory=dict)
    provenance: list[Provenance] = field(default_factory=list)

    @property
    def ok_rows(self) -> int:
        return self.rows[1] - self.rows[0] - len(self.failed)

    def to_json(self) -> str:
        data = _head("shard") | {
            "name": self.name,
            "rows": list(self.rows),
            "tokens": self.tokens,
            "positions": self.positions,
            "bytes": self.bytes,
            "failed": {str(row): self.failed[row] for row in sorted(self.failed)},
            "spec_id": self.spec_id,
            "corpus": self.corpus,
            "plan": self.plan,
            "index_xxh3": f"{self.index_xxh3:016x}",
            "provenance": [dict(sorted(p.items())) for p in self.provenance],
        }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Sidecar:
        """Raises ValueError for anything but what `to_json` writes."""
        data = _load(text, "shard")
        try:
            start, stop = (int_field(row) for row in data["rows"])
            failed = {int(row): text_field(reason) for row, reason in data["failed"].items()}
            if list(map(str, failed)) != list(data["failed"]) or not all(start <= row < stop for row in failed):
                raise ValueError(f"failed rows that are not of {start} to {stop}")
            return cls(
                name=text_field(data["name"]),
                rows=(start, stop),
                tokens=int_field(data["tokens"]),
                positions=int_field(data["positions"]),
                bytes=int_field(data["bytes"]),
                failed=failed,
                spec_id=text_field(data["spec_id"]),
                corpus=text_field(data["corpus"]),
                plan=text_field(data["plan"]),
                index_xxh3=digest_field(data["index_xxh3"]),
                provenance=provenance_field(data["provenance"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or ill-typed: {error!r}"[:300]) from error


def manifest_json(info: StoreInfo, sidecars: Sequence[Sidecar]) -> str:
    """`manifest.json`, a function of the sidecars (in order of their rows) and nothing else."""
    provenance = {json.dumps(p, sort_keys=True): p for sidecar in sidecars for p in sidecar.provenance}
    head = _head("manifest") | {
        "spec_id": info.spec.spec_id,
        "spec": info.spec.to_dict(),
        "corpus": info.corpus,
        "plan": info.plan.digest,
        "planned_shards": len(info.plan.shards),
        "complete_shards": len(sidecars),
        "rows": sum(s.rows[1] - s.rows[0] for s in sidecars),
        "failed": sum(len(s.failed) for s in sidecars),
        "tokens": sum(s.tokens for s in sidecars),
        "positions": sum(s.positions for s in sidecars),
        "bytes": sum(s.bytes for s in sidecars),
        "provenance": [dict(sorted(provenance[key].items())) for key in sorted(provenance)],
    }
    table = [
        {
            "name": s.name,
            "rows": list(s.rows),
            "failed": len(s.failed),
            "tokens": s.tokens,
            "positions": s.positions,
            "bytes": s.bytes,
            "index_xxh3": f"{s.index_xxh3:016x}",
        }
        for s in sidecars
    ]
    return _document(head, "shards", table)
