from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.corpus import CorpusMeta, CorpusWriter
from eyas.data.statistics import SHARES, coverage, needed, statistics
from eyas.errors import ConfigError

META = CorpusMeta(model="m", tokenizer_hash="a" * 32, template_hash="b" * 32, vocab_size=5_000)
Row = tuple[str, list[int], list[int]]

ROWS = st.lists(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.sampled_from(["a", "b", ""]),
            st.lists(st.integers(0, 30), min_size=n, max_size=n),
            st.lists(st.integers(0, 1), min_size=n, max_size=n),
        )
    ),
    min_size=1,
    max_size=12,
)


def write(path: Path, rows: list[Row], meta: CorpusMeta = META) -> Path:
    with CorpusWriter(path, meta) as writer:
        for number, (source, tokens, mask) in enumerate(rows):
            writer.add(str(number), tokens, mask, source)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(ROWS, ROWS)
def test_the_figures_are_those_of_a_plain_count(tmp_path: Path, first: list[Row], second: list[Row]) -> None:
    found = statistics([write(tmp_path / "a", first), write(tmp_path / "b", second)])
    rows = [*first, *second]
    lengths = sorted(len(tokens) for _, tokens, _ in rows)
    trained = Counter(token for _, tokens, mask in rows for token, on in zip(tokens, mask, strict=True) if on)
    assert (found.rows, found.tokens, found.trained_tokens) == (len(rows), sum(lengths), trained.total())
    assert (found.lengths["min"], found.lengths["max"]) == (lengths[0], lengths[-1])
    for source, each in found.by_source.items():
        mine = [row for row in rows if row[0] == source]
        assert (each.rows, each.tokens) == (len(mine), sum(len(row[1]) for row in mine))
        assert each.trained_tokens == sum(map(sum, (row[2] for row in mine)))
    assert set(found.by_source) == {row[0] for row in rows}
    assert sum(count for _, _, count in found.histogram) == len(rows)
    for least, most, count in found.histogram:
        assert count == sum(least <= length <= most for length in lengths)
    assert found.distinct_tokens == len(trained)
    assert json.loads(json.dumps(found.to_json()))["rows"] == len(rows)


FREQUENCIES = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(lambda counts: np.array(counts, np.int64))


@given(FREQUENCIES)
def test_the_needed_vocabulary_is_the_smallest(frequencies: np.ndarray) -> None:
    found, total = needed(frequencies), int(frequencies.sum())
    assert [share for share, _ in found] == (list(SHARES) if total else [])
    largest = np.sort(frequencies)[::-1]
    for share, size in found:
        assert largest[:size].sum() / total >= share
        assert largest[: size - 1].sum() / total < share


def test_the_coverage_curve_ends_at_the_whole_vocabulary() -> None:
    frequencies = np.zeros(5_000, np.int64)
    frequencies[:2_000] = 1
    frequencies[4_000] = 2_000
    assert coverage(frequencies) == ((1024, 3_023 / 4_000), (2048, 1.0), (4096, 1.0), (5_000, 1.0))
    assert coverage(np.zeros(5_000, np.int64)) == ()


def test_lines_fit_an_80_column_screen(tmp_path: Path) -> None:
    rows: list[Row] = [(f"source {i} " * 9, [i % 4_000] * (1 << i % 12), [1] * (1 << i % 12)) for i in range(60)]
    path = tmp_path / ("deep/" * 30)
    path.mkdir(parents=True)
    lines = statistics([write(path / "a.parquet", rows)]).lines()
    assert max(len(line.plain) for line in lines) <= 80
    text = "\n".join(line.plain for line in lines)
    for part in ("p50", "1,024", "99.5%", "and 40 more", "share of the trained tokens"):
        assert part in text
    assert all(line.plain.isprintable() for line in lines)


def test_a_corpus_without_trained_tokens_has_no_curve(tmp_path: Path) -> None:
    found = statistics([write(tmp_path / "a", [("s", [1, 2], [0, 0])])])
    assert (found.coverage, found.needed, found.trained_tokens) == ((), (), 0)
    assert found.lines()


def test_other_tokenizers_are_not_counted_together(tmp_path: Path) -> None:
    rows: list[Row] = [("s", [1], [1])]
    other = CorpusMeta(model="o", tokenizer_hash="c" * 32, template_hash="b" * 32, vocab_size=5_000)
    with pytest.raises(ConfigError, match="different tokenizers"):
        statistics([write(tmp_path / "a", rows), write(tmp_path / "b", rows, other)])
    with pytest.raises(ConfigError, match="no corpus"):
        statistics([])
