"""Having a server answer prompts, one or several at a time, and what that takes: pass after pass over the same prompts.

The first pass asks one prompt at a time and makes the prompts as it goes: a later turn is asked with the answers before
it. Every later pass, of this server or another one, asks those very prompts.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Final

from eyas.errors import ConfigError
from eyas.evaluate.conversation import Conversations, Prompt
from eyas.evaluate.counters import Cycles
from eyas.evaluate.questions import Question
from eyas.evaluate.served import Answer, Asking, ServedModel

_WARM_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts, answered.

    Attributes:
        concurrency: requests at a time.
        prompts, answers: in the same order.
        cycles: of each answer; empty where only their sum is known.
        total: of all answers; None without speculation.
        seconds: waiting for answers.
    """

    concurrency: int
    prompts: tuple[Prompt, ...]
    answers: tuple[Answer, ...]
    cycles: tuple[Cycles, ...]
    total: Cycles | None
    seconds: float

    @property
    def tokens(self) -> int:
        """Of the answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of the answers, prefill included."""
        return self.tokens / self.seconds

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token, in milliseconds."""
        return 1000 * statistics.median(answer.first_s for answer in self.answers)

    def of(self, chosen: Callable[[Prompt], bool]) -> Pass:
        """Some of the prompts. Only where one is asked at a time are times theirs alone."""
        kept = [n for n, prompt in enumerate(self.prompts) if chosen(prompt)]
        cycles = tuple(self.cycles[n] for n in kept) if self.cycles else ()
        answers = tuple(self.answers[n] for n in kept)
        return Pass(
            self.concurrency,
            tuple(self.prompts[n] for n in kept),
            answers,
            cycles,
            Cycles.total(cycles),
            sum(answer.seconds for answer in answers),
        )


@dataclass
class Asker:
    """Asks one server.

    Args:
        server: it.
        asking: how answers are sampled.
        tick: called with the number of answers, of prompts, and those at a time.
    """

    server: ServedModel
    asking: Asking
    tick: Callable[[int, int, int], None] = lambda *_: None
    _salt: str = field(default_factory=lambda: secrets.token_hex(8))
    _asked: int = 0

    async def converse(self, questions: Sequence[Question], conversations: Conversations) -> Pass:
        """One prompt at a time, later turns with the answers before them."""
        found: list[tuple[Prompt, Answer, Cycles | None]] = []
        firsts = (conversations.begin(number, question).prompt for number, question in enumerate(questions))
        first = next((prompt for prompt in firsts if prompt is not None), None)
        await self._warm_up([first] if first else [], 1)
        for number, question in enumerate(questions):
            talk = conversations.begin(number, question)
            while (prompt := talk.prompt) is not None:
                answer, cycles = await self._alone(prompt)
                found.append((prompt, answer, cycles))
                self.tick(number + (prompt.turn + 1) // len(question.turns), len(questions), 1)
                talk.answer(answer.tokens)
        if not found:
            raise ConfigError("no prompt fits the server", self.server.where, "; ".join(conversations.left_out[:3]))
        return _alone_pass(found)

    async def ask(self, prompts: Sequence[Prompt], concurrency: int) -> Pass:
        """Prompts that are known, so many at a time."""
        await self._warm_up(prompts, concurrency)
        if concurrency == 1:
            found: list[tuple[Prompt, Answer, Cycles | None]] = []
            for number, prompt in enumerate(prompts, 1):
                found.append((prompt, *await self._alone(prompt)))
                self.tick(number, len(prompts), 1)
            return _alone_pass(found)
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(prompts))
        loop = asyncio.get_running_loop()

        async def work() -> None:
            for number, prompt in waiting:
                answers[number] = await self._answer(prompt, self.asking)
                self.tick(len(answers), len(prompts), concurrency)

        began = loop.time()
        await _together(work() for _ in range(concurrency))
        seconds = loop.time() - began
        ordered = [answers[number] for number in range(len(prompts))]
        total = await self.server.settle(ordered, sum(len(prompt.ids) for prompt in prompts))
        told = [answer.cycles or (_none(total) if len(answer.tokens) == 1 else None) for answer in ordered]
        cycles = tuple(one for one in told if one is not None)
        whole = total is not None and len(cycles) == len(ordered)
        return Pass(concurrency, tuple(prompts), tuple(ordered), cycles if whole else (), total, seconds)

    async def _alone(self, prompt: Prompt) -> tuple[Answer, Cycles | None]:
        answer = await self._answer(prompt, self.asking)
        return answer, await self.server.settle([answer], len(prompt.ids))

    async def _answer(self, prompt: Prompt, asking: Asking) -> Answer:
        self._asked += 1
        seeded = replace(asking, seed=asking.seed * 1_000_003 + prompt.question * 101 + prompt.turn)
        return await self.server.answer(prompt.ids, seeded, f"{self._salt}-{self._asked}")

    async def _warm_up(self, prompts: Sequence[Prompt], concurrency: int) -> None:
        """What a server does once, it does now: kernels are compiled, graphs recorded. Nothing of it is counted.

        Raises:
            EngineError: as of any answer; others use the server.
        """
        if self._asked == 0:
            await self.server.begin()
        short = replace(self.asking, max_new_tokens=min(_WARM_TOKENS, self.asking.max_new_tokens))
        asked = list(islice(cycle(prompts), concurrency))
        answers: list[Answer] = []

        async def work(prompt: Prompt) -> None:
            answers.append(await self._answer(prompt, short))

        await _together(work(prompt) for prompt in asked)
        # Counters may lag behind: were they not waited for, these requests would look like those of others.
        await self.server.settle(answers, sum(len(prompt.ids) for prompt in asked))


async def _together(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """All at once; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _alone_pass(found: Sequence[tuple[Prompt, Answer, Cycles | None]]) -> Pass:
    prompts, answers, cycles = zip(*found, strict=True)
    counted = tuple(one for one in cycles if one is not None)
    return Pass(1, prompts, answers, counted, Cycles.total(counted), sum(answer.seconds for answer in answers))


def _none(like: Cycles | None) -> Cycles | None:
    """No cycles, of the same depth."""
    return None if like is None else Cycles((0,) * len(like.reached), (0,) * len(like.right))
