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

from eyas.capture.contract import DTYPES, CaptureSpec, field_hash
from eyas.capture.tensorfile import Layout, layout
from eyas.store.journal import Provenance
from eyas.store.plan import Plan, Shard

FORMAT: Final = "eyas-store"
FORMAT_VERSION: Final = 1
FIELDS: Final = ("tokens", "loss_mask", "aux", "last")  # columns of row_xxh3
STORE_FILE: Final = "store.json"
MANIFEST_FILE: Final = "manifest.json"
EVENTS_DIR: Final = "events"  # run logs, for people; no part of the format


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
    states = DTYPES[spec.dtype][0]
    # `aux` and `last` must stay neighbours: everything outside the two is hashed as the shard's index.
    tensors = [
        ("row_offsets", "I64", (rows + 1,)),
        ("row_xxh3", "U64", (rows, len(FIELDS))),
        ("last_index", "I32", (positions,)),
        ("tokens", "I32", (tokens,)),
        ("aux", states, (tokens, len(spec.layers), spec.hidden_size)),
        ("last", states, (positions, spec.hidden_size)),
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
    for row, (tokens, mask, positions) in enumerate(packed, shard.start):
        ascending = bool(np.all(np.diff(positions) > 0))
        inside = not len(positions) or (positions[0] >= 0 and positions[-1] < len(tokens))
        if len(mask) != len(tokens) or not ascending or not inside:
            raise ValueError(f"row {row}: loss mask or kept positions do not fit its {len(tokens)} tokens")
    return KnownTensors(
        row_offsets,
        last_offsets,
        np.concatenate([p + o for (_, _, p), o in zip(packed, row_offsets[:-1], strict=True)]).astype("<i4"),
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
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("kind") != kind:
        raise ValueError(f"not a {kind} of an {FORMAT}")
    if data.get("version") != FORMAT_VERSION:
        raise ValueError(f"format version {data.get('version')}, this is version {FORMAT_VERSION}")
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
            "columns": ["start", "stop", "tokens", "positions"],
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
            shards = tuple(Shard(index, *(int(x) for x in row)) for index, row in enumerate(data["shards"]))
            plan = Plan(shards, str(data["plan"]), int(data["total_bytes"]))
            str(data["corpus"]["digest"])
            return cls(spec, dict(data["corpus"]), int(data["shard_bytes"]), plan)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or ill-typed: {error!r}") from error

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
            start, stop = data["rows"]
            return cls(
                name=str(data["name"]),
                rows=(int(start), int(stop)),
                tokens=int(data["tokens"]),
                positions=int(data["positions"]),
                bytes=int(data["bytes"]),
                failed={int(row): str(reason) for row, reason in data["failed"].items()},
                spec_id=str(data["spec_id"]),
                corpus=str(data["corpus"]),
                plan=str(data["plan"]),
                index_xxh3=int(data["index_xxh3"], 16),
                provenance=[dict(p) for p in data["provenance"]],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or ill-typed: {error!r}") from error


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
