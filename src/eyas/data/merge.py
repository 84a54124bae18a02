"""Corpora of one target joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from eyas.data.corpus import CORPUS_FILE, Corpus, CorpusWriter
from eyas.data.outfolder import OutFolder
from eyas.errors import ConfigError

_SAME: Final = {
    "tokenizer_hash": "tokenizers",
    "template_hash": "chat templates",
    "vocab_size": "vocabulary sizes",
}


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
        for key, what in _SAME.items():
            if getattr(other.meta, key) != getattr(first.meta, key):
                hint = f"{first.path} is of {first.meta.model}, {other.path} of {other.meta.model}"
                raise ConfigError(f"the corpora were made with different {what}", other.path, hint)
    with OutFolder(out, (str(one.path) for one in opened)) as folder:
        with CorpusWriter(folder.work / CORPUS_FILE, first.meta) as writer:
            for corpus in opened:
                for row in corpus.rows():
                    writer.add(row.id, row.tokens, row.loss_mask, row.source)
        folder.publish()
    return Corpus.open(out)
