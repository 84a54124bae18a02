"""What became of the rows: `read == kept + dropped`, in numbers and by name."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from rich.text import Text

from eyas.data.names import shortened, visible
from eyas.data.outfolder import PROMPTS_FILE
from eyas.data.rows import Dropped

EXAMPLES: Final = 3  # kinds of detail shown for each reason
SOURCES: Final = 12  # sources shown
ROLES: Final = 8  # renamed roles shown

REASONS: Final[dict[str, str]] = {
    "bad-utf8": "not UTF-8",
    "bad-json": "not JSON",
    "bad-file": "the file is damaged from here on",
    "line-too-long": "the line is too long to be a row",
    "not-an-object": "not an object",
    "unknown-columns": "no column that holds a conversation",
    "bad-messages": "not a list of messages",
    "bad-text": "half a surrogate pair in the text",
    "bad-tokens": "not token ids of the target",
    "bad-tools": "tools or calls that are not OpenAI's",
    "unknown-role": "a role that is not known; prepare.roles maps it",
    "not-text": "images or audio",
    "tools-unsupported": "the template renders no tools",
    "other-tokenizer": "token ids of another tokenizer",
    "prompt-only": "no answer to learn from",
    "empty-prompt": "a blank user turn",
    "empty-answer": "every answer is blank",
    "template-error": "the template refuses it",
    "template-rewrites-history": "no answer is rendered as it was given",
    "other-template": "text in another chat format",
    "too-long": "the answer starts after max_tokens",
    "nothing-to-learn": "no two trained tokens in a row",
    "duplicate": "equal to an earlier row",
    "contaminated": "shares text with an evaluation set",
}

NOTES: Final[dict[str, str]] = {
    "last-user-turn-cut": "the last user turn has no answer and was left out",
    "cut-after-unfinished-answer": "what follows an answer that was cut off was left out",
    "earlier-turn-rewritten": "answers that later turns render otherwise are context; with"
    " prepare.rewritten_turns=split they are trained in rows of their own",
    "reasoning-not-rendered": "the template leaves the thought out",
    "system-merged-into-user": "the template takes no system message; the user turn holds it",
    "consecutive-turns-merged": "the template wants turns in order; two became one",
    "greeting-dropped": "the template wants a user turn first; the greeting was left out",
    "cut-at-max-tokens": "cut at max_tokens, without an end token",
}

#: Different details of one reason that are told apart; more are counted with the reason alone.
_KINDS: Final = 100


@dataclass(slots=True)
class SourceCounts:
    """Of one source: rows of its files, and rows and tokens of the corpus."""

    read: int = 0
    kept: int = 0
    dropped: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass(slots=True)
class Example:
    """The first row dropped with a detail of this kind, and how many there are."""

    first: Dropped
    rows: int = 1


@dataclass(slots=True)
class PrepareReport:
    """What became of the rows: `read == kept + dropped.total()`.

    Attributes:
        out: the folder that was written.
        target: the model the corpus is for.
        tokenizer_hash, template_hash: of the target.
        read, kept: rows of the inputs.
        dropped: reason -> rows.
        examples: reason -> kinds of detail, numbers apart, each with its first row.
        changed: what was changed in rows that were kept -> rows.
        renamed: (role as written, role given to the template) -> messages.
        rows, tokens, trained_tokens: of the corpus; rows may be split or weighted, so `rows` need not be `kept`.
        prompts: rows without an answer that wait in prompts.jsonl.
        by_source: label of an input -> its counts.
        filters: what was asked for and did something to the rows -> what it did.
        digest: of the corpus; empty where there is none.
        seconds: wall time.
    """

    out: Path
    target: str
    tokenizer_hash: str = ""
    template_hash: str = ""
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, dict[str, Example]] = field(default_factory=lambda: defaultdict(dict))
    changed: Counter[str] = field(default_factory=Counter)
    renamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    prompts: int = 0
    by_source: dict[str, SourceCounts] = field(default_factory=lambda: defaultdict(SourceCounts))
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0

    def drop(self, row: Dropped) -> None:
        """Counts a row that is not kept."""
        self.read += 1
        self.dropped[row.reason] += 1
        counts = self.by_source[row.source]
        counts.read += 1
        counts.dropped += 1
        kinds = self.examples[row.reason]
        kind = re.sub(r"\d+", "0", row.detail)
        if kind in kinds:
            kinds[kind].rows += 1
        elif len(kinds) < _KINDS:
            kinds[kind] = Example(row)

    def keep(self, source: str, notes: tuple[str, ...]) -> None:
        """Counts a row that is."""
        self.read += 1
        self.kept += 1
        counts = self.by_source[source]
        counts.read += 1
        counts.kept += 1
        self.changed.update(notes)

    def add(self, source: str, tokens: int, trained_tokens: int) -> None:
        """Counts a row of the corpus."""
        counts = self.by_source[source]
        for into in (self, counts):
            into.rows += 1
            into.tokens += tokens
            into.trained_tokens += trained_tokens

    def to_json(self) -> dict[str, Any]:
        """What summary.json holds."""
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": self.dropped.total(),
            "dropped_by_reason": {str(reason): count for reason, count in self.dropped.most_common()},
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "prompts": self.prompts,
            "changed": dict(self.changed.most_common()),
            "roles": [{"written": name, "role": role, "messages": n} for (name, role), n in self.renamed.most_common()],
            "by_source": {label: asdict(counts) for label, counts in self.by_source.items()},
            "filters": self.filters,
            "digest": self.digest or None,
            "target": self.target,
            "tokenizer_hash": self.tokenizer_hash,
            "template_hash": self.template_hash,
            "seconds": round(self.seconds, 3),
        }

    def lines(self, width: int = 80) -> list[Text]:
        """The account for a person, one line each of at most `width` columns."""
        rate = self.read / self.seconds if self.seconds else 0.0
        lines = [
            _fact("read", f"{self.read:,} rows in {self.seconds:,.1f} s ({rate:,.0f} rows/s)"),
            _fact("kept", f"{self.kept:,} rows"),
            _fact("dropped", f"{self.dropped.total():,} rows"),
        ]
        for reason, count in self.dropped.most_common():
            lines += _counted(reason, count, self.read, REASONS.get(reason, ""), width)
            kinds = sorted(self.examples[reason].values(), key=lambda one: -one.rows)
            for example in kinds[:EXAMPLES]:
                times = f"{example.rows:,} x " if len(kinds) > 1 else ""
                lines.append(Text(f"      {times}{_place(example.first, width - 6 - len(times))}", "dim"))
        if self.changed:
            lines.append(_fact("changed", f"{self.changed.total():,} notes on rows that were kept"))
        for note, count in self.changed.most_common():
            lines += _counted(note, count, self.read, NOTES.get(note, ""), width)
        for number, ((name, role), count) in enumerate(self.renamed.most_common(ROLES)):
            written = shortened(visible(name), 30)
            lines.append(_fact("" if number else "roles", f"{written!r} is {role}: {count:,} messages"))
        lines += [_fact(name.replace("_", " "), text) for name, text in _filters(self)]
        lines += _by_source(self, width)
        share = f"{self.trained_tokens / self.tokens:.1%}" if self.tokens else "none"
        lines.append(_fact("corpus", f"{self.rows:,} rows, {self.tokens:,} tokens, {share} trained"))
        if self.digest:
            lines.append(_fact("digest", self.digest))
        return lines + _next(self)


# --- for people -------------------------------------------------------------------------------------------------------


def _next(report: PrepareReport) -> list[Text]:
    lines: list[Text] = []
    if report.rows:
        lines.append(_fact("next", f"eyas extract {report.out} STORE --server URL"))
    if report.prompts:
        lines.append(_fact("prompts", f"{report.prompts:,} rows without an answer; the target answers them with"))
        lines.append(_fact("", f"eyas regenerate {report.out / PROMPTS_FILE} --server URL --out answers.jsonl"))
    return lines


def _filters(report: PrepareReport) -> Iterator[tuple[str, str]]:
    for name, facts in report.filters.items():
        match name:
            case "dedupe":
                yield name, f"by {facts['by']}: {facts['dropped']:,} rows dropped"
            case "decontaminate":
                unread = f", {facts['unread']:,} could not be read" if facts["unread"] else ""
                yield name, f"{facts['dropped']:,} rows dropped; {facts['rows']:,} evaluation rows{unread}"
            case "max_tokens":
                yield name, f"{facts['limit']:,}: {facts['cut']:,} rows cut, {facts['dropped']:,} dropped"
            case "max_rows":
                yield name, f"reached in {len(facts['reached']):,} inputs"
            case "weights":
                for label, each in facts.items():
                    done = f"{each['left_out']:,} rows left out, {each['copies']:,} more copies"
                    yield name, f"{label} x {each['weight']:g}: {done}"
            case "shuffle":
                yield name, f"by seed {facts['seed']}"
            case _:
                yield name, f"{facts['rows']:,} rows, {facts['tokens']:,} tokens set aside ({facts['share']:.1%} asked)"


def _by_source(report: PrepareReport, width: int) -> list[Text]:
    names = ("read", "kept", "dropped", "tokens", "trained")
    sources = sorted(report.by_source.items(), key=lambda item: -item[1].read)
    rows = [(c.read, c.kept, c.dropped, c.tokens, c.trained_tokens) for _, c in sources]
    widths = [max([len(name), *(len(f"{row[i]:,}") for row in rows)]) for i, name in enumerate(names)]
    room = max(width - 2 - sum(widths) - 2 * len(widths), 8)
    label_width = min(max([9, *(len(label) for label, _ in sources)]), room)
    cells = "".join(f"  {name:>{w}}" for name, w in zip(names, widths, strict=True))
    lines = [Text(f"{'by source':<{label_width + 2}}{cells}", "bold")]
    for (label, _), row in zip(sources[:SOURCES], rows, strict=False):
        cells = "".join(f"  {value:>{w},}" for value, w in zip(row, widths, strict=True))
        lines.append(Text(f"  {shortened(visible(label or '(no label)'), label_width):<{label_width}}{cells}"))
    if len(sources) > SOURCES:
        lines.append(Text(f"  and {len(sources) - SOURCES:,} more in summary.json", "dim"))
    return lines


def _fact(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<14}", "bold"), visible(text))


def _counted(name: str, count: int, total: int, meaning: str, width: int) -> list[Text]:
    head = f"  {name:<26}{count:>9,}  {count / max(total, 1):>6.1%}  "
    first, *more = textwrap.wrap(meaning, max(width - len(head), 20)) or [""]
    return [Text(head + first), *(Text(" " * len(head) + line) for line in more)]


def _place(row: Dropped, width: int) -> str:
    """Where a row is and what is wrong with it; a long path loses its folders, a long detail its end."""
    detail = f"  {row.detail}" if row.detail else ""
    text = f"{row.file}:{row.line}{detail}"
    if len(text) > width:
        text = f"…/{PurePath(row.file).name}:{row.line}{detail}"
    return shortened(visible(text), width)
