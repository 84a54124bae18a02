from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from eyas.data import prepare as prepare_module
from eyas.data.corpus import Corpus
from eyas.data.prepare import prepare
from eyas.data.template import Template
from eyas.errors import ConfigError, EyasError


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def screen(**options: bool) -> Console:
    return Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_row_is_accounted_for(tmp_path: Path, template: Template) -> None:
    first = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."), {"text": "x"}, chat("Hi"), chat("Hi", "Hello.", "Bye"))
    second = jsonl(tmp_path / "b.jsonl", *[chat(f"prompt {i}") for i in range(5)], chat("Hi", " "))
    report = prepare([first, second], template.model, tmp_path / "c.parquet", console=screen(), template=template)
    assert (report.read, report.kept) == (10, 2)
    assert dict(report.dropped) == {"unknown-columns": 1, "prompt-only": 6, "empty-answer": 1}
    assert dict(report.changed) == {"last-user-turn-cut": 1}
    assert report.examples["prompt-only"] == [f"{first}:3", f"{second}:1", f"{second}:2"]
    corpus = Corpus.open(tmp_path / "c.parquet")
    assert [row.id for row in corpus.rows()] == ["a:1", "a:4"]
    assert (corpus.meta.tokens, corpus.meta.trained_tokens, corpus.digest) == (
        report.tokens,
        report.trained_tokens,
        report.digest,
    )
    assert (corpus.meta.model, corpus.meta.vocab_size) == (template.model, 49152)
    text = "\n".join(report.lines())
    assert "read 10 rows, kept 2, dropped 8" in text
    assert f"{first}:2: found text; expected" in text


def test_rows_keep_their_order_over_batches(tmp_path: Path, template: Template) -> None:
    count = 2 * prepare_module.BATCH_ROWS + 3
    rows = [chat(f"number {i}", "Good number." if i % 3 else "") for i in range(count)]
    path = jsonl(tmp_path / "many.jsonl", *rows)
    prepare([path], template.model, tmp_path / "c.parquet", console=screen(), template=template)
    ids = [row.id for row in Corpus.open(tmp_path / "c.parquet").rows()]
    assert ids == [f"many:{i + 1}" for i in range(count) if i % 3]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, template: Template) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."))
    out = tmp_path / "out" / "c.parquet"
    prepare([path], template.model, out, console=screen(), template=template)
    before = out.read_bytes()
    prepare([path], template.model, out, console=screen(), template=template)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_long_rows(tmp_path: Path, template: Template, too_long: str) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", chat("Hi", "Hello."), chat("Hi", "one two three " * 30), chat("Hi " * 200, "Yes.")
    )
    out = tmp_path / "c.parquet"
    options = {"max_tokens": 60, "too_long": too_long}
    report = prepare([path], template.model, out, console=screen(), template=template, **options)  # type: ignore[arg-type]
    rows = list(Corpus.open(out).rows())
    if too_long == "cut":
        assert dict(report.dropped) == {"too-long": 1}
        assert dict(report.changed) == {"cut-at-max-tokens": 1}
        assert len(rows[1].tokens) == 60
        assert rows[1].tokens[-1] not in template.end_ids
        assert rows[1].loss_mask[-1] == 1
    else:
        assert dict(report.dropped) == {"too-long": 2}
        assert len(rows) == 1


def test_ids_as_sampled_are_the_corpus_row(tmp_path: Path, template: Template) -> None:
    sampled = {"id": "s", "prompt_ids": [1, 2, 3], "answer_ids": [9, 8, 7], **chat("what people", "see")}
    path = jsonl(tmp_path / "a.jsonl", sampled, {**sampled, "tokenizer_hash": "other"})
    report = prepare([path], template.model, tmp_path / "c.parquet", console=screen(), template=template)
    (row,) = Corpus.open(tmp_path / "c.parquet").rows()
    assert (row.tokens.tolist(), row.loss_mask.tolist()) == ([1, 2, 3, 9, 8, 7], [0, 0, 0, 1, 1, 1])
    assert dict(report.dropped) == {"other-tokenizer": 1}


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_empty_corpus_names_what_was_dropped_and_writes_nothing(tmp_path: Path, template: Template) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("Hi"), chat("Hi"), {"text": ""})
    with pytest.raises(ConfigError, match=r"empty corpus.*a\.jsonl.*read 3; dropped: prompt-only 2, unknown-columns 1"):
        prepare([path], template.model, tmp_path / "c.parquet", console=screen(), template=template)
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_is_an_empty_corpus(tmp_path: Path, template: Template) -> None:
    with pytest.raises(ConfigError, match="empty corpus"):
        prepare([jsonl(tmp_path / "a.jsonl")], "m", tmp_path / "c", console=screen(), template=template)


@pytest.mark.parametrize("options", [{"too_long": "maybe"}, {"max_tokens": 1}, {"max_tokens": -5}])
def test_bad_options(tmp_path: Path, template: Template, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        prepare([], "m", tmp_path / "c", console=screen(), template=template, **options)  # type: ignore[arg-type]


def test_a_missing_input_leaves_the_old_corpus(tmp_path: Path, template: Template) -> None:
    out = tmp_path / "c.parquet"
    out.write_bytes(b"old")
    good = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."))
    with pytest.raises(ConfigError, match="missing"):
        prepare([good, tmp_path / "missing.jsonl"], "m", out, console=screen(), template=template)
    assert out.read_bytes() == b"old"


def test_every_hostile_file_is_read_to_its_end(tmp_path: Path, template: Template, shared_data: Path) -> None:
    files = sorted((shared_data / "hostile").glob("*.jsonl"))
    assert len(files) >= 11
    for path in files:
        report = prepare([path], "m", tmp_path / "c", console=screen(), template=template)
        rows = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        assert report.read == len(rows) == report.kept + report.dropped.total(), path.name
        for row in Corpus.open(tmp_path / "c").rows():
            assert "[{" not in template.decode(row.tokens.tolist()), path.name
    with pytest.raises(EyasError, match="23a_nulls"):
        prepare(
            [shared_data / "hostile" / "23a_nulls.parquet"], "m", tmp_path / "c", console=screen(), template=template
        )


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_mark_the_trained_tokens_where_there_is_no_colour(tmp_path: Path, template: Template) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("[bold]Hi[/bold]", "Hello.", "x", "Bye."), chat("never", "shown"))
    console = screen()
    prepare([path], "m", tmp_path / "c", show=1, console=console, template=template)
    text = shown(console)
    assert "user\n[bold]Hi[/bold]<|im_end|>\n" in text
    assert "assistant\n⟦Hello.<|im_end|>⟧\n" in text
    assert "assistant\n⟦Bye.<|im_end|>⟧\n" in text
    assert "never" not in text
    assert "\x1b" not in text


def test_samples_are_coloured_on_a_terminal(tmp_path: Path, template: Template) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", _environ={})
    prepare([path], "m", tmp_path / "c", show=1, console=console, template=template)
    assert "\x1b[1;32mHello.<|im_end|>\x1b[0m" in shown(console)
    assert "⟦" not in shown(console)


def test_samples_cannot_drive_the_terminal(tmp_path: Path, template: Template) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("a\x1b[2Jb\u202ec", "Hello."))
    console = screen()
    prepare([path], "m", tmp_path / "c", show=1, console=console, template=template)
    assert r"a\x1b[2Jb\u202ec" in shown(console)
