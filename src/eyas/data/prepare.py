"""`eyas prepare`: chat files -> corpus, every row accounted for.

files -> read_chats -> Template.encode_batch -> fit -> CorpusWriter
             └ Dropped        └ Rejected         └ Rejected        read = kept + dropped
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.data.rows import Chat, Dropped, Sampled
from eyas.data.sources import read_chats
from eyas.data.template import Encoded, Rejected, Template, fit
from eyas.errors import ConfigError

TOO_LONG: Final = ("cut", "drop")
BATCH_ROWS: Final = 256  # rows tokenised in one call
EXAMPLES: Final = 3  # dropped rows named for each reason
PLAIN_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A row of the corpus, and where it came from."""

    source: Chat | Sampled
    row: Encoded


@dataclass(slots=True)
class PrepareReport:
    """What became of the rows: `read == kept + sum(dropped.values())`.

    Attributes:
        dropped: reason -> rows.
        examples: reason -> the first few rows dropped for it, as `file:line: detail`.
        changed: what was changed in rows that were kept -> rows.
        tokens, trained_tokens: of the rows kept.
        digest: of the corpus.
        seconds: wall time.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    changed: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    trained_tokens: int = 0
    digest: str = ""
    seconds: float = 0.0

    def drop(self, row: Dropped) -> None:
        """Counts a row that is not kept."""
        self.dropped[row.reason] += 1
        if len(examples := self.examples[row.reason]) < EXAMPLES:
            examples.append(str(row))

    def keep(self, row: Encoded) -> None:
        """Counts a row that is."""
        self.kept += 1
        self.tokens += len(row.tokens)
        self.trained_tokens += int(row.loss_mask.sum())
        self.changed.update(row.notes)

    def lines(self) -> list[str]:
        """The report for a person, one fact a line."""
        rate = self.read / self.seconds if self.seconds else 0.0
        text = [
            f"read {self.read:,} rows, kept {self.kept:,}, dropped {self.dropped.total():,}"
            f" in {self.seconds:.1f} s ({rate:,.0f} rows/s)",
            f"{self.tokens:,} tokens, {self.trained_tokens:,} of them trained",
        ]
        text += [f"changed {count:,}: {note}" for note, count in self.changed.most_common()]
        for reason, count in self.dropped.most_common():
            text.append(f"dropped {count:,}: {reason}")
            text += [f"  {example}" for example in self.examples[reason]]
        return text


def prepare(
    inputs: Sequence[Path],
    model: str,
    out: Path,
    *,
    max_tokens: int | None = None,
    too_long: str = "cut",
    trust_remote_code: bool = False,
    show: int = 0,
    console: Console | None = None,
    template: Template | None = None,
) -> PrepareReport:
    """Tokenises the chats of `inputs`, in order, into the corpus `out`, which is replaced as a whole.

    Args:
        inputs: JSONL files, see `eyas.data.sources`.
        model: the target, a folder or a Hugging Face id.
        out: Parquet file to write.
        max_tokens: rows longer than this are cut there or dropped, as `too_long` says (`cut` or `drop`).
        trust_remote_code: whether the tokenizer's own code may run.
        show: so many of the first rows kept are printed, trained tokens marked.
        console: where progress, samples and the report go; standard error when not given.
        template: the target's, when it is loaded already.

    Raises:
        ConfigError: a file or the model cannot be read, a bad option, or no row is left.
        StoreError: the corpus cannot be written.
    """
    if too_long not in TOO_LONG:
        raise ConfigError("too_long must be cut or drop", too_long)
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError("max_tokens must be at least 2", max_tokens)
    console = console or Console(stderr=True)
    template = template or Template.load(model, trust_remote_code=trust_remote_code)
    known_as = str(Path(model).resolve()) if Path(model).is_dir() else model  # good from any folder
    meta = CorpusMeta(known_as, template.tokenizer_hash, template.template_hash, template.vocab_size)
    report, began = PrepareReport(), time.monotonic()
    with CorpusWriter(out, meta) as writer, _Ticker(console, report) as ticker:
        for batch in _batches(_all_rows(inputs)):
            for row in encode_rows(template, batch, max_tokens, too_long):
                report.read += 1
                if isinstance(row, Dropped):
                    report.drop(row)
                    continue
                if report.kept < show:
                    console.print(render_sample(template, row, colour=_colours(console)), soft_wrap=True)
                report.keep(row.row)
                writer.add(row.source.id, row.row.tokens, row.row.loss_mask)
            ticker.tick()
        if not report.kept:
            counts = ", ".join(f"{reason} {count}" for reason, count in report.dropped.most_common()) or "no rows"
            first = next((f"; the first: {report.examples[r][0]}" for r, _ in report.dropped.most_common(1)), "")
            where = ", ".join(map(str, inputs))
            raise ConfigError("empty corpus: no row is left", where, f"read {report.read}; dropped: {counts}{first}")
    report.digest, report.seconds = writer.digest, time.monotonic() - began
    return report


def encode_rows(
    template: Template,
    rows: Sequence[Chat | Sampled | Dropped],
    max_tokens: int | None = None,
    too_long: str = "cut",
) -> Iterator[Kept | Dropped]:
    """Each row with its tokens, or the reason why it has none, in order."""
    results = iter(template.encode_batch([row for row in rows if not isinstance(row, Dropped)]))
    for row in rows:
        if isinstance(row, Dropped):
            yield row
            continue
        found = next(results)
        for result in (found,) if isinstance(found, Rejected) else found:
            fitted = fit(result, max_tokens, too_long) if isinstance(result, Encoded) else result
            if isinstance(fitted, Rejected):
                yield Dropped(fitted.reason, row.file, row.line, fitted.detail)
            else:
                yield Kept(row, fitted)


# --- samples for people -----------------------------------------------------------------------------------------------


def render_sample(template: Template, kept: Kept, *, colour: bool) -> Text:
    """A row's text as the target sees it: trained tokens in colour, or between ⟦ and ⟧ where there is none."""
    source, row = kept.source, kept.row
    trained = int(row.loss_mask.sum())
    text = Text()
    place = f"{source.file}:{source.line}"
    text.append(f"── {source.id}  {len(row.tokens)} tokens, {trained} trained  ({place})\n", "dim")
    for mask, run in groupby(zip(row.loss_mask, row.tokens, strict=True), key=lambda pair: pair[0]):
        part = _visible(template.decode([token for _, token in run]))
        if not mask:
            text.append(part, "none")
        else:
            text.append(part if colour else f"⟦{part}⟧", "bold green" if colour else "none")
    return text


def _visible(text: str) -> str:
    """Control and direction characters escaped: a sample must not drive the terminal it is shown on."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def _colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color


# --- progress ---------------------------------------------------------------------------------------------------------


def _all_rows(inputs: Iterable[Path]) -> Iterator[Chat | Sampled | Dropped]:
    for path in inputs:
        yield from read_chats(path)


def _batches(rows: Iterator[Chat | Sampled | Dropped]) -> Iterator[list[Chat | Sampled | Dropped]]:
    while batch := list(islice(rows, BATCH_ROWS)):
        yield batch


class _Ticker:
    """Shows how far the report has come: a live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, report: PrepareReport) -> None:
        self._console, self._report = console, report
        self._began = self._said = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> _Ticker:
        if self._live:
            self._live.start()
            self._task = self._live.add_task("prepare")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        now, report = time.monotonic(), self._report
        rate = report.read / max(now - self._began, 1e-9)
        line = f"prepare: {report.read:,} rows, {report.kept:,} kept, {report.tokens:,} tokens, {rate:,.0f} rows/s"
        if self._live:
            self._live.update(self._task, description=line)
        elif now - self._said >= PLAIN_EVERY_S:
            self._console.print(line, highlight=False, soft_wrap=True)
            self._said = now
