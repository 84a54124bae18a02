"""`eyas prepare`: chat files -> corpus, every row accounted for.

Input.rows_raw -> parse -> Template.encode_batch -> fit -> duplicate? -> weight, holdout -> shuffle -> CorpusWriter
    └──────────── in workers, chunk by chunk ───────┘      └──────────── here, in the order of the inputs ──────────┘

A row that is lost on the way is a `Dropped`: read = kept + dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console

from eyas.config import PrepareConfig, SourceConfig
from eyas.data.corpus import CORPUS_FILE, CorpusMeta, CorpusWriter
from eyas.data.names import display
from eyas.data.outfolder import DROPPED_FILE, HOLDOUT_FILE, PROMPTS_FILE, SUMMARY_FILE, OutFolder
from eyas.data.prepare.decontaminate import GRAM_WORDS, EvaluationIndex
from eyas.data.prepare.dedupe import Seen
from eyas.data.prepare.encode import EncodedChunk, EncodeSettings, Kept, Outcome, Prompt
from eyas.data.prepare.pool import Chunk, Team, chunks_of, encode_chunks
from eyas.data.prepare.progress import Progress
from eyas.data.prepare.report import PrepareReport
from eyas.data.prepare.samples import render_sample
from eyas.data.prepare.shuffle import PlainRow, Shuffle
from eyas.data.rows import CHOICES, Dropped, DropReason
from eyas.data.sources import Input, open_sources
from eyas.data.template import Encoded, Template
from eyas.data.template.encoder import CUT_AT_LIMIT
from eyas.errors import ConfigError
from eyas.signals import StopSignals

_DEFAULTS = PrepareConfig()


def prepare(
    inputs: Sequence[Path | str | SourceConfig],
    target: str,
    out: Path,
    *,
    cfg: PrepareConfig = _DEFAULTS,
    show: int = 0,
    console: Console | None = None,
    template: Template | None = None,
) -> PrepareReport:
    """Tokenises chats into the folder `out`.

    It gets corpus.parquet; holdout.parquet where `cfg.holdout` asks for it; prompts.jsonl, rows without an answer;
    dropped.jsonl, every other row that is not in the corpus; summary.json. An earlier run's files are replaced at the
    end; a run that fails leaves them as they were.

    Args:
        inputs: files, folders, globs or data sets, see `eyas.data.sources`; read in order.
        target: the model whose tokenizer and chat template are used, a folder or a Hugging Face id.
        out: folder to write.
        cfg: settings; its own `target` and `sources` are not read.
        show: so many of the first rows kept are printed, trained tokens marked.
        console: where progress and samples go; standard error when not given.
        template: the target's, with the template settings of `cfg`, when it is loaded already.

    Raises:
        ConfigError: a file or the model cannot be read; `cfg.strict` and a row cannot be used; or no row is left,
            where the accounts and the prompts are written all the same.
        StoreError: the folder cannot be written.
    """
    began = time.monotonic()
    console = console or Console(stderr=True)
    opened = open_sources(inputs)
    if not opened:
        raise ConfigError("no input", "", "name files of chats, or set prepare.sources")
    evaluations = EvaluationIndex.read(cfg.decontaminate) if cfg.decontaminate else None
    settings = EncodeSettings(target, cfg, evaluations)
    folder = OutFolder(out, (one.path for one in opened))
    with StopSignals() as stop, Team(settings, cfg.workers) as team:
        team.start_for(sum(map(_size, opened)))
        template = template or settings.load_template()
        known_as = str(Path(target).resolve()) if Path(target).is_dir() else target  # good from any folder
        hashes = template.tokenizer_hash, template.template_hash
        needs = {"options": cfg.template_options, "rewritten_turns": cfg.rewritten_turns}
        meta = CorpusMeta(known_as, *hashes, template.vocab_size, template_settings=needs)
        report = PrepareReport(out, known_as, *hashes)
        with folder, Progress(console, report, opened) as progress:
            try:
                encoded = _checked(encode_chunks(chunks_of(opened), settings, template, team), stop)
                with _Books(folder.work, report, opened, settings, meta) as books:
                    _fill(books, encoded, template, progress, show)
                stop.check()
                report.seconds = time.monotonic() - began
                text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
                (folder.work / SUMMARY_FILE).write_text(text, encoding="utf-8", errors="replace")
            except OSError as error:
                raise folder.failed(error) from error
            folder.publish(keep=() if report.rows else (CORPUS_FILE, HOLDOUT_FILE))
    if not report.rows:
        raise _nothing_left(report, opened)
    return report


def _checked(chunks: Iterable[tuple[Chunk, EncodedChunk]], stop: StopSignals) -> Iterator[tuple[Chunk, EncodedChunk]]:
    for chunk in chunks:
        stop.check()
        yield chunk


def _fill(
    books: _Books,
    chunks: Iterable[tuple[Chunk, EncodedChunk]],
    template: Template,
    progress: Progress,
    show: int,
) -> None:
    shown = 0
    for chunk, encoded in chunks:
        for number, (outcome, rows) in zip(chunk.inputs, encoded.rows(), strict=True):
            taken = books.take(number, outcome, rows)
            if isinstance(outcome, Kept) and taken and shown < show:
                progress.print(render_sample(template, outcome, rows, progress.console))
                shown += 1
        books.report.renamed.update(encoded.renamed)
        progress.advance(chunk.inputs[-1], chunk.raws[-1])
    progress.say("writing the corpus")
    books.close()


class _Books:
    """Takes rows in the order of the inputs and decides where each goes; the files are those of `folder`."""

    def __init__(
        self,
        folder: Path,
        report: PrepareReport,
        inputs: Sequence[Input],
        settings: EncodeSettings,
        meta: CorpusMeta,
    ) -> None:
        self._folder, self.report, self._inputs, self._settings = folder, report, inputs, settings
        self._cfg = settings.cfg
        self._corpus = CorpusWriter(folder / CORPUS_FILE, meta)
        self._holdout = CorpusWriter(folder / HOLDOUT_FILE, meta) if self._cfg.holdout else None
        self._shuffle = Shuffle(folder / "shuffle", self._cfg.seed) if self._cfg.shuffle else None
        self._seen = Seen()
        self._read = Counter[int]()  # by number of the input
        self._copies, self._left_out = Counter[str](), Counter[str]()
        self._files = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as files:
            self._prompts = files.enter_context((self._folder / PROMPTS_FILE).open("wb"))
            self._dropped = files.enter_context((self._folder / DROPPED_FILE).open("w", encoding="utf-8", newline="\n"))
            for one in (self._corpus, self._holdout, self._shuffle):
                if one is not None:
                    files.enter_context(one)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def take(self, number: int, outcome: Outcome, rows: list[Encoded]) -> bool:
        """One row of input `number`, and what it becomes; whether it is kept.

        Raises:
            ConfigError: it cannot be used, and `strict` asks to stop there.
        """
        self._read[number] += 1
        match outcome:
            case Kept():
                if self._is_duplicate(outcome.key, answered=True):
                    self._drop(self._duplicate(outcome.file, outcome.line, outcome.source))
                    return False
                self._keep(outcome, rows, self._inputs[number].weight)
                return True
            case Prompt(dropped=dropped):
                if self._is_duplicate(outcome.key, answered=False):
                    self._drop(self._duplicate(dropped.file, dropped.line, dropped.source))
                    return False
                self._prompts.write(outcome.text)
                self.report.prompts += 1
                self.report.drop(dropped)
            case Dropped():
                self._drop(outcome)
        return False

    def close(self) -> None:
        """After the last row: what waits for its place is written, and the report told what was done."""
        if self._shuffle is not None:
            for row in self._shuffle.rows():
                self._corpus.add(row.id, row.tokens, row.loss_mask, row.source)
        self.report.digest = self._corpus.digest if self.report.rows else ""
        self.report.filters = self._filters()
        self._files.close()
        for writer in (self._corpus, self._holdout):
            if writer is not None and not writer.meta.rows:
                writer.path.unlink()

    def _keep(self, outcome: Kept, rows: list[Encoded], weight: float) -> None:
        copies = self._copies_of(outcome.source, weight)
        self.report.keep(outcome.source, outcome.notes)
        if self._holdout is not None and _unit(self._cfg.seed, outcome.prompt_key) < self._cfg.holdout:
            for row in rows:
                self._holdout.add(outcome.id, row.tokens, row.loss_mask, outcome.source)
            return
        if copies == 0:
            self._left_out[outcome.source] += 1
        elif copies > 1:
            self._copies[outcome.source] += copies - 1
        for row in rows * copies:
            self.report.add(outcome.source, len(row.tokens), int(np.count_nonzero(row.loss_mask)))
            if self._shuffle is not None:
                self._shuffle.add(PlainRow(outcome.id, outcome.source, row.tokens, row.loss_mask))
            else:
                self._corpus.add(outcome.id, row.tokens, row.loss_mask, outcome.source)

    def _copies_of(self, source: str, weight: float) -> int:
        """How often a row is seen: `weight` on average, the same for this row of its source in every run."""
        whole = math.floor(weight)
        part = weight - whole
        row = b"%d %s" % (self.report.by_source[source].read, source.encode())
        return whole + (1 if part and _unit(self._cfg.seed, row) < part else 0)

    def _is_duplicate(self, key: bytes, *, answered: bool) -> bool:
        return self._cfg.dedupe != "off" and not self._seen.is_new(key, answered=answered)

    def _duplicate(self, file: str, line: int, source: str) -> Dropped:
        what = "the same user turns" if self._cfg.dedupe == "prompt" else "the same conversation"
        return Dropped(DropReason.DUPLICATE, file, line, f"an earlier row has {what}", source)

    def _drop(self, row: Dropped) -> None:
        if self._cfg.strict and row.reason not in CHOICES:
            hint = f"{row.reason}{f': {row.detail}' if row.detail else ''}; without strict it is dropped and counted"
            raise ConfigError("a row cannot be used", f"{row.file}:{row.line}", hint)
        self.report.drop(row)
        fields = {"reason": row.reason, "file": row.file, "line": row.line, "detail": row.detail, "source": row.source}
        self._dropped.write(json.dumps(fields) + "\n")

    def _filters(self) -> dict[str, dict[str, Any]]:
        """What the settings asked for, and what it did."""
        cfg, dropped, found = self._cfg, self.report.dropped, dict[str, dict[str, Any]]()
        capped = {one.path: one.max_rows for i, one in enumerate(self._inputs) if one.max_rows == self._read[i]}
        if capped:
            found["max_rows"] = {"reached": capped}
        if cfg.max_tokens:
            found["max_tokens"] = {
                "limit": cfg.max_tokens,
                "cut": self.report.changed[CUT_AT_LIMIT],
                "dropped": dropped[DropReason.TOO_LONG],
            }
        if cfg.dedupe != "off":
            found["dedupe"] = {"by": cfg.dedupe, "dropped": dropped[DropReason.DUPLICATE]}
        if (evaluations := self._settings.evaluations) is not None:
            found["decontaminate"] = {
                "sets": list(cfg.decontaminate),
                "rows": len(evaluations.origins),
                "unread": evaluations.unread,
                "words": GRAM_WORDS,
                "dropped": dropped[DropReason.CONTAMINATED],
            }
        if weights := {one.source: one.weight for one in self._inputs if one.weight != 1}:
            found["weights"] = {
                label: {"weight": weight, "left_out": self._left_out[label], "copies": self._copies[label]}
                for label, weight in weights.items()
            }
        if cfg.shuffle:
            found["shuffle"] = {"seed": cfg.seed}
        if self._holdout is not None:
            meta = self._holdout.meta
            totals = {"rows": meta.rows, "tokens": meta.tokens, "trained_tokens": meta.trained_tokens}
            found["holdout"] = {"share": cfg.holdout, "seed": cfg.seed, **totals, "digest": self._holdout.digest}
        return found


def _size(one: Input) -> int:
    """Bytes of a file that is read to its end, 0 where that is not known."""
    return Path(one.path).stat().st_size if one.max_rows is None and Path(one.path).is_file() else 0


def _unit(seed: int, name: bytes) -> float:
    """A number in [0, 1) that a seed gives a name."""
    digest = hashlib.blake2b(b"%d " % seed + name, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _nothing_left(report: PrepareReport, inputs: Sequence[Input]) -> ConfigError:
    """Why a run made no corpus, and what to do about it."""
    more = f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""
    where = ", ".join(display(one.path) for one in inputs[:3]) + more
    answer = f"eyas regenerate {report.out / PROMPTS_FILE} has the target answer them"
    if not report.read:
        return ConfigError("empty corpus: the input holds no rows", where)
    if report.kept:
        return ConfigError("empty corpus: weights and holdout left no row", where, f"{report.kept:,} rows were kept")
    if report.prompts == report.read:
        what = f"empty corpus: all {report.read:,} rows are prompts without an answer"
        return ConfigError(what, where, answer)
    counts = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.most_common())
    reason = next((reason for reason, _ in report.dropped.most_common() if reason != DropReason.PROMPT_ONLY), None)
    first = f"; the first {reason}: {next(iter(report.examples[reason].values())).first}" if reason else ""
    prompts = f"; {answer}" if report.prompts else ""
    what = "empty corpus: no usable row is left"
    return ConfigError(what, where, f"read {report.read:,}, dropped {counts}{first}{prompts}")
