"""Stage two: in the store, open or finished."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from eyas.capture.contract import CaptureSpec
from eyas.data.corpus import Corpus
from eyas.errors import EyasError
from eyas.positions import kept_positions
from eyas.store.check import Problem
from eyas.store.documents import read_sidecar, write_manifest
from eyas.store.files import ShardPaths
from eyas.store.format import RowContents, StoreInfo
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader, StoreRow
from eyas.store.shardfile import state_span
from eyas.store.writer import StoreWriter
from eyas.verify import verify
from mutations.bench import Bench, Target0, bench, make_corpus, notes, quiet, store_bytes
from mutations.judge import Judged, mismatch
from mutations.mutation import Check, Mutation, OpenShard, Shards, Verdict, bytes_of

ROW_TOKENS: Final = 12
SHARD_ROWS: Final = 3
SHARD_BYTES: Final = 80_000  # three rows of that length, not four
_STEM: Final = re.compile(r"shard-\d{5}")
_NOTE: Final = re.compile(r"(shard-\d{5})\.safetensors: ([a-z-]+): ")

Names = dict[str, list[str]]  # by shard stem; "" for what is no shard's


def judge_store(
    folder: Path,
    target: Target0,
    opened: Sequence[Mutation],
    shards: Sequence[Mutation],
    documents: Sequence[Mutation],
) -> dict[str, Judged]:
    """Open shards, finished shards and documents, each compared with one control store that a real job made."""
    needed = max(sum(m.rows for m in opened), sum(m.rows for m in shards)) + 2
    with bench(folder, target, [ROW_TOKENS] * (needed * SHARD_ROWS), SHARD_BYTES) as made:
        made.extract(folder / "control", "extract.attempts=3")
        judge = _Judge(made, folder)
        return {
            "open": judge.open(opened),
            "shards": judge.shards(shards),
            "documents": judge.documents(documents),
        }


class _Judge:
    def __init__(self, made: Bench, folder: Path) -> None:
        self._bench, self._folder = made, folder
        self._control = folder / "control"
        reader = StoreReader(self._control)
        self._info, self._rows = reader.info, list(reader)
        self._provenance = reader.provenance[0]
        assert {shard.rows for shard in self._info.plan.shards} == {SHARD_ROWS}
        assert len(self._rows) == self._info.plan.shards[-1].stop
        self._right = store_bytes(self._control)
        lengths = [ROW_TOKENS] * len(self._rows)
        self._other_corpus = make_corpus(folder, lengths, seed=1)
        self._other = folder / "other"
        self._fill(self._other, self._other_corpus, reader.spec, whole=True)

    # --- open shards --------------------------------------------------------------------------------------------------

    def open(self, mutations: Sequence[Mutation]) -> Judged:
        """Interrupted runs, resumed by the same command."""
        spec, store = self._info.spec, self._folder / "open"
        other_spec = CaptureSpec.from_dict({**spec.to_dict(), "model": "e" * 32})
        roots = [store, self._folder / "open-corpus", self._folder / "open-spec"]
        self._fill(roots[0], self._bench.corpus, spec, whole=False)
        self._fill(roots[1], self._other_corpus, spec, whole=False)
        self._fill(roots[2], self._bench.corpus, other_spec, whole=False)
        verdicts, touched = self._deal(mutations, lambda stems: self._open_shard(roots, stems))
        self._bench.extract(store)
        seen = {
            Check.RESUME: _group([match.groups() for text in notes(store) if (match := _NOTE.match(text))]),
            Check.VERIFY: self._verified(store),
            **self._values(store),
        }
        for shard in self._info.plan.shards:
            sidecar = read_sidecar(ShardPaths(store, shard.stem).sidecar)
            assert sidecar is not None
            seen[Check.RESUME].setdefault(shard.stem, []).extend(sidecar.failed.values())
        _remove(store, {stem for stem, names in seen[Check.AGAINST].items() if names})
        self._bench.extract(store, retry_failed=True)
        return self._judged(verdicts, touched, seen, store)

    def _open_shard(self, roots: Sequence[Path], stems: list[str]) -> OpenShard:
        shard = self._shard(stems[0])
        layout, spec = self._info.layout(shard), self._info.spec
        contents = _packed(self._bench.corpus, self._info, shard)
        spans = [tuple(state_span(layout, spec, f, o, row) for f, o in contents) for row in range(shard.rows)]
        beyond = stems[-1] if len(stems) > 1 else self._info.plan.shards[-1].stem
        paths = [ShardPaths(root, stem) for root, stem in ((roots[0], beyond), *((r, stems[0]) for r in roots[1:]))]
        mine = ShardPaths(roots[0], stems[0])
        return OpenShard(
            mine.part,
            mine.journal,
            range(shard.start, shard.stop),
            spans,
            *((p.part, p.journal) for p in paths),
        )

    # --- finished shards and documents --------------------------------------------------------------------------------

    def shards(self, mutations: Sequence[Mutation]) -> Judged:
        """Those that only values tell are in a store of their own: `--against` does not look at broken shards."""
        verdicts: list[Verdict] = []
        control: list[str] = []
        for name, valued in (("broken", False), ("wrong", True)):
            chosen = [m for m in mutations if (m.seen_by is Check.AGAINST) is valued]
            store = self._copy(name)
            dealt, touched = self._deal(chosen, lambda stems, root=store: self._finished(root, stems))
            if valued:
                write_manifest(store)  # every hash fits: this one too
            seen = {Check.VERIFY: self._verified(store), Check.CORPUS: self._identity(store)}
            if valued:
                seen |= self._values(store)
            else:
                seen[Check.VERIFY].pop("")  # the manifest is not that of these shards, whichever of them is to blame
            named = {stem for names in seen.values() for stem in names if names[stem]}
            _remove(store, named)
            self._bench.extract(store)
            judged = self._judged(dealt, touched, seen, store)
            verdicts += judged.verdicts
            control += judged.control
        return Judged(verdicts, control)

    def documents(self, mutations: Sequence[Mutation]) -> Judged:
        """Each in a copy of its own. A store.json that is wrong must stop the command; all else it puts right."""
        verdicts = []
        for number, mutation in enumerate(mutations):
            store = self._copy(f"document-{number}")
            mutation.inject(self._finished(store, [self._info.plan.shards[0].stem]))
            verdict = Verdict(mutation, {Check.RESUME: [], Check.VERIFY: []})
            try:
                report = verify(store, console=quiet())
                verdict.seen[Check.VERIFY] = sorted({str(problem.kind) for problem in report.problems})
                for problem in report.problems:
                    if problem.kind == "stray":
                        (store / problem.shard).unlink()
            except EyasError as error:
                verdict.seen[Check.VERIFY] = [error.what]
            try:
                self._bench.extract(store)
                verdict.right_again = store_bytes(store) == self._right
            except EyasError as error:
                verdict.right_again = True  # nothing is written to a store that is for something else
                if mutation.seen_by is Check.RESUME:
                    verdict.seen[Check.RESUME] = [error.what.partition(" (")[0]]
            verdicts.append(verdict)
        return Judged(verdicts, [])

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _deal(
        self, mutations: Sequence[Mutation], context: Callable[[list[str]], object]
    ) -> tuple[list[Verdict], list[list[str]]]:
        """Give each mutation shards of its own and let it strike; the last shard stays as it is."""
        stems = iter([shard.stem for shard in self._info.plan.shards])
        touched = [[next(stems) for _ in range(mutation.rows)] for mutation in mutations]
        for mutation, its in zip(mutations, touched, strict=True):
            mutation.inject(context(its))
        return [Verdict(mutation) for mutation in mutations], touched

    def _judged(
        self, verdicts: list[Verdict], touched: list[list[str]], seen: dict[Check, Names], store: Path
    ) -> Judged:
        after = store_bytes(store)
        for verdict, stems in zip(verdicts, touched, strict=True):
            for check, names in seen.items():
                verdict.seen[check] = sorted({name for stem in stems for name in names.pop(stem, [])})
            files = [f"{stem}.{kind}" for stem in stems for kind in ("safetensors", "json")]
            verdict.right_again = all(after.get(file) == self._right[file] for file in files)
        left = [f"{c}: {stem}: {n}" for c, names in seen.items() for stem, ns in names.items() for n in ns]
        return Judged(verdicts, left)

    def _shard(self, stem: str) -> Shard:
        return next(shard for shard in self._info.plan.shards if shard.stem == stem)

    def _copy(self, name: str) -> Path:
        store = self._folder / name
        shutil.copytree(self._control, store)
        return store

    def _finished(self, root: Path, stems: list[str]) -> Shards:
        return Shards(root, self._info, stems, self._other)

    def _verified(self, store: Path) -> Names:
        problems = verify(store, console=quiet()).problems
        return {"": []} | _group((_stem(problem), str(problem.kind)) for problem in problems)

    def _identity(self, store: Path) -> Names:
        """What only the corpus tells."""
        problems = verify(store, corpus=self._bench.corpus, console=quiet()).problems
        return _group((_stem(problem), str(problem.kind)) for problem in problems if problem.kind == "identity")

    def _values(self, store: Path) -> dict[Check, Names]:
        """What the recomputed states tell, and what the server's log-probabilities do."""
        path, url = str(self._bench.target.path), self._bench.server.url
        report = verify(store, against=path, logits=url, sample=0, console=quiet())
        assert report.comparison is not None
        assert report.audit is not None
        found = [mismatch(text) for text in report.comparison.mismatches]
        audited = [(problem.row, str(problem.kind)) for problem in report.audit.problems]
        return {
            check: _group((f"shard-{row // SHARD_ROWS:05d}", name) for row, name in pairs)
            for check, pairs in ((Check.AGAINST, found), (Check.LOGITS, audited))
        }

    def _fill(self, root: Path, corpus: Path, spec: CaptureSpec, *, whole: bool) -> None:
        """A store with the control's states; unless `whole`, the last row of every shard is pending."""
        opened, mine = Corpus.open(corpus), self._info.corpus
        writer = StoreWriter.open(
            root,
            spec=spec,
            corpus={**mine, "digest": opened.digest},
            tokens_N=opened.n_tokens,
            positions_N=opened.n_positions,
            shard_bytes=SHARD_BYTES,
            provenance=self._provenance,
        )
        for shard in writer.plan.shards:
            lease = writer.lease(shard, lambda its: _contents(opened, its))
            assert lease is not None
            with lease:
                for row in lease.pending[: None if whole else -1]:
                    lease.put(row, *(bytes_of(states) for states in _states(self._rows[row])))
                if whole:
                    lease.finish()
        if whole:
            writer.write_manifest()


def _states(row: StoreRow) -> tuple:
    return row.aux, row.last


def _contents(corpus: Corpus, shard: Shard) -> list[RowContents]:
    rows = corpus.rows(shard.start, shard.stop)
    return [RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, "loss")) for row in rows]


def _packed(corpus: Path, info: StoreInfo, shard: Shard) -> list[tuple[str, list[int]]]:
    """Offsets of each field's rows."""
    rows = _contents(Corpus.open(corpus), shard)
    edges: dict[str, list[int]] = {"aux": [0], "last": [0]}
    for row in rows:
        edges["aux"].append(edges["aux"][-1] + len(row.tokens))
        edges["last"].append(edges["last"][-1] + len(row.last_positions))
    return list(edges.items())


def _stem(problem: Problem) -> str:
    return match[0] if (match := _STEM.match(problem.shard)) else ""


def _group(pairs: Iterable[Sequence[str]]) -> Names:
    found: Names = {}
    for stem, name in pairs:
        found.setdefault(stem, []).append(name)
    return found


def _remove(store: Path, stems: Iterable[str]) -> None:
    """What the hint of `eyas verify` says: remove the shards named."""
    for stem in stems:
        for path in store.glob(f"{stem}.*"):
            path.unlink()
