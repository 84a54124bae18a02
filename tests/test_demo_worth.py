"""What a second demo relies on of the first: only what is surely of the same weights, measured in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.demo.worth import earlier_length, earlier_verdict

MADE = {"head_digest": "5f0c", "mode": "offline-decoded", "depth": 3, "command": "eyas evaluate a --questions b"}
#: Files that are torn, or a stranger's.
FOREIGN = (b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{}", b'{"results": [], "lines": [[]]}', b"[" * 100_000)


def written(path: Path, **document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def folder_of(path: Path, **section: Any) -> Path:
    path.mkdir()
    written(path / "config.json", architectures=["LlamaForCausalLMEagle3"], eyas=section)
    return path


# --- evaluations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_was_measured_is_found_among_whatever_lies_there(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "evaluation-a.json").write_bytes(foreign)
    (tmp_path / "evaluation-b.json").mkdir()
    assert earlier_length(tmp_path, MADE) is None
    written(tmp_path / "evaluation-c.json", **MADE, results=[{"accept_length": 2.5}, {"accept_length": 1.5}])
    assert earlier_length(tmp_path, MADE) == 2.5


@pytest.mark.parametrize(
    "change",
    [
        {"head_digest": "other"},
        {"head_digest": None},
        {"mode": "live"},
        {"depth": 4},
        {"command": "eyas evaluate a --questions mt_bench/question.jsonl"},
        {"results": []},
        {"results": [{}]},
        {"results": [{"accept_length": None}]},
        {"results": [{"accept_length": "2.5"}]},
        {"results": {"0": 2.5}},
    ],
)
def test_another_measurement_is_not_taken_for_it(tmp_path: Path, change: dict[str, Any]) -> None:
    written(tmp_path / "evaluation-a.json", **{**MADE, "results": [{"accept_length": 2.5}], **change})
    assert earlier_length(tmp_path, MADE) is None


# --- checks -----------------------------------------------------------------------------------------------------------

PASSED = {"tensors": "7e", "refused": 0, "unproven": 1, "lines": [["names", "passed"], ["verdict", "passed"]]}


@pytest.mark.parametrize("foreign", [*FOREIGN, None])
def test_a_check_that_cannot_be_read_is_none(tmp_path: Path, foreign: bytes | None) -> None:
    exported = folder_of(tmp_path / "exported", export={"tensors": "7e"})
    kept = written(tmp_path / "check.json", **PASSED)
    assert earlier_verdict(kept, exported) == "passed"
    if foreign is None:
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes(foreign)
    assert earlier_verdict(kept, exported) is None
    written(tmp_path / "check", **PASSED)
    (exported / "config.json").write_bytes(foreign or b"")
    assert earlier_verdict(tmp_path / "check", exported) is None


@pytest.mark.parametrize(
    "change",
    [{"tensors": "other"}, {"tensors": None}, {"refused": 1}, {"refused": None}, {"lines": []}, {"lines": [["x"]]},
     {"lines": "passed"}],
)  # fmt: skip
def test_a_check_of_other_weights_or_that_was_not_passed_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    exported = folder_of(tmp_path / "exported", export={"tensors": "7e"})
    assert earlier_verdict(written(tmp_path / "check.json", **{**PASSED, **change}), exported) is None


def test_without_a_record_nothing_is_known(tmp_path: Path) -> None:
    kept = written(tmp_path / "check.json", **{**PASSED, "tensors": None})
    for number, section in enumerate(({}, {"export": None}, {"export": {}}, {"export": {"tensors": None}})):
        assert earlier_verdict(kept, folder_of(tmp_path / str(number), **section)) is None
    assert earlier_verdict(kept, tmp_path / "none") is None
