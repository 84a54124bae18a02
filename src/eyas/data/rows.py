"""Rows as the parts of `data` hand them on: a good one is a `Chat`, `Preformatted` or `Sampled`, a bad one a `Dropped`
that says what and where.

    sources/files.py   bytes -> Raw    sources/layouts.py   Raw -> Row    template/   Row -> token ids and loss mask
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: A chat message as templates take it: `role` and `content` (texts); at times `reasoning_content` (text), `tool_calls`
#: ([{"id", "type": "function", "function": {"name", "arguments": object or text}}]), `tool_call_id`, `name`, and
#: `finish_reason` ("length": the answer was cut by a token limit and has no end token).
Message = dict[str, Any]

#: A tool as OpenAI's API describes it: {"type": "function", "function": {"name", "description", "parameters"}}.
Tool = dict[str, Any]


class DropReason(StrEnum):
    """Why a row is not in the corpus. Closed: reports and tests match on it."""

    # what a file holds
    BAD_UTF8 = "bad-utf8"
    BAD_JSON = "bad-json"
    BAD_FILE = "bad-file"  # the file is damaged from here on: cut, or a checksum does not match
    LINE_TOO_LONG = "line-too-long"
    NOT_AN_OBJECT = "not-an-object"
    UNKNOWN_COLUMNS = "unknown-columns"
    BAD_MESSAGES = "bad-messages"  # not a non-empty list of objects with a role and a text
    BAD_TEXT = "bad-text"  # holds half a surrogate pair: no tokenizer can encode it
    BAD_TOKENS = "bad-tokens"  # token ids that are not lists of ids of the target's vocabulary
    BAD_TOOLS = "bad-tools"  # tools or tool calls that are not what OpenAI's API describes
    UNKNOWN_ROLE = "unknown-role"
    NOT_TEXT = "not-text"  # images, audio
    # what the target's template makes of it
    TOOLS = "tools-unsupported"  # the template does not render tools, calls or results
    OTHER_TOKENIZER = "other-tokenizer"  # token ids made with another tokenizer than the target's
    PROMPT_ONLY = "prompt-only"  # no answer to learn from
    EMPTY_PROMPT = "empty-prompt"  # a blank user turn, where those are not wanted
    EMPTY_ANSWER = "empty-answer"  # every answer is blank
    TEMPLATE_ERROR = "template-error"
    REWRITES_HISTORY = "template-rewrites-history"  # no answer is rendered as the target would have given it
    OTHER_TEMPLATE = "other-template"  # preformatted text without the target's assistant header
    TOO_LONG = "too-long"
    NOTHING_TO_LEARN = "nothing-to-learn"  # no two trained tokens in a row
    # what the user asked to leave out
    DUPLICATE = "duplicate"
    CONTAMINATED = "contaminated"  # shares 13 words in a row with an evaluation set


#: Reasons that are choices, not faults of the data: `--strict` does not stop at them.
CHOICES = frozenset(
    {
        DropReason.PROMPT_ONLY,
        DropReason.EMPTY_PROMPT,
        DropReason.TOO_LONG,
        DropReason.DUPLICATE,
        DropReason.CONTAMINATED,
    }
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation; ids need not be unique, a corpus row is known by its number.

    Attributes:
        file, line: where it was read; `line` is the line of a file of lines, else the number of the row, from 1.
        tools: what the target may call.
        source: label of the input it came from.
    """

    id: str
    messages: list[Message]
    file: str
    line: int
    tools: list[Tool] | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Preformatted:
    """One conversation as text in the target's own chat format, control tokens included."""

    id: str
    text: str
    file: str
    line: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer as token ids, exactly as the target sampled them: nothing is rendered or tokenised again.

    Attributes:
        prompt_ids, answer_ids: token ids; the answer holds its end token only if the target emitted one.
        tokenizer_hash: of the tokenizer that made the ids; empty when the row does not say.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    tokenizer_hash: str
    file: str
    line: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not kept: why (by name), where, and what exactly."""

    reason: DropReason
    file: str
    line: int
    detail: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.detail}" if self.detail else f"{self.file}:{self.line}"


Row = Chat | Preformatted | Sampled | Dropped


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row that could not be read."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """One row as it was read: small and picklable, parsed in another process.

    Attributes:
        line: number of the line, or of the row in an array or table, from 1.
        payload: bytes are the JSON text of the row; a Fault says why there is none; all else is the row itself.
        offset: of the JSON text in the (decompressed) file, in bytes.
    """

    file: str
    line: int
    source: str
    payload: Any
    offset: int = 0
