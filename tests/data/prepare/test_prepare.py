from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.config import PrepareConfig, SourceConfig
from eyas.data.corpus import Corpus
from eyas.data.outfolder import FILES
from eyas.data.prepare import prepare
from eyas.data.prepare.pool import SMALL_BYTES
from eyas.data.prepare.report import PrepareReport
from eyas.data.template import Template
from eyas.errors import ConfigError


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def chats(path: Path, count: int) -> Path:
    return jsonl(path, *(chat(f"Question {i}?", f"Answer {i}.") for i in range(count)))


def screen(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=80, **options)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Run:
    """`prepare` with the template that all tests share, into one folder."""

    def __init__(self, template: Template, out: Path) -> None:
        self.template, self.out = template, out

    def __call__(self, *inputs: Path | str | SourceConfig, show: int = 0, **options: Any) -> PrepareReport:
        self.console = screen()
        cfg = PrepareConfig(workers=1, **options)
        model = self.template.model
        return prepare(inputs, model, self.out, cfg=cfg, show=show, console=self.console, template=self.template)

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text(encoding="utf-8"))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / name).read_text(encoding="utf-8").split("\n") if line]

    @property
    def ids(self) -> list[str]:
        return [row.id for row in Corpus.open(self.out)]


@pytest.fixture
def run(template: Template, tmp_path: Path) -> Run:
    return Run(template, tmp_path / "out")


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_every_row_is_accounted_for(run: Run, tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."), {"x": 1}, chat("Hi"), chat("Hi", "Hello.", "Bye"))
    second = jsonl(tmp_path / "b.jsonl", *[chat(f"prompt {i}") for i in range(5)], chat("Hi", " "))
    report = run(first, second)
    assert (report.read, report.kept, report.rows) == (10, 2, 2)
    assert dict(report.dropped) == {"unknown-columns": 1, "prompt-only": 6, "empty-answer": 1}
    assert dict(report.changed) == {"last-user-turn-cut": 1}
    corpus = Corpus.open(run.out)
    assert [(row.id, row.source) for row in corpus] == [("a:1", "a"), ("a:4", "a")]
    assert (corpus.meta.vocab_size, corpus.digest) == (49152, report.digest)
    summary = run.summary
    assert summary["read"] == summary["kept"] + summary["dropped"] == 10
    assert summary["dropped"] == sum(summary["dropped_by_reason"].values()) == 8
    assert summary["tokens"] == corpus.meta.tokens == int(corpus.n_tokens.sum())
    assert summary["trained_tokens"] == corpus.meta.trained_tokens
    assert summary["by_source"]["b"] == {
        "read": 6,
        "kept": 0,
        "dropped": 6,
        "rows": 0,
        "tokens": 0,
        "trained_tokens": 0,
    }
    assert (summary["digest"], Path(summary["target"])) == (corpus.digest, Path(run.template.model).resolve())
    assert summary["tokenizer_hash"] == run.template.tokenizer_hash == corpus.meta.tokenizer_hash
    dropped = [(row["reason"], row["file"], row["line"]) for row in run.lines("dropped.jsonl")]
    assert dropped == [("unknown-columns", str(first), 2), ("empty-answer", str(second), 6)]


def test_roles_are_never_renamed_silently(run: Run, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": 'Say {"role": "gpt"}'}, {"from": "GPT ", "value": "Hello."}]
    mine = [{"role": "user", "content": "Hi"}, {"role": "my_model", "content": "Hello."}]
    report = run(
        jsonl(tmp_path / "a.jsonl", {"conversations": turns}, {"messages": mine}), roles={"My_Model": "assistant"}
    )
    assert report.renamed == {("human", "user"): 1, ("GPT ", "assistant"): 1, ("my_model", "assistant"): 1}
    assert {"written": "human", "role": "user", "messages": 1} in run.summary["roles"]


def test_prompts_are_input_for_another_run(run: Run, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    asked = [
        {"id": "p", **chat("Hi\u2028there")},
        {**chat("Hi"), "tools": tools},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ü"}]},
    ]
    run(jsonl(tmp_path / "a.jsonl", *asked, chat("Hi", "Hello.")))
    prompts = run.lines("prompts.jsonl")
    assert [prompt["id"] for prompt in prompts] == ["p", "a:2", "a:3"]
    assert [prompt["conversations"] for prompt in prompts] == [row["messages"] for row in asked]
    assert [prompt.get("tools") for prompt in prompts] == [None, tools, None]
    assert run.lines("dropped.jsonl") == []
    again = Run(run.template, tmp_path / "again")
    with pytest.raises(ConfigError, match="all 3 rows are prompts"):
        again(run.out / "prompts.jsonl")
    assert (again.out / "prompts.jsonl").read_bytes() == (run.out / "prompts.jsonl").read_bytes()


def test_rows_keep_their_order_over_chunks(run: Run, tmp_path: Path) -> None:
    rows = [chat(f"number {i}", "Good number." if i % 3 else "") for i in range(1_100)]
    run(jsonl(tmp_path / "many.jsonl", *rows))
    assert run.ids == [f"many:{i + 1}" for i in range(1_100) if i % 3]


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_long_rows(run: Run, tmp_path: Path, too_long: str) -> None:
    rows = chat("Hi", "Hello."), chat("Hi", "one two three " * 30), chat("Hi " * 200, "Yes.")
    report = run(jsonl(tmp_path / "a.jsonl", *rows), max_tokens=60, too_long=too_long)
    corpus = Corpus.open(run.out)
    if too_long == "cut":
        assert dict(report.dropped) == {"too-long": 1}
        assert dict(report.changed) == {"cut-at-max-tokens": 1}
        assert len(corpus[1].tokens) == 60
        assert corpus[1].tokens[-1] not in run.template.end_ids
    else:
        assert dict(report.dropped) == {"too-long": 2}
    assert report.filters["max_tokens"] == {
        "limit": 60,
        "cut": int(too_long == "cut"),
        "dropped": 1 + (too_long == "drop"),
    }


def test_ids_as_sampled_are_the_corpus_row(run: Run, tmp_path: Path) -> None:
    sampled = {"id": "s", "prompt_ids": [1, 2, 3], "answer_ids": [9, 8, 7], **chat("what people", "see")}
    report = run(jsonl(tmp_path / "a.jsonl", sampled, {**sampled, "tokenizer_hash": "other"}))
    (row,) = Corpus.open(run.out)
    assert (row.tokens.tolist(), row.loss_mask.tolist()) == ([1, 2, 3, 9, 8, 7], [0, 0, 0, 1, 1, 1])
    assert dict(report.dropped) == {"other-tokenizer": 1}


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "kept"), [("off", 5), ("conversation", 4), ("prompt", 2)])
def test_duplicates(run: Run, tmp_path: Path, by: str, kept: int) -> None:
    rows = chat("Hi!", "One."), chat("hi", "Two."), chat("HI", "one"), chat("Bye", "x y"), chat("Bye", "x z")
    report = run(jsonl(tmp_path / "a.jsonl", *rows), dedupe=by)
    assert report.kept == kept
    assert report.dropped["duplicate"] == 5 - kept
    assert run.ids[0] == "a:1"
    assert run.summary["filters"] == ({} if by == "off" else {"dedupe": {"by": by, "dropped": 5 - kept}})


def test_duplicate_prompts_are_asked_once_and_not_when_answered(run: Run, tmp_path: Path) -> None:
    rows = chat("Hi"), chat("hi?"), chat("Bye", "x y"), chat("bye")
    report = run(jsonl(tmp_path / "a.jsonl", *rows), dedupe="prompt")
    assert (report.kept, report.prompts, report.dropped["duplicate"], report.dropped["prompt-only"]) == (1, 1, 2, 1)
    assert [row["line"] for row in run.lines("dropped.jsonl")] == [2, 4]


def test_a_dropped_row_has_no_duplicates(run: Run, tmp_path: Path) -> None:
    run(jsonl(tmp_path / "a.jsonl", chat("Hi", " "), chat("Hi", "Hello.")), dedupe="prompt")
    assert run.ids == ["a:2"]


def test_sampled_rows_have_keys_too(run: Run, tmp_path: Path) -> None:
    rows = [{"prompt_ids": [504, 2], "answer_ids": [9, 8, last]} for last in (7, 7, 6)]
    assert run(jsonl(tmp_path / "a.jsonl", *rows), dedupe="conversation").kept == 2
    assert run(jsonl(tmp_path / "a.jsonl", *rows), dedupe="prompt").kept == 1


def test_rows_that_share_text_with_an_evaluation_set(run: Run, tmp_path: Path) -> None:
    question = "How many clips did Natalia sell altogether in the months of April and May this year?"
    evals = jsonl(tmp_path / "eval.jsonl", {"turns": ["Hi"]}, {"turns": [question]})
    rows = chat(f"Say. {question.lower()}", "72."), chat("Something else?", "Yes."), chat(question)
    report = run(jsonl(tmp_path / "a.jsonl", *rows), decontaminate=(str(evals),))
    assert dict(report.dropped) == {"contaminated": 2}, "nor is the prompt asked"
    assert run.ids == ["a:2"]
    assert [row["detail"] for row in run.lines("dropped.jsonl")] == [f"meets {evals}:2"] * 2
    assert report.filters["decontaminate"]["rows"] == 2


def test_weights(run: Run, tmp_path: Path) -> None:
    sources = [
        SourceConfig(path=str(chats(tmp_path / "half.jsonl", 400)), weight=0.5),
        SourceConfig(path=str(chats(tmp_path / "more.jsonl", 400)), weight=2.25, name="named"),
    ]
    report = run(*sources)
    ids = run.ids
    half, more = ids[: ids.index("more:1")], ids[ids.index("more:1") :]
    assert len(half) == len(set(half))
    assert 150 < len(half) < 250
    assert {more.count(name) for name in more} == {2, 3}
    assert 850 < len(more) < 950
    assert more == sorted(more, key=lambda name: int(name.split(":")[1])), "copies come one after another"
    assert (report.kept, report.rows) == (800, len(ids))
    assert report.filters["weights"] == {
        "half": {"weight": 0.5, "left_out": 400 - len(half), "copies": 0},
        "named": {"weight": 2.25, "left_out": 0, "copies": len(more) - 400},
    }
    run(sources[0], sources[0].model_copy(update={"name": "x"}), seed=1)
    assert run.ids[: len(half)] != half, "the seed chooses"
    run(sources[0])
    assert run.ids == half, "whatever else is prepared"


def test_max_rows(run: Run, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 10)
    report = run(SourceConfig(path=str(path), max_rows=3))
    assert (report.read, run.ids) == (3, ["a:1", "a:2", "a:3"])
    assert report.filters["max_rows"] == {"reached": {str(path): 3}}
    assert run(SourceConfig(path=str(path), max_rows=30)).filters == {}


def test_shuffle_mixes_the_same_rows(run: Run, tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a.jsonl", 40), chats(tmp_path / "b.jsonl", 40)
    run(first, second)
    plain = run.ids
    report = run(first, second, shuffle=True)
    mixed = run.ids
    assert mixed != plain
    assert sorted(mixed) == sorted(plain)
    assert len({name[0] for name in mixed[:20]}) == 2
    assert report.filters == {"shuffle": {"seed": 0}}
    run(first, second, shuffle=True, seed=1)
    assert run.ids not in (mixed, plain)


def test_the_holdout_is_the_same_whatever_else_is_prepared(run: Run, tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a.jsonl", 300), jsonl(tmp_path / "b.jsonl", chat("question 7", "Other answer."))
    report = run(second, first, holdout=0.2)
    kept, held = run.ids, [row.id for row in Corpus.open(run.out / "holdout.parquet")]
    assert sorted(kept + held) == sorted([*(f"a:{i + 1}" for i in range(300)), "b:1"])
    assert 30 < len(held) < 90
    assert ("b:1" in held) == ("a:8" in held), "the same user turns are on the same side"
    assert report.filters["holdout"]["rows"] == len(held)
    assert (report.kept, report.rows) == (301, len(kept))
    run(first, holdout=0.2, shuffle=True)
    assert {row.id for row in Corpus.open(run.out / "holdout.parquet")} == set(held) - {"b:1"}
    run(first)
    assert not (run.out / "holdout.parquet").exists(), "a file of an earlier run is not of this one"


# --- the same input, the same bytes -----------------------------------------------------------------------------------


def test_the_same_input_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello."), chat("Hi"), {"x": 1}, chat("Bye", "x y z"))
    options: dict[str, Any] = {"shuffle": True, "holdout": 0.4, "dedupe": "prompt"}
    run(path, **options)
    before = {name: (run.out / name).read_bytes() for name in FILES if name != "summary.json"}
    run(path, **options)
    assert {name: (run.out / name).read_bytes() for name in before} == before
    assert sorted(file.name for file in run.out.iterdir()) == sorted(FILES)


def padded(path: Path, rows: Iterable[object]) -> Path:
    """Rows that are large in the file and small in tokens: enough bytes for workers to be started."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row)[:-1] + " " * 100_000 + "}\n")
    assert path.stat().st_size > SMALL_BYTES
    return path


@pytest.mark.slow
def test_the_corpus_does_not_depend_on_the_number_of_workers(smollm2_dir: Path, tmp_path: Path) -> None:
    rows = [chat(f"Question {i % 600}? " + "More. " * (i % 60), f"Answer {i % 600}.") for i in range(700)]
    path = padded(tmp_path / "a.jsonl", [*rows, chat("prompt"), {"x": 1}])
    options: dict[str, Any] = {"shuffle": True, "holdout": 0.1, "dedupe": "conversation", "max_tokens": 150}
    made: list[dict[str, bytes]] = []
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        cfg = PrepareConfig(workers=workers, **options)
        report = prepare([path], str(smollm2_dir), out, cfg=cfg, console=screen())
        assert (report.read, report.dropped["duplicate"] > 50) == (702, True)
        made.append({name: (out / name).read_bytes() for name in FILES if name != "summary.json"})
    assert made[0] == made[1] == made[2]


# --- nothing usable, strict, faults -----------------------------------------------------------------------------------


def test_an_empty_corpus_names_what_was_dropped_and_keeps_the_account(run: Run, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("Hi"), chat("Hi"), {"x": ""})
    with pytest.raises(ConfigError) as caught:
        run(path)
    text = str(caught.value)
    for part in ("empty corpus", "a.jsonl", "prompt-only 2", "unknown-columns 1", f"{path}:3", "eyas regenerate"):
        assert part in text
    assert (run.summary["read"], run.summary["kept"], run.summary["digest"]) == (3, 0, None)
    assert len(run.lines("prompts.jsonl")) == 2
    assert len(run.lines("dropped.jsonl")) == 1
    assert not (run.out / "corpus.parquet").exists()


def test_prompts_alone_are_sent_to_regenerate(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"all 2 rows are prompts.*eyas regenerate .*out/prompts\.jsonl"):
        run(jsonl(tmp_path / "a.jsonl", chat("Hi"), chat("Bye")))


def test_an_empty_file_is_an_empty_corpus(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        run(SourceConfig(path=str(jsonl(tmp_path / "a.json", {"rows": []})), field="rows"))
    assert run.summary["read"] == 0


def test_a_run_that_keeps_nothing_leaves_an_earlier_corpus(run: Run, tmp_path: Path) -> None:
    run(chats(tmp_path / "a.jsonl", 3))
    before = (run.out / "corpus.parquet").read_bytes()
    with pytest.raises(ConfigError):
        run(jsonl(tmp_path / "b.jsonl", chat("Hi")))
    assert (run.out / "corpus.parquet").read_bytes() == before


def test_all_rows_in_the_holdout_is_an_empty_corpus(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights and holdout left no row"):
        run(chats(tmp_path / "a.jsonl", 1), holdout=0.999999)


def test_strict_stops_at_the_first_row_that_is_a_fault(run: Run, tmp_path: Path) -> None:
    good = jsonl(tmp_path / "a.jsonl", chat("Hi"), chat("Hi", "Hello."), chat("Hi", "Hello."))
    assert run(good, strict=True, dedupe="prompt").kept == 1, "what was asked for is no fault"
    before = {file.name: file.read_bytes() for file in run.out.iterdir()}
    bad = jsonl(tmp_path / "b.jsonl", chat("Hi", "Hello."), {"x": 1}, {"y": 1})
    with pytest.raises(ConfigError, match=r"cannot be used: .*b\.jsonl:2 \(unknown-columns: "):
        run(good, bad, strict=True)
    assert {file.name: file.read_bytes() for file in run.out.iterdir()} == before


def test_a_missing_input_leaves_everything(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        run(chats(tmp_path / "a.jsonl", 1), tmp_path / "missing.jsonl")
    assert not run.out.exists()


def test_no_input(run: Run) -> None:
    with pytest.raises(ConfigError, match="no input"):
        run()


def test_an_output_of_its_own_is_no_input(run: Run, tmp_path: Path) -> None:
    run(jsonl(tmp_path / "a.jsonl", chat("Hi"), chat("Hi", "Hello.")))
    with pytest.raises(ConfigError, match="written over"):
        run(run.out / "prompts.jsonl")


# --- stopped ----------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from eyas.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_the_old_files_and_no_processes(
    run: Run, smollm2_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run(chats(tmp_path / "a.jsonl", 3))
    before = {file.name: file.read_bytes() for file in run.out.iterdir()}
    rows = (chat(f"Question {i}? " + "word " * 8_000, "Yes. " * 500) for i in range(600))
    large = padded(tmp_path / "large.jsonl", rows)
    words = ["prepare", large, "--target", smollm2_dir, "--out", run.out, "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *map(str, words)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    children: list[int] = []
    deadline = time.monotonic() + 60
    work = run.out / ".prepare"
    # Children are the workers, and the tracker of semaphores.
    while (len(children) < 3 or not work.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
        children = children_of(process.pid)
    assert len(children) >= 3
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C is seen by the workers too
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    while any(alive(child) for child in children) and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert not any(alive(child) for child in children)
    if number == signal.SIGKILL:
        assert work.exists()
        run(chats(tmp_path / "a.jsonl", 3))  # the next run cleans up
    else:
        assert process.returncode == 130, errors
        assert "stopped" in errors
    left = {file.name: file.read_bytes() for file in run.out.iterdir()}
    assert left.keys() == before.keys()
    assert left["corpus.parquet"] == before["corpus.parquet"]


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interrupt_that_python_swallows_is_not_lost(template: Template, tmp_path: Path) -> None:
    """Raised in a destructor, KeyboardInterrupt is told and ignored: the run must stop all the same."""
    swallowed: list[object] = []

    class Interrupts:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the handler runs here

    class Watching(Console):
        def print(self, *args: Any, **kwargs: Any) -> None:
            hook, sys.unraisablehook = sys.unraisablehook, lambda told: swallowed.append(told.exc_type)
            Interrupts()
            sys.unraisablehook = hook

    source, console = chats(tmp_path / "a.jsonl", 5), Watching(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        prepare([source], "made-up", tmp_path / "out", template=template, show=1, console=console)
    assert swallowed == [KeyboardInterrupt]
    assert not (tmp_path / "out").exists()
