from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
from containers import COMPRESS, parquet

from eyas.config import SourceConfig
from eyas.data.rows import Chat, Dropped, DropReason, Preformatted, Row
from eyas.data.sources import open_sources, parse, read_chats, read_rows
from eyas.errors import ConfigError


def write(path: Path, *ids: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"id": name, "prompt": "Hi"}) + "\n" for name in ids or [path.name]).encode()
    suffix = path.suffix.removeprefix(".")
    path.write_bytes(COMPRESS[suffix](text) if suffix in COMPRESS else text)
    return path


def ids(*sources: SourceConfig | Path | str) -> list[str]:
    rows = list(read_rows(open_sources(sources)))
    assert all(isinstance(row, Chat) for row in rows)
    return [row.id for row in rows if isinstance(row, Chat)]


# --- what a source names ----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.json.gz", "sub/c.ndjson.zst", "sub/deep/a.jsonl.bz2", "sub/D.JSONL"):
        write(tmp_path / name)
    for name in (
        "README.txt",
        "notes.md",
        ".hidden.jsonl",
        ".cache/x.jsonl",
        "LICENSE",
        "model.safetensors",
        "a.jsonl.lock",
    ):
        write(tmp_path / name, "never read")
    return tmp_path


def test_a_folder_is_its_data_files_sorted_and_those_below_it(tree: Path) -> None:
    assert (
        ids(tree)
        == ids(str(tree))
        == ids(f"{tree}/")
        == ["a.json.gz", "b.jsonl", "D.JSONL", "c.ndjson.zst", "a.jsonl.bz2"]
    )


def test_what_prepare_wrote_in_a_folder_is_not_read_again(tree: Path) -> None:
    before = open_sources([tree])
    for folder in (tree / "corpus", tree / "below" / "corpus"):
        folder.mkdir(parents=True)
        for name in ("prompts.jsonl", "dropped.jsonl", "summary.json", "corpus.parquet", "holdout.parquet"):
            (folder / name).write_text('{"prompt": "Hi"}\n')
    assert open_sources([tree]) == before
    with pytest.raises(ConfigError, match="no data"):
        open_sources([tree / "corpus"])
    assert len(open_sources([tree / "corpus" / "prompts.jsonl"])) == 1
    (tree / "corpus" / "mine.jsonl").write_text('{"prompt": "Hi"}\n')
    assert [one.source for one in open_sources([tree / "corpus"])] == ["mine"]


def test_an_empty_name_is_not_the_folder_at_hand() -> None:
    with pytest.raises(ConfigError, match="without a name"):
        open_sources([""])


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl", ["b.jsonl"]),
        ("*.json*", ["a.json.gz", "a.jsonl.lock", "b.jsonl"]),  # a glob asks for whatever it matches
        ("**/*.json*", ["a.json.gz", "a.jsonl.lock", "b.jsonl", "a.jsonl.bz2"]),
        ("sub/**/*.bz2", ["a.jsonl.bz2"]),
        ("s?b", ["D.JSONL", "c.ndjson.zst", "a.jsonl.bz2"]),
        ("[ab].*", ["a.json.gz", "a.jsonl.lock", "b.jsonl"]),
    ],
)
def test_globs_are_sorted(tree: Path, pattern: str, found: list[str]) -> None:
    write(tree / "a.jsonl.lock")
    assert ids(f"{tree}/{pattern}") == found


def test_a_name_with_the_signs_of_a_glob_is_a_name_first(tmp_path: Path) -> None:
    write(tmp_path / "a[1].jsonl")
    write(tmp_path / "a1.jsonl")
    assert ids(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_a_file_is_read_as_often_as_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert ids(path, tmp_path, f"{tmp_path}/*") == ["a.jsonl"] * 3
    assert ids(f"{tmp_path}/**/**/*.jsonl") == ["a.jsonl"]


def test_links_to_folders_are_not_walked_in_circles(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.jsonl")
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "b.jsonl").symlink_to(tmp_path / "d" / "a.jsonl")
    assert ids(tmp_path / "d") == ["a.jsonl", "a.jsonl"]


def test_home_is_expanded(tmp_path: Path) -> None:
    home, os.environ["HOME"] = os.environ.get("HOME", ""), str(tmp_path)
    try:
        write(tmp_path / "a.jsonl")
        assert ids("~/a.jsonl") == ids("~/*.jsonl") == ["a.jsonl"]
    finally:
        os.environ["HOME"] = home


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("missing.jsonl", "No such file"),
        ("missing/*.jsonl", "no file matches"),
        ("*.nothing", "no file matches"),
        ("nodata", "no data in the folder"),
        ("nodata/notes.md", "not JSON"),
        ("~no-such-user-at-all/x", "cannot read"),
        ("a\0b", "cannot read"),
        ("x" * 5000, "cannot read"),
        ("pipe", "neither a file nor a folder"),
        ("", "no data in the folder|neither"),
    ],
)
def test_what_is_not_there_is_told_before_any_work(tmp_path: Path, path: str, told: str) -> None:
    (tmp_path / "nodata").mkdir()
    (tmp_path / "nodata" / "notes.md").write_text("# Notes\n")
    os.mkfifo(tmp_path / "pipe")
    good = write(tmp_path / "sub" / "good.jsonl")
    where = path if path.startswith("~") else str(tmp_path / "nodata") if not path else f"{tmp_path}/{path}"
    with pytest.raises(ConfigError, match=told):
        open_sources([good, where])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        open_sources([path])


def test_names_that_are_no_utf8_are_read_and_can_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    path.write_text('{"prompt": "Hi"}\n7\n')
    good, bad = read_rows(open_sources([tmp_path]))
    for text in (good.file, good.source, str(bad), bad.file):
        text.encode("utf-8")
    assert isinstance(good, Chat)
    assert good.id == "caf\\udce9:1"


# --- settings of a source ---------------------------------------------------------------------------------------------


def test_labels_are_names_without_suffixes(tmp_path: Path) -> None:
    paths = [write(tmp_path / name) for name in ("v1.5.jsonl.gz", "a.b.ndjson", "c")]
    assert [one.source for one in open_sources(paths)] == ["v1.5", "a.b", "c"]
    (named,) = open_sources([SourceConfig(path=str(paths[0]), name="mine", weight=2)])
    assert (named.source, named.weight, named.path) == ("mine", 2.0, str(paths[0]))
    assert [row.source for row in read_rows([named])] == ["mine"]


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_max_rows_counts_bad_rows_too(tmp_path: Path, most: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Hi"}\n\n7\n{"prompt": "Hi"}\n')
    rows = list(read_rows(open_sources([SourceConfig(path=str(path), max_rows=most)])))
    assert [row.line for row in rows] == [1, 3, 4][:most]


def test_max_rows_holds_for_each_file(tree: Path) -> None:
    for name in ("b.jsonl", "sub/D.JSONL"):
        write(tree / name, 1, 2, 3)
    rows = read_rows(open_sources([SourceConfig(path=str(tree), max_rows=2)]))
    assert Counter(Path(row.file).name for row in rows) == {
        "a.json.gz": 1,
        "b.jsonl": 2,
        "D.JSONL": 2,
        "c.ndjson.zst": 1,
        "a.jsonl.bz2": 1,
    }


def test_a_field_of_each_file(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"data": [{"id": name, "prompt": "Hi"}]}, indent=1))
    assert ids(SourceConfig(path=str(tmp_path), field="data")) == ["a.json", "b.json"]
    with pytest.raises(ConfigError, match="field: data"):
        open_sources([tmp_path])


def test_inputs_and_raw_rows_go_to_other_processes(tree: Path) -> None:
    parquet([{"id": 1, "prompt": "Hi"}], tree / "t.parquet")
    inputs = open_sources([tree])
    assert pickle.loads(pickle.dumps(inputs)) == inputs
    for one in inputs:
        again = list(pickle.loads(pickle.dumps(one)).rows_raw())
        assert [parse(pickle.loads(pickle.dumps(raw))) for raw in again] == list(read_rows([one]))


def test_roles_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "My_Model_v2", "content": "Hi"}]}))
    (kept,) = read_rows(open_sources([path]), {"my_model_v2": "assistant"})
    assert isinstance(kept, Chat)
    assert kept.messages[0]["role"] == "assistant"
    (dropped,) = read_chats(path)
    assert isinstance(dropped, Dropped)
    assert dropped.reason is DropReason.UNKNOWN_ROLE


def test_rows_of_one_id_are_all_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "same", "same", "same")
    assert [(row.line, row.id) for row in read_chats(path) if isinstance(row, Chat)] == [
        (1, "same"),
        (2, "same"),
        (3, "same"),
    ]


# --- files of real and of hostile shapes ------------------------------------------------------------------------------

#: file -> rows kept, and line -> reason of the others
HOSTILE: dict[str, tuple[int, dict[int, str]]] = {
    "01_empty_assistant.jsonl": (5, {5: "bad-messages"}),  # empty answers are the template's to judge
    "03_consecutive_roles.jsonl": (5, {}),
    "05_unknown_role.jsonl": (4, {1: "unknown-role", 4: "unknown-role"}),
    "07_mixed_types.jsonl": (4, {3: "bad-messages", 5: "bad-messages", 7: "bad-messages"}),
    "09_image_parts.jsonl": (2, {1: "not-text", 2: "not-text", 4: "not-text", 5: "not-text"}),
    "11_invalid_utf8.jsonl": (3, {2: "bad-utf8", 4: "bad-utf8", 5: "bad-json"}),
    "13_bom_crlf.jsonl": (4, {}),
    "15_cut_last_line.jsonl": (2, {3: "bad-json"}),
    "17_column_names.jsonl": (9, {10: "unknown-columns"}),
    "19_line_separators.jsonl": (2, {}),
    "21_one_row.jsonl": (1, {}),
    "23a_nulls.parquet": (1, {2: "unknown-columns", 3: "bad-messages"}),
}
FORMATS = {
    "alpaca.json": 60,
    "conversations.parquet": 60,
    "openai_messages.jsonl": 60,
    "preformatted_text.jsonl": 60,
    "prompts.txt": 60,
    "sharegpt.jsonl": 60,
    "sharegpt_array.json": 60,
    "specforge_tool_use.jsonl": 1,
    "turns.jsonl": 60,
}
TRAIN = {
    "banking77": 1539,
    "bfcl_tools": 1134,
    "fastchat_identity": 154,
    "glaive_toolcall_en": 176,
    "glaive_toolcall_zh": 179,
    "gsm8k_train": 7472,
    "ifeval_en": 541,
    "ifeval_es": 115,
    "ifeval_fr": 235,
    "ifeval_ja": 172,
    "mbpp_train": 460,
    "mtbench101_multiturn": 1386,
    "oasst_prompt_lottery": 250,
    "oasst_trees": 100,
    "self_instruct_seed": 175,
    "self_instruct_user_oriented": 252,
    "taubench_airline_agent": 29,
    "unicode_mix": 60,
}


def tally(rows: list[Row]) -> tuple[int, dict[int, str]]:
    dropped = {row.line: str(row.reason) for row in rows if isinstance(row, Dropped)}
    return len(rows) - len(dropped), dropped


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(shared_data: Path, name: str) -> None:
    assert tally(list(read_chats(shared_data / "hostile" / name))) == HOSTILE[name]


def test_every_hostile_file_has_its_count(shared_data: Path) -> None:
    assert sorted(HOSTILE) == sorted(path.name for path in (shared_data / "hostile").iterdir() if path.suffix != ".md")


def test_hostile_texts_are_what_the_files_say(shared_data: Path) -> None:
    rows = {path.name: list(read_chats(path)) for path in (shared_data / "hostile").iterdir() if path.suffix != ".md"}
    chats = {name: [row for row in found if isinstance(row, Chat)] for name, found in rows.items()}
    texts = [message["content"] for found in chats.values() for chat in found for message in chat.messages]
    assert not any("\r" in text or text.startswith(("[{", "\ufeff")) for text in texts)
    assert [chat.id for chat in chats["07_mixed_types.jsonl"]] == ["1", "two", "07_mixed_types:4", "07_mixed_types:6"]
    assert [chat.messages[0]["content"] for chat in chats["09_image_parts.jsonl"]] == ["Hi, there", "Name ok colours."]
    assert [chat.id for chat in chats["13_bom_crlf.jsonl"]] == ["b0", "b1", "b2", "b3"]
    assert "one\u2028two\u2029three\u0085four" in chats["19_line_separators.jsonl"][0].messages[0]["content"]
    assert chats["23a_nulls.parquet"][0].messages[0] == {"role": "user", "content": "Hi"}
    roles = [[message["role"] for message in chat.messages] for chat in chats["03_consecutive_roles.jsonl"]]
    assert roles[:2] == [["user", "user", "assistant"], ["user", "assistant", "assistant"]]
    assert roles[2:4] == [["assistant", "user", "assistant"], ["user", "assistant", "user"]]


def test_hostile_details_say_what_and_where(shared_data: Path) -> None:
    folder = shared_data / "hostile"
    data = (folder / "11_invalid_utf8.jsonl").read_bytes()
    first, second, third = (row for row in read_chats(folder / "11_invalid_utf8.jsonl") if isinstance(row, Dropped))
    latin1, cut = data.index(b"\xe9"), data.index(b'\xf0\x9f\x98"')
    assert f"11_invalid_utf8.jsonl:2: byte {latin1}:" in str(first)
    assert f"11_invalid_utf8.jsonl:4: byte {cut}:" in str(second)
    assert "NUL" in str(third)
    *_, torn = read_chats(folder / "15_cut_last_line.jsonl")
    assert "15_cut_last_line.jsonl:3: " in str(torn)
    assert "ends in the middle" in str(torn)
    *_, unknown = read_chats(folder / "17_column_names.jsonl")
    assert "found data; expected conversations, " in str(unknown)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(shared_data: Path, name: str) -> None:
    rows = list(read_chats(shared_data / "formats" / name))
    assert tally(rows) == (FORMATS[name], {})
    assert all(isinstance(row, Preformatted if "preformatted" in name else Chat) for row in rows)


def test_formats_hold_the_same_chats(shared_data: Path) -> None:
    def chats(name: str) -> list[object]:
        return [getattr(row, "messages", None) for row in read_chats(shared_data / "formats" / name)]

    expected = chats("openai_messages.jsonl")
    for name in ("sharegpt.jsonl", "sharegpt_array.json", "conversations.parquet"):
        assert chats(name) == expected
    users = [[message for message in chat if message["role"] == "user"] for chat in expected]  # pyright: ignore[reportGeneralTypeIssues]
    assert chats("turns.jsonl") == users
    prompts = [chat[0]["content"].split() for chat in chats("prompts.txt")]  # pyright: ignore[reportIndexIssue]
    assert prompts == [chat[0]["content"].split() for chat in users]  # line ends were made blanks


@pytest.mark.parametrize("name", TRAIN)
def test_training_files(shared_data: Path, name: str) -> None:
    rows = list(read_chats(shared_data / "train" / f"{name}.jsonl"))
    assert tally(rows) == (TRAIN[name], {})
    with_tools = sum(isinstance(row, Chat) and row.tools is not None for row in rows)
    assert with_tools == {"bfcl_tools": 1134, "glaive_toolcall_en": 102, "glaive_toolcall_zh": 120}.get(name, 0)


def test_training_rows_in_all(shared_data: Path) -> None:
    rows = list(read_rows(open_sources([shared_data / "train"])))
    assert len(rows) == sum(TRAIN.values()) == 14_429
    answered = [
        row for row in rows if isinstance(row, Chat) and any(message["role"] == "assistant" for message in row.messages)
    ]
    assert 14_429 - len(answered) == 12_191
    calls = [call for row in answered for message in row.messages for call in message.get("tool_calls", [])]
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)


def test_evaluation_sets(shared_data: Path) -> None:
    rows = list(read_rows(open_sources([shared_data / "eval"])))
    assert len(rows) == 1504
    assert all(isinstance(row, Chat) and {message["role"] for message in row.messages} == {"user"} for row in rows)
