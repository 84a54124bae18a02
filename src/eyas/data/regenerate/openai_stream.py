"""The chunks of a streamed answer put together. Pure.

Servers differ: usage comes with the last chunk, with the finish, or in every chunk; thoughts are `reasoning_content` or
`reasoning`; calls come in pieces by index, or whole. An unstreamed reply is one chunk with a `message`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from eyas.data.regenerate.budget import Usage
from eyas.data.regenerate.openai_faults import Fault, FaultKind, fault_of_body
from eyas.data.rows import Message

MAX_CHARS: Final = 64 << 20  # no answer is longer; a server that never ends must not fill memory
_WHOLE: Final = {"stop", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence", "end_turn"}
_CUT: Final = {"length", "max_tokens", "model_length"}


class StreamedAnswer:
    """Takes chunks in order; `message` says what they make, or why they make nothing.

    Attributes:
        finish_reason: as the server said it; empty until then.
        usage: the last one seen.
        began: something of the answer has come.
    """

    def __init__(self) -> None:
        self.finish_reason = ""
        self.usage: dict[str, Any] | None = None
        self.began = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._at: dict[int, dict[str, Any]] = {}  # calls by their index in the stream
        self._chars = 0

    def take(self, chunk: object) -> None:
        """One chunk.

        Raises:
            Fault: it holds an error instead.
            ValueError: it is not what the API describes.
        """
        try:
            self._take(chunk)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"a chunk is not what the API describes: {error}") from error

    def _take(self, chunk: Any) -> None:
        if chunk.get("error"):
            raise fault_of_body(chunk["error"], in_answer=True)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        for choice in chunk.get("choices") or []:
            if choice.get("index") in (0, None):
                self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        self.began = True
        if isinstance(usage := choice.get("usage"), dict):
            self.usage = usage
        if choice.get("error"):
            raise fault_of_body(choice["error"], in_answer=True)
        delta = choice.get("delta") or choice.get("message") or {}
        self._add(self._text, _text(delta.get("content")))
        self._add(self._reasoning, _text(delta.get("reasoning_content") or delta.get("reasoning")))
        for call in delta.get("tool_calls") or []:
            self._take_call(call)
        if reason := choice.get("finish_reason"):
            self.finish_reason = str(reason)

    def _add(self, parts: list[str], text: str) -> None:
        if text:
            parts.append(text)
            self._chars += len(text)
            if self._chars > MAX_CHARS:
                raise ValueError("the answer does not end")

    def _take_call(self, piece: dict[str, Any]) -> None:
        index = piece.get("index")
        call = self._at.get(index) if index is not None else (self._calls[-1] if self._calls else None)
        new_id = piece.get("id")
        if call is None or (index is None and new_id and new_id != call["id"]):
            call = {"id": "", "type": "function", "function": {"name": "", "arguments": []}}
            self._calls.append(call)
            if index is not None:
                self._at[index] = call
        function = piece.get("function") or {}
        call["id"] = call["id"] or str(new_id or "")
        call["function"]["name"] = call["function"]["name"] or str(function.get("name") or "")
        self._add(call["function"]["arguments"], _text(function.get("arguments")))

    def texts(self) -> Iterator[str]:
        """All that the server wrote."""
        yield "".join(self._text)
        yield "".join(self._reasoning)
        for call in self._calls:
            yield call["function"]["name"]
            yield "".join(call["function"]["arguments"])

    def message(self, usage: Usage | None) -> Message:
        """The answer as a message, `finish_reason` included: `stop`, `length` or `tool_calls`.

        Raises:
            Fault: it is not whole, empty, filtered, or no text, or ends within a call; `usage` is what it cost.
        """
        finish_reason = self._finish(usage)
        message: Message = {"role": "assistant", "content": _joined(self._text, usage)}
        if reasoning := _joined(self._reasoning, usage):
            message["reasoning_content"] = reasoning
        calls = [call for call in self._calls if call["function"]["name"]]
        if calls and finish_reason == "length":
            raise Fault("cut-tool-call", kind=FaultKind.ROW, usage=usage, charged=True)
        if calls:
            message["tool_calls"] = [_whole_call(call, usage) for call in calls]
        if not calls and not message["content"].strip() and not reasoning.strip():
            raise Fault("empty-answer", f"finish_reason {self.finish_reason}", usage=usage, charged=True)
        return message | {"finish_reason": finish_reason}

    def _finish(self, usage: Usage | None) -> str:
        if not self.began:
            raise Fault("malformed-reply", "no choices", usage=usage, charged=True)
        match self.finish_reason.lower():
            case "":
                raise Fault("cut-stream", "no finish_reason", charged=True)
            case "content_filter":
                raise Fault("content-filter", usage=usage, charged=True)
            case reason if reason in _CUT:
                return "length"
            case reason if reason in _WHOLE:
                return "tool_calls" if self._calls else "stop"
            case reason:
                raise Fault("malformed-reply", f"finish_reason {reason[:40]}", usage=usage, charged=True)


def _text(content: object) -> str:
    """A text, or the texts of a list of text parts."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_text(part.get("text")) for part in content if part.get("type") == "text")
        case _:
            raise TypeError(f"the content is {type(content).__name__}, not a text")


def _joined(parts: list[str], usage: Usage | None) -> str:
    """The pieces as one text: a surrogate pair may have been cut in two between them."""
    text = "".join(parts)
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise Fault("malformed-reply", "half a surrogate pair", usage=usage, charged=True) from error


def _whole_call(call: dict[str, Any], usage: Usage | None) -> dict[str, Any]:
    function = call["function"]
    whole: dict[str, Any] = {"id": call["id"]} if call["id"] else {}
    arguments = _joined(function["arguments"], usage) or "{}"
    return whole | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
