from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from containers import parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.rows import Chat, Dropped, DropReason, Raw, Row
from eyas.data.sources.layouts import parse
from eyas.data.sources.tables import check_table, clean, table_rows
from eyas.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def read(path: Path) -> list[Row]:
    check_table(path, "t")
    return [
        parse(Raw("t", number, "s", row)) if fault is None else Dropped(fault[0], "t", number, fault[1])
        for number, row, fault in table_rows(path)
    ]


def reasons(rows: list[Row]) -> dict[int, DropReason]:
    return {row.line: row.reason for row in rows if isinstance(row, Dropped)}


def test_a_null_is_no_field_at_every_depth(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        }
    ]
    other = [
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {"y": {"enum": ["a"]}}}},
        }
    ]
    parquet(
        [
            {"id": 1, "messages": [USER, ANSWER], "system": None},
            {"id": None, "messages": [USER, {**ANSWER, "content": None, "tool_calls": [call]}], "tools": tools},
            {"id": 3, "messages": [{**USER, "name": "n"}, ANSWER], "tools": other, "system": "S"},
            {"id": 4, "messages": None},
            {"id": 5, "messages": []},
        ],
        tmp_path / "t.parquet",
    )
    first, second, third, *bad = read(tmp_path / "t.parquet")
    assert first == Chat("1", [USER, ANSWER], "t", 1, source="s")
    assert second == Chat("t:2", [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "t", 2, tools, "s")
    assert third == Chat("3", [{"role": "system", "content": "S"}, {**USER, "name": "n"}, ANSWER], "t", 3, other, "s")
    assert reasons(bad) == {4: DropReason.UNKNOWN_COLUMNS, 5: DropReason.BAD_MESSAGES}
    assert "messages (null)" in str(bad[0])


def test_clean_keeps_what_is_there() -> None:
    assert clean({"a": None, "b": [None, {"c": None, "d": 0}], "e": float("nan"), "f": ""}) == {
        "b": [None, {"d": 0}],
        "f": "",
    }


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.float64(),
        pa.bool_(),
        pa.binary(),
        pa.decimal128(5, 2),
        pa.timestamp("us"),
        pa.date32(),
        pa.large_string(),
    ],
)
def test_ids_of_every_type_become_texts(tmp_path: Path, kind: pa.DataType) -> None:
    day = datetime(2024, 1, 2, tzinfo=UTC).replace(tzinfo=None)
    value: Any = {
        pa.binary(): b"\xff",
        pa.large_string(): "a/..",
        pa.timestamp("us"): day,
        pa.date32(): day.date(),
    }.get(kind, kind == pa.bool_() or 1)
    pq.write_table(pa.table({"id": pa.array([value], kind), "prompt": ["Hi"]}), tmp_path / "t")
    (row,) = read(tmp_path / "t")
    assert isinstance(row, Chat)
    assert row.id
    assert isinstance(row.id, str)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", tz="Mars/Olympus"), 1),
        (pa.timestamp("us", tz="UTC"), -(2**62)),
        (pa.timestamp("ms"), 2**62),
        (pa.timestamp("ns"), 1),
        (pa.duration("s"), 10**15),
        (pa.time64("ns"), 1),
        (pa.date64(), 86_400_000 * 10**8),
    ],
)
def test_times_that_python_does_not_know_cost_no_row(tmp_path: Path, kind: pa.DataType, value: int) -> None:
    pq.write_table(pa.table({"id": pa.array([value, None], kind), "prompt": ["Hi", "Ho"]}), tmp_path / "t")
    first, second = read(tmp_path / "t")
    assert isinstance(first, Chat)
    assert first.id
    assert isinstance(second, Chat)


@pytest.mark.parametrize("name", ["prompt", "response", "id", "images"])
def test_a_column_that_is_there_twice(tmp_path: Path, name: str) -> None:
    names = [*dict.fromkeys(["prompt", "response", name]), name]
    pq.write_table(pa.table([pa.array(["x"])] * len(names), names=names), tmp_path / "t")
    with pytest.raises(ConfigError, match=f"two columns.*{name}"):
        read(tmp_path / "t")
    pq.write_table(pa.table([pa.array(["x"])] * 3, names=["prompt", "other", "other"]), tmp_path / "t")
    assert isinstance(read(tmp_path / "t")[0], Chat)


def test_maps_dictionaries_and_large_lists(tmp_path: Path) -> None:
    struct = pa.struct([("role", pa.string()), ("content", pa.large_string())])
    table = pa.table(
        {
            "messages": pa.array([[USER, ANSWER]], pa.large_list(struct)),
            "id": pa.array(["a"]).dictionary_encode(),
            "tools": pa.array([[[("name", "f")]]], pa.list_(pa.map_(pa.string(), pa.string()))),
        }
    )
    pq.write_table(table, tmp_path / "t")
    assert read(tmp_path / "t") == [
        Chat("a", [USER, ANSWER], "t", 1, [{"type": "function", "function": {"name": "f"}}], "s")
    ]


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("image", [{"bytes": b"png", "path": None}, None, {"bytes": b"png", "path": "a"}]),
        ("image", ["a.png", None, "b.png"]),
        ("images", [["a.png"], [], ["b.png", "c.png"]]),
        ("images", [[{"bytes": b"png"}], None, [{"bytes": b"png"}]]),
        ("audio", [b"wav", None, b"wav"]),
    ],
)
def test_rows_with_media_are_not_text_and_the_others_are_kept(
    tmp_path: Path, column: str, values: list[Any], statistics: bool
) -> None:
    rows = [{"messages": [USER, ANSWER], column: value} for value in values]
    parquet(rows, tmp_path / "some", write_statistics=statistics)
    assert reasons(read(tmp_path / "some")) == {1: DropReason.NOT_TEXT, 3: DropReason.NOT_TEXT}
    parquet([rows[0], rows[2]], tmp_path / "all", write_statistics=statistics)
    assert reasons(read(tmp_path / "all")) == {1: DropReason.NOT_TEXT, 2: DropReason.NOT_TEXT}
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table.slice(1, 1), tmp_path / "none", write_statistics=statistics)
    assert reasons(read(tmp_path / "none")) == {}


def test_columns_that_no_layout_knows_and_bytes_of_images_are_never_decoded(tmp_path: Path) -> None:
    """Their pages are overwritten: a reader that looked at them would fail."""
    junk = [bytes([i]) * 3000 for i in range(50)]
    images = [{"bytes": data, "path": None} if i % 2 else None for i, data in enumerate(junk)]
    columns = {
        "prompt": ["Hi"] * 50,
        "pixels": junk,
        "image": images,
        "images": [[image] if image else [] for image in images],
    }
    pq.write_table(pa.table(columns), tmp_path / "t", compression="none", use_dictionary=False)
    with pq.ParquetFile(tmp_path / "t") as file:
        meta = file.metadata.row_group(0)
        chunks = [meta.column(i) for i in range(meta.num_columns)]
    data = bytearray((tmp_path / "t").read_bytes())
    overwritten = [chunk for chunk in chunks if chunk.path_in_schema.endswith(("pixels", "bytes"))]
    for chunk in overwritten:
        start, size = chunk.data_page_offset, chunk.total_compressed_size
        data[start : start + size] = b"\xff" * size
    (tmp_path / "t").write_bytes(data)
    assert len(overwritten) == 3
    assert reasons(read(tmp_path / "t")) == dict.fromkeys(range(2, 51, 2), DropReason.NOT_TEXT)


def test_a_text_that_is_no_utf8_costs_no_other_row(tmp_path: Path) -> None:
    texts = pa.array([b"Hi", b"\xff\xfe", b"Yo"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "t")
    rows = read(tmp_path / "t")
    assert reasons(rows) == {2: DropReason.BAD_UTF8}
    assert [row.messages[0]["content"] for row in rows if isinstance(row, Chat)] == ["Hi", "Yo"]


def test_a_corrupt_page_ends_the_file_with_one_fault(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [{"id": i, "prompt": f"{i} {'x' * 500}"} for i in range(1000)]
    parquet(rows, path, row_group_size=100, compression="zstd")
    with pq.ParquetFile(path) as file:
        start = (
            file.metadata.row_group(5).column(1).dictionary_page_offset
            or file.metadata.row_group(5).column(1).data_page_offset
        )
    data = bytearray(path.read_bytes())
    data[start : start + 60] = bytes(60)
    path.write_bytes(data)
    *good, last = read(path)
    assert [row.id for row in good if isinstance(row, Chat)] == [str(i) for i in range(500)]
    assert isinstance(last, Dropped)
    assert (last.line, last.reason) == (501, DropReason.BAD_FILE)
    assert "row 501" in last.detail


def test_tables_that_hold_no_rows_of_ours(tmp_path: Path) -> None:
    parquet([{"a": 1, "b": 2}], tmp_path / "t")
    with pytest.raises(ConfigError, match="found a, b; expected conversations"):
        check_table(tmp_path / "t", "t")
    (tmp_path / "cut").write_bytes((tmp_path / "t").read_bytes()[:-20])
    with pytest.raises(ConfigError, match="damaged"):
        check_table(tmp_path / "cut", "cut")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty")
    assert read(tmp_path / "empty") == []


def test_rows_are_numbered_through_row_groups(tmp_path: Path) -> None:
    parquet([{"id": i, "prompt": "Hi"} for i in range(1000)], tmp_path / "t", row_group_size=300)
    assert [(row.line, row.id) for row in read(tmp_path / "t") if isinstance(row, Chat)] == [
        (i + 1, str(i)) for i in range(1000)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
                "messages": st.none()
                | st.lists(
                    st.none()
                    | st.fixed_dictionaries({"role": st.none() | st.just("user"), "content": st.none() | st.text("aé")})
                ),
                "tools": st.none()
                | st.lists(
                    st.none() | st.fixed_dictionaries({"a": st.none() | st.lists(st.none() | st.integers(0, 9))})
                ),
                "system": st.none() | st.fixed_dictionaries({"x": st.none() | st.floats()}),
            }
        ),
        max_size=8,
    ),
    st.integers(1, 4),
    st.booleans(),
)
def test_values_are_those_that_pyarrow_gives_without_nulls(
    tmp_path: Path, rows: list[dict[str, Any]], group: int, dictionary: bool
) -> None:
    struct = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {
        "text": pa.string(),
        "messages": pa.list_(struct),
        "tools": pa.list_(pa.struct([("a", pa.large_list(pa.int64()))])),
        "system": pa.struct([("x", pa.float64())]),
    }
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in columns.items()})
    pq.write_table(table, tmp_path / "t", row_group_size=group, use_dictionary=dictionary)
    found = [row for _, row, _ in table_rows(tmp_path / "t")]
    assert found == [{name: clean(row[name]) for name in columns} for row in rows]
