"""What a target would emit, told slowly and independently of the product: a server is played, turn by turn.

For each answer the prompt that a server would get is rendered by a Jinja environment of our own and tokenised as a
whole. The answer's ids are then walked one by one, as they would be sampled, until the first id that ends a turn. What
was emitted is looked up in the whole conversation's text by decoded characters. Nothing here imports the product's
template code.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """A row by the oracle: ids, mask, and how many answers of how many it trains; or why there is none."""

    ids: list[int]
    mask: list[int]
    trained: int
    answers: int
    refusal: str = ""


class Oracle:
    """A server that is played.

    Args:
        tokenizer: a fast one of `transformers`, with character offsets.
        end_ids: ids at which the server stops.
        variables: given to the template at every rendering.
        null_content: whether the template takes calls only beside a content of none, and arguments as text.
        reads_thoughts: whether it reads `reasoning_content`; then an empty thought is as good as none.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: set[int],
        variables: dict[str, Any] | None = None,
        null_content: bool = False,
        reads_thoughts: bool = False,
    ) -> None:
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.null_content, self.reads_thoughts = null_content, reads_thoughts
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        self.template = environment.from_string(tokenizer.chat_template)
        self.variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, **(variables or {})}

    def row(self, messages: list[Message], tools: list[Any] | None) -> Expected:
        """What the row of a conversation must be, earlier turns that were rewritten left as context."""
        if all(message["role"] != "assistant" for message in messages):
            return Expected([], [], 0, 0, "prompt-only")
        messages = self._until_unfinished(messages)
        answers = [i for i in range(len(messages)) if self._is_answer(messages, i)]
        if not answers:
            return Expected([], [], 0, 0, "empty-answer or nothing-to-learn")
        messages = messages[: answers[-1] + 1]
        unfinished = messages[-1].get("finish_reason") == "length"
        whole = self._render(messages, tools, False)
        if unfinished:
            whole = self._until_said(whole, messages, tools)
        spans: list[tuple[int, int]] = []
        emissions: dict[int, tuple[str, str]] = {}
        first = self._render(messages[: answers[0]], tools, True)
        for i in answers:
            prompt = self._render(messages[:i], tools, True)
            answered = whole if i == answers[-1] else self._render(messages[: i + 1], tools, False)
            if not answered.startswith(prompt):
                continue
            said = self._emit(answered[len(prompt) :])
            emissions[i] = said, answered[len(prompt) :]
            if said and whole.startswith(prompt + said):
                spans.append((len(prompt), len(prompt) + len(said)))
        refusal = self._unrendered(messages, tools, first, whole, emissions)
        if refusal or not spans:
            return Expected([], [], 0, len(answers), refusal or "template-rewrites-history")
        ids, mask = self._played(whole, spans)
        if not any(a and b for a, b in pairwise(mask)):
            return Expected([], [], 0, len(answers), "nothing-to-learn")
        return Expected(ids, mask, len(spans), len(answers))

    def _emit(self, text: str) -> str:
        """The text of the ids up to the first that ends a turn, one by one."""
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (_, stop) in zip(coded["input_ids"], coded["offset_mapping"], strict=True):
            if token in self.end_ids:
                return text[:stop]
        return text

    def _played(self, whole: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Ids and mask: what is given to the server and what it emits, in turn."""
        ids: list[int] = []
        mask: list[int] = []
        place = 0
        for start, stop in [*spans, (len(whole), len(whole))]:
            given = self._ids(whole[place:start])
            emitted = self._ids(whole[start:stop])
            ids += given + emitted
            mask += [0] * len(given) + [1] * len(emitted)
            place = stop
        return ids, mask

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _render(self, messages: list[Message], tools: list[Any] | None, ask: bool) -> str:
        shown = [self._shown(message) for message in messages]
        return self.template.render(messages=shown, tools=tools or None, add_generation_prompt=ask, **self.variables)

    def _shown(self, message: Message) -> Message:
        shown = {key: value for key, value in message.items() if value is not None and key != "finish_reason"}
        shown["content"] = shown.get("content", "")
        opens, tags = shown["content"].lstrip().startswith("<think>"), re.findall("</?think>", shown["content"])
        if opens and tags == ["<think>", "</think>"] and not shown.get("reasoning_content", "").strip():
            shown.pop("reasoning_content", None)  # the thought is in the content, where the template finds it too
        if self.null_content and shown.get("tool_calls"):
            calls = json.loads(json.dumps(shown["tool_calls"]))
            for call in calls:
                if not isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            shown["tool_calls"] = calls
            if not shown["content"].strip():
                shown["content"] = None
        return shown

    def _is_answer(self, messages: list[Message], i: int) -> bool:
        message = messages[i]
        said = message.get("content") or ""
        if self.reads_thoughts:
            said = re.sub(r"^\s*<think>\s*</think>\s*$", "", said)
        said += message.get("reasoning_content") or ""
        after_user = any(earlier["role"] == "user" for earlier in messages[:i])
        return message["role"] == "assistant" and after_user and bool(said.strip() or message.get("tool_calls"))

    @staticmethod
    def _until_unfinished(messages: list[Message]) -> list[Message]:
        for i, message in enumerate(messages):
            if message.get("finish_reason") == "length":
                later = [one for one in messages[i + 1 :] if one["role"] == "assistant"]
                return messages[: i + 1] if later else messages
        return messages

    def _until_said(self, whole: str, messages: list[Message], tools: list[Any] | None) -> str:
        """Up to where a flag put after the last words comes out; templates may trim those."""
        field = "content" if messages[-1].get("content") else "reasoning_content"
        flagged = {**messages[-1], field: messages[-1][field] + "~FLAG~"}
        said = self._render([*messages[:-1], flagged], tools, False).rpartition("~FLAG~")[0]
        return said if whole.startswith(said) else said.rstrip()

    @staticmethod
    def _unrendered(
        messages: list[Message],
        tools: list[Any] | None,
        first: str,
        whole: str,
        emissions: dict[int, tuple[str, str]],
    ) -> str:
        """`tools` when the text lacks what it should hold of tools, calls or results."""
        missing = [tool for tool in tools or () if tool["function"]["name"] not in first]
        for i, message in enumerate(messages):
            said, rendered = emissions.get(i, (whole, whole))
            for call in message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                if name not in said or (isinstance(arguments, str) and arguments.strip() not in rendered):
                    missing.append(call)
            result = (message.get("content") or "").strip()
            forms = [result, json.dumps(result)[1:-1], json.dumps(result, ensure_ascii=False)[1:-1]]
            if message["role"] == "tool" and not any(form in whole for form in forms):
                missing.append(message)
        return "tools" if missing else ""


def _raise(message: str) -> None:
    raise TemplateError(message)
