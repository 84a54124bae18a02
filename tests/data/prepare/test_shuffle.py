from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.prepare.shuffle import PlainRow, Shuffle

Content = tuple[str, str, list[int], list[int]]


def plain(row: Content) -> PlainRow:
    return PlainRow(row[0], row[1], np.array(row[2], np.int32), np.array(row[3], np.uint8))


def shuffled(folder: Path, rows: list[Content], seed: int = 0, memory: int = 1 << 20) -> list[Content]:
    with Shuffle(folder / "shuffle", seed, memory) as shuffle:
        for row in rows:
            shuffle.add(plain(row))
        found = [(row.id, row.source, row.tokens.tolist(), row.loss_mask.tolist()) for row in shuffle.rows()]
    assert not (folder / "shuffle").exists()
    return found


def numbered(count: int) -> list[Content]:
    return [(str(i), "s", [i, i + 1], [0, 1]) for i in range(count)]


ROWS = st.lists(
    st.integers(0, 6).flatmap(
        lambda n: st.tuples(
            st.text(max_size=4),
            st.text(max_size=4),
            st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n),
            st.lists(st.integers(0, 1), min_size=n, max_size=n),
        )
    ),
    max_size=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(ROWS, st.integers(-5, 5), st.sampled_from([1, 60, 1 << 20]))
def test_every_row_comes_back_once_whatever_the_memory(
    tmp_path: Path, rows: list[Content], seed: int, memory: int
) -> None:
    found = shuffled(tmp_path, rows, seed, memory)
    assert Counter(map(repr, found)) == Counter(map(repr, rows))
    assert found == shuffled(tmp_path, rows, seed), "the order is the seed's alone"


def test_files_that_do_not_fit_into_memory_are_scattered_again(tmp_path: Path) -> None:
    rows = numbered(3_000)
    assert shuffled(tmp_path, rows, memory=200) == shuffled(tmp_path, rows)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    rows = numbered(50)
    orders = {tuple(row[0] for row in shuffled(tmp_path, rows, seed)) for seed in range(5)}
    assert len(orders) == 5
    assert tuple(row[0] for row in rows) not in orders


def test_every_order_is_as_likely_as_any_other(tmp_path: Path) -> None:
    counts = Counter(tuple(row[0] for row in shuffled(tmp_path, numbered(3), seed)) for seed in range(600))
    assert len(counts) == 6
    assert all(60 < count < 140 for count in counts.values())  # 100 expected, standard deviation 9


def test_a_failure_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Shuffle(tmp_path / "shuffle", 0) as shuffle:
        shuffle.add(plain(numbered(1)[0]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
