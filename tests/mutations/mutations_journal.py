"""In an interrupted run's open shards: the part and its journal, before the same command resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from eyas.capture.contract import field_hash
from eyas.store.journal import RowFailed, RowOk, decode_journal, row_line
from mutations.mutation import Check, Mutation, OpenShard, Stage, flip, swap_files


def _resumed(name: str, error: str, inject: Callable[[OpenShard], object], rows: int = 1) -> Mutation:
    return Mutation(name, Stage.OPEN, inject, Check.RESUME, error, rows=rows)


def _line_bit(line: int) -> Callable[[OpenShard], None]:
    def inject(shard: OpenShard) -> None:
        flip(shard.journal, sum(map(len, shard.lines()[:line])) + 40)

    return inject


def _replayed(shard: OpenShard) -> None:
    """A line that an earlier life of the file wrote of row 0 comes again, last."""
    shard.write_lines([*shard.lines(), row_line(RowOk(shard.rows[0], 1, 2))])


def _exchanged(shard: OpenShard) -> None:
    """Rows 0 and 1 have each other's checksums."""
    entries = decode_journal(shard.journal.read_bytes()).sessions[0].rows
    one, other = (entries[row] for row in shard.rows[:2])
    assert isinstance(one, RowOk)
    assert isinstance(other, RowOk)
    lines = [row_line(RowOk(one.row, other.aux, other.last)), row_line(RowOk(other.row, one.aux, one.last))]
    shard.write_lines([shard.lines()[0], *lines])


def _claimed(shard: OpenShard) -> None:
    """Row 2, which nobody wrote, is called ok, with the checksums of row 0."""
    first = decode_journal(shard.journal.read_bytes()).sessions[0].rows[shard.rows[0]]
    assert isinstance(first, RowOk)
    shard.write_lines([*shard.lines(), row_line(RowOk(shard.rows[2], first.aux, first.last))])


def _zeros_claimed(shard: OpenShard) -> None:
    """Row 2, which nobody wrote, is called ok, with the checksums of the zeros that lie there."""
    aux, last = (field_hash(bytes(stop - start)) for start, stop in shard.spans[2])
    shard.write_lines([*shard.lines(), row_line(RowOk(shard.rows[2], aux, last))])


def _given_up(shard: OpenShard) -> None:
    shard.write_lines([*shard.lines(), row_line(RowFailed(shard.rows[0], "forged"))])


def _hole(shard: OpenShard) -> None:
    start, stop = shard.spans[1][0]
    with shard.part.open("r+b") as file:
        file.seek(start)
        file.write(bytes(stop - start))


def _taken(files: Callable[[OpenShard], tuple[Path, Path]], *, part: bool) -> Callable[[OpenShard], None]:
    def inject(shard: OpenShard) -> None:
        source_part, source_journal = files(shard)
        shutil.copy(source_journal, shard.journal)
        if part:
            shutil.copy(source_part, shard.part)

    return inject


OPEN = (
    _resumed("bit flipped in a journal's session", "journal-damaged", _line_bit(0)),
    _resumed("bit flipped in a row's line", "journal-damaged", _line_bit(1)),
    _resumed("a journal whose lines are out of order", "journal-damaged", lambda s: s.write_lines(s.lines()[::-1])),
    _resumed("a journal without its first line", "journal-damaged", lambda s: s.write_lines(s.lines()[1:])),
    _resumed("a line of an earlier life replayed", "row-differs", _replayed),
    _resumed("two rows' checksums exchanged", "row-differs", _exchanged),
    _resumed("a pending row called ok", "row-differs", _claimed),
    _resumed("an ok row called failed", "forged", _given_up),
    _resumed("another shard's journal", "journal-foreign", _taken(lambda s: s.neighbour, part=False)),
    _resumed("another shard's part and journal", "journal-foreign", _taken(lambda s: s.neighbour, part=True)),
    _resumed(
        "part and journal of another corpus with rows of equal length",
        "journal-foreign",
        _taken(lambda s: s.other_corpus, part=True),
    ),
    _resumed("part and journal of another spec", "journal-foreign", _taken(lambda s: s.other_spec, part=True)),
    _resumed("two parts exchange their names", "row-differs", lambda s: swap_files(s.part, s.neighbour[0]), rows=2),
    _resumed("bit flipped in a journalled row's aux", "row-differs", lambda s: flip(s.part, s.spans[0][0][0] + 77)),
    _resumed("bit flipped in a journalled row's last", "row-differs", lambda s: flip(s.part, s.spans[1][1][1] - 1)),
    _resumed("a part with a hole", "row-differs", _hole),
    _resumed("a part cut short", "row-differs", lambda s: os.truncate(s.part, s.spans[1][0][0] + 5)),
    _resumed("a part that is gone, its journal left", "row-differs", lambda s: s.part.unlink()),
    Mutation(
        "a pending row called ok, with the checksum of its zeros",
        Stage.OPEN,
        _zeros_claimed,
        Check.AGAINST,
        "last",
        logits="logits-differ",
    ),
)
