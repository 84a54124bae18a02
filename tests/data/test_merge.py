from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.data.merge import merge
from eyas.errors import ConfigError

META = CorpusMeta(model="m", tokenizer_hash="a" * 32, template_hash="b" * 32, vocab_size=100)


def write(path: Path, *ids: str, meta: CorpusMeta = META) -> Path:
    with CorpusWriter(path, meta) as writer:
        for name in ids:
            writer.add(name, [1, 2, 3], [0, 1, 1], f"from {path.name}")
    return path


def test_one_after_another_with_their_labels(tmp_path: Path) -> None:
    merged = merge([write(tmp_path / "a", "x", "y"), write(tmp_path / "b", "x")], tmp_path / "out")
    assert [(row.id, row.source) for row in merged] == [("x", "from a"), ("y", "from a"), ("x", "from b")]
    assert merged.meta == replace(META, rows=3, tokens=9, trained_tokens=6)
    assert Corpus.open(tmp_path / "out").digest == merged.digest
    merged.verify()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tokenizer_hash": "c" * 32}, "tokenizers"),
        ({"template_hash": "c" * 32}, "chat templates"),
        ({"vocab_size": 101}, "vocabulary sizes"),
    ],
)
def test_corpora_of_different_targets_are_refused_by_name(tmp_path: Path, change: dict[str, object], name: str) -> None:
    other = write(tmp_path / "b", "x", meta=replace(META, **change))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"different {name}: .*b"):
        merge([write(tmp_path / "a", "x"), other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "corpus.parquet", "x")
    with pytest.raises(ConfigError, match="written over"):
        merge([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(ConfigError, match="no corpus"):
        merge([], tmp_path / "b")
