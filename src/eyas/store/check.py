"""`eyas verify`: is every byte of a store what it claims to be? Problems are values: one does not hide the next.

report = verify_store(root)
for problem in report.problems: print(problem)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np

from eyas.capture.contract import CaptureSpec, field_hash
from eyas.capture.folder import read_limited
from eyas.errors import IntegrityError, StoreError
from eyas.events import EVENTS_DIR
from eyas.store.documents import read_sidecar, read_store_info
from eyas.store.files import MAX_DOCUMENT_BYTES, ShardPaths, hash_range, open_regular
from eyas.store.format import (
    FIELDS,
    MANIFEST_FILE,
    STORE_FILE,
    Contents,
    RowStatus,
    Sidecar,
    StoreInfo,
    manifest_json,
    pack_contents,
)
from eyas.store.plan import Shard
from eyas.store.shardfile import ShardIndex, read_index

# Infinity's bits. Read as integers, NaNs and infinity are the greatest: positive ones as signed integers, negative ones
# as unsigned. Two passes that only read take half the time of one that computes.
_INFINITY: Final = {"bf16": (2, 0x7F80), "f16": (2, 0x7C00), "f32": (4, 0x7F800000)}


class ProblemKind(StrEnum):
    """Closed set of what can be wrong."""

    MISSING = "missing"  # a planned shard is absent
    UNFINISHED = "unfinished"  # a part, or a file without its sidecar
    CONSUMED = "consumed"  # trained on and removed to make room
    STRAY = "stray"  # a file that belongs to nothing
    UNREADABLE = "unreadable"  # the disk, or a volume that is not there
    STRUCTURE = "structure"  # not the layout that the plan gives
    SIDECAR = "sidecar"  # sidecar and file disagree, or the sidecar is damaged
    MANIFEST = "manifest"  # not the manifest of these sidecars
    INDEX_HASH = "index-hash"  # bytes outside aux and last changed
    ROW_HASH = "row-hash"  # a row's bytes are not those that were written
    ROW_STATUS = "row-status"  # a pending row, or a failed one that holds bytes
    NOT_FINITE = "not-finite"  # a state is NaN or infinite
    IDENTITY = "identity"  # tokens, mask or positions are not the corpus's


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong. `row` is a corpus row number where the problem is a row's."""

    kind: ProblemKind
    shard: str
    row: int | None
    detail: str

    def __str__(self) -> str:
        where = self.shard if self.row is None else f"{self.shard} row {self.row}"
        return f"{self.kind} at {where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was read, and what is wrong with it.

    Attributes:
        shards: files read to the end. rows: good rows whose every byte was read; failed: rows marked failed.
        tokens: of the good rows. bytes: of the files.
    """

    shards: int = 0
    rows: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def __add__(self, other: Report) -> Report:
        return Report(
            self.shards + other.shards,
            self.rows + other.rows,
            self.failed + other.failed,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.problems + other.problems,
        )


def finite_check(spec: CaptureSpec) -> Callable[[memoryview], bool]:
    """A function that tells whether all states in a buffer are finite.

    It serves one pass over one field of one row (`aux` or `last`), given piece by piece in order: quantised states show
    it in their scales alone, so where a piece begins matters.
    """
    if spec.stored_dtype == "U8":
        return _FiniteScales(spec.stored_width)
    width, infinity = _INFINITY[spec.dtype]
    sign = 1 << (8 * width - 1)

    def finite(data: memoryview) -> bool:
        if not len(data):
            return True
        positive, negative = np.frombuffer(data, f"<i{width}"), np.frombuffer(data, f"<u{width}")
        return bool(positive.max() < infinity and negative.max() < infinity | sign)

    return finite


class _FiniteScales:
    """Looks at the float32 behind each state of `width` bytes: at its upper two, which hold the exponent."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._until_top = width - 1  # bytes before the next scale's uppermost one
        self._previous = 0  # the byte before this piece: a scale may lie across two

    def __call__(self, data: memoryview) -> bool:
        values = np.frombuffer(data, "u1")
        if not len(values):
            return True
        tops = values[self._until_top :: self._width]
        below = (
            values[self._until_top - 1 :: self._width] if self._until_top else values[self._width - 1 :: self._width]
        )
        if not self._until_top:
            below = np.concatenate([np.array([self._previous], dtype="u1"), below])
        self._until_top = (self._until_top - len(values)) % self._width
        self._previous = int(values[-1])
        return not np.any((tops & 0x7F == 0x7F) & (below[: len(tops)] >= 0x80))


def row_problems(fd: int, index: ShardIndex, *, finite: bool = True) -> list[Problem]:
    """Check every row's bytes against `row_xxh3` and `row_status`.

    Args:
        fd: the shard file, open for reading.
        index: as read from it.
        finite: also look for NaN and infinity.
    """
    found: list[Problem] = []
    name = index.shard.name
    for position in range(index.shard.rows):
        row, status = index.shard.start + position, int(index.row_status[position])
        start, stop = index.row_offsets[position : position + 2]
        hashes = {
            "tokens": field_hash(index.tokens[start:stop]),
            "loss_mask": field_hash(index.loss_mask[start:stop]),
        }
        bad: set[str] = set()
        for field in ("aux", "last"):
            look = _Look(status, finite_check(index.spec) if finite else None)
            hashes[field] = hash_range(fd, *index.span(field, position), look.chunk)
            if status == RowStatus.FAILED:
                hashes[field] = 0
            if look.bad:
                bad.add(field)
        differ = [f for f, claimed in zip(FIELDS, index.row_xxh3[position], strict=True) if hashes[f] != int(claimed)]
        if status == RowStatus.PENDING:
            found.append(Problem(ProblemKind.ROW_STATUS, name, row, "neither ok nor failed"))
        if differ:
            found.append(Problem(ProblemKind.ROW_HASH, name, row, f"bytes of {', '.join(differ)} changed"))
        if bad and status == RowStatus.FAILED:
            found.append(Problem(ProblemKind.ROW_STATUS, name, row, "marked failed, but holds states"))
        elif bad:
            found.append(Problem(ProblemKind.NOT_FINITE, name, row, f"NaN or infinity in {', '.join(sorted(bad))}"))
    return found


class _Look:
    """What is looked for in a row's chunks besides their hash: zeros in a failed row, finite numbers in a good one."""

    def __init__(self, status: int, finite: Callable[[memoryview], bool] | None) -> None:
        self.bad = False
        self._failed, self._finite = status == RowStatus.FAILED, finite

    def chunk(self, data: memoryview) -> None:
        if self._failed:
            self.bad |= bool(np.frombuffer(data, "u1").any())
        elif self._finite is not None:
            self.bad |= not self._finite(data)


def verify_shard(
    path: str | Path,
    sidecar: Sidecar | None = None,
    *,
    info: StoreInfo | None = None,
    contents: Contents | None = None,
    finite: bool = True,
) -> Report:
    """Check one finished shard file.

    Args:
        path: the file (or a link to it).
        sidecar: compared with the file when given.
        info: the store's; the file must then be the planned shard.
        contents: the corpus's part of a shard's rows; tokens, mask and positions must then equal it.
        finite: also look for NaN and infinity.
    """
    name = Path(path).name
    try:
        fd = open_regular(Path(path))
    except OSError as error:
        return Report(problems=(Problem(ProblemKind.UNREADABLE, name, None, error.strerror or str(error)),))
    try:
        index = read_index(fd, path)
        problems = _structure_problems(index, name, info)
        if sidecar is not None:
            problems += _sidecar_problems(index, name, sidecar)
        problems += row_problems(fd, index, finite=finite)
    except IntegrityError as error:
        return Report(problems=(Problem(ProblemKind.STRUCTURE, name, None, f"{error.what}: {error.hint}"),))
    except OSError as error:
        return Report(problems=(Problem(ProblemKind.UNREADABLE, name, None, error.strerror or str(error)),))
    finally:
        os.close(fd)
    if contents is not None:
        problems += _identity_problems(index, contents)
    ok = index.row_status == RowStatus.OK
    tokens = int(np.diff(index.row_offsets)[ok].sum())
    failed = int((index.row_status == RowStatus.FAILED).sum())
    return Report(1, int(ok.sum()), failed, tokens, index.layout.file_bytes, tuple(problems))


def _structure_problems(index: ShardIndex, name: str, info: StoreInfo | None) -> list[Problem]:
    if info is None:
        return []
    if index.shard.name != name:
        return [Problem(ProblemKind.STRUCTURE, name, None, f"the file says it is {index.shard.name}")]
    planned = info.plan.shards[index.shard.index] if index.shard.index < len(info.plan.shards) else None
    if planned is None or info.layout(planned).header != index.layout.header:
        return [Problem(ProblemKind.STRUCTURE, name, None, "layout, spec or corpus is not the store's")]
    return []


def _sidecar_problems(index: ShardIndex, name: str, sidecar: Sidecar) -> list[Problem]:
    problems = []
    if sidecar.index_xxh3 != index.index_xxh3:
        detail = f"{index.index_xxh3:016x}, the sidecar says {sidecar.index_xxh3:016x}"
        problems.append(Problem(ProblemKind.INDEX_HASH, name, None, detail))
    mine = {
        "name": index.shard.name,
        "rows": (index.shard.start, index.shard.stop),
        "tokens": index.shard.tokens,
        "positions": index.shard.positions,
        "bytes": index.layout.file_bytes,
        "spec_id": index.spec.spec_id,
        "corpus": index.corpus,
        "plan": index.plan,
    }
    differ = [f"{k} {getattr(sidecar, k)}, the file has {v}" for k, v in mine.items() if getattr(sidecar, k) != v]
    failed = set((np.flatnonzero(index.row_status == RowStatus.FAILED) + index.shard.start).tolist())
    if failed != set(sidecar.failed):
        differ.append(f"failed rows {sorted(sidecar.failed)}, the file has {sorted(failed)}")
    if differ:
        problems.append(Problem(ProblemKind.SIDECAR, name, None, f"sidecar says {'; '.join(differ)}"))
    return problems


def _identity_problems(index: ShardIndex, contents: Contents) -> list[Problem]:
    name, shard = index.shard.name, index.shard
    try:
        known = pack_contents(shard, contents(shard))
    except ValueError as error:
        return [Problem(ProblemKind.IDENTITY, name, None, f"corpus: {error}")]
    if not np.array_equal(known.row_offsets, index.row_offsets):
        return [Problem(ProblemKind.IDENTITY, name, None, "row lengths are not the corpus's")]
    found = []
    for position in range(shard.rows):
        start, stop = index.row_offsets[position : position + 2]
        mine, theirs = (slice(*o[position : position + 2]) for o in (index.last_offsets, known.last_offsets))
        same = {
            "tokens": np.array_equal(index.tokens[start:stop], known.tokens[start:stop]),
            "loss_mask": np.array_equal(index.loss_mask[start:stop], known.loss_mask[start:stop]),
            "last_index": np.array_equal(index.last_index[mine], known.last_index[theirs]),
        }
        if differ := [field for field, equal in same.items() if not equal]:
            found.append(
                Problem(ProblemKind.IDENTITY, name, shard.start + position, f"{', '.join(differ)} not the corpus's")
            )
    return found


def verify_store(
    root: str | Path,
    corpus_rows: Contents | None = None,
    *,
    finite: bool = True,
    progress: Callable[[Shard, Report], None] = lambda shard, report: None,
) -> Report:
    """Check a whole store, reading every byte once.

    Args:
        root: the store's folder.
        corpus_rows: the corpus's part of a shard's rows, as for StoreWriter.lease; checks identity too.
        finite: also look for NaN and infinity.
        progress: called after each shard with its own report.

    Raises:
        StoreError: `root` is not a store.
    """
    folder, info = Path(root), read_store_info(root)
    names = set(os.listdir(folder))  # noqa: PTH208
    total = Report()
    sidecars: list[Sidecar] = []
    for shard in info.plan.shards:
        paths = ShardPaths(folder, shard.stem)
        sidecar, problems = _find(shard, paths, names)
        report = Report(problems=tuple(problems))
        if sidecar is not None:
            sidecars.append(sidecar)
            report += verify_shard(paths.final, sidecar, info=info, contents=corpus_rows, finite=finite)
        progress(shard, report)
        total += report
    return total + Report(problems=tuple(_folder_problems(folder, info, names, sidecars)))


def _find(shard: Shard, paths: ShardPaths, names: set[str]) -> tuple[Sidecar | None, list[Problem]]:
    """The sidecar of a complete shard, and what its files' names already say is wrong."""
    has = {p.name: p.name in names for p in (paths.final, paths.sidecar, paths.part, paths.journal)}
    problems = []
    sidecar = None
    if paths.consumed.name in names:
        detail = f"rows {shard.start} to {shard.stop - 1} were trained on and removed under a disk budget; to capture "
        detail += f"them again remove {paths.consumed.name} and run eyas extract"
        problems.append(Problem(ProblemKind.CONSUMED, shard.name, None, detail))
    elif has[paths.final.name] and has[paths.sidecar.name]:
        try:
            sidecar = read_sidecar(paths.sidecar)
        except (IntegrityError, StoreError) as error:
            problems.append(Problem(ProblemKind.SIDECAR, shard.name, None, str(error)))
        problems += [
            Problem(ProblemKind.STRAY, shard.name, None, f"{p.name} beside the complete shard")
            for p in (paths.part, paths.journal)
            if has[p.name]
        ]
    elif has[paths.final.name]:
        problems.append(Problem(ProblemKind.UNFINISHED, shard.name, None, "no sidecar"))
    elif has[paths.part.name]:
        problems.append(Problem(ProblemKind.UNFINISHED, shard.name, None, "still open"))
    else:
        problems.append(Problem(ProblemKind.MISSING, shard.name, None, f"rows {shard.start} to {shard.stop - 1}"))
    return sidecar, problems


def _folder_problems(folder: Path, info: StoreInfo, names: set[str], sidecars: Iterable[Sidecar]) -> Iterable[Problem]:
    known = {STORE_FILE, MANIFEST_FILE, EVENTS_DIR}
    for shard in info.plan.shards:
        paths = ShardPaths(folder, shard.stem)
        known |= {p.name for p in (paths.final, paths.sidecar, paths.part, paths.journal, paths.consumed)}
    for name in sorted(names - known):
        yield Problem(ProblemKind.STRAY, name, None, "belongs to no planned shard")
    described = list(sidecars)
    if MANIFEST_FILE in names:
        try:
            text = str(read_limited(folder / MANIFEST_FILE, MAX_DOCUMENT_BYTES)[0], "utf-8")
        except (OSError, ValueError) as error:
            yield Problem(ProblemKind.MANIFEST, MANIFEST_FILE, None, str(error))
            return
        if text != manifest_json(info, described):
            yield Problem(ProblemKind.MANIFEST, MANIFEST_FILE, None, "not that of the shards beside it; write it again")
    elif len(described) == len(info.plan.shards):
        yield Problem(ProblemKind.MANIFEST, MANIFEST_FILE, None, "missing, though every shard is complete; run extract")
