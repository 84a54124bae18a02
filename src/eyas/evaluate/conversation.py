"""Questions as prompts: each turn is asked with the answers before it, by the target's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.data.template import Template
from eyas.errors import ConfigError
from eyas.evaluate.questions import Question


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked.

    Attributes:
        question: its number.
        turn: of the question, from 0.
        ids: tokens.
    """

    question: int
    turn: int
    ids: tuple[int, ...]


@dataclass
class Conversations:
    """Makes prompts of questions.

    Args:
        template: of the target.
        room: most tokens of a prompt; None is no limit.
        limit: whose limit that is, for people.

    Attributes:
        left_out: what was not asked, in words.
    """

    template: Template
    room: int | None
    limit: str = "the server admits"
    left_out: list[str] = field(default_factory=list)

    def begin(self, number: int, question: Question) -> Conversation:
        """The conversation of a question, whose number its prompts bear.

        Raises:
            ConfigError: the chat template refuses the conversation; later prompts likewise.
        """
        return Conversation(self, number, question)


class Conversation:
    """The prompts of one question, one after the other.

    Attributes:
        prompt: what is asked now; None behind the last turn, or where no further one fits.
    """

    def __init__(self, made_by: Conversations, number: int, question: Question) -> None:
        self._made_by, self._number, self._question = made_by, number, question
        self._messages: list[dict[str, Any]] = []
        self.prompt = self._next(0)

    def answer(self, tokens: Sequence[int]) -> None:
        """Go on with the answer to `prompt`; an end token at its end is not repeated."""
        assert self.prompt is not None
        template = self._made_by.template
        said = list(tokens[:-1] if tokens[-1] in template.end_ids else tokens)
        self._messages.append({"role": "assistant", "content": template.decode(said)})
        self.prompt = self._next(self.prompt.turn + 1)

    def _next(self, turn: int) -> Prompt | None:
        if turn == len(self._question.turns):
            return None
        made_by, name = self._made_by, f"question {self._question.id}"
        self._messages.append({"role": "user", "content": self._question.turns[turn]})
        try:
            ids = tuple(made_by.template.prompt_ids(self._messages))
        except Exception as error:  # a template may raise whatever it likes
            raise ConfigError("the chat template refuses a question", name, str(error)) from error
        if made_by.room is None or len(ids) <= made_by.room:
            return Prompt(self._number, turn, ids)
        missed = f"{name} from turn {turn + 1} on is longer than {made_by.limit}"
        if missed not in made_by.left_out:
            made_by.left_out.append(missed)
        return None
