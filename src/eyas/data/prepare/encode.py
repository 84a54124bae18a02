"""Raw rows -> token ids: the part of `prepare` that costs time, in this process or in a worker's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.config import PrepareConfig
from eyas.data.prepare.decontaminate import EvaluationIndex
from eyas.data.prepare.dedupe import conversation_key, key_of, prompt_key, text_key
from eyas.data.prepare.renamed import renamed_roles
from eyas.data.rows import Chat, Dropped, DropReason, Preformatted, Sampled
from eyas.data.sources import Raw, parse
from eyas.data.template import Encoded, Rejected, Template, fit


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """What it takes to encode rows, in any process.

    Attributes:
        target: folder or hub id.
        cfg: the run's settings.
        evaluations: sets that rows must not share text with.
    """

    target: str
    cfg: PrepareConfig
    evaluations: EvaluationIndex | None = None

    def load_template(self) -> Template:
        """The target's template with the run's settings.

        Raises:
            ConfigError: it cannot be loaded.
        """
        return Template.load(
            self.target,
            trust_remote_code=self.cfg.trust_remote_code,
            options=self.cfg.template_options,
            rewritten_turns=self.cfg.rewritten_turns,
            empty_prompt=self.cfg.empty_prompt,
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """A row that can be learned from.

    Attributes:
        lengths: tokens of each corpus row it becomes; nearly always of one.
        notes: what was changed in it.
        key: names it among duplicates; empty where none are looked for.
        prompt_key: names its user turns; empty where nothing depends on them.
    """

    id: str
    source: str
    file: str
    line: int
    lengths: tuple[int, ...]
    notes: tuple[str, ...] = ()
    key: bytes = b""
    prompt_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row without an answer: `text` is one JSON line, input for `eyas regenerate`."""

    dropped: Dropped
    text: bytes
    key: bytes = b""


Outcome = Kept | Prompt | Dropped


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChunk:
    """Some rows in order.

    Attributes:
        tokens, loss_mask: int32 and uint8, of all kept rows, one after another.
        made_with: hashes of tokenizer and template.
        renamed: (role as written, role given to the template) -> messages.
    """

    outcomes: list[Outcome]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    made_with: tuple[str, str]
    renamed: Counter[tuple[str, str]]

    def rows(self) -> Iterator[tuple[Outcome, list[Encoded]]]:
        """Each outcome with the corpus rows it becomes."""
        start = 0
        for outcome in self.outcomes:
            rows: list[Encoded] = []
            for length in outcome.lengths if isinstance(outcome, Kept) else ():
                stop = start + length
                rows.append(Encoded(self.tokens[start:stop], self.loss_mask[start:stop]))
                start = stop
            yield outcome, rows


class ChunkEncoder:
    """Encodes chunk after chunk with one template."""

    def __init__(self, settings: EncodeSettings, template: Template) -> None:
        self._template, self._cfg, self._evaluations = template, settings.cfg, settings.evaluations
        self._needs_prompt_key = settings.cfg.holdout > 0 or settings.cfg.dedupe == "prompt"

    def encode(self, raws: Sequence[Raw]) -> EncodedChunk:
        """What becomes of each row, in order."""
        rows = [parse(raw, self._cfg.roles) for raw in raws]
        results = iter(self._template.encode_batch([row for row in rows if not isinstance(row, Dropped)]))
        outcomes: list[Outcome] = []
        kept: list[Encoded] = []
        renamed = Counter[tuple[str, str]]()
        for raw, row in zip(raws, rows, strict=True):
            if isinstance(row, Dropped):
                outcomes.append(row)
                continue
            if isinstance(row, Chat):
                renamed.update(renamed_roles(raw.payload, self._cfg.roles))
            outcome, encoded = self._outcome(row, next(results))
            outcomes.append(outcome)
            kept += encoded
        return EncodedChunk(
            outcomes,
            np.concatenate([row.tokens for row in kept]) if kept else np.empty(0, np.int32),
            np.concatenate([row.loss_mask for row in kept]) if kept else np.empty(0, np.uint8),
            (self._template.tokenizer_hash, self._template.template_hash),
            renamed,
        )

    def _outcome(
        self, row: Chat | Preformatted | Sampled, result: tuple[Encoded, ...] | Rejected
    ) -> tuple[Outcome, list[Encoded]]:
        fitted = self._fit(result)
        if isinstance(fitted, Rejected):
            dropped = Dropped(fitted.reason, row.file, row.line, fitted.detail, row.source)
            if fitted.reason is not DropReason.PROMPT_ONLY or not isinstance(row, Chat):
                return dropped, []
            return self._contaminated(row, []) or Prompt(dropped, _prompt_line(row), self._key(row, [])), []
        if (contaminated := self._contaminated(row, fitted)) is not None:
            return contaminated, []
        notes = tuple(dict.fromkeys(note for piece in fitted for note in piece.notes))
        lengths = tuple(len(piece.tokens) for piece in fitted)
        keys = self._key(row, fitted), self._prompt_key(row, fitted) if self._needs_prompt_key else b""
        return Kept(row.id, row.source, row.file, row.line, lengths, notes, *keys), fitted

    def _fit(self, result: tuple[Encoded, ...] | Rejected) -> list[Encoded] | Rejected:
        """The pieces that fit, or why none does."""
        if isinstance(result, Rejected):
            return result
        fitted = [fit(piece, self._cfg.max_tokens, self._cfg.too_long) for piece in result]
        pieces = [piece for piece in fitted if isinstance(piece, Encoded)]
        return pieces or next(piece for piece in fitted if isinstance(piece, Rejected))

    def _contaminated(self, row: Chat | Preformatted | Sampled, pieces: list[Encoded]) -> Dropped | None:
        if self._evaluations is None:
            return None
        match row:
            case Chat():
                met = self._evaluations.find(row.messages)
            case Preformatted():
                met = self._evaluations.find_text(row.text)
            case Sampled():
                met = self._evaluations.find_text(self._template.decode(pieces[0].tokens.tolist()))
        return None if met is None else Dropped(DropReason.CONTAMINATED, row.file, row.line, f"meets {met}", row.source)

    def _key(self, row: Chat | Preformatted | Sampled, pieces: list[Encoded]) -> bytes:
        match self._cfg.dedupe:
            case "off":
                return b""
            case "prompt":
                return self._prompt_key(row, pieces)
            case "conversation":
                match row:
                    case Chat():
                        return conversation_key(row.messages, row.tools)
                    case Preformatted():
                        return text_key(row.text)
                    case Sampled():
                        return key_of([str(row.prompt_ids), str(row.answer_ids)])

    def _prompt_key(self, row: Chat | Preformatted | Sampled, pieces: list[Encoded]) -> bytes:
        if isinstance(row, Chat):
            return prompt_key(row.messages)
        first = pieces[0]  # user turns are not known one by one: all that the target did not write
        return text_key(self._template.decode(first.tokens[first.loss_mask == 0].tolist()))


def _prompt_line(row: Chat) -> bytes:
    content: dict[str, Any] = {"id": row.id, "conversations": row.messages}
    if row.tools:
        content["tools"] = row.tools
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
