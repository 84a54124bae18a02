from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.sources.json_split import BrokenJsonError, NoListError, find_list, split_array

LIMIT = 1 << 20
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(['"', "\\", "]}"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def reader(data: bytes, most: int = LIMIT) -> Callable[[int], bytes]:
    stream = io.BytesIO(data)
    return lambda size: stream.read(min(size, most))


def elements(data: bytes, most: int = LIMIT, limit: int = LIMIT, field: str | None = None) -> list[bytes | None]:
    return [text for _, text in split_array(reader(data, most), limit, field)]


@given(st.lists(JSON, max_size=5), st.sampled_from([None, 1, "\t"]), st.booleans(), st.sampled_from([1, 2, 7, LIMIT]))
def test_elements_are_those_of_the_array_however_it_is_written_and_read(
    array: list[object], indent: int | str | None, escaped: bool, most: int
) -> None:
    data = json.dumps(array, indent=indent, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    found = list(split_array(reader(data, most), LIMIT))
    assert [json.loads(text.decode("utf-8", "surrogatepass")) for _, text in found if text] == array
    assert all(data[offset : offset + len(text)] == text for offset, text in found if text)


@given(st.dictionaries(st.text(), JSON), st.lists(JSON, max_size=3), st.dictionaries(st.text(), JSON))
def test_a_field_is_found_between_others(
    before: dict[str, object], rows: list[object], after: dict[str, object]
) -> None:
    inner = {
        **{key: value for key, value in before.items() if key != "rows"},
        "rows": rows,
        **{f"{k}_": v for k, v in after.items()},
    }
    data = json.dumps({"version": 1, "result": inner, "more": [1]}).encode()
    assert [json.loads(text or b"") for text in elements(data, 5, field="result.rows")] == rows


@given(st.lists(JSON, min_size=1, max_size=4), st.data())
def test_an_array_that_is_cut_gives_the_elements_before_the_cut(array: list[object], data: st.DataObject) -> None:
    whole = json.dumps(array).encode()
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    found: list[object] = []
    with pytest.raises(BrokenJsonError, match="ends"):
        for _, text in split_array(reader(cut), LIMIT):
            found.append(text)
    assert found == [json.dumps(item).encode() for item in array[: len(found)]]


@pytest.mark.parametrize(
    ("data", "good", "why"),
    [
        (b'[{"a": 1}, {"b": 2]', 1, "another kind of bracket"),
        (b'[{"a": 1} {"b": 2}]', 1, "expected a comma"),
        (b'[{"a": 1},]', 1, "expected a value"),
        (b'[{"a": 1}]]', 1, "after the end"),
        (b'[{"a": 1}] [{"b": 2}]', 1, "after the end"),
        (b'[{"a": 1}, {"b": "', 1, "in the middle"),
        (b'[{"a": 1},', 1, "in the middle of a value"),
        (b"[", 0, "in the middle"),
    ],
)
def test_a_broken_array_says_where_and_why(data: bytes, good: int, why: str) -> None:
    found: list[object] = []
    with pytest.raises(BrokenJsonError, match=why) as error:
        found.extend(text for _, text in split_array(reader(data), LIMIT))
    assert len(found) == good
    assert 0 <= error.value.offset <= len(data)


def test_an_element_that_is_no_json_costs_no_other() -> None:
    assert elements(b'[{"a": NaN}, {"a" 1}, nul, {"a": 2}]') == [b'{"a": NaN}', b'{"a" 1}', b"nul", b'{"a": 2}']


@pytest.mark.parametrize("field", ["data", "a", "a.b.c", "list", "a.list"])
def test_a_field_that_is_not_there_is_told_with_what_is(field: str) -> None:
    data = b'{"a": {"b": {"x": 1}, "list": {}}, "list": 7}'
    with pytest.raises(NoListError, match=r"no key|is not a list|is not an object"):
        find_list(reader(data), LIMIT, field)


def test_elements_beyond_the_limit_are_skipped_whole() -> None:
    small = b'{"a": "' + b"x" * 500 + b'"}'
    large = b'{"a": [' + b", ".join([b'"' + b"y" * 900 + b'"'] * 20) + b"]}"
    assert elements(b"[" + b", ".join([small, large, small]) + b"]", 64, limit=1000) == [small, None, small]
    with pytest.raises(BrokenJsonError, match="more than"):  # one text that is longer than may be held
        elements(b'["' + b"z" * (3 << 20) + b'"]', limit=1000)


def test_memory_does_not_grow_with_the_array() -> None:
    row = b'{"a": "' + b"x" * 1000 + b'"},'
    chunks = iter([b"[", *[row * 1000] * 60, row[:-1] + b"]"])
    tracemalloc.start()
    try:
        count = sum(1 for _ in split_array(lambda _: next(chunks, b""), LIMIT))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 60_001
    assert peak < 8 << 20
