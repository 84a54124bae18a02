"""What corpora hold, and how far a draft vocabulary of the most frequent tokens reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.text import Text

from eyas.data.corpus import Corpus, RowGroup
from eyas.data.names import shortened, visible
from eyas.errors import ConfigError

#: Shares of the trained tokens whose smallest vocabulary is told.
SHARES: Final = (0.90, 0.95, 0.99, 0.995, 0.999)
_PERCENTILES: Final = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
_BAR: Final = 24
_SOURCES: Final = 20
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Of one label: rows, tokens and trained tokens."""

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CorpusStatistics:
    """What corpora hold together.

    Attributes:
        paths, digests: of each corpus.
        target, tokenizer_hash, template_hash, vocab_size: of the first; the tokenizer is that of all.
        lengths: `min`, `p50`, `p90`, `p99`, `max`, `mean` tokens of a row.
        histogram: (least, most, rows): rows of so many tokens, by powers of two.
        by_source: label -> totals.
        distinct_tokens: different tokens among the trained ones.
        coverage: (k, share): the k most frequent trained tokens make up that share of all trained tokens.
        needed: (share, k): the fewest tokens that make up the share.
    """

    paths: tuple[str, ...]
    digests: tuple[str, ...]
    target: str
    tokenizer_hash: str
    template_hash: str
    vocab_size: int
    rows: int
    tokens: int
    trained_tokens: int
    lengths: dict[str, float]
    histogram: tuple[tuple[int, int, int], ...]
    by_source: dict[str, SourceTotals]
    distinct_tokens: int
    coverage: tuple[tuple[int, float], ...]
    needed: tuple[tuple[float, int], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values by the names above."""
        return asdict(self)

    def lines(self) -> list[Text]:
        """For a person, one line each of at most 80 columns; bars are plain characters, for any screen and any file."""
        lines: list[Text] = []
        for path, digest in zip(self.paths, self.digests, strict=True):
            lines += [_fact("corpus", path), _fact("digest", digest)]
        lines += [
            _fact("target", self.target),
            _fact("tokenizer", self.tokenizer_hash or "not known"),
            _fact("template", self.template_hash or "not known"),
            _fact("rows", f"{self.rows:,}"),
            _fact("tokens", f"{self.tokens:,}"),
            _fact("trained", f"{self.trained_tokens:,} ({self.trained_tokens / self.tokens:.1%} of the tokens)"),
            Text(""),
            _heading("tokens in a row"),
            Text("  " + "   ".join(f"{name} {value:,}" for name, value in self.lengths.items())),
        ]
        most = max(rows for _, _, rows in self.histogram)
        for least, last, rows in self.histogram:
            lines.append(Text(f"  {f'{least:,} - {last:,}':>19}  {rows:>11,}  {_bar(rows / most)}"))
        lines += ["", _heading("by source"), *_source_lines(self)] if self.by_source else []
        lines += [
            Text(""),
            _heading("draft vocabulary"),
            Text(f"  {self.distinct_tokens:,} of the target's {self.vocab_size:,} tokens are trained"),
        ]
        lines.append(Text("  the most frequent   share of the trained tokens"))
        lines += [Text(f"  {size:>17,}   {share:>8.3%}  {_bar(share)}") for size, share in self.coverage]
        lines.append(Text("  to cover" + "".join(f"{share:>12.1%}" for share, _ in self.needed)))
        lines.append(Text("  it takes" + "".join(f"{size:>12,}" for _, size in self.needed)))
        return [line if isinstance(line, Text) else Text(line) for line in lines]


def statistics(corpora: Sequence[Path | str]) -> CorpusStatistics:
    """Reads every row; a row group is in memory at a time.

    Raises:
        ConfigError: none is named, one is no corpus, or their tokenizers differ.
    """
    opened = [Corpus.open(path) for path in corpora]
    if not opened:
        raise ConfigError("no corpus is named", "", "name a folder that eyas prepare wrote")
    meta = opened[0].meta
    for other in opened[1:]:
        if (other.meta.tokenizer_hash, other.meta.vocab_size) != (meta.tokenizer_hash, meta.vocab_size):
            hint = f"{opened[0].path} is of {meta.model}, this one of {other.meta.model}"
            raise ConfigError("the corpora were made with different tokenizers", other.path, hint)
    frequencies = np.zeros(meta.vocab_size, np.int64)
    totals: dict[str, Counts] = {}
    for corpus in opened:
        for group in corpus.row_groups():
            _count(group, frequencies, totals)
    lengths = np.concatenate([corpus.n_tokens for corpus in opened])
    return CorpusStatistics(
        paths=tuple(str(corpus.path) for corpus in opened),
        digests=tuple(corpus.digest for corpus in opened),
        target=meta.model,
        tokenizer_hash=meta.tokenizer_hash,
        template_hash=meta.template_hash,
        vocab_size=meta.vocab_size,
        rows=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        trained_tokens=int(frequencies.sum()),
        lengths=_lengths(lengths),
        histogram=_histogram(lengths),
        by_source={label: SourceTotals(*map(int, counts)) for label, counts in sorted(totals.items())},
        distinct_tokens=int(np.count_nonzero(frequencies)),
        coverage=coverage(frequencies),
        needed=needed(frequencies),
    )


def coverage(frequencies: Counts) -> tuple[tuple[int, float], ...]:
    """(k, share of all trained tokens that the k most frequent make up), k from 1,024 in powers of two to all.

    Args:
        frequencies: int64 [V], how often each token is trained.
    """
    reached = _reached(frequencies)
    if not len(reached):
        return ()
    sizes = [1 << power for power in range(10, 31) if 1 << power < len(frequencies)] + [len(frequencies)]
    return tuple((size, float(reached[min(size, len(reached)) - 1])) for size in sizes)


def needed(frequencies: Counts) -> tuple[tuple[float, int], ...]:
    """(share, fewest tokens that make up that share of all trained tokens).

    Args:
        frequencies: int64 [V], how often each token is trained.
    """
    reached = _reached(frequencies)
    return tuple((share, int(np.searchsorted(reached, share)) + 1) for share in SHARES) if len(reached) else ()


def _reached(frequencies: Counts) -> npt.NDArray[np.float64]:
    """Share of the trained tokens that the 1, 2, ... most frequent make up; as long as there are trained ones."""
    found = np.sort(frequencies[frequencies > 0])[::-1]
    return np.cumsum(found) / max(int(found.sum()), 1)


def _count(group: RowGroup, frequencies: Counts, totals: dict[str, Counts]) -> None:
    trained = group.loss_mask.astype(bool)
    frequencies += np.bincount(group.tokens[trained], minlength=len(frequencies))
    # Sums over rows as differences of a running sum: no row is too short for it.
    before = np.concatenate([[0], np.cumsum(trained, dtype=np.int64)])
    per_row = np.stack(
        [np.ones(len(group.ids), np.int64), np.diff(group.offsets), np.diff(before[group.offsets])], axis=1
    )
    labels, index = np.unique(np.array(group.sources, dtype=object).astype(str), return_inverse=True)
    sums = np.zeros((len(labels), 3), np.int64)
    np.add.at(sums, index, per_row)
    for label, row in zip(labels.tolist(), sums, strict=True):
        totals[label] = totals.get(label, np.zeros(3, np.int64)) + row


def _lengths(lengths: npt.NDArray[np.int32]) -> dict[str, float]:
    found = np.percentile(lengths, list(_PERCENTILES.values()), method="nearest")
    return {name: int(value) for name, value in zip(_PERCENTILES, found, strict=True)} | {
        "mean": round(float(lengths.mean()), 1)
    }


def _histogram(lengths: npt.NDArray[np.int32]) -> tuple[tuple[int, int, int], ...]:
    powers = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(powers)
    first = int(powers.min())
    return tuple((1 << p, (2 << p) - 1, int(counts[p])) for p in range(first, len(counts)))


# --- for people -------------------------------------------------------------------------------------------------------


def _source_lines(found: CorpusStatistics) -> list[Text]:
    ordered = sorted(found.by_source.items(), key=lambda item: -item[1].tokens)
    lines = [Text(f"  {'':<26}{'rows':>12}{'tokens':>16}{'share':>8}{'trained':>9}", "dim")]
    for label, each in ordered[:_SOURCES]:
        name = shortened(visible(label) or "(no label)", 26)
        share, trained = each.tokens / found.tokens, each.trained_tokens / each.tokens
        lines.append(Text(f"  {name:<26}{each.rows:>12,}{each.tokens:>16,}{share:>8.1%}{trained:>9.1%}"))
    if len(ordered) > _SOURCES:
        lines.append(Text(f"  and {len(ordered) - _SOURCES:,} more: --json names them", "dim"))
    return lines


def _bar(share: float) -> str:
    return "#" * max(round(share * _BAR), 1 if share else 0)


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _fact(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<11}", "bold"), shortened(visible(text), 69))
