from __future__ import annotations

import hashlib
import pickle
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data import corpus as corpus_module
from eyas.data.corpus import GROUP_TOKENS, SCHEMA, Corpus, CorpusMeta, CorpusWriter
from eyas.errors import ConfigError, IntegrityError, StoreError
from eyas.positions import loss_positions

META = CorpusMeta(model="m", tokenizer_hash="a" * 32, template_hash="b" * 32, vocab_size=100)
Row = tuple[str, list[int], list[int]]


def write(path: Path, rows: list[Row], meta: CorpusMeta = META) -> Path:
    with CorpusWriter(path, meta) as writer:
        for row in rows:
            writer.add(*row)
    return path


def content(corpus: Corpus, start: int = 0, stop: int | None = None) -> list[Row]:
    return [(row.id, row.tokens.tolist(), row.loss_mask.tolist()) for row in corpus.rows(start, stop)]


def long_rows() -> list[Row]:
    """Rows of three row groups, the last one short."""
    size = GROUP_TOKENS // 2
    return [(f"r{i}", [i] * size, [0] + [1] * (size - 1)) for i in range(5)]


ROWS = st.lists(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.text(max_size=5),
            st.lists(st.integers(0, 99), min_size=n, max_size=n),
            st.lists(st.integers(0, 1), min_size=n, max_size=n),
        )
    ),
    min_size=1,
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(ROWS, st.data())
def test_what_is_written_is_read(tmp_path: Path, rows: list[Row], data: st.DataObject) -> None:
    corpus = Corpus.open(write(tmp_path / "c.parquet", rows))
    assert len(corpus) == len(rows)
    assert content(corpus) == rows
    assert corpus.n_tokens.tolist() == [len(tokens) for _, tokens, _ in rows]
    assert corpus.n_positions.tolist() == [len(loss_positions(mask)) for _, _, mask in rows]
    assert corpus.meta.tokens == sum(corpus.n_tokens)
    assert corpus.meta.trained_tokens == sum(sum(mask) for _, _, mask in rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert content(corpus, start, stop) == rows[start:stop]
    index = data.draw(st.integers(0, len(rows) - 1))
    assert (corpus[index].index, corpus[index].id) == (index, rows[index][0])
    corpus.verify()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(ROWS, ROWS)
def test_the_digest_names_the_content(tmp_path: Path, rows: list[Row], other: list[Row]) -> None:
    first, second = Corpus.open(write(tmp_path / "a", rows)), Corpus.open(write(tmp_path / "b", other))
    assert (first.digest == second.digest) == (rows == other)


def test_the_digest_covers_the_hashes_and_nothing_local(tmp_path: Path) -> None:
    rows: list[Row] = [("a", [1, 2], [1, 1])]
    digests = {
        Corpus.open(write(tmp_path / "c", rows, meta)).digest
        for meta in (META, CorpusMeta("m", "c" * 32, "b" * 32, 100), CorpusMeta("m", "a" * 32, "c" * 32, 100))
    }
    assert len(digests) == 3
    elsewhere = CorpusMeta("another/folder", META.tokenizer_hash, META.template_hash, 100)
    assert Corpus.open(write(tmp_path / "c", rows, elsewhere)).digest in digests


def test_bytes_depend_on_the_rows_alone(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, long_rows()).read_bytes() for name in ("a", "b"))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


def test_only_the_row_groups_needed_are_read(tmp_path: Path) -> None:
    corpus = Corpus.open(write(tmp_path / "c", long_rows()))
    footer = pq.read_metadata(corpus.path)
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [2, 2, 1]
    assert [row.index for row in corpus.rows(1, 4)] == [1, 2, 3]
    assert [corpus[i].tokens[0] for i in (4, 0, 3)] == [4, 0, 3]
    damaged = bytearray(corpus.path.read_bytes())
    start = footer.row_group(0).column(1).data_page_offset
    damaged[start : start + 64] = b"\0" * 64
    corpus.path.write_bytes(damaged)
    assert [row.id for row in corpus.rows(2, 5)] == ["r2", "r3", "r4"]  # never touches the first group
    with pytest.raises(IntegrityError):
        corpus[0]


def test_rows_are_writable_copies_of_the_named_types(tmp_path: Path) -> None:
    corpus = Corpus.open(write(tmp_path / "c", [("a", [1, 2, 3], [0, 1, 1])]))
    row = next(corpus.rows())
    assert (row.tokens.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    assert row.tokens.flags.writeable
    assert row.loss_mask.flags.writeable
    row.tokens[:] = 0
    assert next(corpus.rows()).tokens.tolist() == [1, 2, 3]
    assert (corpus.n_tokens.dtype, corpus.n_positions.dtype) == (np.int32, np.int32)


def test_pickled_it_reopens(tmp_path: Path) -> None:
    corpus = Corpus.open(write(tmp_path / "c", long_rows()))
    list(corpus.rows(0, 1))
    data = pickle.dumps(corpus)
    assert len(data) < 1000
    assert pickle.loads(data).digest == corpus.digest


@pytest.mark.parametrize("bounds", [(-1, 1), (0, 3), (2, 1)])
def test_rows_out_of_range(tmp_path: Path, bounds: tuple[int, int]) -> None:
    corpus = Corpus.open(write(tmp_path / "c", [("a", [1, 2], [1, 1])] * 2))
    with pytest.raises(IndexError):
        list(corpus.rows(*bounds))
    for index in (-1, 2):
        with pytest.raises(IndexError):
            corpus[index]


def test_rows_say_where_they_came_from(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", META) as writer:
        writer.add("a", [1, 2], [1, 1], "first")
        writer.add("b", [3, 4, 5], [0, 1, 1])
    corpus = Corpus.open(tmp_path / "c")
    assert [(row.id, row.source) for row in corpus] == [("a", "first"), ("b", "")]
    assert corpus.digest == Corpus.open(write(tmp_path / "d", content(corpus))).digest, "a label is no content"


def test_row_groups_are_the_rows(tmp_path: Path) -> None:
    corpus = Corpus.open(write(tmp_path / "c", long_rows()))
    groups = list(corpus.row_groups())
    assert [group.first for group in groups] == [0, 2, 4]
    assert np.array_equal(
        np.concatenate([group.tokens for group in groups]), np.concatenate([r.tokens for r in corpus])
    )
    assert [row for group in groups for row in np.diff(group.offsets)] == corpus.n_tokens.tolist()


def test_the_file_format_has_not_changed(tmp_path: Path) -> None:
    """The digest is written into stores: another one for the same rows would orphan them."""
    path = write(tmp_path / "c", [("a", [1, 2, 3], [0, 1, 1]), ("é", [4], [1])])
    assert Corpus.open(path).digest == "f1ef1ca1601cd730b41175515f8045ad"
    assert pq.read_schema(path).names == ["id", "source", "tokens", "loss_mask", "n_tokens", "n_positions"]


def test_the_folder_that_prepare_wrote_is_its_corpus(tmp_path: Path) -> None:
    write(tmp_path / corpus_module.CORPUS_FILE, [("a", [1, 2], [1, 1])])
    corpus = Corpus.open(tmp_path)
    assert (len(corpus), corpus.path) == (1, tmp_path / corpus_module.CORPUS_FILE)
    assert pickle.loads(pickle.dumps(corpus)).digest == corpus.digest


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["id", "tokens", "loss_mask", "n_tokens", "n_positions"])
def test_verify_sees_any_changed_column(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "c", [("a", [1, 2, 3], [0, 1, 1]), ("b", [4, 5, 6], [1, 1, 1])])
    table, key = pq.read_table(path), corpus_module.METADATA_KEY.encode()
    changed = (
        table.take([1, 0])[column]
        if column in ("id", "tokens", "loss_mask", "n_positions")
        else pa.array([3, 4], pa.int32())
    )
    index = table.schema.get_field_index(column)
    forged = table.set_column(index, SCHEMA.field(index), changed)
    pq.write_table(forged.replace_schema_metadata({key: pq.read_metadata(path).metadata[key]}), path)
    with pytest.raises(IntegrityError):
        Corpus.open(path).verify()


# --- faults -----------------------------------------------------------------------------------------------------------


def broken_files(folder: Path) -> dict[str, Path]:
    whole = write(folder / "whole", [("a", [1, 2], [1, 1])]).read_bytes()
    files = {
        "folder": folder,
        "missing": folder / "nowhere",
        "text": folder / "text",
        "empty file": folder / "nothing",
        "cut": folder / "cut",
        "other table": folder / "table",
        "other columns": folder / "columns",
        "no rows": write(folder / "none", []),
        "version": folder / "version",
        "metadata": folder / "metadata",
    }
    files["text"].write_text("hello\n")
    files["empty file"].write_bytes(b"")
    files["cut"].write_bytes(whole[:-20])
    pq.write_table(pa.table({"x": [1]}), files["other table"])
    key = corpus_module.METADATA_KEY.encode()
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({key: b"{}"}), files["other columns"])
    table = pq.read_table(folder / "whole")
    pq.write_table(table.replace_schema_metadata({key: b'{"version": 99}'}), files["version"])
    pq.write_table(table.replace_schema_metadata({key: b'{"version": 2, "strange": 2}'}), files["metadata"])
    return files


@pytest.mark.parametrize(
    "kind",
    [
        "folder",
        "missing",
        "text",
        "empty file",
        "cut",
        "other table",
        "other columns",
        "no rows",
        "version",
        "metadata",
    ],
)
def test_what_is_no_corpus_is_a_config_error_naming_the_file(tmp_path: Path, kind: str) -> None:
    path = broken_files(tmp_path)[kind]
    with pytest.raises(ConfigError, match=path.name):
        Corpus.open(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c", [("a", [1, 2], [1, 1])])
    before = path.read_bytes()
    with pytest.raises(RuntimeError), CorpusWriter(path, META) as writer:
        writer.add("b", [3, 4], [1, 1])
        raise RuntimeError
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_folder_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the corpus"):
        write(tmp_path / "file" / "c.parquet", [("a", [1, 2], [1, 1])])


@pytest.mark.parametrize("room", [1_000, GROUP_TOKENS])
def test_a_full_disk_is_a_store_error(tmp_path: Path, room: int) -> None:
    """A limit on the size of files stands in for the disk: the write fails at the end, or in the middle."""
    noise = np.random.default_rng(0).integers(0, 2**31, (3, GROUP_TOKENS))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(StoreError, match="cannot write the corpus"), CorpusWriter(tmp_path / "c", META) as writer:
            for row in noise:
                writer.add("a", row[: room * 2], np.ones(min(room * 2, GROUP_TOKENS)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tokens", "mask"), [([], []), ([1, 2], [1]), ([[1]], [[1]])])
def test_rows_must_be_rows(tmp_path: Path, tokens: list[int], mask: list[int]) -> None:
    with pytest.raises(ValueError, match="equally long"):
        write(tmp_path / "c", [("a", tokens, mask)])
    assert list(tmp_path.iterdir()) == []
