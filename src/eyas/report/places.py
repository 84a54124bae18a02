"""Which files belong to a run: those in its folder, those that its training's settings name, those that are named."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from eyas.capture.strictjson import loads
from eyas.config import Config, ReportConfig
from eyas.data.corpus import CORPUS_FILE, Corpus
from eyas.disk import is_file_there, is_folder_there, is_there
from eyas.errors import ConfigError, EyasError
from eyas.logs import read_text
from eyas.report.sections import Missing
from eyas.store.documents import read_store_info
from eyas.store.format import STORE_FILE
from eyas.train.log import TrainLog, read_train_log

CHECKPOINTS: Final = "checkpoints"  # of a training run, docs/training.md
VOCAB: Final = "vocab.safetensors"
DRAFT_FILES: Final = ("config.json", "model.safetensors")
EVALUATIONS: Final = "evaluation-*.json"
_VOCAB_FACTS: Final = "eyas"  # of its metadata
_MOST_FACTS: Final = 1 << 16
_DEPTH: Final = 3
_MOST_FOLDERS: Final = 2000


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run's parts lie; None is a part that was not found.

    Attributes:
        run: what the user named.
        corpus: the Parquet file. store, train, exported: folders.
        evaluations: files, in the order of their names.
        lost: parts that the run's own settings name and that are not there, or are another run's: (part, path).
        log: of the training run.
    """

    run: Path
    corpus: Path | None = None
    store: Path | None = None
    train: Path | None = None
    exported: Path | None = None
    evaluations: tuple[Path, ...] = ()
    lost: tuple[tuple[str, Path], ...] = ()
    log: TrainLog = field(default_factory=TrainLog, repr=False)

    def quoted(self, part: str) -> str:
        """A part's place in a command to paste; its name in capitals where it is not known."""
        path: Path | None = getattr(self, part)
        if path is None:
            return part.upper()
        return shlex.quote(str(path.parent if path.name == CORPUS_FILE else path))

    def missing(self, part: str, command: str) -> Missing:
        """Says that a part is not there, and which command makes it."""
        path = next((path for name, path in self.lost if name == part), None)
        what = "is of another corpus" if path and _is_part(part, path) else "is not there or not to be read"
        why = f"the training's settings name {path}, which {what}" if path else ""
        return Missing(f"the {part}" if path else f"a {part}", why, command)


def find(run: Path | None, cfg: Config) -> Places:
    """Where the parts of a run lie.

    What section `report` names comes first, then what lies in the folder, then what the training's settings name.

    Args:
        run: a folder: of a whole run, or a corpus, a store, a training run or an exported drafter.
        cfg: sections `report` and `train`.

    Raises:
        ConfigError: nothing to report on, a named part is not there, or the folder has two of a kind.
    """
    named, told = _named(cfg.report), {}
    if run is not None:
        told = _in_folder(run, known=set(named))
    found: dict[str, Path] = {**told, **named}
    # What is only told by settings may have moved; it is no error.
    train = found.get("train") or _there(cfg.train.out)
    log = read_train_log(train) if train else TrainLog()
    lost: list[tuple[str, Path]] = []
    trained_on = _corpus_of_run(train) if train else ""
    for part in ("corpus", "store"):
        typed = getattr(cfg.train, part)
        said = typed or log.settings.get(part)
        if part not in found and said:
            path = _there(Path(str(said)))
            # Older logs say places as they were typed, in another folder than this one.
            if path is None or not _is_part(part, path) or (not typed and _is_anothers(part, path, trained_on)):
                lost.append((part, Path(str(said))))
            else:
                found[part] = path
    if train is not None:
        found["train"] = train
    corpus = found.get("corpus")
    if corpus is not None and is_folder_there(corpus):
        found["corpus"] = corpus / CORPUS_FILE
    folders = [folder for folder in (run, train, found.get("exported")) if folder is not None]
    evaluations = cfg.report.evaluations or _evaluations(folders)
    if not found and not evaluations:
        hint = "name the folder of a corpus, a store, a training run, or one that holds them"
        raise ConfigError("nothing to report on", run or "report", hint)
    return Places(
        run=run or train or next(iter(found.values()), Path()),
        evaluations=tuple(evaluations),
        lost=tuple(lost),
        log=log,
        **{part: found.get(part) for part in ("corpus", "store", "train", "exported")},
    )


def _named(cfg: ReportConfig) -> dict[str, Path]:
    """What the section names, which must be there."""
    found: dict[str, Path] = {}
    for part in ("corpus", "store", "train", "exported"):
        path: Path | None = getattr(cfg, part)
        if path is None:
            continue
        if not _is_part(part, path):
            raise ConfigError(f"no {_KINDS[part]} there", path, f"named by report.{part}")
        found[part] = path
    for path in cfg.evaluations:
        if not is_file_there(path):
            raise ConfigError("no such file", path, "named by report.evaluations")
    return found


_KINDS: Final = {
    "corpus": "corpus",
    "store": "store",
    "train": "training run",
    "exported": "exported drafter",
}


def _is_part(part: str, path: Path) -> bool:
    match part:
        case "corpus":
            return (path.suffix == ".parquet" and is_file_there(path)) or is_file_there(path / CORPUS_FILE)
        case "store":
            return is_file_there(path / STORE_FILE)
        case "train":
            return is_folder_there(path / CHECKPOINTS) or is_file_there(path / VOCAB)
        case _:
            return all(is_file_there(path / name) for name in DRAFT_FILES)


def _in_folder(run: Path, known: set[str]) -> dict[str, Path]:
    """The parts in a folder, one of each kind."""
    if not is_folder_there(run):
        if _is_part("corpus", run):
            return {"corpus": run}
        what = "not a run" if is_there(run) else "no such run"
        raise ConfigError(what, run, "name its folder, or a YAML file of settings")
    found: dict[str, Path] = {}
    for folder in _folders(run):
        for part in _KINDS:
            if part in known or not _is_part(part, folder):
                continue
            if part == "exported" and _is_part("train", folder.parent):
                continue  # a training run's own copy
            if part in found:
                both = f"{found[part]} and {folder}"
                raise ConfigError(f"two {_KINDS[part]}s in one run", both, f"name one: --set report.{part}=FOLDER")
            found[part] = folder
    return found


def _folders(root: Path) -> Iterator[Path]:
    """The folder and those in it, by name, not into what holds thousands of files of its own."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < _MOST_FOLDERS:
        folder, depth = waiting.pop(0)
        yield folder
        seen += 1
        if depth == _DEPTH or _is_part("store", folder):
            continue
        try:
            inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        skipped = (CHECKPOINTS, "events")
        waiting += [(folder / name, depth + 1) for name in inside if not name.startswith(".") and name not in skipped]


def _evaluations(folders: list[Path]) -> list[Path]:
    looked_in = {folder for root in folders for folder in _folders(root) if is_folder_there(folder)}
    found = {path for folder in looked_in for path in folder.glob(EVALUATIONS)}
    return sorted(found, key=lambda path: (path.name, str(path)))


def _corpus_of_run(train: Path) -> str:
    """Digest of the corpus that a training run's vocabulary was made for; empty where it does not say."""
    try:
        with safe_open(train / VOCAB, "numpy") as file:
            facts = loads((file.metadata() or {})[_VOCAB_FACTS], _MOST_FACTS)
    except (OSError, SafetensorError, KeyError, ValueError):
        return ""
    return read_text(facts, "corpus_digest")


def _is_anothers(part: str, path: Path, trained_on: str) -> bool:
    """Whether a corpus, or that of a store, is surely not the one of this digest."""
    if not trained_on:
        return False
    try:
        found = Corpus.open(path).digest if part == "corpus" else read_store_info(path).corpus.get("digest")
    except EyasError:
        return False  # its own section says what is wrong with it
    return found != trained_on


def _there(path: Path | None) -> Path | None:
    return path if path is not None and is_there(path) else None
