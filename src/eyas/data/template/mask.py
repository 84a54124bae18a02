"""Which text of a conversation its target would emit. Pure but for the template it is handed.

For an assistant message i, with P the rendering of the messages before it and the generation prompt, and A the
rendering of the messages up to and including it: when A starts with P, the target emits A[len(P):] up to and including
the first end-of-turn token, where a server stops. (What the template writes after it, often a newline, is never
emitted.) The turn can be trained in a row whose text starts with P and that emission. Where the text of a later row
does not, the template has rewritten the turn: Qwen3 strips earlier thoughts.

Stated rules: turns after the last answer are cut; an answer before the first user turn (a greeting) and a blank answer
are context; a conversation ends at an answer that was cut by a token limit, and that has no end token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from eyas.data.rows import Chat, DropReason, Message, Preformatted, Tool
from eyas.data.template.rendering import TEMPLATE_ERRORS, Renderer
from eyas.data.template.repairs import forms, readable, repairs, thought_of
from eyas.data.template.tools import calls_fault, results_fault, tools_fault

#: Part of every template hash: another number where the same text would get other ids or another mask.
RULES_VERSION: Final = 1

#: Notes: what was changed in a row that was kept, or what of it is not trained.
LAST_TURN_CUT: Final = "last-user-turn-cut"
UNFINISHED_CUT: Final = "cut-after-unfinished-answer"
REWRITTEN: Final = "earlier-turn-rewritten"
THOUGHT_LOST: Final = "reasoning-not-rendered"

REWRITTEN_TURNS: Final = ("context", "split", "drop")


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why there is no row."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Segments:
    """A row's text in parts that are tokenised each by itself: no token straddles the start of an emission.

    Attributes:
        texts: the parts; none is empty.
        trained: of each part, whether its tokens are trained, up to and including the first end-of-turn token.
        notes: what was changed.
    """

    texts: list[str]
    trained: list[bool]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation up to its last answer; `broke_off` is the field in which that ended, if a token limit cut it."""

    messages: list[Message]
    tools: list[Tool] | None
    broke_off: str | None


@dataclass(frozen=True, slots=True)
class _Emission:
    """A turn as its target would emit it: `text[start:stop]`; `ended` when an end-of-turn token closes it."""

    message: Message
    text: str
    start: int
    stop: int
    ended: bool

    @property
    def value(self) -> str:
        return self.text[self.start : self.stop]

    def is_in(self, text: str) -> bool:
        return text is self.text or text.startswith(self.text[: self.stop])


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer: the conversation's text up to and including it, and what its target emitted, where that shows."""

    message: Message
    text: str
    emission: _Emission | None


class Masker:
    """The rules, for one template.

    Args:
        renderer: the template.
        ends: texts of the end-of-turn tokens.
        tokens: texts of all added tokens; where one of them overlaps the text of an end token, it hides it.
        rewritten_turns: `context`, `split` or `drop`, see `PrepareConfig`.
        empty_prompt: `keep` or `drop`.
    """

    def __init__(
        self, renderer: Renderer, ends: Iterable[str], tokens: Iterable[str], rewritten_turns: str, empty_prompt: str
    ) -> None:
        self._renderer, self._rewritten_turns, self._empty_prompt = renderer, rewritten_turns, empty_prompt
        self._ends = frozenset(ends)
        hiding = {token for token in tokens if any(_overlap(token, end) for end in self._ends)}
        literals = sorted(self._ends | hiding, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, literals)) or "(?!)")

    def chat(self, row: Chat) -> list[Segments] | Rejected:
        """The rows of a conversation."""
        if not any(message["role"] == "assistant" for message in row.messages):
            return Rejected(DropReason.PROMPT_ONLY)
        given, notes = _until_unfinished(row.messages)
        messages = [readable(message, self._renderer.reasoning_field) for message in given]
        answers = _answers(messages)
        if not answers:
            roles = [message["role"] for message in messages]
            followed = "user" in roles and "assistant" in roles[roles.index("user") :]
            blank = DropReason.EMPTY_ANSWER, "every answer is blank"
            return Rejected(*(blank if followed else (DropReason.NOTHING_TO_LEARN, "no answer follows a user turn")))
        stop = answers[-1] + 1
        asked = [message["content"] for message in messages[:stop] if message["role"] == "user"]
        if self._empty_prompt == "drop" and not all(map(str.strip, asked)):
            return Rejected(DropReason.EMPTY_PROMPT)
        if stop < len(messages):
            notes = (*notes, LAST_TURN_CUT)
        last = given[stop - 1]
        field = "content" if last.get("content") else self._renderer.reasoning_field or "content"
        broke_off = field if last.get("finish_reason") == "length" else None
        return self._first_that_renders(_Talk(messages[:stop], row.tools, broke_off), notes)

    def preformatted(self, row: Preformatted) -> list[Segments] | Rejected:
        """The row of a text in the template's own format: trained is what follows each assistant header."""
        header, text = self._renderer.header, row.text
        if not header.strip() or header not in text:
            return Rejected(DropReason.OTHER_TEMPLATE, f"expected the assistant header {header!r}")
        emissions: list[_Emission] = []
        place, nobody = 0, {"role": "assistant"}
        while (found := text.find(header, place)) >= 0:
            start = found + len(header)
            body, place = self._end(text, start)
            if text[start:body].strip():
                emissions.append(_Emission(nobody, text, start, place, body < place))
        if not emissions:
            blank = text[text.rindex(header) + len(header) :].strip()
            return Rejected(DropReason.EMPTY_ANSWER if blank else DropReason.PROMPT_ONLY)
        return [_segments(text, emissions, ())]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _first_that_renders(self, talk: _Talk, notes: tuple[str, ...]) -> list[Segments] | Rejected:
        failure: Rejected | None = None
        for messages, changes in _attempts(talk.messages):
            if changes and failure and failure.reason is not DropReason.TEMPLATE_ERROR:
                break  # it renders, but not the calls: other forms may help there, repairs do not
            result = self._rendered(replace(talk, messages=messages), (*notes, *changes))
            if not isinstance(result, Rejected) or result.reason not in _WORTH_ANOTHER_FORM:
                return result
            if failure is None or failure.reason is DropReason.TEMPLATE_ERROR is not result.reason:
                failure = result
        assert failure is not None
        return failure

    def _rendered(self, talk: _Talk, notes: tuple[str, ...]) -> list[Segments] | Rejected:
        try:
            turns = self._turns(talk)
        except TEMPLATE_ERRORS as error:
            return Rejected(DropReason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}")
        return _tool_fault(talk, turns, self._bare_prompt(talk)) or self._rows(turns, notes)

    def _bare_prompt(self, talk: _Talk) -> str:
        """The prompt of the first answer without the tools; empty without tools, or where the template wants them."""
        with suppress(*TEMPLATE_ERRORS):
            return self._renderer.prompt(talk.messages[: _answers(talk.messages)[0] + 1]) if talk.tools else ""
        return ""

    def _turns(self, talk: _Talk) -> list[_Turn]:
        """The answers, in order; the last one's text is the whole conversation's."""
        *earlier, last = _answers(talk.messages)
        final = self._turn(talk, last, broke_off=talk.broke_off)
        whole = None if self._rewritten_turns == "split" else final.text
        return [*(self._turn(talk, i, within=whole) for i in earlier), final]

    def _turn(self, talk: _Talk, i: int, *, broke_off: str | None = None, within: str | None = None) -> _Turn:
        messages, message = talk.messages[: i + 1], talk.messages[i]
        prompt = self._renderer.prompt(messages, talk.tools)
        if within is not None and not within.startswith(prompt):
            return _Turn(message, within, None)  # not trained there whatever the answer's own rendering is
        text = self._renderer.render(messages, talk.tools, generation_prompt=False)
        if not text.startswith(prompt):
            reopened = _reopened(message, prompt, text)
            if reopened is None:
                return _Turn(message, text, None)
            text = reopened
        body, stop = self._end(text, len(prompt))
        ended = body < stop
        if broke_off:
            text = text[: self._end_of_words(talk, broke_off, text, body)]
            stop = min(stop, len(text))
            ended = body < stop
        emission = _Emission(message, text, len(prompt), stop, ended) if stop > len(prompt) else None
        return _Turn(message, text, emission)

    def _rows(self, turns: list[_Turn], notes: tuple[str, ...]) -> list[Segments] | Rejected:
        remaining = [turn.emission for turn in turns if turn.emission]
        text = turns[-1].text
        rows: list[tuple[str, list[_Emission]]] = []
        while remaining:
            trained = _in_order(emission for emission in remaining if emission.is_in(text))
            if trained:
                rows.append((text, trained))
                remaining = [emission for emission in remaining if emission not in trained]
            if self._rewritten_turns != "split" or not remaining:
                break
            text = remaining[-1].text  # the latest answer left: its row holds most of what came before
        untrained = len(turns) - sum(len(trained) for _, trained in rows)
        if not rows or (untrained and self._rewritten_turns == "drop"):
            return Rejected(DropReason.REWRITES_HISTORY, f"{untrained} of {len(turns)} answers")
        segments = [_segments(text, trained, _lost(trained)) for text, trained in reversed(rows)]
        segments[-1] = replace(segments[-1], notes=(*notes, *((REWRITTEN,) if untrained else ()), *segments[-1].notes))
        return segments

    def _end_of_words(self, talk: _Talk, field: str, text: str, body: int) -> int:
        """Where the last answer, an unfinished one, ends: after its words, before what the template closes it with."""
        *earlier, message = talk.messages
        if message.get("tool_calls"):
            return body
        going_on = {**message, field: f"{message.get(field) or ''}{_MORE}"}
        other = self._renderer.render([*earlier, going_on], talk.tools, generation_prompt=False)
        pairs = zip(text, other, strict=False)
        return next((place for place, (one, two) in enumerate(pairs) if one != two), len(text))

    def _end(self, text: str, start: int) -> tuple[int, int]:
        """Where the first end-of-turn token after `start` begins and ends; the text's length twice without one."""
        for control in self._controls.finditer(text, start):
            if control[0] in self._ends:
                return control.span()
        return len(text), len(text)


#: A character that no template writes: where the words of an answer go on, its rendering does.
_MORE: Final = "\ue000"

_WORTH_ANOTHER_FORM: Final = (DropReason.TEMPLATE_ERROR, DropReason.TOOLS, DropReason.BAD_TOOLS)


def _until_unfinished(messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Up to the first answer that a token limit cut, where others follow it."""
    for i, message in enumerate(messages):
        if message.get("finish_reason") == "length":
            followed = any(later["role"] == "assistant" for later in messages[i + 1 :])
            return (messages[: i + 1], (UNFINISHED_CUT,)) if followed else (messages, ())
    return messages, ()


def _answers(messages: Sequence[Message]) -> list[int]:
    """Assistant messages that follow a user turn and are not blank."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [
        i
        for i in range(first + 1, len(messages))
        if messages[i]["role"] == "assistant"
        and ((messages[i]["content"] or "").strip() or messages[i].get("tool_calls") or thought_of(messages[i]))
    ]


def _attempts(messages: list[Message]) -> Iterator[tuple[list[Message], tuple[str, ...]]]:
    yield messages, ()
    for other in forms(messages):
        yield other, ()
    for repaired, notes in repairs(messages):
        yield repaired, notes
        for other in forms(repaired):
            yield other, notes


def _tool_fault(talk: _Talk, turns: list[_Turn], bare: str) -> Rejected | None:
    first, last = turns[0], turns[-1]
    prompt = first.text[: first.emission.start] if first.emission else first.text
    fault = tools_fault(talk.tools, prompt, bare) or results_fault(talk.messages, last.text)
    for turn in turns:
        emission = turn.emission
        said, rendered = (emission.value, turn.text[emission.start :]) if emission else (turn.text, turn.text)
        fault = fault or calls_fault(turn.message, said, rendered)
    for message in talk.messages[: next(i for i, m in enumerate(talk.messages) if m is first.message)]:
        fault = fault or calls_fault(message, last.text, last.text)  # a greeting
    return Rejected(*fault) if fault else None


def _reopened(message: Message, prompt: str, text: str) -> str | None:
    """The text of an answer whose thought the prompt opens and the rendering drops (DeepSeek-R1, QwQ).

    After a prompt that ends in `<think>` the target emits the thought, closes it, and gives the answer: which the
    template renders, without the thought, in place of that tag.
    """
    opened = _OPEN_THOUGHT.search(prompt)
    thought = thought_of(message)
    if not opened or not thought or not text.startswith(prompt[: opened.start()]):
        return None
    answer = text[opened.start() :].lstrip("\n")
    return None if thought in answer else f"{prompt}{thought}\n</think>\n\n{answer}"


_OPEN_THOUGHT: Final = re.compile(r"<think>\s*$")


def _in_order(emissions: Iterable[_Emission]) -> list[_Emission]:
    """Without those that start before the one before them has ended, as a rewritten prompt may."""
    kept: list[_Emission] = []
    for emission in emissions:
        if not kept or kept[-1].stop <= emission.start:
            kept.append(emission)
    return kept


def _lost(emissions: list[_Emission]) -> tuple[str, ...]:
    """The note on thoughts that are not in what is trained."""
    return (THOUGHT_LOST,) if any(thought_of(one.message) not in one.value for one in emissions) else ()


def _segments(text: str, emissions: list[_Emission], notes: tuple[str, ...]) -> Segments:
    """Cut at the start of each emission, and at the end of one that no end-of-turn token closes: what follows an end
    token is tokenised with it, as a server tokenises the whole prompt."""
    parts: list[tuple[str, bool]] = []
    place = 0
    for emission, after in zip(emissions, [*(one.start for one in emissions[1:]), len(text)], strict=True):
        stop = after if emission.ended else emission.stop
        parts += [(text[place : emission.start], False), (text[emission.start : stop], True)]
        place = stop
    parts.append((text[place:], False))
    parts = [part for part in parts if part[0]]
    return Segments([part for part, _ in parts], [trained for _, trained in parts], notes)


def _overlap(token: str, end: str) -> bool:
    """Whether matching `token` in a text may hide an occurrence of `end`."""
    if token == end:
        return False
    return end in token or any(token.endswith(end[:size]) for size in range(1, min(len(token), len(end))))
