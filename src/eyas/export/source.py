"""What is exported: a run's drafter, or a draft's folder of any make, and what the run's log says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from eyas.data.corpus import Corpus
from eyas.errors import EyasError
from eyas.store.documents import read_store_info

EVENTS: Final = "events"
DRAFT: Final = "draft"
_EVALUATIONS: Final = "evaluation-*.json"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A training run as its log and its inputs tell.

    Attributes:
        folder: the run's.
        settings: of `eyas train`.
        steps, tokens: of the whole run.
        evaluation: the event of the best evaluation, whose weights were published.
        evaluations: files of `eyas evaluate`, by name.
        data: rows, tokens and digest of the corpus; empty where the store is gone.
        spec_id: of the store; empty likewise.
        version: of eyas.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    evaluation: Mapping[str, Any] | None = None
    evaluations: tuple[Path, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    spec_id: str = ""
    version: str = ""

    @property
    def store(self) -> Path | None:
        """The states it was trained on, where they are still there."""
        said = self.settings.get("store")
        path = Path(said) if isinstance(said, str) else None
        return path if path is not None and path.is_dir() else None

    @property
    def target(self) -> str | None:
        """The model it was trained for."""
        said = self.settings.get("target")
        if isinstance(said, str):
            return said
        try:
            return Corpus.open(Path(self.settings["corpus"])).meta.model
        except (EyasError, KeyError, TypeError):
            return None


def find_run(source: str | Path) -> tuple[str, Path | None]:
    """(the draft's folder or hub id, the run's folder if it has one) of what the user named."""
    folder = Path(source)
    if (folder / DRAFT).is_dir() and (folder / EVENTS).is_dir():
        return str(folder / DRAFT), folder
    parent = folder.absolute().parent
    is_of_run = folder.is_dir() and folder.absolute().name == DRAFT and (parent / EVENTS).is_dir()
    return str(source), parent if is_of_run else None


def read_run(folder: Path) -> RunFacts:
    """What there is to know of a run; a line of its log that was cut off is passed over."""
    events = [event for path in sorted((folder / EVENTS).glob("*.jsonl")) for event in _events(path)]
    starts = [event for event in events if event["event"] == "start" and isinstance(event.get("settings"), dict)]
    settings = starts[-1]["settings"] if starts else {}
    ends = [event for event in events if event["event"] == "end"]
    evaluations = [event for event in events if event["event"] == "eval" and event.get("accept_length") is not None]
    best = max(evaluations, key=lambda event: (event["accept_length"], event.get("step", 0)), default=None)
    data, spec_id = _inputs(settings)
    return RunFacts(
        folder,
        settings,
        steps=int(ends[-1].get("step") or 0) if ends else 0,
        tokens=int(ends[-1].get("tokens") or 0) if ends else 0,
        evaluation=best,
        evaluations=tuple(sorted(folder.glob(_EVALUATIONS))),
        data=data,
        spec_id=spec_id,
    )


def _events(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


def _inputs(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    try:
        info = read_store_info(settings["store"])
    except (EyasError, KeyError, TypeError, OSError):
        return {}, ""
    data = {
        "rows": sum(shard.stop - shard.start for shard in info.plan.shards),
        "tokens": sum(shard.tokens for shard in info.plan.shards),
        "digest": info.corpus["digest"],
    }
    return data, info.spec.spec_id
