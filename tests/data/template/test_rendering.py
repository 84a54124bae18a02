from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_chats import hostile_chats
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.data.rows import Message
from eyas.data.template.rendering import TEMPLATE_ERRORS, Renderer
from eyas.errors import ConfigError
from families import deepseek_style, llama_style, qwen3, smollm2

TALK: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def tokenizer(smollm2_dir: Path) -> Iterator[PreTrainedTokenizerBase]:
    tokenizer = smollm2(smollm2_dir).tokenizer
    own = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = own


def rendered(tokenizer: PreTrainedTokenizerBase, template: Any, messages: list[Message] = TALK, **options: Any) -> str:
    tokenizer.chat_template = template
    return Renderer(tokenizer, "model", options).render(messages, generation_prompt=False)


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama_style"])
def test_it_renders_what_transformers_renders(name: str, smollm2_dir: Path, qwen3_dir: Path) -> None:
    make = {"smollm2": smollm2, "qwen3": qwen3, "llama_style": llama_style}[name]
    tokenizer = make(qwen3_dir if name == "qwen3" else smollm2_dir).tokenizer
    renderer = Renderer(tokenizer, name, {})
    for row in hostile_chats(150, seed=3):
        messages = [{**message, "content": message["content"] or ""} for message in row.messages]
        for asks in (False, True):
            theirs = tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=asks,  # type: ignore[arg-type]
            )
            assert renderer.render(messages, row.tools, generation_prompt=asks) == theirs


def test_headers(smollm2_dir: Path, qwen3_dir: Path) -> None:
    assert Renderer(smollm2(smollm2_dir).tokenizer, "m", {}).header == "<|im_start|>assistant\n"
    assert Renderer(qwen3(qwen3_dir).tokenizer, "m", {}).header == "<|im_start|>assistant\n"
    renderer = Renderer(deepseek_style(qwen3_dir).tokenizer, "m", {"thinking": True})
    assert renderer.header == "<｜Assistant｜><think>\n"  # noqa: RUF001
    assert Renderer(llama_style(smollm2_dir).tokenizer, "m", {}).header == (
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_headerless_template_has_what_lies_between_the_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    )
    assert Renderer(tokenizer, "m", {}).header == "[/INST]"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{{ m.reasoning_content }}", "reasoning_content"),
        ("{{ m['reasoning'] }}", "reasoning"),
        ("{% if 'thinking' in m %}{% endif %}", "thinking"),
        ("{{ m.get('reasoning_content') }}", "reasoning_content"),
        ("some thinking and reasoning_content as prose{{ enable_thinking }}", None),
    ],
)
def test_the_field_that_thoughts_are_read_from(
    tokenizer: PreTrainedTokenizerBase, template: str, field: str | None
) -> None:
    loop = f"{{% for m in messages %}}{template}{{% endfor %}}"
    tokenizer.chat_template = "{% if false %}" + loop + "{% endif %}{{ messages[-1].content }}"
    assert Renderer(tokenizer, "m", {}).reasoning_field == field


def test_the_date_is_always_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    dated = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
    assert rendered(tokenizer, dated) == "26 Jul 2024"
    assert rendered(tokenizer, dated, date_string="1 May 2031") == "1 May 2031"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ dict.update(messages[0], a=1) }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''['__class__'] | string + ''.__class__.x }}",
        "{{ '{0.__class__.__name__}'.format(1) }}",
        "{{ messages[0].__class__.__name__ }}",
        "{% set ns = namespace(a=1) %}{{ ns.__class__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% for m in messages %}{{ loop._iterator.x }}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_stays_in_its_box(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    before = [dict(message) for message in TALK]
    with pytest.raises(TEMPLATE_ERRORS):
        rendered(tokenizer, template)
    assert before == TALK


def test_what_is_unset_is_undefined(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "{% set ns = namespace(a=1) %}{{ ns.b is defined }}{{ messages[0].zzz is defined }}{{ messages[0]['q'] }}"
    assert rendered(tokenizer, text) == "FalseFalse"
    assert rendered(tokenizer, "{{ messages[9] is defined }}{{ messages[-1].content }}") == "Falseb"
    named: list[Message] = [{"role": "user", "content": "a", "items": "mine"}]
    assert rendered(tokenizer, "{{ messages[0]['items'] }}", named) == "mine"


@pytest.mark.parametrize("name", ["tools", "messages", "documents", "add_generation_prompt", "chat_template", "self"])
def test_options_that_no_template_can_have(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    with pytest.raises(ConfigError, match=f"not an option.*{name}"):
        Renderer(tokenizer, "m", {"mood": "glad", name: 1})
    assert rendered(tokenizer, "{{ mood }}{{ bos_token }}", mood="glad", bos_token="<b>") == "glad<b>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ dict(a=1) }}{{ dict([('b', 2)]) | tojson }}{{ dict.fromkeys(['a', 'b'], 0) }}{{ dict.fromkeys('ab') }}",
        "{{ {'é': '<b>&\u2028'} | tojson }}{{ {'b': [1], 'a': none} | tojson(indent=2, sort_keys=true) }}",
        "{{ [1, 2.5, true] | tojson(separators=(',', ':'), ensure_ascii=true) }}{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ add_generation_prompt }}{% for m in messages %}\n "
        "{% if loop.first %}{% continue %}{% endif %}\n {{ m.role }}\n{% endfor %}\n\n",
        "{{ add_generation_prompt }}{% for m in messages %}{{ m.role }}\n{% break %}{% endfor %}\n\n",
        "{% generation %} {{ messages[0].content }}\n {% endgeneration %}\n{{ eos_token }}{{ unk_token }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ messages[::-1][0]['content'] }}{{ messages[0].items() | list }}{{ 'a,b'.split(',')[-1].upper() }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}{{ messages[0].no }}{{ tools is none }}",
        "{{ documents is none }}{{ add_generation_prompt }}{{ (messages | length) }}{{ messages[0]['content'][0] }}",
    ],
)
def test_the_environment_is_that_of_transformers(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    found = rendered(tokenizer, template)
    assert found == tokenizer.apply_chat_template(TALK, tokenize=False)  # type: ignore[arg-type]


def test_a_template_for_tools_is_used_with_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}  # type: ignore[assignment]
    renderer = Renderer(tokenizer, "m", {})
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    assert renderer.render(TALK, generation_prompt=False) == "plain"
    assert renderer.render(TALK, [tool], generation_prompt=False) == "with look"


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", {"other": "x"}, "", None])
def test_no_usable_template_is_a_config_error(tokenizer: PreTrainedTokenizerBase, template: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="chat template"):
        Renderer(tokenizer, "m", {})


def test_a_tokenizer_that_renders_itself_is_left_to_it(smollm2_dir: Path) -> None:
    tokenizer = smollm2(smollm2_dir).tokenizer

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            return f"{len(conversation)} {options['add_generation_prompt']} {options.get('mood')}"

    own = Own.from_pretrained(str(smollm2_dir))
    renderer = Renderer(own, "m", {"mood": "glad"})
    assert renderer.render(TALK, generation_prompt=True) == "2 True glad"


def test_it_can_be_sent_to_another_process(smollm2_dir: Path) -> None:
    renderer = Renderer(smollm2(smollm2_dir).tokenizer, "m", {})
    again = pickle.loads(pickle.dumps(renderer))
    assert again.render(TALK, generation_prompt=True) == renderer.render(TALK, generation_prompt=True)


def test_template_errors_cover_jinja() -> None:
    assert issubclass(TemplateError, TEMPLATE_ERRORS)
