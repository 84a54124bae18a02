"""`eyas serve --draft`: the command, and that it is only given for a draft that was looked at."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from eyas.cli import app
from eyas.config import load
from eyas.errors import ConfigError
from eyas.export.launch import Drafting, Engine
from eyas.serve import draft_command
from eyas.target.checkpoint import Target
from eyas.target.embeddings import input_embeddings
from eyas.train.checkpoint_format import save_checkpoint
from eyas.train.draft import Eagle3Config, Eagle3Draft
from eyas.train.vocab import DraftVocab
from tiny_models import llama

VOCAB = DraftVocab(torch.arange(3, 259, 4), 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target with space")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, target = tmp_path_factory.mktemp("draft"), Target.load(str(model))
    shape = Eagle3Config.from_target(target, aux_layers=[0, 1, 2], draft_vocab_size=len(VOCAB))
    made = Eagle3Draft(shape, input_embeddings(target))
    save_checkpoint(folder, shape, made.state_dict(), VOCAB, target)
    return folder


def eyas(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_sglang(model: Path, draft: Path) -> None:
    command = draft_command(str(model), draft, extra=["--tp", "2"])
    assert command.env == {}
    assert not command.warning
    assert command.argv[1:] == (
        *("-m", "sglang.launch_server", "--model-path", str(model), "--port", "30000", "--host", "127.0.0.1"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--tp", "2"),
    )
    assert shlex.split(command.shell()) == list(command.argv)


def test_vllm(model: Path, draft: Path) -> None:
    command = draft_command(str(model), draft, engine="vllm", drafting=Drafting(5), host="0.0.0.0")
    assert command.argv[:3] == ("vllm", "serve", str(model))
    said = json.loads(command.argv[command.argv.index("--speculative-config") + 1])
    assert said == {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 5}
    assert command.argv[3:5] == ("--port", "8000")
    assert "give vLLM an --api-key" in command.warning
    assert "give SGLang an --api-key" in draft_command(str(model), draft, host="0.0.0.0").warning
    assert draft_command("owner/name", "owner/draft", engine="vllm", python="py").argv[:5] == (
        *("py", "-m", "vllm.entrypoints.cli.main", "serve"),
        "owner/name",
    )


@pytest.mark.parametrize("extra", [["--speculative-draft-model-path", "x"], ["--speculative-algorithm=EAGLE"]])
def test_what_is_said_twice(extra: list[str]) -> None:
    with pytest.raises(ConfigError, match="beside --draft"):
        draft_command("m", "d", extra=extra)


def test_the_verb_prints_it(model: Path, draft: Path) -> None:
    done = eyas("serve", model, "--draft", draft, "--engine", "vllm", "--max-model-len", "256")
    assert done.exit_code == 0, done.output
    line = done.stdout.splitlines()[-1]
    assert line == draft_command(str(model), draft, engine="vllm", extra=["--max-model-len", "256"]).shell()
    assert "not proven" in done.stderr  # a stranger's head: names alone prove little
    done = eyas("serve", model, "--draft", draft, "--set", "serve.draft_topk=4", "--port", "31000")
    assert shlex.split(done.stdout.splitlines()[-1])[-1] == "13"


def test_a_draft_that_is_refused_gets_no_command(model: Path, draft: Path, tmp_path: Path) -> None:
    spoilt = shutil.copytree(draft, tmp_path / "draft")
    held = load_file(spoilt / "model.safetensors")
    save_file({name: tensor for name, tensor in held.items() if name != "d2t"}, spoilt / "model.safetensors")
    done = eyas("serve", model, "--draft", spoilt)
    assert (done.exit_code, done.stdout) == (4, "")
    assert "SGLang finds no d2t" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--draft", "{draft}", "--layers", "1,2,3"), 2, "captures nothing"),
        (("--draft", "{draft}", "--quota", "1GiB"), 2, "captures nothing"),
        (("--draft", "{draft}", "--engine", "tgi"), 2, "serve.engine"),
        (("--draft", "{draft}", "--engine", "vllm", "--set", "serve.draft_topk=2"), 2, "vLLM drafts chains"),
        (("--draft", "{draft}", "--set", "serve.draft_tokens=6"), 2, "verifies 4 tokens, not 6"),
        (("--draft", "{draft}", "--engine", "vllm", "--set", "serve.draft_tokens=6"), 2, "verifies 4 tokens, not 6"),
        (("--draft", "{draft}", "--port", "70000"), 2, "not a port"),
        (("--draft", "{draft}/nowhere"), 2, "no such folder"),
        (("--engine", "vllm"), 2, "without a --draft"),
    ],
)
def test_wrong_words(words: tuple[str, ...], code: int, says: str, model: Path, draft: Path) -> None:
    done = eyas("serve", model, *(word.format(draft=draft) for word in words))
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert says in " ".join(done.stderr.split())


def test_run_becomes_the_server(model: Path, draft: Path, tmp_path: Path) -> None:
    """The program gets the very words that are printed."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    code = (
        "import sys; from eyas.serve import draft_command; "
        f"draft_command({str(model)!r}, {str(draft)!r}, engine='vllm', python={str(program)!r}).run()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected: Any = draft_command(str(model), draft, engine="vllm", python=str(program)).argv[1:]
    assert json.loads(done.stdout) == list(expected)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_is_not_there_is_named_by_its_own_name(
    engine: Engine, model: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    title, other = ("vLLM", "SGLang") if engine == "vllm" else ("SGLang", "vLLM")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("eyas.serve.drafting.installed_sglang", lambda: None)
    for python in (None, str(tmp_path / "python")):
        with pytest.raises(ConfigError) as caught:
            draft_command(str(model), draft, engine=engine, python=python).run()
        said = f"{caught.value} {caught.value.hint}"
        assert title in said or "the interpreter that has it" in said
        assert other not in said
        assert "serve.python" in said


def test_the_settings() -> None:
    cfg = load(overrides=["serve.engine=vllm", "serve.draft_steps=5"]).serve
    assert (cfg.engine, cfg.draft_steps, cfg.draft_topk, cfg.draft_tokens) == ("vllm", 5, 1, None)


# --- eyas export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "nothing to export is named"),
        (("{draft}",), 2, "no folder is named"),
        (("{draft}", "--out", "{tmp}/out"), 2, "whose draft is this"),
        (("{draft}/nowhere", "--out", "{tmp}/out", "--target", "{model}"), 2, "no such folder"),
        (("{model}", "--out", "{tmp}/out", "--target", "{model}"), 2, "config.json"),
        (("--check", "{draft}", "--out", "{tmp}/out"), 2, "--check makes nothing"),
        (("--check", "{model}"), 2, "name the --target"),
        (("--check", "{draft}", "--questions", "{tmp}/q.jsonl"), 2, "whose answers"),
        (("--check", "{model}", "--target", "{model}"), 4, "the draft is refused: names"),
        (
            ("--check", "{draft}", "--target", "{model}", "--questions", "{tmp}/none.jsonl"),
            2,
            "cannot read the questions",
        ),
        (("--check", "{draft}", "--target", "{model}", "--set", "export.nothing=1"), 2, "unknown config key"),
    ],
)
def test_words_of_export(
    words: tuple[str, ...], code: int, says: str, model: Path, draft: Path, tmp_path: Path
) -> None:
    done = eyas("export", *(word.format(draft=draft, model=model, tmp=tmp_path) for word in words))
    assert done.exit_code == code, done.output
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_export_and_check_from_the_command_line(model: Path, draft: Path, tmp_path: Path) -> None:
    done = eyas("export", draft, "--out", tmp_path / "out", "--target", model)
    assert done.exit_code == 0, done.output
    assert "probe" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("README.md", "config.json", "generation_config.json", "model.safetensors")
    ]
    done = eyas("export", "--check", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].split() == ["verdict", "passed;", "not", "proven:", "weights,", "acceptance"]
