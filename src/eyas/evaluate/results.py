"""What an evaluation found: figures by category, the file that keeps them (see `eyas.evaluate`), and its table."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from rich.table import Table

from eyas.acceptance import acceptance, cycle_counts
from eyas.errors import ConfigError, EyasError, IntegrityError
from eyas.store.files import disk_errors, make_folder, write_atomic

FORMAT: Final = 1
ALL: Final = "all"

_USER: Final = re.compile(r"(?<=://)[^/?#\s]*@")  # user and password of a URL
_KEY: Final = re.compile(r"""(api[_-]?key["']?\s*[=:]\s*).+""", re.IGNORECASE | re.DOTALL)
#: What tells evaluations apart that go by one name.
_OF: Final = ("head", "head_digest", "target", "prompts_digest", "sampling")

Mode = Literal["offline-simulated", "offline-decoded", "live"]


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What one prompt gave, all of its turns together.

    Attributes:
        category: of the prompt.
        tokens: of the answers.
        cycles: (accepted, possible) of each, as `eyas.acceptance.cycle_counts` takes them.
        accepted: of each cycle as a server counts it; None where that is not known.
        notes: what was left out.
    """

    category: str
    tokens: int
    cycles: Sequence[tuple[int, int]]
    accepted: Sequence[int] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one category; the keys of the file."""

    category: str
    prompts: int
    cycles: int
    tokens: int
    accept_length: float
    ci95: tuple[float, float]
    accept_by_position: tuple[float, ...]
    reached: tuple[int, ...]
    right: tuple[int, ...]
    counters: dict[str, Any] | None = None
    concurrency: int = 1
    tokens_per_s: float | None = None
    speedup: float | None = None
    ttft_ms: float | None = None

    @classmethod
    def of(cls, category: str, prompts: Sequence[PromptCounts], depth: int, seed: int = 0) -> Self:
        """From cycles; the interval is a bootstrap over the prompts."""
        counts = [cycle_counts(prompt.cycles, depth) for prompt in prompts]
        return cls.of_counts(
            category,
            np.array([one[0] for one in counts]).reshape(-1, depth),
            np.array([one[1] for one in counts]).reshape(-1, depth),
            tokens=sum(prompt.tokens for prompt in prompts),
            prompts=len(prompts),
            seed=seed,
            cycles=sum(len(prompt.cycles) for prompt in prompts),
            counters=_counters(prompts, depth),
        )

    @classmethod
    def of_counts(
        cls, category: str, reached_CK: Any, right_CK: Any, *, tokens: int, prompts: int, seed: int = 0, **others: Any
    ) -> Self:
        """From counts by cluster and step, as `eyas.acceptance.acceptance` takes them.

        Args:
            category: or `ALL`.
            reached_CK, right_CK: [C, K], a prompt a line where prompts are told apart, else one line.
            tokens, prompts: in number.
            seed: of the bootstrap.
            **others: further fields; `cycles` defaults to those that drafted.
        """
        found = acceptance(reached_CK, right_CK, seed=seed)
        reached, right = (np.atleast_2d(np.asarray(counts)).sum(0).tolist() for counts in (reached_CK, right_CK))
        return cls(
            category=category,
            prompts=prompts,
            tokens=tokens,
            accept_length=found.length,
            ci95=(found.low, found.high),
            accept_by_position=found.by_position,
            reached=tuple(reached),
            right=tuple(right),
            **{"cycles": reached[0] if reached else 0, **others},
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation; the keys of the file."""

    head: str
    head_digest: str
    target: str
    engine: str
    mode: Mode
    benchmark: str
    depth: int
    topk: int
    draft_tokens: int
    prompts_digest: str
    sampling: dict[str, Any]
    versions: dict[str, str]
    command: str
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def file_name(self) -> str:
        """Tells apart what can stand side by side: benchmark, mode, drafting and sampling."""
        parts = ["evaluation", _plain(self.benchmark), self.mode, f"d{self.depth}"]
        if self.mode == "live":
            parts.insert(2, self.engine)
        if self.topk > 1:
            parts.append(f"k{self.topk}-n{self.draft_tokens}")
        if temperature := self.sampling.get("temperature"):
            parts.append(f"t{temperature:g}")
        return "-".join(parts) + ".json"

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    def path_in(self, folder: Path) -> Path:
        """Where the file goes: one of another drafter, target, prompts or sampling is not replaced."""
        path = folder / self.file_name
        try:
            known = read_evaluation(path)
        except EyasError:
            return path
        mine = {name: getattr(self, name) for name in _OF}
        if all(known.get(name) == value for name, value in mine.items()):
            return path
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        return path.with_name(f"{path.stem}-{digest[:6]}{path.suffix}")

    def write(self, folder: Path) -> Path:
        """Write the file at `path_in`, in place of an earlier one of the same kind.

        Raises:
            StoreError: the disk.
        """
        path = self.path_in(folder)
        with disk_errors(path):
            if not folder.exists():
                make_folder(folder)
            write_atomic(path, self.to_json().encode())
        return path

    def table(self) -> Table:
        """For people; a single category is that of all."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("category", "prompts", "tokens", "cycles", "accepted", "95 %", "by position"):
            table.add_column(name, justify="left" if name in ("category", "by position") else "right")
        shown = self.results[:1] if len(self.results) == 2 else self.results
        for one in shown:
            table.add_row(
                one.category,
                f"{one.prompts:,}",
                f"{one.tokens:,}",
                f"{one.cycles:,}",
                f"{one.accept_length:.3f}",
                f"{one.ci95[0]:.3f} to {one.ci95[1]:.3f}",
                " ".join(f"{share:.3f}" for share in one.accept_by_position),
            )
        return table


def by_category(prompts: Iterable[PromptCounts], depth: int, seed: int = 0) -> tuple[Result, ...]:
    """All prompts together, then each category by name."""
    prompts = list(prompts)
    names = sorted({prompt.category for prompt in prompts})
    groups = [(name, [prompt for prompt in prompts if prompt.category == name]) for name in names]
    return tuple(Result.of(name, group, depth, seed) for name, group in [(ALL, prompts), *groups])


def without_secrets(text: str) -> str:
    """A command line, or a URL, without users, passwords and API keys."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = [text]
    kept = [_KEY.sub(r"\1***", _USER.sub("", word)) for word in words]
    return text if kept == words else shlex.join(kept) if len(words) > 1 else kept[0]


def read_evaluation(path: Path) -> dict[str, Any]:
    """What an evaluation's file holds.

    Raises:
        ConfigError: no such file, or another one. IntegrityError: it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("no such evaluation", path, "eyas evaluate writes evaluation-*.json") from error
    except (OSError, ValueError) as error:
        raise IntegrityError("the evaluation cannot be read", path, str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("results"), list):
        raise ConfigError("not an evaluation", path, f"format {FORMAT} is expected")
    return value


def _counters(prompts: Sequence[PromptCounts], depth: int) -> dict[str, Any] | None:
    counted = [accepted for prompt in prompts if prompt.accepted is not None for accepted in prompt.accepted]
    if not counted and any(prompt.accepted is None for prompt in prompts):
        return None
    return {"drafts": len(counted), "accepted": [sum(one > k for one in counted) for k in range(depth)]}


def _plain(name: str) -> str:
    """A name that a file may have."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name) or "questions"
