"""The tokenised corpus: one Parquet file, written once, read by row number.

    with CorpusWriter(path, template_meta) as writer:      corpus = Corpus.open(path)
        writer.add(id, tokens, loss_mask, source)          corpus.n_tokens, corpus.rows(start, stop), corpus[i]

Columns: id string, source string (label of the input), tokens list<int32>, loss_mask list<uint8>, n_tokens int32,
n_positions int32. The Parquet metadata hold one JSON object under the key `eyas`: CorpusMeta and the digest. A corpus
is known by its digest, a content address over every row's id, tokens and mask and the tokenizer and template hashes; a
row is known by its number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.capture.contract import PROBE_ROW
from eyas.disk import is_file_there, is_folder_there
from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.positions import loss_positions

FORMAT_VERSION: Final = 2
METADATA_KEY: Final = "eyas"
#: The corpus in a folder that `eyas prepare` wrote.
CORPUS_FILE: Final = "corpus.parquet"
#: A row group is closed at the first of these: it is what one read brings into memory.
GROUP_TOKENS: Final = 1 << 20
GROUP_ROWS: Final = 1 << 16

SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("n_tokens", pa.int32()),
        ("n_positions", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class CorpusMeta:
    """What a corpus was made with and how much it holds.

    Attributes:
        model: name or folder of the target, as given.
        tokenizer_hash, template_hash: 32 hex digits each; empty where it is not known.
        vocab_size: of the target; every token id is below it.
        template_settings: what else the template's hash depends on: arguments of `Template.load`.
        rows, tokens, trained_tokens: totals.
        version: of this file format.
    """

    model: str
    tokenizer_hash: str
    template_hash: str
    vocab_size: int
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    version: int = FORMAT_VERSION
    template_settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CorpusRow:
    """One row: `tokens` int32 [T], `loss_mask` uint8 [T]; both writable copies."""

    index: int
    id: str
    source: str
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Some rows one after another, as they lie in the file; read-only.

    Attributes:
        first: number of the first row.
        ids, sources: of each row.
        tokens: int32, of all rows, flat.
        loss_mask: uint8, of all rows, flat.
        offsets: int [rows + 1]; row `first + i` is `tokens[offsets[i] : offsets[i + 1]]`.
    """

    number: int
    first: int
    ids: list[str]
    sources: list[str]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def row(self, index: int) -> CorpusRow:
        """Row `index` of the corpus, copied out."""
        i = index - self.first
        cut = slice(self.offsets[i], self.offsets[i + 1])
        return CorpusRow(index, self.ids[i], self.sources[i], self.tokens[cut].copy(), self.loss_mask[cut].copy())


class _Digest:
    """The content address, fed row by row."""

    def __init__(self, meta: CorpusMeta) -> None:
        head = [FORMAT_VERSION, meta.tokenizer_hash, meta.template_hash]
        self._sha = hashlib.sha256(json.dumps(head).encode())

    def add(self, row_id: str, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> None:
        name = row_id.encode()
        self._sha.update(b"%d %d\n" % (len(name), len(tokens)))  # lengths first: rows cannot run into each other
        self._sha.update(name)
        self._sha.update(np.ascontiguousarray(tokens, dtype="<i4").data)
        self._sha.update(np.ascontiguousarray(mask).data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()[:32]


class CorpusWriter:
    """Writes a corpus under a temporary name and renames it on a clean exit; the bytes depend on the rows alone.

    Args:
        path: the file to make; an existing one is replaced at the end.
        meta: its totals are ignored and counted anew.

    Raises:
        StoreError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, path: Path, meta: CorpusMeta) -> None:
        self.path, self._digest = path, _Digest(meta)
        self.meta = replace(meta, rows=0, tokens=0, trained_tokens=0)
        self._part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._pending: list[tuple[str, str, npt.NDArray[np.int32], npt.NDArray[np.uint8]]] = []
        self._pending_tokens = 0

    @property
    def digest(self) -> str:
        """Content address of the rows so far."""
        return self._digest.hexdigest()

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            dictionary: Any = ["source"]  # the stubs know only yes or no
            self._writer = pq.ParquetWriter(self._part, SCHEMA, compression="zstd", use_dictionary=dictionary)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def add(self, row_id: str, tokens: npt.ArrayLike, loss_mask: npt.ArrayLike, source: str = "") -> None:
        """Appends one row: token ids [T] and 0/1 mask [T], and the label of the input it came from."""
        ids, mask = np.asarray(tokens, dtype=np.int32), np.asarray(loss_mask, dtype=np.uint8)
        if ids.shape != mask.shape or ids.ndim != 1 or not len(ids):
            raise ValueError(f"tokens {ids.shape} and loss_mask {mask.shape} must be equally long rows")
        meta = self.meta
        if meta.rows >= PROBE_ROW:
            raise ConfigError(f"a corpus holds at most {PROBE_ROW} rows", self.path, "split the input")
        self._digest.add(row_id, ids, mask)
        self._pending.append((row_id, source, ids, mask))
        self._pending_tokens += len(ids)
        trained = meta.trained_tokens + int(np.count_nonzero(mask))
        self.meta = replace(meta, rows=meta.rows + 1, tokens=meta.tokens + len(ids), trained_tokens=trained)
        if self._pending_tokens >= GROUP_TOKENS or len(self._pending) >= GROUP_ROWS:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                text = json.dumps(asdict(self.meta) | {"digest": self.digest}, sort_keys=True)
                self._writer.add_key_value_metadata({METADATA_KEY: text})
            self._writer.close()
            if kind is None:
                with self._part.open("rb") as file:
                    os.fsync(file.fileno())
                self._part.replace(self.path)
        except OSError as fault:
            raise self._failed(fault) from fault
        finally:
            self._part.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        ids, sources, tokens, masks = zip(*self._pending, strict=True)
        columns = {
            "id": pa.array(ids, pa.string()),
            "source": pa.array(sources, pa.string()),
            "tokens": _lists(tokens, pa.int32()),
            "loss_mask": _lists(masks, pa.uint8()),
            "n_tokens": pa.array([len(row) for row in tokens], pa.int32()),
            "n_positions": pa.array([len(loss_positions(mask)) for mask in masks], pa.int32()),
        }
        table = pa.table(columns, schema=SCHEMA)
        try:
            self._writer.write_table(table, row_group_size=len(table))
        except OSError as error:
            raise self._failed(error) from error
        self._pending, self._pending_tokens = [], 0

    def _failed(self, error: OSError) -> StoreError:
        return StoreError("cannot write the corpus", self.path, error.strerror or str(error))


class Corpus:
    """A corpus on disk. Opening reads the counts only; cheap to pickle and to open again in another process.

    Attributes:
        path: the Parquet file.
        meta: what it was made with.
        digest: 32 hex digits, the content address.
        n_tokens: int32 [N], tokens of each row.
        n_positions: int32 [N], `len(loss_positions(mask))` of each row.
    """

    def __init__(self, path: Path, footer: pq.FileMetaData, info: Mapping[str, Any]) -> None:
        """Use `Corpus.open`."""
        fields = dict(info)
        self.path, self._footer = path, footer
        self.digest: str = fields.pop("digest")
        self.meta = CorpusMeta(**fields)
        with pq.ParquetFile(path, metadata=footer) as file:
            counts = file.read(columns=["n_tokens", "n_positions"])
        self.n_tokens: npt.NDArray[np.int32] = counts["n_tokens"].to_numpy()
        self.n_positions: npt.NDArray[np.int32] = counts["n_positions"].to_numpy()
        groups = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        self._starts = np.cumsum([0, *groups])
        self._cached: RowGroup | None = None

    @classmethod
    def open(cls, path: Path | str) -> Corpus:
        """Opens a corpus for reading: the file, or the folder that `eyas prepare` wrote.

        Raises:
            ConfigError: missing, unreadable, not a corpus, of another version, or empty.
        """
        path, hint = corpus_file(path), "make it with eyas prepare"
        try:
            footer = pq.read_metadata(path)
            text = (footer.metadata or {}).get(METADATA_KEY.encode())
            if text is None:
                raise ConfigError("not a corpus", path, hint)
            info = json.loads(text)
            if info.get("version") != FORMAT_VERSION:
                versions = f"version {info.get('version')}, this is {FORMAT_VERSION}; {hint}"
                raise ConfigError("a corpus of another version", path, versions)
            if not footer.schema.to_arrow_schema().equals(SCHEMA):
                raise ConfigError("not a corpus", path, hint)
            if not footer.num_rows:
                raise ConfigError("empty corpus", path, hint)
            corpus = cls(path, footer, info)
        except FileNotFoundError as error:
            raise ConfigError("no such corpus", path, hint) from error
        except OSError as error:  # ArrowInvalid is a ValueError, a torn page an OSError without errno
            raise ConfigError("cannot read the corpus", path, error.strerror or str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("not a corpus", path, f"{error}; {hint}") from error
        if len(corpus.n_tokens) != corpus.meta.rows:
            raise ConfigError("not a corpus", path, f"{len(corpus.n_tokens)} rows, its metadata say {corpus.meta.rows}")
        return corpus

    def __len__(self) -> int:
        return len(self.n_tokens)

    def __getitem__(self, index: int) -> CorpusRow:
        """Row `index`; the row group it lies in stays in memory for the next call."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a corpus of {len(self)}")
        return self._group(self._group_of(index)).row(index)

    def __iter__(self) -> Iterator[CorpusRow]:
        return self.rows()

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[CorpusRow]:
        """Rows [start, stop) in order; one row group is in memory at a time, and stays for the next call."""
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of a corpus of {len(self)}")
        while start < stop:
            group = self._group_of(start)
            end = min(stop, int(self._starts[group + 1]))
            decoded = self._group(group)  # held here: other readers may ask for other groups meanwhile
            for index in range(start, end):
                yield decoded.row(index)
            start = end

    def row_groups(self) -> Iterator[RowGroup]:
        """All rows in order, many at a time: for what goes over whole columns."""
        for number in range(len(self._starts) - 1):
            yield self._read(number)

    def verify(self) -> None:
        """Reads every row and recomputes the digest.

        Raises:
            IntegrityError: the content is not what the digest names, or a row's counts are wrong.
        """
        digest = _Digest(self.meta)
        for row in self.rows():
            digest.add(row.id, row.tokens, row.loss_mask)
            counts = len(row.tokens), len(row.loss_mask), len(loss_positions(row.loss_mask))
            claimed = int(self.n_tokens[row.index])
            if counts != (claimed, claimed, int(self.n_positions[row.index])):
                raise IntegrityError("a row's counts are wrong", f"{self.path} row {row.index}", "prepare it again")
        if digest.hexdigest() != self.digest:
            raise IntegrityError("the corpus is not what its digest names", self.path, "prepare it again")

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Corpus.open, (self.path,)

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _group(self, number: int) -> RowGroup:
        # A shard is often much smaller than a row group: who reads shard after shard decodes each group once.
        group = self._cached
        if group is None or group.number != number:
            group = self._cached = self._read(number)
        return group

    def _read(self, number: int) -> RowGroup:
        columns = ["id", "source", "tokens", "loss_mask"]
        try:
            with pq.ParquetFile(self.path, metadata=self._footer) as file:
                table = file.read_row_group(number, columns=columns).combine_chunks()
        except (OSError, pa.ArrowInvalid) as error:
            raise IntegrityError("the corpus cannot be read", self.path, str(error)) from error
        tokens, masks = (table[name].chunk(0) for name in ("tokens", "loss_mask"))
        offsets = tokens.offsets.to_numpy()
        if not np.array_equal(offsets, masks.offsets.to_numpy()):
            raise IntegrityError("a row's counts are wrong", self.path, "prepare it again")
        return RowGroup(
            number,
            int(self._starts[number]),
            table["id"].to_pylist(),
            table["source"].to_pylist(),
            tokens.values.to_numpy(),
            masks.values.to_numpy(),
            offsets.astype(np.int64),
        )


def corpus_file(path: Path | str) -> Path:
    """The corpus that a user named: a file, or the one in a folder that `eyas prepare` wrote.

    Raises:
        ConfigError: a folder without one.
    """
    path = Path(path)
    if not is_folder_there(path):
        return path
    if not is_file_there(file := path / CORPUS_FILE):
        raise ConfigError("no corpus in the folder", path, f"expected {CORPUS_FILE} in it; make it with eyas prepare")
    return file


def _lists(rows: tuple[npt.NDArray[Any], ...], item: pa.DataType) -> pa.Array:
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), item))
