from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from eyas.config import SourceConfig
from eyas.data.rows import Chat, Dropped, DropReason
from eyas.data.sources import open_sources, read_rows
from eyas.errors import ConfigError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
ROWS = [{"id": i, "messages": TURNS, "system": None, "junk": b"x"} for i in range(5)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "files").mkdir()
    for split, part in (("train", data), ("test", data.select([1, 2]))):
        part.to_parquet(str(tmp_path / "files" / f"{split}-00000-of-00001.parquet"))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        *[("{}/one", 5), ("hf:{}/one", 5), ("{}/two", 5), ("hf:{}/two", 5), ("hf:{}/two:test", 1), ("hf:{}/files", 5)],
        *[("hf:{}/files:test", 2), ("hf:{}/files:train", 5), ("{}/files", 7)],
    ],
)
def test_folders_are_read_like_files(folder: Path, path: str, rows: int) -> None:
    inputs = open_sources([path.format(folder)])
    found = list(read_rows(inputs))
    assert len(found) == rows
    assert all(isinstance(row, Chat) and row.messages == TURNS for row in found)
    if len(inputs) == 1:
        assert [row.line for row in found] == list(range(1, rows + 1))
        assert inputs[0].source in ("one", "two", "files")


def test_caps_and_labels(folder: Path) -> None:
    config = SourceConfig(path=f"hf:{folder}/one", name="mine", max_rows=2, weight=0.5)
    (one,) = open_sources([config])
    assert (one.source, one.weight) == ("mine", 0.5)
    assert [(row.source, row.line) for row in read_rows([one])] == [("mine", 1), ("mine", 2)]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("hf:{}/two:valid", "no split valid"),
        ("hf:{}/one:train", "leave the split out"),
        ("hf:{}/nothing", "cannot open the data set"),
        ("hf:no-such/data-set", "cannot open the data set"),
        ("hf:", "hf:NAME"),
        ("hf::train", "hf:NAME"),
    ],
)
def test_what_is_not_there_is_told_before_any_work(folder: Path, path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_sources([path.format(folder)])


def test_unknown_columns_and_fields(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"a": 1}]).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="found a; expected conversations"):
        open_sources([tmp_path / "d"])
    with pytest.raises(ConfigError, match="no field"):
        open_sources([SourceConfig(path=str(tmp_path / "d"), field="rows")])


def test_images_are_not_decoded_and_not_text(tmp_path: Path) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": ["Hi", "Yo"], "image": [{"bytes": b"no picture at all", "path": None}, None]}
    datasets.Dataset.from_dict(rows).cast(features).save_to_disk(str(tmp_path / "d"))
    first, second = read_rows(open_sources([tmp_path / "d"]))
    assert isinstance(first, Dropped)
    assert first.reason is DropReason.NOT_TEXT
    assert isinstance(second, Chat)


def test_the_package_is_optional() -> None:
    code = (
        "import sys; sys.modules['datasets'] = None; from eyas.data.sources import open_sources; open_sources(['hf:x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "pip install 'eyas[hf]'" in done.stderr


def test_the_package_is_not_imported_for_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi"}')
    code = (
        "import sys; from eyas.data import sources as s; s.open_sources(sys.argv[1:]); print('datasets' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_a_data_set_that_breaks_midway_keeps_the_rows_before(folder: Path) -> None:
    inputs = open_sources([f"hf:{folder}/files"])
    with (folder / "files" / "train-00000-of-00001.parquet").open("r+b") as file:
        file.write(bytes(500))
    (only,) = read_rows(inputs)
    assert isinstance(only, Dropped)
    assert only.reason is DropReason.BAD_FILE
    assert "cannot be read" in only.detail
