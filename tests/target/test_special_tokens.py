"""Which ids a target ends with, by the small files of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.target.special_tokens import SpecialTokens
from tiny_models import llama


def target(folder: Path, **files: Any) -> Target:
    """A target of 300 tokens with these files; `config` is added to its own."""
    llama().config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | files.pop("config", {"eos_token_id": None})))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return Target.load(str(folder))


def test_each_file_has_its_say(tmp_path: Path) -> None:
    found = SpecialTokens.of(
        target(
            tmp_path,
            config={"eos_token_id": 7},
            generation_config={"eos_token_id": [7, 8]},
            tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 10, "content": "<tool>"}]},
            tokenizer_config={"eos_token": "<end>"},
        )
    )
    assert found == SpecialTokens(ends=frozenset({7, 8, 9}), added=frozenset({9, 10}))


def test_a_tokenizer_without_a_fast_file(tmp_path: Path) -> None:
    settings = {
        "eos_token": {"content": "<end>", "special": True},
        "added_tokens_decoder": {"20": {"content": "<end>"}, "21": {"content": "<think>"}},
    }
    found = SpecialTokens.of(target(tmp_path, tokenizer_config=settings))
    assert found == SpecialTokens(ends=frozenset({20}), added=frozenset({20, 21}))


def test_of_a_wrapper_both_configs_count(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text()) | {"eos_token_id": 5}
    path.write_text(json.dumps({"model_type": "wrapper", "eos_token_id": [6], "text_config": inner}))
    assert SpecialTokens.of(Target.load(str(tmp_path))).ends == {5, 6}


def test_ids_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 299, "content": "a"}, {"id": 300, "content": "b"}]}
    found = SpecialTokens.of(target(tmp_path, config={"eos_token_id": [300, -1, True, 3]}, tokenizer=added))
    assert found == SpecialTokens(ends=frozenset({3}), added=frozenset({299}))


def test_nothing_is_known_of_a_bare_config(tmp_path: Path) -> None:
    assert SpecialTokens.of(target(tmp_path)) == SpecialTokens(frozenset(), frozenset())


@pytest.mark.parametrize(("text", "what"), [("{", "unreadable"), ("[]", "does not hold an object")])
def test_a_broken_file_is_named(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json.*{what}|{what}.*generation_config.json"):
        SpecialTokens.of(target(tmp_path, generation_config=text))


def test_real_files(smollm2_dir: Path) -> None:
    found = SpecialTokens.of(Target.load(str(smollm2_dir)))
    assert found.ends == {2}
    assert found.added == set(range(17))
