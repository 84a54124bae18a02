"""A server of the target that answers prompts of token ids and counts its drafts: what both engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, Final

from eyas.errors import EngineError
from eyas.evaluate.counters import Cycles
from eyas.evaluate.http import Http

SETTLE_S: Final = 10.0  # longest wait for counters that lag behind replies
POLL_S: Final = 0.02
BUSY: Final = "counts and times of a server that others use are not the drafter's; wait, or use a server of your own"
NO_DRAFTS: Final = {
    "sglang": "start it with --speculative-algorithm EAGLE3 and --speculative-draft-model-path",
    "vllm": "start it with --speculative-config",
}


@dataclass(frozen=True, slots=True)
class Asking:
    """How answers are sampled, in the words of both engines.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: longest answer.
        ends: tokens that end it.
        seed: of sampling, where the engine takes one a request.
    """

    temperature: float
    max_new_tokens: int
    ends: tuple[int, ...]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        tokens: its ids, the end token included.
        first_s: from sending the prompt to the first token.
        seconds: to the last.
        cycles: that the reply told of; None where it told of none.
    """

    tokens: tuple[int, ...]
    first_s: float
    seconds: float
    cycles: Cycles | None = None


class ServedModel(ABC):
    """A server.

    Attributes:
        engine: sglang or vllm.
        where: its URL, to be shown.
        version: of the engine.
        model: what it serves, a folder or hub id as the server names it.
        longest: most tokens of prompt and answer.
        draft: the drafter as the server names it; "" where it tells of none.
        depth: steps drafted in a cycle; 0 where it does not speculate.
        topk, draft_tokens: branches of a step; most tokens verified in a cycle, root not counted.
    """

    engine: ClassVar[str]

    def __init__(self, http: Http) -> None:
        self._http = http
        self.where = http.where
        self.version = self.model = self.draft = ""
        self.longest: int | None = None
        self.depth = self.draft_tokens = 0
        self.topk = 1

    @property
    def name(self) -> str:
        """Of the model, without the folders before it."""
        return PurePath(self.model).name

    @abstractmethod
    async def identify(self, card: Mapping[str, Any]) -> None:
        """Fill in the attributes; `card` is the model's at /v1/models.

        Raises:
            EngineError: the server does not tell what is needed.
        """

    @abstractmethod
    async def answer(self, prompt: Sequence[int], asking: Asking, salt: str) -> Answer:
        """Have a prompt answered. Prompts of other salts share no cache with it.

        Raises:
            EngineError: no answer, or one that cannot be right.
        """

    @abstractmethod
    async def begin(self) -> None:
        """What is counted from now on is ours.

        Raises:
            EngineError: others use the server, or it does not count.
        """

    @abstractmethod
    async def settle(self, answers: Sequence[Answer], prompted: int) -> Cycles | None:
        """The cycles of all answers since `begin`, or the last `settle`; None of a server that does not speculate.

        Args:
            answers: all of them.
            prompted: tokens of their prompts.

        Raises:
            EngineError: counters are missing, or do not fit the answers: others used the server.
        """

    async def close(self) -> None:
        await self._http.close()

    def _told(self, answers: Sequence[Answer]) -> Cycles | None:
        """The cycles of which the replies themselves told; None where one of them did not."""
        if any(answer.cycles is None and len(answer.tokens) > 1 for answer in answers):
            return None
        try:
            found = Cycles.total(answer.cycles for answer in answers if answer.cycles is not None)
        except ValueError as error:
            raise EngineError("the server drafted to several depths", self.where, "let it draft to one") from error
        return found or Cycles((0,) * self.depth, (0,) * self.depth)

    def _fitting(self, cycles: Cycles, answers: Sequence[Answer]) -> Cycles:
        """Raises EngineError where so many answers cannot have come of these cycles."""
        tokens = sum(len(answer.tokens) for answer in answers)
        if not cycles.number and tokens > len(answers):
            raise EngineError("the server counts no drafts", self.where, NO_DRAFTS[self.engine])
        if not cycles.fit(len(answers), tokens):
            what = f"{cycles.number:,} cycles with {cycles.accepted:,} drafts accepted cannot give {tokens:,} tokens"
            raise EngineError(what, self.where, f"in {len(answers):,} answers; {BUSY}")
        return cycles


def make_answer(
    tokens: list[int],
    counted: Any,
    times: list[float],
    began: float,
    cycles: Cycles | None,
    where: str,
    asking: Asking,
) -> Answer:
    """The answer, once its last piece has come.

    Raises:
        EngineError: it is not whole.
    """
    if not tokens or not all(type(token) is int for token in tokens):
        raise EngineError("the server gave an empty answer", where)
    if counted != len(tokens) or len(tokens) > asking.max_new_tokens:
        what = f"the server counts {counted} tokens of an answer, and sent {len(tokens)}"
        raise EngineError(what, where, f"at most {asking.max_new_tokens} were asked for")
    return Answer(tuple(tokens), times[0] - began, times[-1] - began, cycles)


def whole(value: Any) -> int | None:
    """A whole number that a server tells, or None."""
    return value if type(value) is int else None
