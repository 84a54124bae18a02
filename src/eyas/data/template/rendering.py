"""Messages -> text, by the target's own chat template.

A chat template is a program of someone else's: it runs in Jinja's sandbox and may raise anything. It is rendered many
times a conversation (once a turn and more), so its environment takes short cuts where messages, which are plain
dictionaries and texts, are read; what it gives is what `tokenizer.apply_chat_template` gives.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from inspect import signature
from itertools import takewhile
from typing import Any, Final, cast

from jinja2 import Template as JinjaTemplate
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers import PreTrainedTokenizerBase

from eyas.data.rows import Message, Tool
from eyas.errors import ConfigError

#: What a template may raise on messages it does not like.
TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

#: What a template is told that asks for today's date: the same input must give the same text tomorrow. Templates that
#: take a date of their own (`date_string`) get it from the options.
TODAY: Final = datetime(2024, 7, 26, tzinfo=UTC)

#: Names under which templates read an assistant's thought.
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")

#: Names that options cannot have: a template has them from elsewhere, or `apply_chat_template` takes them for itself.
_TAKEN: Final = frozenset(("self", "messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters))

_PROBE: Final[Tool] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


class Renderer:
    """A tokenizer's chat template.

    Attributes:
        sources: the template's text, without and with tools (often the same).
        reasoning_field: the name it reads thoughts under, if it does.
        header: what it writes before an answer, as at the end of a generation prompt; empty when it writes nothing.

    Args:
        tokenizer: with a chat template.
        model: name or folder, for messages.
        options: passed to the template at every rendering.

    Raises:
        ConfigError: no chat template, one that is no template, one that does not say where an answer starts; or an
            option that is none of the template's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._model, self._options = tokenizer, model, dict(options)
        if not tokenizer.chat_template:
            raise ConfigError("the model has no chat template", model, "use its instruct version")
        if taken := sorted(_TAKEN & self._options.keys()):
            raise ConfigError("not an option of a chat template", taken[0], "leave it out of the template options")
        # Some tokenizers bring Python code that prepares the messages: then only they can render.
        own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        self._marks = tuple(f"\0{secrets.token_hex(8)}\0" for _ in range(2))
        try:
            self.sources = (
                tokenizer.get_chat_template(),
                tokenizer.get_chat_template(tools=cast(Any, [_PROBE])),
            )
            self._environment = _Environment()
            fields = _names_read(self._environment, "".join(dict.fromkeys(self.sources)))
            self._compiled = None if own else [self._compile(source) for source in self.sources]
        except (TemplateError, ValueError) as error:
            raise ConfigError("the chat template cannot be used", model, str(error)) from error
        self.reasoning_field = next((name for name in REASONING_FIELDS if name in fields), None)
        self._variables = {**tokenizer.special_tokens_map, **self._options}
        self._uses_spans = False
        self.header = self._probe()

    def __reduce__(self) -> tuple[Any, ...]:
        return Renderer, (self._tokenizer, self._model, self._options)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, generation_prompt: bool
    ) -> str:
        """The template's text. Raises what the template raises, see `TEMPLATE_ERRORS`."""
        if self._compiled is None:
            text = self._tokenizer.apply_chat_template(
                cast(Any, list(messages)),
                tools=cast(Any, tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
            )
            return cast(str, text)
        return self._compiled[bool(tools)].render(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._variables,
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """The text that the last message, an assistant's, answers: what a server is sent for it."""
        if not self._uses_spans:
            return self.render(messages[:-1], tools, generation_prompt=True)
        start, _ = self._marks
        marked = self._render_marked(messages, tools)
        return marked[: marked.rindex(start)].replace(start, "").replace(self._marks[1], "")

    def _compile(self, source: str) -> JinjaTemplate:
        template = self._environment.from_string(source)
        template.globals = dict(template.globals)  # a chain of maps is copied slowly, and that at every rendering
        return template

    def _render_marked(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        """The text with marks around what `{% generation %}` encloses."""
        self._environment.marks = self._marks
        try:
            return self.render(messages, tools, generation_prompt=False)
        finally:
            self._environment.marks = ("", "")

    def _probe(self) -> str:
        """What the template writes before an answer.

        A template that ignores `add_generation_prompt` would have its assistant header trained: unless it marks what
        is generated, it is refused.
        """
        user = {"role": "user", "content": "Hi"}
        answers = [[user, {"role": "assistant", "content": text}] for text in ("One", "Two")]
        try:
            asked, prompt = (self.render([user], generation_prompt=flag) for flag in (False, True))
            first, second = (self.render(answer, generation_prompt=False) for answer in answers)
        except TEMPLATE_ERRORS:
            return ""  # it wants other messages than these: rows it fails on are dropped by name
        shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        if prompt != asked or not shared.startswith(prompt) or not shared[len(prompt) :].strip():
            end = prompt.rfind("Hi") + len("Hi")  # without a header: what lies between the question and the answer
            return prompt[len(asked) :] if prompt != asked and prompt.startswith(asked) else prompt[end:]
        if self._compiled is None or self._marks[0] not in self._render_marked(answers[0], None):
            hint = "add {% if add_generation_prompt %}...{% endif %} to it"
            raise ConfigError("the chat template has no generation prompt", self._model, hint)
        self._uses_spans = True
        return self.prompt(answers[0])[len(prompt) :]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: its text, between the environment's marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        start, end = cast(_Environment, self.environment).marks
        return f"{start}{caller()}{end}"


_DICT_NAMES: Final = frozenset(dir(dict))
_STR_METHODS: Final = frozenset(
    ("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "splitlines", "replace", "find", "lower", "upper")
)
_LOOP_NAMES: Final = frozenset(("index", "index0", "first", "last", "length", "revindex", "previtem", "nextitem"))
_UNSET: Final = object()
_STR_METHOD_TYPE: Final = type("".strip)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, as chat templates expect it.

    Reading a key of a plain dictionary, a harmless method of a text or a loop's counter skips the sandbox's questions,
    whose answer is known; everything else is asked.
    """

    marks: tuple[str, ...] = ("", "")

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = TODAY.strftime
        self.globals["dict"] = _Dict()  # not the type, whose methods would change any dictionary

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_NAMES:
                return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, _UNSET)
            return self.undefined(obj=obj, name=attribute) if value is _UNSET else value
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        kind = type(obj)
        if kind is dict and type(argument) is str and argument in obj:
            return obj[argument]
        if kind is list and type(argument) is int and -len(obj) <= argument < len(obj):
            return obj[argument]
        return super().getitem(obj, argument)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is _STR_METHOD_TYPE and type(__obj.__self__) is str and __obj.__name__ in _STR_METHODS:
            return __context.call(__obj, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class _Dict:
    """What is harmless of the type `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _names_read(environment: _Environment, source: str) -> set[str]:
    """Attributes and constant keys that occur in a template, prose apart."""
    tree = environment.parse(source)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
