"""What a person sees: one message, the right exit code, and nothing half done."""

from __future__ import annotations

import dataclasses
import http.server
import io
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner, Result

import eyas
from eyas.cli import app
from eyas.cli.console import say_figures
from eyas.data.corpus import CorpusMeta, CorpusWriter
from servers import free_port
from sglang_cpu.models import tiny_llama

#: Places of a training run, none of them there.
TRAIN = ("--store", "{tmp}/s", "--corpus", "{tmp}/c", "--out", "{tmp}/r")


def run(*args: object) -> Result:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [str(arg) for arg in args])
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Hello {n} there"}]}
        for n in range(6)
    ]
    rows.append({"conversations": [{"role": "user", "content": "no answer"}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "corpus.parquet"
    meta = CorpusMeta(model=str(model), tokenizer_hash="", template_hash="", vocab_size=1024)
    with CorpusWriter(path, meta) as writer:
        for row in range(4):
            writer.add(str(row), np.arange(10, 20 + row), np.ones(10 + row, np.uint8))
    return path


def test_the_whole_way_by_commands(chats: Path, model: Path, tmp_path: Path) -> None:
    corpus, store = tmp_path / "corpus", tmp_path / "store"
    prepared = run("prepare", chats, "--target", model, "--out", corpus, "--show", 1)
    assert prepared.exit_code == 0, prepared.output
    for part in ("read          7 rows", "kept          6 rows", "prompt-only", f"eyas extract {corpus} STORE"):
        assert part in prepared.output
    planned = run("extract", corpus, store, "--plan", "--set", "store.reserve_bytes=0")
    assert planned.exit_code == 0, planned.output
    assert "6" in planned.output
    assert not store.exists()
    extracted = run("extract", corpus, store, "--set", "store.reserve_bytes=0")
    assert extracted.exit_code == 0, extracted.output
    assert "6 of 6 stored" in extracted.output
    checked = run("verify", store, "--corpus", corpus, "--against", model, "--sample", 0)
    assert checked.exit_code == 0, checked.output
    assert "0 mismatches" in checked.output
    told = run("store", "info", store)
    assert told.exit_code == 0
    assert "6 good of 6" in told.output
    assert "hf " in told.output
    (tmp_path / "other").mkdir()
    moved = run("store", "move", store, "--to", tmp_path / "other")
    assert (moved.exit_code, "moved" in moved.output) == (0, True)
    assert run("verify", store).exit_code == 0


def test_settings_alone_are_enough(chats: Path, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    sources = f"[{chats}, {{path: {chats}, name: twice, weight: 2, max_rows: 3}}]"
    path.write_text(f"prepare: {{target: {model}, sources: {sources}, seed: 3}}\n")
    done = run("prepare", "--config", path, "--out", tmp_path / "c")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "c" / "summary.json").read_text())
    assert (summary["read"], summary["kept"], summary["rows"]) == (10, 9, 12)
    assert summary["by_source"]["twice"]["rows"] == 6
    done = run("prepare", chats, "--config", path, "--out", tmp_path / "c")  # arguments win
    assert json.loads((tmp_path / "c" / "summary.json").read_text())["read"] == 7
    assert run("prepare", "--config", path, "--target", "no/such", "--out", tmp_path / "d").exit_code == 2


def test_prompts_alone_exit_with_2_and_say_what_to_do(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    result = run("prepare", path, "--target", model, "--out", tmp_path / "c")
    assert result.exit_code == 2
    assert f"eyas regenerate {tmp_path / 'c' / 'prompts.jsonl'}" in result.output
    assert json.loads((tmp_path / "c" / "summary.json").read_text())["dropped_by_reason"] == {"prompt-only": 1}


def test_strict_names_the_row(chats: Path, model: Path, tmp_path: Path) -> None:
    with chats.open("a") as file:
        file.write("no json\n")
    result = run("prepare", chats, "--target", model, "--out", tmp_path / "c", "--strict")
    assert result.exit_code == 2
    assert f"{chats}:8" in result.output
    assert "bad-json" in result.output
    assert not (tmp_path / "c").exists()


def test_corpora_are_described_and_joined(chats: Path, model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("prepare", chats, "--target", model, "--out", tmp_path / name).exit_code == 0
    joined = run("corpus", "merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert (joined.exit_code, "rows    12" in joined.output) == (0, True), joined.output
    told = run("corpus", "stats", tmp_path / "c")
    assert (told.exit_code, "draft vocabulary" in told.output) == (0, True), told.output
    facts = json.loads(run("corpus", "stats", tmp_path / "a", tmp_path / "b", "--json").output)
    assert facts["rows"] == 12
    assert facts["by_source"]["chats"]["rows"] == 12


def test_a_corpus_of_another_tokenizer_is_refused(chats: Path, model: Path, tmp_path: Path) -> None:
    assert run("prepare", chats, "--target", model, "--out", tmp_path / "c").exit_code == 0
    opened = eyas.Corpus.open(tmp_path / "c")
    other = dataclasses.replace(opened.meta, tokenizer_hash="0" * 32)
    with CorpusWriter(tmp_path / "other.parquet", other) as writer:
        for row in opened:
            writer.add(row.id, row.tokens, row.loss_mask)
    for more in ([], ["--plan"]):
        result = run("extract", tmp_path / "other.parquet", tmp_path / "s", "--target", model, *more)
        assert result.exit_code == 2
        assert "made with another tokenizer" in result.output
    assert not (tmp_path / "s").exists()


def test_failed_rows_exit_with_6_and_say_how_to_retry(corpus: Path, tmp_path: Path) -> None:
    sets = ("--set", "extract.engine=fake", "--set", "store.reserve_bytes=0", "--set", "fake.failing_rows=[2]")
    result = run("extract", corpus, tmp_path / "store", *sets)
    assert result.exit_code == 6
    assert "1 x made-to-fail" in result.output
    assert "--retry-failed" in result.output
    again = run("extract", corpus, tmp_path / "store", *sets[:4], "--retry-failed")
    assert (again.exit_code, "4 of 4 stored, 0 failed" in again.output) == (0, True)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("prepare", "absent.jsonl", "--target", "{model}", "--out", "{tmp}/c"), 2, "absent.jsonl"),
        (("prepare", "{empty}", "--target", "{model}", "--out", "{tmp}/c"), 2, "empty"),
        (("prepare", "{chats}", "--model", "no/such-model-anywhere", "--out", "{tmp}/c"), 2, "no/such-model-anywhere"),
        (("prepare", "{chats}", "--out", "{tmp}/c"), 2, "no target"),
        (("prepare", "--target", "{model}", "--out", "{tmp}/c"), 2, "no input"),
        (("prepare", "{chats}", "--target", "{model}", "--out", "{tmp}/c.parquet"), 2, "--out {tmp}/c,"),
        (("prepare", "{chats}", "--target", "{model}", "--out", "{empty}"), 2, "this is a file"),
        (("prepare", "{chats}", "--target", "{model}", "--out", "{empty}/c"), 5, "cannot write"),
        (("prepare", "{chats}", "--target", "{model}", "--set", "prepare.dedupe=all"), 2, "prepare.dedupe"),
        (("prepare", "{chats}", "--target", "{model}", "--set", "prepare.too_long=maybe"), 2, "prepare.too_long"),
        (("prepare", "{chats}", "--target", "{model}", "--set", "prepare.decontaminate=[x.jsonl]"), 2, "x.jsonl"),
        (("corpus", "stats", "{model}"), 2, "no corpus in the folder"),
        (("corpus", "stats", "{empty}"), 2, "not a corpus"),
        (("corpus", "merge", "{corpus}", "--out", "{tmp}/c.parquet"), 2, "--out is a folder"),
        (("extract", "{model}", "{tmp}/s"), 2, "no corpus in the folder"),
        (("extract", "absent.parquet", "{tmp}/s"), 2, "absent.parquet"),
        (("extract", "{empty}", "{tmp}/s"), 2, "not a corpus"),
        (("extract", "{corpus}", "{tmp}/s", "--set", "extract.atempts=1"), 2, "extract.attempts"),
        (("extract", "{corpus}", "{tmp}/s", "--config", "absent.yaml"), 2, "absent.yaml"),
        (("extract", "{corpus}", "{tmp}/s", "--server", "nonsense"), 2, "nonsense"),
        (("extract", "{corpus}", "{tmp}/s", "--server", "http://127.0.0.1:{port}"), 3, "eyas serve"),
        (("extract", "{corpus}", "{empty}"), 5, "{empty}"),
        (("verify", "{tmp}"), 5, "no store"),
        (("store", "info", "{tmp}/absent"), 5, "absent"),
        (("store", "move", "{tmp}", "--to", "{tmp}"), 5, "no store"),
        (("train",), 2, "--store"),
        (("train", "absent.yaml"), 2, "absent.yaml"),
        (("train", "{empty}", "--config", "{empty}"), 2, "two files"),
        (("train", "--store", "{tmp}/s", "--out", "{tmp}/r"), 2, "--corpus"),
        (("train", "--store", "{tmp}/s", "--corpus", "{corpus}", "--out", "{tmp}/r"), 5, "no store"),
        (("train", "--store", "{tmp}", "--corpus", "{empty}", "--out", "{tmp}/r"), 5, "no store"),
        (("train", "--set", "train.lr=0"), 2, "train.lr"),
        (("train", "--set", "train.learning_rate=1"), 2, "train."),
        (("train", "--set", "train.device=tpu9", *TRAIN), 2, "tpu9"),
        (("serve", "no/such-model-anywhere"), 2, "no/such-model-anywhere"),
        (("serve", "{model}", "--set", "capture.layers=[3, 1]"), 2, "ascending"),
        (("serve", "{model}", "--run"), 2, "serve.python"),
        (("serve", "{model}", "--quota", "lots"), 2, "2GiB"),
        (("serve", "{model}", "--set", "serve.sglang_version=0.5.3"), 2, "0.5.17"),
    ],
)
def test_each_error_is_one_message_with_its_exit_code(
    words: tuple[str, ...], code: int, expected: str, corpus: Path, model: Path, chats: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    names = {"model": model, "empty": empty, "tmp": tmp_path, "corpus": corpus, "chats": chats, "port": free_port()}
    before = sorted(tmp_path.rglob("*"))
    result = run(*(word.format(**names) for word in words))
    assert result.exit_code == code, result.output
    assert expected.format(**names) in result.output
    assert [line[:6] for line in result.output.splitlines()].count("error ") == 1
    assert sorted(tmp_path.rglob("*")) == before, "an error must leave nothing behind"


@pytest.fixture
def other_server() -> Iterator[str]:
    """An HTTP server that is no SGLang."""
    handler = http.server.SimpleHTTPRequestHandler
    handler.log_message = lambda *_: None  # type: ignore[method-assign]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_that_is_not_sglang(other_server: str, corpus: Path, tmp_path: Path) -> None:
    result = run("extract", corpus, tmp_path / "store", "--server", other_server)
    assert result.exit_code == 3
    assert "SGLang" in result.output
    assert not (tmp_path / "store").exists()


def test_serve_prints_one_line_to_paste(model: Path) -> None:
    result = run("serve", model, "--port", 31000, "--tp", 8, "--set", "serve.sglang_version=0.5.23")
    assert result.exit_code == 0, result.output
    (line,) = result.output.strip().splitlines()
    assert line.startswith("EYAS_CAPTURE=")
    assert line.endswith("--tp 8")
    assert "--return-aux-hidden-state-layer-ids 1 3 4" in line


def test_serve_says_which_release_it_assumed(model: Path, tmp_path: Path) -> None:
    assert "serve.sglang_version" in run("serve", model).output
    assert "serve.sglang_version" not in run("serve", model, "--set", "serve.sglang_version=0.5.17").output
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.17\n")  # an interpreter that has that release
    python.chmod(0o755)
    output = run("serve", model, "--set", f"serve.python={python}").output
    assert "--return-hidden-states-mode full" in output
    assert "serve.sglang_version" not in output


def test_an_unfinished_store_is_told_to_go_on_not_to_be_deleted(corpus: Path, tmp_path: Path) -> None:
    sets = ("--set", "extract.engine=fake", "--set", "store.reserve_bytes=0", "--set", "fake.failing_rows=[2]")
    one_by_one = ("extract.on_failure=stop", "fake.delay_s=0.1", "extract.window_requests=1")
    more = [word for text in one_by_one for word in ("--set", text)]
    stopped = run("extract", corpus, tmp_path / "store", *sets, *more)
    assert stopped.exit_code == 3
    checked = run("verify", tmp_path / "store")
    assert checked.exit_code == 4
    assert "the store is not finished" in checked.output
    assert "the same extract command resumes" in checked.output
    assert "remove" not in checked.output
    assert "2 good of 4, 2 in open shards" in run("store", "info", tmp_path / "store").output
    planned = run("extract", corpus, tmp_path / "store", *sets, "--plan").output
    assert "for 25 tokens at" in planned, planned


def test_serve_and_extract_name_dtypes_alike(model: Path, corpus: Path, tmp_path: Path) -> None:
    served = run("serve", model, "--set", "serve.sglang_version=0.5.23", "--dtype", "fp8_e4m3")
    assert '"dtype":"fp8_e4m3"' in served.output
    assert " --dtype" not in served.output, "SGLang has a flag of this name, with another meaning"
    planned = run("extract", corpus, tmp_path / "store", "--layers", "1,2", "--dtype", "fp8_e4m3", "--plan")
    assert (planned.exit_code, "fp8_e4m3" in planned.output) == (0, True)
    for command in (("serve", model), ("extract", corpus, tmp_path / "store")):
        refused = run(*command, "--dtype", "fp8")
        assert (refused.exit_code, "fp8_e4m3" in refused.output) == (2, True)


@pytest.mark.parametrize("words", [("--dtype", "bfloat16"), ("--dtype=bfloat16",)])
def test_what_the_model_computes_in_is_for_sglang(model: Path, words: tuple[str, ...]) -> None:
    arguments = ("serve", model, "--set", "serve.sglang_version=0.5.23", *words)
    alone, both = run(*arguments), run(*arguments, "--dtype", "fp8_e4m3")
    assert '"dtype":"bf16"' in alone.output
    assert '"dtype":"fp8_e4m3"' in both.output
    assert alone.output.count(" --dtype bfloat16") == both.output.count(" --dtype bfloat16") == 1


def test_serve_and_extract_name_layers_alike(model: Path) -> None:
    result = run("serve", model, "--set", "serve.sglang_version=0.5.23", "--layers", "2,3,5")
    assert '"layers":[2,3,5]' in result.output
    assert "--return-aux-hidden-state-layer-ids 2 3 5" in result.output


def test_a_flag_that_would_do_nothing_is_refused(corpus: Path, tmp_path: Path) -> None:
    for arguments, told in (
        (("extract", corpus, tmp_path / "s", "--last", "pre-norm"), "add --dump-dir"),
        (("extract", corpus, tmp_path / "s", "--last", "pre-norm", "--plan"), "add --dump-dir"),
        (("verify", tmp_path / "s", "--target", "model"), "add --logits"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert told in result.output
    assert not (tmp_path / "s").exists()


def test_the_quota_comes_from_the_flag_or_the_settings(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("serve: {quota_bytes: 1GiB}\n")
    assert '"quota_bytes":1073741824' in run("serve", model, "--config", path).output
    assert '"quota_bytes":2147483648' in run("serve", model, "--config", path, "--quota", "2GiB").output


def test_the_door_opens_on_every_name() -> None:
    for name in eyas.__all__:
        assert getattr(eyas, name) is not None
    with pytest.raises(AttributeError):
        _ = eyas.nothing  # type: ignore[attr-defined]
    assert set(eyas.__all__) <= set(dir(eyas))


def test_import_is_quick_and_free_of_torch() -> None:
    code = "import sys, eyas; print([m for m in ('torch', 'numpy', 'pydantic', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert cpu_seconds("-c", "import eyas") < 0.2


def test_help_is_quick_and_free_of_torch() -> None:
    code = "import sys, eyas.cli; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert cpu_seconds("-m", "eyas", "--help") < 0.5


def cpu_seconds(*arguments: str) -> float:
    """CPU time of Python with these arguments, the least of three runs: wall time would measure the neighbours too."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["verify", "nowhere"], 5)])
def test_an_interrupt_while_python_tidies_up_changes_nothing(arguments: list[str], code: int) -> None:
    """The command has said all that it had to say, and done it."""
    program = (
        "import atexit, os, signal, sys, time\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.2)))\n"
        "from eyas.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


@pytest.mark.parametrize("columns", [1, 20, 79, 80, 109, 300])
@pytest.mark.parametrize("terminal", [False, True])
def test_no_figure_of_a_table_is_cut_however_narrow_the_output(columns, terminal, monkeypatch):
    written = io.StringIO()
    narrow = Console(file=written, width=columns, force_terminal=terminal, emoji=False)
    monkeypatch.setattr("eyas.cli.console.out", narrow)
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [("at a time", "accepted", "by position"), ("1", "1.634", "0.405 0.396"), ("32", "12,345,678.9", "x" * 90)]
    for name in rows[0]:
        table.add_column(name, no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)

    say_figures(table)

    plain = Text.from_ansi(written.getvalue()).plain
    lines = [line for line in plain.splitlines() if line.strip()]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert all(cell in line for cell in row)
