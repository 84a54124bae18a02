"""One row's look at what is new in the dump folder: which dumps may be its own, read and compared. Runs in threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from eyas.capture.contract import field_hash
from eyas.extract.dumpdir.content import Evidence, Judge
from eyas.extract.dumpdir.folder import Fresh
from eyas.extract.dumpdir.layout import Layout, Misfit, Unfinished
from eyas.extract.dumpdir.loading import Dump, DumpReader
from eyas.extract.dumpdir.matching import Candidate, Fit, Sighting, sort_out
from eyas.extract.engine import Failed

_MOST_COUNTS: Final = 10_000
_BEGUN_BEFORE: Final = -1  # no row's count

#: Token counts by folder name, each with what it was read from: shared by all rows, so that a dump's is read once.
Counts = dict[str, tuple[Fresh, int]]


@dataclass(frozen=True, slots=True)
class _Read:
    fresh: Fresh
    candidate: Candidate
    dump: Dump | None
    last: torch.Tensor | None


class Desk:
    """Holds what was read for one row.

    Args:
        folder: the dump folder.
        layout: what is where in a dump.
        judge: compares contents.
        counts: known token counts; is added to.
    """

    def __init__(self, folder: Path, layout: Layout, judge: Judge, counts: Counts) -> None:
        self._folder, self._layout, self._judge = folder, layout, judge
        self._counts = counts
        self._reads: dict[str, _Read] = {}
        self._said: dict[str, str] = {}  # why a dump is not finished, or of what other count it is

    def read(self, fresh: Iterable[Fresh], tokens: int, evidence: Evidence | None) -> tuple[list[Candidate], set[str]]:
        """Finished dumps of `tokens` tokens, and the names of those that may still become one.

        Args:
            fresh: folders with something new in them since the request was sent.
            tokens: the row's.
            evidence: of its reply; None where contents are not compared.
        """
        seen = {one.name: one for one in fresh}
        readers = {name: DumpReader(self._folder, one, self._layout) for name, one in seen.items()}
        self._reads = {name: read for name, read in self._reads.items() if seen.get(name) == read.fresh}
        self._said = {}
        sightings = [
            Sighting(name, self._layout.done in one.files, self._count(one, readers[name]))
            for name, one in seen.items()
        ]
        for sighting in sightings:
            if sighting.count == tokens and not sighting.finished:
                self._said[sighting.name] = f"{tokens} tokens, but no new {self._layout.done}"
        finished, unfinished = sort_out(tokens, sightings)
        for name in finished:
            if name not in self._reads:
                try:
                    self._reads[name] = self._compared(seen[name], readers[name], tokens, evidence)
                except Unfinished as reason:
                    self._said[name] = str(reason)
                    unfinished.add(name)
        return [read.candidate for read in self._reads.values()], unfinished

    def taken(self, name: str) -> tuple[Fresh, Dump, torch.Tensor]:
        """A dump that was decided for: its files, its states, and its last states after the norm."""
        read = self._reads[name]
        assert read.dump is not None
        assert read.last is not None
        return read.fresh, read.dump, read.last

    def explained(self, failure: Failed) -> Failed:
        """A failure that also tells what was seen instead."""
        if failure.reason not in ("dump-late", "dump-unfinished") or not self._said:
            return failure
        said = "; ".join(f"{name}: {text}" for name, text in sorted(self._said.items())[:4])
        if failure.reason == "dump-unfinished" and set(self._said) >= set(failure.detail.split(", ")):
            return replace(failure, detail=said)  # it names them all
        return replace(failure, detail=f"{failure.detail} ({said})")

    def _count(self, fresh: Fresh, reader: DumpReader) -> int | None:
        known = self._counts.get(fresh.name)
        if known is not None and known[0] == fresh:
            count = known[1]
        else:
            try:
                count = reader.count()
            except (Unfinished, Misfit) as reason:
                if self._begun_before(fresh):
                    return _BEGUN_BEFORE
                self._said[fresh.name] = str(reason)
                return None
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
            self._counts[fresh.name] = fresh, count
        self._said[fresh.name] = f"{count} tokens"
        return count

    def _begun_before(self, fresh: Fresh) -> bool:
        """Whether a dump's count was there when the request was sent, and is still the same: it was being written.

        One that takes over the name of another, as after a restart, will bring a count of its own.
        """
        with contextlib.suppress(Unfinished):
            return bool(self._layout.count.files(fresh.old))
        return False

    def _compared(self, fresh: Fresh, reader: DumpReader, tokens: int, evidence: Evidence | None) -> _Read:
        """Raises Unfinished."""
        try:
            dump = reader.dump(tokens)
        except Misfit as misfit:
            return _Read(fresh, Candidate(fresh.name, Fit.MISFIT, 0, str(misfit), misfit.reason), None, None)
        last = self._judge.last(dump.last)
        same = hash((digest(dump.aux), digest(dump.last)))
        if evidence is None:
            return _Read(fresh, Candidate(fresh.name, Fit.RIGHT, same), dump, last)
        fit, detail = self._judge.fit(last, evidence)
        if fit is not Fit.RIGHT and (found := self._judge.explain(dump.last, evidence)):
            reason, text = found
            return _Read(fresh, Candidate(fresh.name, Fit.MISFIT, same, text, reason), dump, last)
        return _Read(fresh, Candidate(fresh.name, fit, same, detail), dump, last)


def digest(states: torch.Tensor) -> int:
    """xxh3-64 of a tensor's bytes."""
    return field_hash(states.contiguous().view(torch.uint8).numpy())
