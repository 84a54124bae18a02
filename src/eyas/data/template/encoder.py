"""Rows -> token ids and loss mask, by the target's own tokenizer and chat template.

    rendering.py  messages -> text         mask.py        which text the target would emit
    repairs.py    what a template will take, tools.py     whether it rendered calls
    tokenizing.py text -> ids              encoder.py     all of it, for many rows at once

The mask covers exactly what the target would emit at run time, see `mask.py`. A row's text is cut where an emission
starts and its parts are tokenised each by itself, as a server has the prompt's ids before the first one is emitted: no
token holds the end of a prompt and the start of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from eyas.data.rows import Chat, DropReason, Message, Preformatted, Sampled, Tool
from eyas.data.template.mask import (
    LAST_TURN_CUT,
    REWRITTEN,
    REWRITTEN_TURNS,
    RULES_VERSION,
    THOUGHT_LOST,
    UNFINISHED_CUT,
    Masker,
    Rejected,
    Segments,
)
from eyas.data.template.rendering import Renderer
from eyas.data.template.tokenizing import Tokenize, digest, tokenizer_hash
from eyas.errors import ConfigError, first_line
from eyas.positions import loss_positions

__all__ = [
    "CUT_AT_LIMIT",
    "LAST_TURN_CUT",
    "REWRITTEN",
    "THOUGHT_LOST",
    "UNFINISHED_CUT",
    "Encoded",
    "Rejected",
    "Template",
    "fit",
]

#: Note: the row was longer.
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


class Template:
    """A target's tokenizer and chat template.

    Args:
        tokenizer: with a chat template.
        model: name or folder, for messages and metadata.
        end_ids: ids that end a turn; the tokenizer's own is added.
        vocab_size: of the target; the tokenizer's length when not given.
        options: passed to the chat template at every rendering, e.g. `{"enable_thinking": False}`.
        rewritten_turns, empty_prompt: as in `PrepareConfig`.

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
        if rewritten_turns not in REWRITTEN_TURNS:
            raise ConfigError(f"rewritten_turns must be one of {', '.join(REWRITTEN_TURNS)}", rewritten_turns)
        self.tokenizer, self.model, self.options = tokenizer, model, dict(options or {})
        own = tokenizer.eos_token_id
        self.end_ids = frozenset(end_ids) | ({own} if isinstance(own, int) else set())
        self.vocab_size = vocab_size or len(tokenizer)
        self._renderer = Renderer(tokenizer, model, self.options)
        self._tokenize = Tokenize(tokenizer)
        self._is_end = np.zeros(max(self.vocab_size, len(tokenizer), *self.end_ids, 0) + 1, dtype=bool)
        self._is_end[list(self.end_ids)] = True
        added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        ends = {text for text, i in added.items() if i in self.end_ids}
        self._masker = Masker(self._renderer, ends, added, rewritten_turns, empty_prompt)
        self.tokenizer_hash = tokenizer_hash(tokenizer)
        sources = list(dict.fromkeys(self._renderer.sources))
        rules = [RULES_VERSION, rewritten_turns, sorted(self.end_ids)]
        self.template_hash = digest([sources, self.options, rules])

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
        except Exception as error:  # a broken tokenizer file raises just that
            raise ConfigError("cannot load the tokenizer", model, first_line(error)) from error
        # Both are optional: many models come without the one, a folder that holds just a tokenizer without the other.
        config: dict[str, Any] = {}
        generation: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            config = PreTrainedConfig.get_config_dict(model)[0]
        with suppress(OSError, ValueError):
            generation = GenerationConfig.from_pretrained(model).to_dict()
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
        """As `encode`, for many at once: all texts are tokenised in one call.

        A row gives one `Encoded`, or several in the order of their answers with `rewritten_turns="split"`.
        """
        plans = [self._plan(row) for row in rows]
        parts = [part for plan in plans if isinstance(plan, list) for part in plan]
        texts = list(chain.from_iterable(part.texts for part in parts))
        goes_on = [place > 0 for part in parts for place in range(len(part.texts))]
        ids = iter(self._tokenize(texts, goes_on))
        return [self._finish(plan, ids) if isinstance(plan, list) else plan for plan in plans]

    def _plan(self, row: Chat | Preformatted | Sampled) -> list[Segments] | tuple[Encoded, ...] | Rejected:
        match row:
            case Chat():
                return self._masker.chat(row)
            case Preformatted():
                return self._masker.preformatted(row)
            case Sampled():
                sampled = self._sampled(row)
                return sampled if isinstance(sampled, Rejected) else (sampled,)

    def _finish(self, plan: list[Segments], ids: Iterator[list[int]]) -> tuple[Encoded, ...] | Rejected:
        found = [self._masked(part, [next(ids) for _ in part.texts]) for part in plan]
        kept = tuple(row for row in found if isinstance(row, Encoded))
        return kept or next(row for row in found if isinstance(row, Rejected))

    def _masked(self, part: Segments, ids: list[list[int]]) -> Encoded | Rejected:
        tokens = np.fromiter(chain.from_iterable(ids), np.int32, sum(map(len, ids)))
        if len(tokens) and tokens.max() >= self.vocab_size:
            return cast(Rejected, self._outside(tokens.tolist()))
        mask = np.zeros(len(tokens), np.uint8)
        place = 0
        for segment, trained in zip(ids, part.trained, strict=True):
            stop = place + len(segment)
            if trained:
                ends = self._is_end[tokens[place:stop]]
                first = int(ends.argmax()) if len(ends) else 0
                mask[place : place + first + 1 if len(ends) and ends[first] else stop] = 1
            place = stop
        return self._checked(tokens, mask, part.notes)

    def _sampled(self, row: Sampled) -> Encoded | Rejected:
        """Ids as the target sampled them: the whole answer is trained, its end token only if it was emitted."""
        if row.tokenizer_hash not in ("", self.tokenizer_hash):
            return Rejected(DropReason.OTHER_TOKENIZER, f"made with tokenizer {row.tokenizer_hash}")
        if not row.answer_ids:
            return Rejected(DropReason.EMPTY_ANSWER)
        ids = [*row.prompt_ids, *row.answer_ids]
        if fault := self._outside(ids):
            return fault
        tokens, mask = np.array(ids, np.int32), np.zeros(len(ids), np.uint8)
        mask[len(row.prompt_ids) :] = 1
        return self._checked(tokens, mask, ())

    def render(
        self, messages: Sequence[Message], *, generation_prompt: bool, tools: Sequence[Tool] | None = None
    ) -> str:
        """The chat template's text. Raises whatever the template raises."""
        return self._renderer.render(messages, tools, generation_prompt=generation_prompt)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Token ids of the messages and the generation prompt: what a server is sent for an answer."""
        return self._tokenize([self.render(messages, generation_prompt=True, tools=tools)], [False])[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _outside(self, ids: list[int]) -> Rejected | None:
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        detail = f"token {outside} is outside the vocabulary of {self.vocab_size}"
        return None if outside is None else Rejected(DropReason.BAD_TOKENS, detail)

    def _checked(
        self, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], notes: tuple[str, ...]
    ) -> Encoded | Rejected:
        if not len(loss_positions(mask)):
            return Rejected(DropReason.NOTHING_TO_LEARN, "no two trained tokens in a row")
        return Encoded(tokens, mask, notes)


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


def _eos_ids(*configs: Mapping[str, Any]) -> set[int]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return found
