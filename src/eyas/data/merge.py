"""Corpora of one target joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.data.corpus import CORPUS_FILE, Corpus, CorpusWriter
from eyas.data.outfolder import OutFolder
from eyas.errors import ConfigError


def merge(corpora: Sequence[Path], out: Path) -> Corpus:
    """The rows of `corpora`, one corpus after another, in the folder `out`; their labels are kept.

    Args:
        corpora: folders that `prepare` wrote, or corpus files.
        out: folder that gets a corpus.parquet; an earlier one is replaced.

    Raises:
        ConfigError: one is no corpus, or they were made with different tokenizers or templates.
        StoreError: the folder cannot be written.
    """
    opened = [Corpus.open(path) for path in corpora]
    if not opened:
        raise ConfigError("no corpus is named", "", "name two or more")
    first = opened[0]
    for other in opened[1:]:
        for what in ("tokenizer_hash", "template_hash", "vocab_size"):
            if getattr(other.meta, what) != getattr(first.meta, what):
                name = {"tokenizer_hash": "tokenizer", "template_hash": "chat template"}.get(what, "vocabulary")
                hint = f"{first.path} is of {first.meta.model}, {other.path} of {other.meta.model}"
                raise ConfigError(f"the corpora were made with different {name}s", other.path, hint)
    with OutFolder(out, (str(one.path) for one in opened)) as folder:
        with CorpusWriter(folder.work / CORPUS_FILE, first.meta) as writer:
            for corpus in opened:
                for row in corpus.rows():
                    writer.add(row.id, row.tokens, row.loss_mask, row.source)
        folder.publish()
    return Corpus.open(out)
