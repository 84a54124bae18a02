"""What is exported: a run's drafter, or a draft's folder of any make, and what the run's log says of it.

A log may be torn, or of a version that wrote places as they were typed, relative to a folder that nobody knows: a store
or corpus counts only if it is of the corpus that the draft's own config.json names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from eyas.data.corpus import Corpus
from eyas.disk import is_folder_there
from eyas.errors import EyasError
from eyas.events import EVENTS_DIR
from eyas.store.documents import read_store_info
from eyas.store.format import StoreInfo
from eyas.target.checkpoint import read_config
from eyas.train.checkpoint_format import SECTION
from eyas.train.log import EvalStep, read_train_log

DRAFT: Final = "draft"
_EVALUATIONS: Final = "evaluation-*.json"


@dataclass(frozen=True, slots=True)
class InTraining:
    """An evaluation of the log. by_position: [K] conditional shares."""

    step: int
    length: float
    low: float | None
    high: float | None
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A training run as its log and its inputs tell.

    Attributes:
        folder: the run's.
        settings: of `eyas train`.
        steps, tokens: of the whole run.
        evaluation: the best one, whose weights were published; None where nothing was evaluated after the first step.
        evaluations: files of `eyas evaluate`, by name.
        target: the model it was trained for.
        store: the states it was trained on, where they are still there.
        data: rows, tokens and digest of the corpus; empty where the store is gone.
        spec_id: of the store; empty likewise.
        version: of eyas.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    evaluation: InTraining | None = None
    evaluations: tuple[Path, ...] = ()
    target: str | None = None
    store: Path | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    spec_id: str = ""
    version: str = ""


def find_run(source: str | Path) -> tuple[str, Path | None]:
    """(the draft's folder or hub id, the run's folder if it has one) of what the user named."""
    folder = Path(source)
    if is_folder_there(folder / DRAFT) and is_folder_there(folder / EVENTS_DIR):
        return str(folder / DRAFT), folder
    parent = folder.absolute().parent
    is_of_run = is_folder_there(folder) and folder.absolute().name == DRAFT and is_folder_there(parent / EVENTS_DIR)
    return str(source), parent if is_of_run else None


def read_run(folder: Path) -> RunFacts:
    """What there is to know of a run; a line of its log that was cut off is passed over."""
    log, corpus = read_train_log(folder), _corpus_of(folder / DRAFT)
    store, info = _store(log.settings.get("store"), corpus)
    return RunFacts(
        folder,
        log.settings,
        steps=log.end.step if log.end else 0,
        tokens=log.end.tokens if log.end else 0,
        evaluation=_in_training(log.best),
        evaluations=tuple(sorted(folder.glob(_EVALUATIONS))),
        target=_target(log.settings, corpus),
        store=store,
        data=_data(info) if info is not None else {},
        spec_id=info.spec.spec_id if info is not None else "",
        version=log.versions.get("eyas", ""),
    )


def _in_training(best: EvalStep | None) -> InTraining | None:
    if best is None or best.length is None:
        return None
    known = tuple(share for share in best.acceptance if share is not None)
    return InTraining(int(best.step), best.length, best.low, best.high, known)


# --- what it was trained on -------------------------------------------------------------------------------------------


def _corpus_of(draft: Path) -> str:
    """Digest of the corpus that a draft's vocabulary was made for; empty where it does not say."""
    try:
        digest = read_config(draft)[SECTION]["vocab"]["corpus_digest"]
    except (EyasError, KeyError, TypeError):
        return ""
    return digest if isinstance(digest, str) else ""


def _store(said: Any, corpus: str) -> tuple[Path | None, StoreInfo | None]:
    """The store that the settings name and what it is for; none where it is gone or of another corpus."""
    if not isinstance(said, str):
        return None, None
    try:
        info = read_store_info(said)
    except EyasError:
        return None, None
    return (Path(said), info) if _is_known(said, corpus, info.corpus.get("digest")) else (None, None)


def _target(settings: Mapping[str, Any], corpus: str) -> str | None:
    """The model it was trained for, else the one that its corpus was prepared for."""
    if isinstance(target := settings.get("target"), str):
        return target
    if not isinstance(said := settings.get("corpus"), str):
        return None
    try:
        found = Corpus.open(Path(said))
    except EyasError:
        return None
    return found.meta.model if _is_known(said, corpus, found.digest) else None


def _is_known(said: str, corpus: str, digest: Any) -> bool:
    """Whether what is found at a place of the log is what was trained on, by the corpus where the draft names one."""
    return digest == corpus if corpus else Path(said).is_absolute()


def _data(info: StoreInfo) -> dict[str, Any]:
    return {
        "rows": sum(shard.stop - shard.start for shard in info.plan.shards),
        "tokens": sum(shard.tokens for shard in info.plan.shards),
        "digest": info.corpus["digest"],
    }
