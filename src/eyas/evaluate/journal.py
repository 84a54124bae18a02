"""What of an evaluation is done, prompt by prompt, so that a stopped one goes on: JSON lines beside the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from eyas.evaluate.results import PromptCounts
from eyas.store.files import disk_errors, make_folder

_SUFFIX: Final = ".partial"


class Journal:
    """Counts of the prompts that are done.

    Args:
        path: of the evaluation's file; the journal lies beside it until `finish`.
        settings: all that the counts depend on; lines of others are passed over.

    Attributes:
        done: number of the prompt -> its counts.

    Raises:
        StoreError: the disk.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path.with_name(path.name + _SUFFIX)
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.done: dict[int, PromptCounts] = {}
        with disk_errors(self.path):
            if not path.parent.exists():
                make_folder(path.parent)
            for line in self.path.read_bytes().split(b"\n") if self.path.is_file() else ():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line is a prompt to do again
                    self._take(json.loads(line))
            mode = "a" if self.done else "w"
            self._file = self.path.open(mode, encoding="utf-8")
            self._file.write("\n" if self.done else "")  # ends a torn line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, number: int, counts: PromptCounts) -> None:
        """One more prompt is done.

        Raises:
            StoreError: the disk.
        """
        accepted = None if counts.accepted is None else list(counts.accepted)
        line: dict[str, Any] = {"key": self._key, "number": number, "category": counts.category}
        line |= {"tokens": counts.tokens, "cycles": list(counts.cycles), "accepted": accepted}
        line |= {"notes": list(counts.notes)}
        with disk_errors(self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.done[number] = counts

    def finish(self) -> None:
        """The evaluation is written: the journal goes."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _take(self, line: dict[str, Any]) -> None:
        if line["key"] != self._key:
            return
        cycles = [(int(accepted), int(possible)) for accepted, possible in line["cycles"]]
        counted = line["accepted"]
        accepted = None if counted is None else [int(one) for one in counted]
        notes = [str(note) for note in line["notes"]]
        counts = PromptCounts(str(line["category"]), int(line["tokens"]), cycles, accepted, notes)
        self.done[int(line["number"])] = counts
