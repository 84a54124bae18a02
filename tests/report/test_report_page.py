"""The page: what it says, what it says is missing, and that nothing of a stranger's gets into it but as text."""

from __future__ import annotations

import html.parser
import json
import shutil
from pathlib import Path

import pytest
from report_runs import (
    HOSTILE,
    copied,
    evaluation,
    make_corpus,
    make_store,
    make_training,
    verified,
    write_check,
    write_evaluation,
)
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import load
from eyas.data.names import visible
from eyas.errors import ConfigError, StoreError
from eyas.report import ReportSummary, write_report
from run_logs import write_log


class Parsed(html.parser.HTMLParser):
    """Elements and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def drawn(run: Path, out: Path) -> tuple[ReportSummary, Parsed]:
    summary = write_report(run, out=out)
    return summary, Parsed(out.read_text(encoding="utf-8"))


def missing(summary: ReportSummary) -> list[str]:
    return [one.what for one in summary.missing]


def test_a_whole_run_has_every_section_and_nothing_is_missing(whole_run: Path, tmp_path: Path) -> None:
    summary, page = drawn(whole_run, tmp_path / "page.html")
    assert summary.shown == (
        "Corpus", "Store", "Extraction", "Verification", "Training", "Evaluation", "Live serving", "Exported drafter",
    )  # fmt: skip
    assert missing(summary) == ["a comparison of the states with the model"]
    assert summary.problems == ()
    for said in (
        "60 rows",
        "fake",
        "2.00 (1.90 to 2.20)",
        "1.80 times",
        "vllm 9.9",
        "+0.0%",
        "eyas verify",
        "15 tensors",
    ):
        assert said in page.text, said
    assert page.tags.count("figure") == 17


def test_a_run_with_only_a_corpus_still_gives_a_page(whole_run: Path, tmp_path: Path) -> None:
    summary, page = drawn(whole_run / "corpus", tmp_path / "page.html")
    assert summary.shown == ("Corpus",)
    assert missing(summary) == [
        "a store", "a training run", "an offline evaluation", "a live measurement", "an exported drafter",
    ]  # fmt: skip
    assert f"eyas extract {whole_run / 'corpus'} store" in page.text
    assert page.tags.count("figure") == 2


def test_the_same_run_gives_the_same_bytes(whole_run: Path, tmp_path: Path) -> None:
    write_report(whole_run, out=tmp_path / "one.html")
    write_report(whole_run, out=tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_page_asks_for_nothing(whole_run: Path, tmp_path: Path) -> None:
    _, page = drawn(whole_run, tmp_path / "page.html")
    assert set(page.tags).isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form"})
    assert page.tags.count("script") == 1
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "style") and not name.startswith("on"), (name, value)
        assert name != "href" or (value or "").startswith("#")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_becomes_markup(tmp_path: Path, name: str) -> None:
    """In sources, logs, settings, evaluations, a config and the title: text, wherever it is shown."""
    run = tmp_path / "run"
    corpus = make_corpus(run / "corpus", sources=(name, "b"), rows=8)
    make_store(corpus, run / "store")
    events = [{"t": 5.0, "event": kind, "row": 1, "reason": name, "text": name, "detail": name} for kind in (
        "start", "row_retried", "row_failed", "note", "progress")]  # fmt: skip
    write_log(run / "store", "z", [{**event, "engine": name, "provenance": {"sglang": name}} for event in events])
    lines = [[name, name], ["rows", name], 3, [name]]
    checked = {"t": 9.0, "event": "verified", "lines": lines, "versions": {name: name}, "against": name}
    write_log(run / "store", "verify", [checked])
    make_training(run / "train", target=name, mask=name, store=name)
    write_log(run / "train", "b", [{"t": 2e9, "event": "start", "device": name, "settings": {"target": name}}])
    rows = [{**row, "category": name} for row in evaluation("live", name)["results"]]
    odd = dict.fromkeys(("head", "benchmark", "depth", "command", "date", "head_digest", "prompts_digest"), name)
    write_evaluation(run, "a", evaluation("live", name, **odd, results=rows, sampling={name: name}))
    write_evaluation(run, "b", evaluation(name, name, versions={name: name}))
    (run / "evaluation-c.json").write_text("{")
    (run / "exported").mkdir()
    (run / "exported" / "model.safetensors").write_bytes(b"")
    config = {"architectures": [name], "hidden_size": name, "eyas": {"aux_layers": [name], "target": name}}
    (run / "exported" / "config.json").write_text(json.dumps(config))
    plain = tmp_path / "plain.html"
    write_report(run, out=plain, cfg=load(overrides=["report.title=plain"]))
    page = Parsed(plain.read_text(encoding="utf-8"))
    assert set(page.tags).isdisjoint({"img", "b", "object"})
    assert (page.tags.count("script"), page.tags.count("style")) == (1, 1)
    assert not any(key.startswith("on") for key, _ in page.attributes)
    assert page.text.count(visible(name)[:20]) >= 5
    assert "\u202e" not in page.text and "\x1b" not in page.text and "\x00" not in page.text


def test_a_template_in_a_title_is_text(whole_run: Path, tmp_path: Path) -> None:
    title = "{{ 7*7 }}{% raw %}<script>"
    write_report(whole_run, out=tmp_path / "page.html", cfg=load(overrides=[f'report.title="{title}"']))
    assert title in Parsed((tmp_path / "page.html").read_text()).text


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_rows_that_failed_and_shards_that_are_missing_are_said(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    store = make_store(corpus, tmp_path / "store", "fake.failing_rows=[2, 50]")
    verified(store, corpus)
    for path in sorted(store.glob("shard-*.safetensors"))[1:3]:
        path.unlink()
        path.with_suffix(".json").unlink()
    summary, page = drawn(tmp_path, tmp_path / "page.html")
    assert any("recorded as failed" in problem for problem in summary.problems)
    assert any(what.startswith("2 of ") and "shards" in what for what in missing(summary))
    assert "Failures by reason" in page.text


def test_a_verification_that_found_something_is_bad_news(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    checked = {
        "t": 4e9,
        "event": "verified",
        "problems": 2,
        "mismatches": 1,
        "recomputed": 5,
        "lines": [["bytes", "2 x index"]],
    }
    write_log(run / "store", "verify-9", [checked])
    summary, page = drawn(run, tmp_path / "page.html")
    assert "The verification found 3 problems." in summary.problems
    assert "3 problems" in page.text
    assert "✗" in page.text


@pytest.mark.parametrize("damage", ["corpus/corpus.parquet", "store/store.json", "exported/config.json"])
def test_a_damaged_part_costs_only_its_section(whole_run: Path, tmp_path: Path, damage: str) -> None:
    run = copied(whole_run, tmp_path / "run")
    (run / damage).write_bytes(b"{ not what it was")
    summary, page = drawn(run, tmp_path / "page.html")
    assert len(summary.problems) == 1
    assert len(summary.shown) == 8
    assert summary.problems[0] in page.text


def test_another_corpuss_account_is_not_shown(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    (corpus / "summary.json").write_text('{"digest": "other", "read": 5, "dropped": 2}')
    summary, page = drawn(tmp_path, tmp_path / "page.html")
    assert "another corpus's account" in summary.problems[0]
    assert "5 rows read" not in page.text


def test_evaluations_of_two_drafters_are_told_apart(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    write_evaluation(run, "z", evaluation("live", "sglang", head_digest="other", prompts_digest="others"))
    summary, page = drawn(run, tmp_path / "page.html")
    assert any("2 different drafters" in problem for problem in summary.problems)
    assert "not comparable" in page.text


def test_a_server_without_drafts_is_set_beside_the_one_with(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    plain = evaluation("live", "vllm", depth=0, head="", head_digest="")
    rows = [{**row, "accept_length": 1.0, "tokens_per_s": 77.7, "speedup": None} for row in plain["results"]]
    write_evaluation(run, "plain", {**plain, "results": rows})
    summary, page = drawn(run, tmp_path / "page.html")
    assert summary.problems == ()
    assert page.text.count("77.7") >= 2
    assert "vllm, mt_bench, without drafts" in page.text
    assert "1.00 (1.90" not in page.text


def test_a_check_of_other_weights_is_no_check(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    write_check(run, "other")
    summary, page = drawn(run, tmp_path / "page.html")
    assert "a check of the exported folder" in missing(summary)
    assert "15 tensors" not in page.text
    write_check(run, "7e", refused=1)
    summary, page = drawn(run, tmp_path / "page.html")
    assert any("The exported folder is refused" in problem for problem in summary.problems)
    assert "15 tensors" in page.text


def test_a_training_that_stopped_goes_on_with_its_command(tmp_path: Path) -> None:
    run = make_training(tmp_path / "train", steps=40, ended=False, store="/gone", out="runs/a b")
    summary, page = drawn(run, tmp_path / "page.html")
    assert "the end of the training" in missing(summary)
    assert "eyas train --store /gone --out 'runs/a b'\n" in page.text
    assert "40 of about 100" in page.text


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_page_lies_in_the_runs_folder(whole_run: Path, tmp_path: Path) -> None:
    run = copied(whole_run, tmp_path / "run")
    first = write_report(run)
    assert first.path == run / "report.html"
    assert write_report(run).bytes == first.bytes  # a page of ours is written over


def test_no_other_file_is_written_over(whole_run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html>years of work")
    for path in (mine, tmp_path, whole_run / "corpus" / "corpus.parquet"):
        with pytest.raises(ConfigError):
            write_report(whole_run, out=path)
    assert mine.read_text().endswith("work")


def test_a_page_that_cannot_be_written_leaves_nothing(whole_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        write_report(whole_run, out=tmp_path / "file" / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_missing_and_where_the_page_is(whole_run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(whole_run / "corpus"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "missing  a store" in done.output
    assert f"page     {tmp_path / 'page.html'}" in done.output


def test_the_command_takes_a_yaml_file(whole_run: Path, tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"report:\n  store: {whole_run / 'store'}\n  title: from yaml\n  out: {tmp_path / 'page.html'}\n"
    )
    done = CliRunner().invoke(app, ["report", str(settings)])
    assert done.exit_code == 0, done.output
    assert "from yaml" in (tmp_path / "page.html").read_text()
    twice = CliRunner().invoke(app, ["report", str(settings), "--config", str(settings)])
    assert twice.exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere"], "no such run"),
        ([], "nothing to report on"),
        (["/nowhere.yaml"], "cannot read the config file"),
        ([".", "--set", "report.stor=x"], "did you mean report.store"),
    ],
)
def test_a_wrong_command_is_one_clear_error(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["report", *words])
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_run_that_is_still_written_to_is_reported(whole_run: Path, tmp_path: Path) -> None:
    """Torn lines, an open shard, no end."""
    run = copied(whole_run, tmp_path / "run")
    log = next(path for path in sorted((run / "store" / "events").iterdir()) if not path.name.startswith("verify"))
    log.write_bytes(b"\n".join(log.read_bytes().split(b"\n")[:-2]) + b'\n{"t": 1')
    shutil.rmtree(run / "train" / "events")
    summary, _ = drawn(run, tmp_path / "page.html")
    assert "the training's log" in missing(summary)
    assert any("has no end" in problem for problem in summary.problems)
