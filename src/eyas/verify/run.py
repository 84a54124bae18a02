"""`eyas verify`: what can be known about a store, cheapest first.

structure, checksums, finiteness      from the store alone
identity                              tokens and masks against the corpus
values                                sampled rows recomputed by transformers, every captured layer and `last`,
                                      with controls (neighbouring layers, shifted rows) that must NOT match
                                      or: `last` of sampled rows against a server's log-probabilities
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from eyas.config import Config
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError
from eyas.positions import kept_positions
from eyas.store.check import ProblemKind, verify_store
from eyas.store.documents import read_store_info
from eyas.store.format import Contents, RowContents, StoreInfo
from eyas.store.plan import Shard
from eyas.store.reader import StoreReader
from eyas.verify.against import compare_with_model
from eyas.verify.logits import audit_by_logits
from eyas.verify.record import record
from eyas.verify.report import VerifyReport

_BROKEN: Final = {ProblemKind.SIDECAR, ProblemKind.STRUCTURE, ProblemKind.UNREADABLE, ProblemKind.INDEX_HASH}


def verify(
    store: Path,
    *,
    corpus: Path | None = None,
    against: str | None = None,
    logits: str | None = None,
    model: str | None = None,
    sample: int = 16,
    cfg: Config | None = None,
    console: Console | None = None,
) -> VerifyReport:
    """Check a store; what was found stays in the store's log, where it can be written.

    Args:
        store: its folder.
        corpus: compare tokens, masks and positions with this corpus, which must be the one the store was made from.
        against: a model's folder or hub id; sampled rows are recomputed with transformers in float32.
        logits: URL of an SGLang server of the target, capturing or not; what the stored `last` predicts is compared
            with its prompt log-probabilities.
        model: whose lm_head `logits` uses, a folder or hub id; default: `against`, else the corpus's.
        sample: how many rows, spread evenly over the store; 0 is all.
        cfg: `extract` (device, trust_remote_code) and `server` (key, certificates).
        console: where progress goes.

    Raises:
        StoreError, ConfigError: the store, corpus or model cannot be read, or belong to another run.
        EngineError: the server is away, of another model, or gives no log-probabilities.
    """
    console = console or Console(stderr=True)
    cfg = cfg or Config()
    info = read_store_info(store)
    lm_head = _lm_head_of(model or against, corpus) if logits else ""
    checked = verify_store(store, _contents(info, corpus) if corpus else None)
    report = VerifyReport(store, checked.rows, checked.failed, checked.problems, corpus=corpus)
    if corpus is None:
        report.notes.append("identity: name the --corpus")
    if {problem.kind for problem in checked.problems} & _BROKEN:
        report.notes.append("values: the bytes are not as they should be")
    else:
        if against is not None:
            report.comparison = compare_with_model(StoreReader(store), against, sample, cfg.extract, console)
        if logits is not None:
            report.audit = audit_by_logits(StoreReader(store), logits, lm_head, sample, cfg, console)
        if against is None and logits is None:
            report.notes.append("values: name the model with --against, or a server of it with --logits")
        elif against is None:
            report.notes.append("values of the captured layers: name the model with --against")
    record(report, against)
    return report


def _lm_head_of(model: str | None, corpus: Path | None) -> str:
    """Which checkpoint gives lm_head."""
    if named := model or (Corpus.open(corpus).meta.model if corpus else ""):
        return named
    raise ConfigError("whose lm_head?", "--logits", "name the checkpoint with --target, or the --corpus that does")


def _contents(info: StoreInfo, path: Path) -> Contents:
    """What the corpus says the rows are; refused when the store was made from another."""
    corpus, made_from = Corpus.open(path), info.corpus["digest"]
    if corpus.digest != made_from:
        what = f"the store was made from another corpus (digest {made_from}, not {corpus.digest})"
        raise ConfigError(what, path, "name the corpus that eyas extract was given")

    def contents(shard: Shard) -> Iterator[RowContents]:
        for row in corpus.rows(shard.start, shard.stop):
            yield RowContents(row.tokens, row.loss_mask, kept_positions(row.loss_mask, info.spec.last))

    return contents
