from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.data.template import Template
from eyas.errors import ConfigError
from eyas.extract.identity import NOT_CHECKED, SAME, check_tokenizer
from sglang_cpu.models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def meta(model: Path) -> CorpusMeta:
    settings = {"options": {"x": 1}, "rewritten_turns": "drop"}
    template = Template.load(str(model), **settings)
    return CorpusMeta(str(model), template.tokenizer_hash, template.template_hash, 1024, template_settings=settings)


def corpus(tmp_path: Path, meta: CorpusMeta) -> Corpus:
    with CorpusWriter(tmp_path / "c.parquet", meta) as writer:
        writer.add("a", np.arange(4), np.ones(4, np.uint8))
    return Corpus.open(tmp_path / "c.parquet")


def test_the_same_target(tmp_path: Path, meta: CorpusMeta, model: Path) -> None:
    assert check_tokenizer(corpus(tmp_path, meta), str(model)) == (SAME, "")


def test_another_tokenizer_is_refused(tmp_path: Path, meta: CorpusMeta, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"another tokenizer: .*c\.parquet .*prepare it again"):
        check_tokenizer(corpus(tmp_path, replace(meta, tokenizer_hash="0" * 32)), str(model))


@pytest.mark.parametrize("change", [{"template_hash": "0" * 32}, {"template_settings": {"options": {"x": 2}}}])
def test_another_template_is_a_warning(
    tmp_path: Path, meta: CorpusMeta, model: Path, change: dict[str, object]
) -> None:
    known, warning = check_tokenizer(corpus(tmp_path, replace(meta, **change)), str(model))  # type: ignore[arg-type]
    assert known == SAME
    assert "another chat template" in warning


def test_what_is_not_known_is_not_checked(tmp_path: Path, meta: CorpusMeta, model: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert check_tokenizer(corpus(tmp_path, meta), str(tmp_path / "weights")) == (NOT_CHECKED, "")
    assert check_tokenizer(corpus(tmp_path, replace(meta, tokenizer_hash="")), str(model)) == (NOT_CHECKED, "")


def test_a_base_model_has_a_tokenizer_without_a_template(tmp_path: Path, meta: CorpusMeta, model: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in model.iterdir():
        if file.name.startswith(("tokenizer", "special", "config")):
            (base / file.name).write_text(file.read_text().replace('"chat_template"', '"no_template"'))
    assert check_tokenizer(corpus(tmp_path, meta), str(base)) == (SAME, "")
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_tokenizer(corpus(tmp_path, replace(meta, tokenizer_hash="0" * 32)), str(base))
