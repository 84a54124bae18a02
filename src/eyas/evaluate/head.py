"""The drafter that is evaluated, and what the run that it came from knows: target, corpus, rows held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from eyas.errors import ConfigError
from eyas.evaluate.drafting import Drafter
from eyas.events import EVENTS_DIR
from eyas.target.checkpoint import Target
from eyas.train.checkpoint_format import CONFIG_FILE, DraftCheckpoint
from eyas.train.log import read_train_log
from eyas.train.run import DRAFT


@dataclass(frozen=True, slots=True)
class Head:
    """Where a drafter lies.

    Attributes:
        name: as the user named it.
        model: its folder, or a hub id.
        run: the run that it is of, or None.
        settings: of that run's training; empty where there is none.
    """

    name: str
    model: str
    run: Path | None
    settings: Mapping[str, Any]

    @classmethod
    def find(cls, name: str) -> Self:
        """A drafter by its folder, its run's folder, or its hub id.

        Raises:
            ConfigError: a folder that is none of these.
        """
        folder = Path(name)
        if (folder / DRAFT / CONFIG_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
            folder = folder / DRAFT
        if folder.exists() and not (folder / CONFIG_FILE).is_file():
            hint = "name the folder of a drafter, or that of the run which trained it"
            raise ConfigError(f"no drafter there: it has no {CONFIG_FILE}", folder, hint)
        run = folder.absolute().parent
        if not (folder.is_dir() and folder.absolute().name == DRAFT and (run / EVENTS_DIR).is_dir()):
            return cls(name, str(folder) if folder.is_dir() else name, None, {})
        return cls(name, str(folder), folder.parent, read_train_log(run).settings)

    def target(self, named: str | None, corpus_model: str | None) -> Target:
        """The target: the one that is named, else the run's, else the corpus's.

        Raises:
            ConfigError: none of them is known, or it cannot be found.
        """
        model = named or self.settings.get("target") or corpus_model
        if not model:
            raise ConfigError("which target does it draft for?", self.name, "name it with --target")
        return Target.load(str(model))

    def corpus(self, named: Path | None) -> Path | None:
        """The corpus that is named, else the run's where it is still there."""
        if named is not None:
            return named
        known = self.settings.get("corpus")
        return Path(known) if isinstance(known, str) and Path(known).exists() else None

    def digest(self) -> str:
        """sha256 of the weights' files, in the order of their names; "" for a hub id that is not a folder."""
        found = hashlib.sha256()
        files = sorted([*Path(self.model).glob("*.safetensors"), *Path(self.model).glob("pytorch_model.bin")])
        for path in files:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest() if files else ""


def load_drafter(
    head: Head, target: Target, device: torch.device, dtype: torch.dtype
) -> tuple[Drafter, DraftCheckpoint]:
    """The drafter, ready to draft.

    Raises:
        ConfigError: it cannot be read, or is of another target.
    """
    checkpoint = DraftCheckpoint.load(head.model, target)
    return Drafter(checkpoint.build(target, dtype).to(device), checkpoint.vocab), checkpoint
