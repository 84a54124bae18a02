"""What a mutation is: one way to make a row wrong, where it strikes, and which check must name it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from eyas.capture.contract import DTYPES, RECORD_METADATA, RecordHeader, field_hash
from eyas.capture.tensorfile import layout, padded
from eyas.store.format import StoreInfo


class Stage(StrEnum):
    """Where it strikes."""

    FORWARD = "server"  # what the recorder is fed: its hashes are honest
    REPLY = "reply"  # the plugin's word
    RECORD = "record"  # the file, between server and client
    SPOOL = "spool"  # the folder the file lies in
    OPEN = "open shard"  # part and journal of an interrupted run
    STORE = "store"  # finished shards and documents


class Check(StrEnum):
    """Who must see it, cheapest first."""

    EXTRACT = "extract"
    RESUME = "extract (resume)"
    VERIFY = "verify"
    CORPUS = "verify --corpus"
    AGAINST = "verify --against"
    LOGITS = "verify --logits"


@dataclass(frozen=True)
class Mutation:
    """One corruption.

    Attributes:
        name: what is wrong, for a person.
        stage: where it is injected.
        inject: does it; the argument depends on the stage: Prefill, the reply's word, Held, Parcel, OpenShard, Shards.
        seen_by: the cheapest check that sees it.
        error: by exactly which name: a failure's reason, a ProblemKind, the state that does not match, an error's what.
        logits: the name under which the audit by log-probabilities sees it; empty where it does not, since it looks at
            `last` alone. Only asked where nothing cheaper than `--against` sees it.
        rows: corpus rows (or shards) it needs.
    """

    name: str
    stage: Stage
    inject: Callable[[Any], Any]
    seen_by: Check
    error: str
    logits: str = ""
    rows: int = 1


# --- what is handed to `inject` ---------------------------------------------------------------------------------------


@dataclass
class Prefill:
    """One request's forwards, as the recorder is about to be fed them. N layers, A captured ones.

    Attributes:
        prompt, ids: [T] token ids of the request, and those that the forwards were fed.
        layers: [T, N, H] outputs of all layers, the last one's before the final norm. embeddings: [T, H].
        captured: the A agreed layers.
        aux: [T, A, H]. last: [T, H] after the final norm.
        chunks: [start, stop) of each forward.
        twin: another row of equal length. stranger: the same row by a model of equal shape and norms.
    """

    prompt: list[int]
    ids: torch.Tensor
    embeddings: torch.Tensor
    layers: torch.Tensor
    captured: tuple[int, ...]
    aux: torch.Tensor
    last: torch.Tensor
    chunks: list[tuple[int, int]]
    twin: Callable[[], Prefill]
    stranger: Callable[[], Prefill]


@dataclass(frozen=True)
class Held:
    """A genuine record that has not reached the client yet.

    Attributes:
        data: the file. header, aux, last: what is in it.
        again: the record of the same row that the recorder writes under other circumstances.
    """

    data: bytes
    header: RecordHeader
    aux: torch.Tensor
    last: torch.Tensor
    dtype: str
    again: Callable[..., Held]

    def rebuilt(self, *, honest: bool = True, dtype: str | None = None, **changes: Any) -> bytes:
        """The file with other tensors or header fields; `honest` recomputes the digests of the tensors."""
        aux, last = changes.pop("aux", self.aux), changes.pop("last", self.last)
        digests = {"aux": _digest(aux), "last": _digest(last)} if honest else {}
        header = replace(self.header, **{**digests, **changes})
        names = [("aux", dtype or DTYPES[self.dtype][0], tuple(aux.shape))]
        names.append(("last", dtype or DTYPES[self.dtype][0], tuple(last.shape)))
        plan = layout(names, {RECORD_METADATA: header.to_json()})
        room = 8 + int.from_bytes(self.data[:8], "little")  # a record of several chunks leaves some after its header
        return padded(plan.header, max(room, len(plan.header))) + bytes_of(aux) + bytes_of(last)

    @property
    def header_bytes(self) -> int:
        return 8 + int.from_bytes(self.data[:8], "little")

    def flipped(self, at: int, mask: int = 1) -> bytes:
        """The file with one byte changed."""
        data = bytearray(self.data)
        data[at] ^= mask
        return bytes(data)


@dataclass(frozen=True)
class Parcel:
    """Records that wait outside the client's spool; whatever `inject` puts there is what the client finds."""

    spool: Path
    held: Sequence[Held]

    def path(self, index: int = 0) -> Path:
        return self.spool / f"{self.held[index].header.rid}.safetensors"

    def put(self, path: Path, data: bytes) -> None:
        """Publish as the server does."""
        hidden = path.with_name(f".{path.stem}.tmp")
        hidden.write_bytes(data)
        hidden.rename(path)


@dataclass(frozen=True)
class OpenShard:
    """A shard of an interrupted run: rows 0 and 1 of it are journalled, row 2 is pending.

    Attributes:
        part, journal: its files. rows: its corpus rows.
        spans: byte ranges of (aux, last) of each row in the part.
        others: (part, journal) of the next shard, and of the same shard of a store of another corpus and another spec.
    """

    part: Path
    journal: Path
    rows: range
    spans: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    neighbour: tuple[Path, Path]
    other_corpus: tuple[Path, Path]
    other_spec: tuple[Path, Path]

    def lines(self) -> list[bytes]:
        return self.journal.read_bytes().splitlines(keepends=True)

    def write_lines(self, lines: Sequence[bytes]) -> None:
        self.journal.write_bytes(b"".join(lines))


@dataclass(frozen=True)
class Shards:
    """Finished shards of a store of its own.

    Attributes:
        root: the store's folder. info: what it is for.
        stems: the shards this mutation may touch.
        other: a store of the same shape, of another corpus.
    """

    root: Path
    info: StoreInfo
    stems: list[str]
    other: Path

    def file(self, index: int = 0) -> Path:
        return self.root / f"{self.stems[index]}.safetensors"

    def sidecar(self, index: int = 0) -> Path:
        return self.root / f"{self.stems[index]}.json"


# --- helpers ----------------------------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(tensor: torch.Tensor) -> str:
    return f"{field_hash(bytes_of(tensor)):016x}"


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ mask
        file.seek(at)
        file.write(bytes([byte]))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a document and write it as it was written."""
    text = path.read_text()
    data = json.loads(text)
    change(data)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def swap_files(one: Path, other: Path) -> None:
    hidden = one.with_name(f"{one.name}.swap")
    one.rename(hidden)
    other.rename(one)
    hidden.rename(other)


def chunks_of(tokens: int, size: int = 16) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*range(0, tokens, size), tokens]))


@dataclass
class Verdict:
    """What came of one mutation.

    Attributes:
        seen: names by which each check that looked saw it; empty where it did not.
        right_again: whether the rows it touched ended right, byte for byte, once it was gone.
    """

    mutation: Mutation
    seen: dict[str, list[str]] = field(default_factory=dict)
    right_again: bool = False

    @property
    def detected(self) -> bool:
        """By the check that must see it, by its name, and by no cheaper one."""
        for check in Check:
            names = self.seen.get(check, [])
            if check is self.mutation.seen_by:
                return self.mutation.error in names and self._audited
            if names:
                return False
        return False

    @property
    def _audited(self) -> bool:
        """Whether the audit saw it exactly where it must, and where it was asked at all."""
        if self.mutation.seen_by is not Check.AGAINST:
            return True
        names = self.seen[Check.LOGITS]
        return self.mutation.logits in names if self.mutation.logits else not names
