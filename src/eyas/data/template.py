"""Messages -> token ids and loss mask, by the target's own tokenizer and chat template.

The assistant's tokens are found by rendering prefixes, never by searching the text: for an assistant message i,

    ids(messages[:i] + generation prompt)  is a prefix of  ids(messages[:i + 1])  is a prefix of  ids(messages)

and what lies between the first two is what the target would have generated. It is trained up to and including its
last end-of-turn token; what the template writes after that (often a newline) the target never generates. Comparing
token ids works for every tokenizer, those without character offsets too.

Stated rules: a trailing user turn is cut; an answer before the first user turn (a greeting) and a blank answer are
context, not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from eyas.data.rows import Chat, DropReason, Message, Preformatted, Sampled
from eyas.errors import ConfigError
from eyas.positions import loss_positions

#: What a template, which is a program of someone else's, may raise on messages it does not like.
_TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

#: Notes: what was changed in a row that was kept.
LAST_TURN_CUT: Final = "last-user-turn-cut"
CUT_AT_LIMIT: Final = "cut-at-max-tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One row of a corpus.

    Attributes:
        tokens: int32 [T] token ids.
        loss_mask: uint8 [T], 1 where the token is trained.
        notes: what was changed in it.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why there is no row."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Text up to where the assistant starts, and up to the end of its message."""

    prompt: str
    answered: str


@dataclass(frozen=True, slots=True)
class _Plan:
    turns: list[_Turn]
    text: str
    notes: tuple[str, ...]


class Template:
    """A target's tokenizer and chat template.

    Args:
        tokenizer: with a chat template.
        model: name or folder, for messages and metadata.
        end_ids: ids that end a turn; the tokenizer's own is added.
        vocab_size: of the target; the tokenizer's length when not given.
        options: passed to the chat template at every rendering, e.g. `{"enable_thinking": False}`.

    Raises:
        ConfigError: no chat template, or one that does not say where the assistant's answer starts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        *,
        end_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        rewritten_turns: str = "context",
        empty_prompt: str = "keep",
    ) -> None:
        self.rewritten_turns, self.empty_prompt = rewritten_turns, empty_prompt
        self.tokenizer, self.model, self.options = tokenizer, model, dict(options or {})
        own = tokenizer.eos_token_id
        self.end_ids = frozenset(end_ids) | ({own} if isinstance(own, int) else set())
        self.vocab_size = vocab_size or len(tokenizer)
        if not tokenizer.chat_template:
            raise ConfigError("the model has no chat template", model, "use its instruct version")
        self.tokenizer_hash = _tokenizer_hash(tokenizer)
        self.template_hash = _digest([tokenizer.get_chat_template(), self.options])
        self._require_generation_prompt()

    @classmethod
    def load(
        cls,
        model: str,
        *,
        trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None,
        rewritten_turns: str = "context",
        empty_prompt: str = "keep",
    ) -> Template:
        """The tokenizer and template of a local folder or a Hugging Face model id.

        Raises:
            ConfigError: it cannot be loaded, or as for the constructor.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
            config: dict[str, Any] = PreTrainedConfig.get_config_dict(model)[0]
        except Exception as error:  # a broken tokenizer file raises just that
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError("cannot load the tokenizer", model, reason[0]) from error
        try:
            generation = GenerationConfig.from_pretrained(model).to_dict()
        except (OSError, ValueError):  # optional: many models come without one
            generation = {}
        inner = config.get("text_config") or {}
        return cls(
            cast(PreTrainedTokenizerBase, tokenizer),
            model,
            end_ids=_eos_ids(generation, config, inner),
            vocab_size=config.get("vocab_size") or inner.get("vocab_size"),
            options=options,
            rewritten_turns=rewritten_turns,
            empty_prompt=empty_prompt,
        )

    def encode(self, row: Chat | Preformatted | Sampled) -> tuple[Encoded, ...] | Rejected:
        """Token ids and loss mask of one row."""
        return self.encode_batch([row])[0]

    def encode_batch(self, rows: Sequence[Chat | Preformatted | Sampled]) -> list[tuple[Encoded, ...] | Rejected]:
        """As `encode`, for many at once: each distinct text is tokenised once, all in one call."""
        plans = [self._plan(row.messages) if isinstance(row, Chat) else row for row in rows]
        texts = {text for plan in plans if isinstance(plan, _Plan) for text in _texts(plan)}
        ids = self._tokenize(sorted(texts))
        return [self._finish(plan, ids) for plan in plans]

    def _finish(
        self, plan: _Plan | Rejected | Preformatted | Sampled, ids: Mapping[str, list[int]]
    ) -> tuple[Encoded, ...] | Rejected:
        match plan:
            case Rejected():
                return plan
            case Preformatted():
                return Rejected(DropReason.OTHER_TEMPLATE)
            case Sampled():
                result = self._sampled(plan)
            case _Plan():
                result = self._mask(plan, ids)
        return (result,) if isinstance(result, Encoded) else result

    def _sampled(self, row: Sampled) -> Encoded | Rejected:
        """Ids as the target sampled them: the whole answer is trained, its end token only if it was emitted."""
        if row.tokenizer_hash not in ("", self.tokenizer_hash):
            return Rejected(DropReason.OTHER_TOKENIZER, f"made with tokenizer {row.tokenizer_hash}")
        if not row.answer_ids:
            return Rejected(DropReason.EMPTY_ANSWER)
        mask = [0] * len(row.prompt_ids) + [1] * len(row.answer_ids)
        return self._checked(row.prompt_ids + row.answer_ids, mask, ())

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The chat template's text. Raises whatever the template raises."""
        text = self.tokenizer.apply_chat_template(
            cast(Any, list(messages)), tokenize=False, add_generation_prompt=generation_prompt, **self.options
        )
        return cast(str, text)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages and the generation prompt: what a server is sent for an answer."""
        text = self.render(messages, generation_prompt=True)
        return self._tokenize([text])[text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _plan(self, messages: list[Message]) -> _Plan | Rejected:
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            return Rejected(DropReason.PROMPT_ONLY)
        stop = len(roles) - roles[::-1].index("assistant")
        notes = (LAST_TURN_CUT,) if stop < len(roles) else ()
        answers = [i for i in range(stop) if roles[i] == "assistant" and "user" in roles[:i]]
        trained = [
            i for i in answers if any(messages[i].get(key, "").strip() for key in ("content", "reasoning_content"))
        ]
        if not trained:
            blank = DropReason.EMPTY_ANSWER, "every answer is blank"
            return Rejected(*(blank if answers else (DropReason.NOTHING_TO_LEARN, "no answer follows a user turn")))
        try:
            turns = [
                _Turn(
                    self.render(messages[:i], generation_prompt=True),
                    self.render(messages[: i + 1], generation_prompt=False),
                )
                for i in trained
            ]
            text = self.render(messages[:stop], generation_prompt=False)
        except _TEMPLATE_ERRORS as error:
            return Rejected(DropReason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}")
        return _Plan(turns, text, notes)

    def _tokenize(self, texts: list[str]) -> dict[str, list[int]]:
        if not texts:
            return {}
        # Templates write the BOS themselves.
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
        return dict(zip(texts, cast(list[list[int]], ids), strict=True))

    def _mask(self, plan: _Plan, ids: Mapping[str, list[int]]) -> Encoded | Rejected:
        tokens = ids[plan.text]
        mask = [0] * len(tokens)
        for turn in plan.turns:
            prompt, answered = ids[turn.prompt], ids[turn.answered]
            if tokens[: len(answered)] != answered or answered[: len(prompt)] != prompt:
                whole = plan.text.startswith(turn.answered) and turn.answered.startswith(turn.prompt)
                return Rejected(DropReason.TOKEN_STRADDLES if whole else DropReason.REWRITES_HISTORY)
            ends = [i for i in range(len(prompt), len(answered)) if answered[i] in self.end_ids]
            stop = ends[-1] + 1 if ends else len(answered)
            mask[len(prompt) : stop] = [1] * (stop - len(prompt))
        return self._checked(tokens, mask, plan.notes)

    def _checked(self, tokens: list[int], mask: list[int], notes: tuple[str, ...]) -> Encoded | Rejected:
        outside = [token for token in tokens if not 0 <= token < self.vocab_size]
        if outside:
            return Rejected(DropReason.BAD_TOKENS, f"token {outside[0]} is outside the vocabulary of {self.vocab_size}")
        if not len(loss_positions(mask)):
            return Rejected(DropReason.NOTHING_TO_LEARN)
        return Encoded(np.asarray(tokens, np.int32), np.asarray(mask, np.uint8), notes)

    def _require_generation_prompt(self) -> None:
        """A template that ignores `add_generation_prompt` would have its assistant header trained."""
        user = {"role": "user", "content": "Hi"}
        answers = [[user, {"role": "assistant", "content": text}] for text in ("One", "Two")]
        try:
            prompt = self.render([user], generation_prompt=True)
            silent = prompt == self.render([user], generation_prompt=False)
            first, second = (self.render(answer, generation_prompt=False) for answer in answers)
        except _TEMPLATE_ERRORS:
            return  # it wants other messages than these: rows it fails on are dropped by name
        shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        if silent and shared.startswith(prompt) and shared[len(prompt) :].strip():
            hint = "add {% if add_generation_prompt %}...{% endif %} to it"
            raise ConfigError("the chat template has no generation prompt", self.model, hint)


def fit(row: Encoded, max_tokens: int | None, too_long: str) -> Encoded | Rejected:
    """A row of at most `max_tokens` tokens: longer ones are cut there (`cut`; no end is invented) or dropped."""
    if max_tokens is None or len(row.tokens) <= max_tokens:
        return row
    mask = row.loss_mask[:max_tokens]
    if too_long == "drop" or not len(loss_positions(mask)):
        return Rejected(
            DropReason.TOO_LONG, f"{len(row.tokens)} tokens, the answer starts at {int(row.loss_mask.argmax())}"
        )
    return replace(row, tokens=row.tokens[:max_tokens], loss_mask=mask, notes=(*row.notes, CUT_AT_LIMIT))


def _texts(plan: _Plan) -> Iterable[str]:
    yield plan.text
    for turn in plan.turns:
        yield from (turn.prompt, turn.answered)


def _eos_ids(*configs: Mapping[str, Any]) -> set[int]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return found


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hex digits of what decides the ids: the whole fast tokenizer, or the vocabulary of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # set by callers, not part of the tokenizer
            content.pop(state, None)
    else:
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), added]
    special = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
    return _digest([content, special])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
