from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from containers import COMPRESS, TEXTS, array, halves, lines, parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.rows import Dropped, DropReason, Fault, Raw, Row
from eyas.data.sources import files
from eyas.data.sources.files import Kind, inspect, read_file
from eyas.data.sources.layouts import parse
from eyas.errors import ConfigError, EyasError

ROWS: list[dict[str, Any]] = [
    {
        "id": f"r{i}",
        "messages": [
            {"role": "user", "content": f'naïve "{i}"\u2028]}}{{[ \u0085'},
            {"role": "assistant", "content": "x" * i},
        ],
    }
    for i in range(60)
]


def raw(path: Path, field: str | None = None) -> list[Raw]:
    return list(read_file(path, inspect(path, field), "s", field))


def rows(path: Path, data: bytes | None = None, field: str | None = None) -> list[Row]:
    if data is not None:
        path.write_bytes(data)
    return [parse(one) for one in raw(path, field)]


def ids(found: list[Row]) -> list[str]:
    return [row.id for row in found if not isinstance(row, Dropped)]


def reasons(found: list[Row]) -> list[tuple[int, DropReason]]:
    return [(row.line, row.reason) for row in found if isinstance(row, Dropped)]


ALL = [row["id"] for row in ROWS]


# --- every container --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.dat", "noname", "a.parquet", "a.gz", "a.zst.bz2"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_known_by_its_content_whatever_its_name(tmp_path: Path, text: str, name: str) -> None:
    found = rows(tmp_path / name, TEXTS[text](ROWS))
    assert [getattr(row, "messages", None) for row in found] == [row["messages"] for row in ROWS]
    assert ids(found) == ALL
    if "array" in text:
        assert [row.line for row in found] == list(range(1, 61))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("text", ["lines", "pretty array"])
def test_compression_is_known_by_its_content(tmp_path: Path, text: str, compression: str, name: str) -> None:
    compress, data = COMPRESS[compression], TEXTS[text](ROWS)
    assert ids(rows(tmp_path / name, compress(data))) == ALL
    assert ids(rows(tmp_path / name, halves(compress, data))) == ALL
    assert ids(rows(tmp_path / name, compress(gzip.compress(data)) if compression != "zst" else compress(data))) == ALL


def test_wrapped_arrays(tmp_path: Path) -> None:
    for indent in (None, 2):
        for compress in (bytes, *COMPRESS.values()):
            data = compress(
                json.dumps({"v": [1, {"data": 2}], "result": {"n": None, "data": ROWS, "z": 1}}, indent=indent).encode()
            )
            assert ids(rows(tmp_path / "a.json", data, "result.data")) == ALL


def test_parquet_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.jsonl", "a"):
        parquet(ROWS, tmp_path / name, row_group_size=7)
        assert ids(rows(tmp_path / name)) == ALL
        assert inspect(tmp_path / name) is Kind.PARQUET


@pytest.mark.parametrize("compression", ["", *COMPRESS])
def test_prompts_one_a_line(tmp_path: Path, compression: str) -> None:
    compress = COMPRESS.get(compression, bytes)
    texts = ["Who?", "  [INST] {x", "naïve\u2028\u0085", "{not JSON}", "7"]
    path = tmp_path / ("p.txt." + compression).rstrip(".")
    found = rows(path, compress(b"\xef\xbb\xbf" + "\r\n\n".join(texts).encode() + b"\n\xff\n"))
    assert [row.messages[0]["content"] for row in found if not isinstance(row, Dropped)] == texts  # pyright: ignore[reportAttributeAccessIssue]
    assert [row.line for row in found] == [1, 3, 5, 7, 9, 10]
    assert reasons(found) == [(10, DropReason.BAD_UTF8)]


@pytest.mark.parametrize("text", TEXTS)
def test_json_in_a_file_called_txt_is_json(tmp_path: Path, text: str) -> None:
    assert ids(rows(tmp_path / "a.txt", TEXTS[text](ROWS))) == ALL


def test_a_list_on_the_first_line_makes_no_array_of_a_file_of_lines(tmp_path: Path) -> None:
    for first in (b"[]", b"[1, 2]", b'[{"prompt": "Hi"}]'):
        found = rows(tmp_path / "a.jsonl", first + b"\n" + lines(ROWS))
        assert reasons(found) == [(1, DropReason.NOT_AN_OBJECT)]
        assert ids(found) == ALL


@pytest.mark.parametrize(
    "first", [b"[" * 100_000 + b"]" * 100_000, b'[{"role": "user"', b"[1, 2", b"[1] 2", b"[INST] Hi"]
)
def test_a_broken_list_on_the_first_line_costs_no_other(tmp_path: Path, first: bytes) -> None:
    for more in (b"\n", b'\n{"deep": ' + b"[" * 100_000 + b"\n", b"\n\n{\n"):
        found = rows(tmp_path / "a.jsonl", first + more + lines(ROWS))
        assert 1 in [line for line, _ in reasons(found)]
        assert ids(found) == ALL


@pytest.mark.parametrize(
    "data",
    [
        b'[{"prompt": "Hi"}]\n\n',
        b'[{"prompt": "Hi"},\n{"prompt": "Hi"}]',
        b'[\n{"prompt": "Hi"}\n]',
        b'[{"prompt": "Hi"}\n,\n{"prompt": "Hi"}\n]',
        b'[{"prompt": "Hi"}\n,{"prompt": "Hi"}]',
        b'[{"prompt":\n{"a": 1}\n}]',
        b'[{"messages": [\n{"a": 1}\n]}]',
    ],
)
def test_arrays_over_some_lines(tmp_path: Path, data: bytes) -> None:
    assert inspect_of(tmp_path, data) is Kind.ARRAY


def inspect_of(folder: Path, data: bytes, name: str = "any") -> Kind:
    (folder / name).write_bytes(data)
    return inspect(folder / name)


@pytest.mark.parametrize(
    "first", [b"\xff\xfa", b"half a line", b'nt": "x"}]}', b"\0\0\0\0", b"7", b'{"id": "k', b"{", b'{"id": 1,}']
)
def test_a_bad_first_line_costs_no_other(tmp_path: Path, first: bytes) -> None:
    found = rows(tmp_path / "a.jsonl", first + b"\n" + lines(ROWS))
    assert [line for line, _ in reasons(found)] == [1]
    assert ids(found) == ALL


def test_a_bad_element_costs_no_other(tmp_path: Path) -> None:
    bad = [
        b'{"messages": [{}}'[:-1] + b"]}",
        b"nul",
        b"7",
        b"[]",
        b'"\xff"',
        b'{"id": ' + b"9" * 5000 + b"}",
        b'{"a" 1}',
    ]
    bad += [b"[" * 3000 + b"]" * 3000]
    good = json.dumps(ROWS[1]).encode()
    found = rows(
        tmp_path / "a.json", b"[" + b",".join(part for element in bad for part in (good, element)) + b"," + good + b"]"
    )
    assert [line for line, _ in reasons(found)] == [2 * i for i in range(1, len(bad) + 1)]
    assert len(ids(found)) == len(bad) + 1


def test_offsets_point_into_the_file(tmp_path: Path) -> None:
    for data in (b"\xef\xbb\xbf" + lines(ROWS), array(ROWS, 1)):
        (tmp_path / "a").write_bytes(data)
        for one in raw(tmp_path / "a"):
            assert data[one.offset : one.offset + len(one.payload)] == one.payload


# --- what is not read -------------------------------------------------------------------------------------------------


def zipped() -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.jsonl", "{}")
        return file.getvalue()


def tarred() -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("a.jsonl"))
        return file.getvalue()


TEXT = '{"messages": []}\n'
FOREIGN = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\r\n\t", "only blank"),
    "only a byte order mark": (b"\xef\xbb\xbf", "only blank"),
    "UTF-16": (TEXT.encode("utf-16"), "UTF-16"),
    "UTF-16 big": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16"),
    "UTF-16 without a mark": (TEXT.encode("utf-16-le"), "UTF-16"),
    "UTF-32": (TEXT.encode("utf-32"), "UTF-32"),
    "zip": (zipped(), "zip"),
    "tar": (tarred(), "tar"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(100), "PNG"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "pickle": (pickle.dumps([TEXT]), "pickle"),
    "CSV": (b"prompt,response\nHi,Hello\n", "CSV"),
    "TSV": (b"prompt\tresponse\nHi\tHello\n", "CSV"),
    "HTML": (b"<!DOCTYPE html><html>\n{\n}\n</html>", "HTML"),
    "YAML": (b"---\n- messages: []\n", "YAML"),
    "YAML too": (b"messages:\n  - role: user\n", "YAML"),
    "prose": (b"Once upon a time\nthere was a file\n", "starts with"),
    "Latin-1": (b"caf\xe9\n", "starts with"),
    "zeros": (bytes(5000), "zero bytes"),
    "Python": (b"{'messages': []}", "JSON"),
    "arrow": (b"ARROW1\0\0", "Arrow"),
    "LZ4": (b"\x04\x22\x4d\x18" + bytes(50), "LZ4"),
    "LZMA": (lzma.compress(TEXT.encode(), format=lzma.FORMAT_ALONE), "LZMA"),
    "Snappy": (b"\xff\x06\0\0sNaPpY" + bytes(50), "Snappy"),
    "encrypted Parquet": (b"PARE" + bytes(50), "encrypted"),
    "XML": (b"<?xml version='1.0'?>\n<a/>", "HTML"),
    "JSON text sequence": (b'\x1e{"messages": []}\n', "starts with"),
    "JSONP": (b'cb([{"messages": []}, 1]);', "starts with"),
    "lines that end at CR": (lines(ROWS, "\r"), "CR alone"),
    "lines that end at CR, but the last": (lines(ROWS, "\r") + b"\n", "CR alone"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS"),
    "wrapped": (array(ROWS).join([b'{"data": ', b"}"]), "field: data"),
    "wrapped, pretty": (json.dumps({"v": 1, "data": ROWS}, indent=1).encode(), "field: data"),
    "wrapped twice": (json.dumps({"result": {"rows": ROWS}}, indent=1).encode(), "field: result.rows"),
    "wrapped, large": (json.dumps({"v": 1, "data": ROWS * 400}, indent=1).encode(), "field: data"),
    "one row, pretty": (json.dumps(ROWS[0], indent=1).encode(), "one row a line"),
    "rows, pretty": (b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), "one row a line"),
    "damaged Parquet": (b"PAR1" + bytes(100), "Parquet"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a", "a.jsonl.gz"])
@pytest.mark.parametrize("shape", FOREIGN)
def test_what_is_no_data_is_told_before_any_work(tmp_path: Path, shape: str, name: str) -> None:
    data, told = FOREIGN[shape]
    if shape == "Python":
        assert reasons(rows(tmp_path / name, data)) == [(1, DropReason.BAD_JSON)]
        return
    for content in (data, gzip.compress(data)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=told) as error:
            inspect(tmp_path / name)
        assert name in error.value.where


@pytest.mark.parametrize(
    "data", [b"\0asm\1\0\0\0", b"Hi\n\0\0\0\0", bytes(range(256)), b"one\rtwo\rthree\r", b"one\rtwo\n"]
)
def test_what_is_no_list_of_prompts(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"binary|CR alone"):
        inspect_of(tmp_path, data, "a.txt")


@pytest.mark.parametrize("prompt", ["ORCA whales", "<b>bold</b> what is it?", "<think>", "<<<<<<< HEAD", "a < b?"])
def test_prompts_that_look_like_other_files(tmp_path: Path, prompt: str) -> None:
    (tmp_path / "a.txt").write_text(f"{prompt}\nHi\r\n")
    row, hi = (raw.payload for raw in read_file(tmp_path / "a.txt", inspect(tmp_path / "a.txt"), ""))
    assert (row, hi) == ({"prompt": prompt}, {"prompt": "Hi"})


def test_marks_of_a_merge_cost_no_row(tmp_path: Path) -> None:
    data = b"<<<<<<< HEAD\n" + lines(ROWS) + b"=======\n>>>>>>> main\n"
    found = rows(tmp_path / "a.jsonl", data)
    assert ids(found) == ALL
    assert len(reasons(found)) == 3


def test_errors_that_quote_a_file_drive_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps({"\x1b[2J": ROWS}))
    parquet([{"a\x1b[2J": 1}], tmp_path / "b")
    thrift = bytearray((tmp_path / "b").read_bytes())
    thrift[-40:-8] = b"\x1f" * 32
    (tmp_path / "c").write_bytes(thrift)
    for name, field in (("a", None), ("a", "rows"), ("b", None), ("c", None)):
        with pytest.raises(ConfigError) as error:
            inspect(tmp_path / name, field)
        assert str(error.value).isprintable()


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (
        tmp_path / "missing",
        tmp_path / "folder",
        Path("/dev/null"),
        tmp_path / ("x" * 300),
        tmp_path / "a\0b",
    ):
        with pytest.raises(ConfigError, match="input"):
            inspect(path)


def test_parquet_inside_of_gzip(tmp_path: Path) -> None:
    parquet(ROWS, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="decompress"):
        inspect_of(tmp_path, gzip.compress((tmp_path / "a.parquet").read_bytes()))


@pytest.mark.parametrize("field", ["data", "v", "result.data", ""])
def test_a_field_that_holds_no_list(tmp_path: Path, field: str) -> None:
    for data in (b'{"v": 1, "rows": []}', array(ROWS), lines(ROWS), b'{"v": 1', b"prose"):
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(ConfigError, match="field"):
            inspect(tmp_path / "a.json", field)
    parquet(ROWS, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="field"):
        inspect(tmp_path / "a.parquet", field)


# --- damage found midway ----------------------------------------------------------------------------------------------

MANY = [{"id": f"m{i}", "prompt": f"{i * 7919 % 10007} {'-' * (i % 50)}"} for i in range(5000)]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("text", ["lines", "compact array"])
def test_a_cut_file_gives_the_rows_before_the_cut_and_one_fault(tmp_path: Path, text: str, compression: str) -> None:
    data = TEXTS[text](MANY)
    whole = halves(COMPRESS[compression], data)
    *good, last = rows(tmp_path / "a.jsonl", whole[: len(whole) * 3 // 4])
    assert isinstance(last, Dropped)
    assert last.reason is DropReason.BAD_FILE
    assert "the rest of the file cannot be read" in last.detail
    assert ids(good) == [row["id"] for row in MANY[: len(good)]]
    assert len(good) >= 2499
    assert last.line == len(good) + 1


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_cut_before_its_first_byte_of_text_is_not_empty(tmp_path: Path, compression: str) -> None:
    whole = COMPRESS[compression](COMPRESS[compression](lines(ROWS)))
    for size in (6, 7, 8, 10, 12):
        with pytest.raises(ConfigError, match=r"cannot decompress|is damaged"):
            inspect_of(tmp_path, whole[:size])
    if compression == "gz":
        with pytest.raises(ConfigError, match=r"cannot decompress|is damaged"):
            inspect_of(tmp_path, whole[:2])


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz", "zst"])
def test_more_bytes_after_the_end_lose_no_row(tmp_path: Path, compression: str) -> None:
    found = rows(tmp_path / "a", COMPRESS[compression](lines(MANY)) + b"garbage" * 20)
    assert ids(found) == [row["id"] for row in MANY]
    assert len(found) - len(MANY) <= 1  # bzip2 and xz take no notice
    if compression in ("gz", "zst"):
        assert reasons(found) == [(len(MANY) + 1, DropReason.BAD_FILE)]


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_checksum_that_does_not_match_is_told(tmp_path: Path, compression: str) -> None:
    compress = COMPRESS[compression]
    first, second = compress(lines(MANY[:100])), bytearray(compress(lines(MANY[100:])))
    second[-8 if compression == "gz" else len(second) // 2] ^= 0xFF
    found = rows(tmp_path / "a", first + second)
    assert ids(found)[:100] == [row["id"] for row in MANY[:100]]
    assert [reason for _, reason in reasons(found)].count(DropReason.BAD_FILE) == 1
    assert reasons(found)[-1][1] is DropReason.BAD_FILE
    (tmp_path / "b").write_bytes(b"BZh9" + bytes(50))
    with pytest.raises(ConfigError, match="bzip2"):
        inspect(tmp_path / "b")


@pytest.mark.parametrize("cut", [1, 10, 30, 100])
def test_an_array_that_ends_in_the_middle(tmp_path: Path, cut: int) -> None:
    found = rows(tmp_path / "a.json", array(MANY)[:-cut])
    assert [reason for _, reason in reasons(found)] == [DropReason.BAD_JSON]
    assert "byte" in found[-1].detail  # pyright: ignore[reportAttributeAccessIssue]
    assert ids(found) == [row["id"] for row in MANY[: len(found) - 1]]
    assert found[-1].line == len(found)


def test_a_file_that_shrinks_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS))
    kind = inspect(path)
    path.write_bytes(b"")
    assert list(read_file(path, kind, "s")) == []
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_file(path, kind, "s"))


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["", "gz"])
def test_a_line_beyond_the_limit_is_skipped_whole(tmp_path: Path, compression: str) -> None:
    good = lines(ROWS[:1])
    data = good + b" " * (files.MAX_LINE_BYTES * 3 // 2) + b"\n" + good + b'"\xff"\n'
    path = tmp_path / "a.jsonl"
    found = rows(path, gzip.compress(data, 1) if compression else data)
    assert reasons(found) == [(2, DropReason.LINE_TOO_LONG), (4, DropReason.BAD_UTF8)]
    assert [row.line for row in found] == [1, 2, 3, 4]
    assert f"byte {len(data) - 3}:" in found[-1].detail  # pyright: ignore[reportAttributeAccessIssue]


def test_a_line_of_the_limit_is_read(tmp_path: Path) -> None:
    text = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
    (found,) = rows(tmp_path / "a.jsonl", text)
    assert ids([found])
    (found,) = rows(tmp_path / "a.json", b"[" + text + b"]")
    assert ids([found])


@pytest.mark.parametrize("text", ["lines", "compact array"])
@pytest.mark.parametrize("compression", ["", "gz", "zst"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, text: str, compression: str) -> None:
    path = tmp_path / "a.jsonl"
    data = TEXTS[text]([{"prompt": "x" * 2000}] * 15_000)
    path.write_bytes(COMPRESS[compression](data) if compression else data)
    del data
    kind = inspect(path)
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_file(path, kind, "s"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 15_000
    assert peak < 8 << 20


# --- anything ---------------------------------------------------------------------------------------------------------


def rows_or_error(path: Path, field: str | None = None) -> list[Row] | EyasError:
    """What becomes of a file, whatever it is."""
    try:
        kind = inspect(path, field)
    except EyasError as error:
        return error
    return [parse(one) for one in read_file(path, kind, "s", field)]


def is_accounted_for(found: list[Row] | EyasError) -> bool:
    """An error to show, or rows that are each kept or dropped, numbered upwards, the file bad at most once."""
    if isinstance(found, EyasError):
        return str(found).isprintable()
    numbers, dropped = [row.line for row in found], [row for row in found if isinstance(row, Dropped)]
    return (
        numbers == sorted(set(numbers))
        and all(row.detail.isprintable() for row in dropped)
        and sum(row.reason is DropReason.BAD_FILE for row in dropped) <= 1
    )


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("containers")
    texts = {name: write(ROWS[:8]) for name, write in TEXTS.items()}
    made = {f"{name}.{suffix}": COMPRESS[suffix](data) for name, data in texts.items() for suffix in COMPRESS}
    for codec in ("zstd", "none", "snappy", "gzip"):
        parquet(ROWS[:8], folder / codec, compression=codec, row_group_size=3, write_page_checksum=codec == "zstd")
        made[f"parquet {codec}"] = (folder / codec).read_bytes()
    return {**texts, **made, "wrapped": json.dumps({"data": ROWS[:8]}).encode()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=400)
@given(st.data())
def test_any_change_of_a_good_file_is_an_error_of_ours_or_accounted_for(
    tmp_path: Path, containers: dict[str, bytes], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(containers)))
    changed = bytearray(containers[name])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(changed)))
        match data.draw(st.sampled_from(["cut", "flip", "insert", "remove"])):
            case "cut":
                del changed[at:]
            case "flip" if at < len(changed):
                changed[at] ^= data.draw(st.integers(1, 255))
            case "insert":
                changed[at:at] = data.draw(
                    st.binary(max_size=8) | st.sampled_from([b"\n", b"[", b"]", b'"', b"\0", b"{}"])
                )
            case _:
                del changed[at : at + data.draw(st.integers(1, 40))]
    path = tmp_path / data.draw(st.sampled_from(["a.jsonl", "a.json", "a.txt", "a.parquet", "a"]))
    path.write_bytes(changed)
    field = "data" if name == "wrapped" and data.draw(st.booleans()) else None
    assert is_accounted_for(rows_or_error(path, field))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [
                b'{"id":1,',
                b'"messages":[',
                b"{}",
                b"]}",
                b"[",
                b"\n",
                b"\r\n",
                b"\xef\xbb\xbf",
                b'"\xf0\x9f"',
                b"null",
                b",",
            ]
        )
    ).map(b"".join),
    st.sampled_from(["a.jsonl", "a.json", "a.txt", "a.txt.gz", "a"]),
    st.none() | st.sampled_from(["", "messages", "id.messages"]),
)
def test_any_bytes_are_an_error_of_ours_or_accounted_for(
    tmp_path: Path, data: bytes, name: str, field: str | None
) -> None:
    for content in (data, *(compress(data) for compress in COMPRESS.values())):
        (tmp_path / name).write_bytes(content)
        assert is_accounted_for(rows_or_error(tmp_path / name, field))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.sampled_from([b'{"prompt": "x"}', b"", b" \t", b"\r", b"[]", b"{", b"\xff", b"7", b"\xc2\x85"]), min_size=1
    )
)
def test_every_line_that_is_not_blank_is_one_row_of_its_number(tmp_path: Path, texts: list[bytes]) -> None:
    data = b"\n".join([b'{"prompt": "first"}', *texts, b'{"prompt": "last"}'])
    found = rows(tmp_path / "a.jsonl", data)
    assert [row.line for row in found] == [n for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5),
    st.sampled_from(sorted(TEXTS)),
)
def test_texts_come_back_unchanged(tmp_path: Path, texts: list[str], text: str) -> None:
    found = rows(tmp_path / "a.jsonl", TEXTS[text]([{"prompt": one} for one in texts]))
    assert [row.messages[0]["content"] for row in found if not isinstance(row, Dropped)] == texts  # pyright: ignore[reportAttributeAccessIssue]


def test_raw_rows_go_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(lines(ROWS))[:-20])
    found = raw(path)
    assert isinstance(found[-1].payload, Fault)
    assert pickle.loads(pickle.dumps(found)) == found
