"""What was measured without speculation: whether it can be compared, and an earlier run of it from its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from eyas.errors import ConfigError, IntegrityError
from eyas.evaluate.conversation import Conversations, Prompt
from eyas.evaluate.passes import Pass
from eyas.evaluate.questions import Question
from eyas.evaluate.results import Evaluation, Result, read_evaluation
from eyas.evaluate.served import ServedModel
from eyas.store.files import disk_errors, write_atomic

_ANSWERS: Final = ".answers.jsonl"
_SAME: Final = ("target", "engine", "benchmark", "prompts_digest", "sampling")


def check_comparable(server: ServedModel, plain: ServedModel) -> None:
    """Two servers that differ by speculation only, as far as they tell.

    Raises:
        ConfigError: they differ elsewhere, or both speculate.
    """
    where = f"{server.where} and {plain.where}"
    if plain.depth:
        what = f"the server without speculation drafts {plain.depth} tokens a cycle"
        raise ConfigError(what, plain.where, "start it without a drafter")
    differing = [
        f"{name} {mine or 'unknown'} and {theirs or 'unknown'}"
        for name, mine, theirs in (
            ("engine", server.engine, plain.engine),
            ("version", server.version, plain.version),
            ("model", server.name, plain.name),
        )
        if mine != theirs
    ]
    if differing:
        raise ConfigError(
            f"the servers cannot be compared: {'; '.join(differing)}", where, "only the drafter may differ"
        )


def save_answers(evaluation: Path, answered: Pass) -> Path:
    """Write what was asked and answered one at a time, beside an evaluation's file.

    Raises:
        StoreError: the disk.
    """
    path = _answers_of(evaluation)
    lines = (
        json.dumps({"question": prompt.question, "turn": prompt.turn, "prompt_ids": prompt.ids, "ids": answer.tokens})
        for prompt, answer in zip(answered.prompts, answered.answers, strict=True)
    )
    with disk_errors(path):
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    return path


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier run without speculation.

    Attributes:
        path: of its evaluation.
        evaluation: it.
        asked: its prompts.
        answers: their answers' tokens, in the same order.
    """

    path: Path
    evaluation: Evaluation
    asked: tuple[Prompt, ...]
    answers: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """From its files.

        Raises:
            ConfigError: no such evaluation, or one of another kind. IntegrityError: a file is damaged.
        """
        raw = read_evaluation(path)
        if raw.get("mode") != "live" or raw.get("depth") != 0:
            hint = "a URL, or the file that a run with --baseline-server URL left: evaluation-*-live-d0.json"
            raise ConfigError("not an evaluation of a server without speculation", path, hint)
        answers = _answers_of(path)
        try:
            evaluation = _evaluation(raw)
            lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
            asked = tuple(Prompt(line["question"], line["turn"], tuple(line["prompt_ids"])) for line in lines)
            return cls(path, evaluation, asked, tuple(tuple(line["ids"]) for line in lines))
        except FileNotFoundError as error:
            raise ConfigError("the answers of this evaluation are gone", answers, "they belong beside it") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError("the evaluation or its answers cannot be read", path, str(error)) from error

    def check(self, wanted: Evaluation) -> None:
        """Raises ConfigError unless what is `wanted` without speculation is this."""
        mine = self.evaluation
        differing = [
            f"{name} {getattr(mine, name)} and {getattr(wanted, name)}"
            for name in _SAME
            if getattr(mine, name) != getattr(wanted, name)
        ]
        for name, key in (("version", wanted.engine), ("model", "model")):
            if (theirs := mine.versions.get(key)) != (ours := wanted.versions.get(key)):
                differing.append(f"{name} {theirs or 'unknown'} and {ours or 'unknown'}")
        if differing:
            hint = "measure both with the same questions, limit and sampling"
            raise ConfigError(f"the runs cannot be compared: {'; '.join(differing)}", self.path, hint)

    def prompts(self, questions: Sequence[Question], conversations: Conversations) -> tuple[Prompt, ...]:
        """The prompts, if they are those that are made here and now.

        Raises:
            ConfigError: the target's template or tokenizer makes others.
        """
        by_question: dict[int, list[tuple[Prompt, tuple[int, ...]]]] = {}
        for prompt, answer in zip(self.asked, self.answers, strict=True):
            by_question.setdefault(prompt.question, []).append((prompt, answer))
        made: list[Prompt] = []
        for number, question in enumerate(questions):
            talk = conversations.begin(number, question)
            for _, answer in by_question.get(number, ()):
                if talk.prompt is None:
                    break
                made.append(talk.prompt)
                talk.answer(answer)
        if tuple(made) != self.asked:
            hint = "another template, tokenizer or context length; measure both anew"
            raise ConfigError("the runs cannot be compared: their prompts' tokens differ", self.path, hint)
        return self.asked


def _answers_of(evaluation: Path) -> Path:
    return evaluation.with_suffix(_ANSWERS)


def _evaluation(raw: dict[str, Any]) -> Evaluation:
    names = {field.name for field in fields(Evaluation)}
    known = {field.name for field in fields(Result)}
    results = tuple(Result(**{key: value for key, value in one.items() if key in known}) for one in raw["results"])
    return Evaluation(**{**{key: value for key, value in raw.items() if key in names}, "results": results})
