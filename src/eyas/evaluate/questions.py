"""Questions of benchmarks: `question.jsonl` as EAGLE's repository and FastChat have it.

    {"question_id": 81, "category": "writing", "turns": ["Compose a blog post ...", "Rewrite it ..."]}

Each turn is asked with the answers before it. Other keys (`reference`, `task_id`) are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError, first_line

_NO_CATEGORY = "none"


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        id: as in the file, or its line.
        category: of the benchmark.
        turns: what is asked, one after another; at least one.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a file, in its order.

    Args:
        path: JSON lines.
        limit: only the first so many.

    Raises:
        ConfigError: no such file, a line that is no question, or none at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        hint = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ConfigError("cannot read the questions", path, hint) from error
    found = [_question(line, f"{path}:{number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError("no questions", path, 'a line holds {"question_id": 1, "category": "math", "turns": ["..."]}')
    return found[:limit]


def _question(line: str, where: str, number: int) -> Question:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError("not a question", where, f"not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError("not a question", where, "an object with turns is needed")
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError("not a question", where, "`turns` must be a list of texts")
    category = value.get("category")
    named = category if isinstance(category, str) and category else _NO_CATEGORY
    return Question(str(value.get("question_id", number)), named, tuple(turns))


def benchmark_of(path: Path) -> str:
    """The benchmark's name: the folder of a `question.jsonl`, else the file's own."""
    return path.resolve().parent.name if path.name == "question.jsonl" else path.stem


def digest_of(questions: Sequence[Question]) -> str:
    """32 hex digits of what is asked, in order."""
    text = json.dumps([question.turns for question in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
