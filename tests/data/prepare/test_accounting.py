"""Every shared file through the command, one by one and all at once: nothing is lost, nothing is a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.data.corpus import Corpus


def prepare(smollm2_dir: Path, out: Path, *words: object) -> tuple[int, str, dict[str, Any] | None]:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    arguments = ["prepare", *words, "--target", smollm2_dir, "--out", out, "--workers", 1]
    result = runner.invoke(app, [str(word) for word in arguments])
    assert "Traceback" not in result.output
    path = out / "summary.json"
    return result.exit_code, result.output, json.loads(path.read_text()) if path.exists() else None


def check(summary: dict[str, Any], out: Path) -> None:
    """The account agrees with itself and with every file beside it."""
    assert summary["read"] == summary["kept"] + summary["dropped"]
    assert summary["dropped"] == sum(summary["dropped_by_reason"].values())
    prompts, dropped = (
        (out / name).read_text(encoding="utf-8").split("\n") for name in ("prompts.jsonl", "dropped.jsonl")
    )
    assert len(prompts) - 1 == summary["prompts"]
    assert len(prompts) + len(dropped) - 2 == summary["dropped"]
    for key in ("read", "kept", "dropped", "rows", "tokens", "trained_tokens"):
        assert sum(source[key] for source in summary["by_source"].values()) == summary[key]
    assert all(isinstance(summary[key], int) for key in ("read", "kept", "dropped", "tokens", "trained_tokens"))
    if summary["rows"]:
        corpus = Corpus.open(out)
        assert (len(corpus), corpus.digest) == (summary["rows"], summary["digest"])
        assert (corpus.meta.tokens, corpus.meta.trained_tokens) == (summary["tokens"], summary["trained_tokens"])
        assert all(row.loss_mask.any() for row in corpus)


def test_all_training_rows_are_read_and_the_prompts_kept(smollm2_dir: Path, shared_data: Path, tmp_path: Path) -> None:
    code, text, summary = prepare(smollm2_dir, tmp_path / "out", *sorted((shared_data / "train").glob("*.jsonl")))
    assert (code, summary is not None) == (0, True), text
    assert summary is not None
    check(summary, tmp_path / "out")
    assert summary["read"] == 14_429
    assert summary["dropped_by_reason"]["prompt-only"] == summary["prompts"] == 12_191
    assert set(summary["dropped_by_reason"]) <= {"prompt-only", "tools-unsupported"}
    assert all(len(line) <= 80 for line in text.split("\n") if str(tmp_path) not in line)


def test_everything_at_once(smollm2_dir: Path, shared_data: Path, tmp_path: Path) -> None:
    options = [
        f"prepare.decontaminate=[{shared_data / 'eval'}]",
        "prepare.dedupe=conversation",
        "prepare.shuffle=true",
        "prepare.holdout=0.05",
    ]
    sources = [
        shared_data / "formats",
        *sorted((shared_data / "hostile").glob("*.[jp]*")),
        shared_data / "train" / "oasst_trees.jsonl",
    ]
    code, text, summary = prepare(
        smollm2_dir, tmp_path / "out", *sources, "--show", 2, *(word for o in options for word in ("--set", o))
    )
    assert code == 0, text
    assert summary is not None
    assert summary["read"] == summary["kept"] + summary["dropped"]
    assert set(summary["filters"]) == {"decontaminate", "dedupe", "shuffle", "holdout"}
    assert summary["dropped_by_reason"]["duplicate"] > 60, "the same 60 conversations in several layouts"
    held = summary["filters"]["holdout"]
    assert len(Corpus.open(tmp_path / "out")) == summary["rows"] == summary["kept"] - held["rows"]


def test_file_by_file(smollm2_dir: Path, shared_data: Path, tmp_path: Path) -> None:
    files = [path for part in ("formats", "hostile") for path in sorted((shared_data / part).iterdir())]
    files = [path for path in files if path.suffix != ".md"]
    assert len(files) == 21
    for number, path in enumerate(files):
        out = tmp_path / str(number)
        code, text, summary = prepare(smollm2_dir, out, path)
        assert code in (0, 2), (path, text)
        assert [line[:6] for line in text.split("\n")].count("error ") == (code == 2)
        if summary is None:
            assert code == 2, path
            assert path.name in text
            continue
        check(summary, out)
        assert (summary["rows"] > 0) == (code == 0), path
        assert summary["read"] > 0, path


@pytest.mark.parametrize("name", ["turns.jsonl", "prompts.txt"])
def test_files_of_prompts_name_the_next_step(smollm2_dir: Path, shared_data: Path, tmp_path: Path, name: str) -> None:
    code, text, summary = prepare(smollm2_dir, tmp_path / "out", shared_data / "formats" / name)
    assert code == 2
    assert "eyas regenerate" in text
    assert summary is not None
    assert summary["dropped_by_reason"] == {"prompt-only": 60}
