"""The rules of the mask, one by one, on templates of several families; some are named for what the oracle saw."""

# ruff: noqa: RUF001 (DeepSeek's control tokens hold fullwidth bars)
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.rows import Chat, DropReason, Message, Preformatted, Tool
from eyas.data.template import Encoded, Rejected, Template
from eyas.data.template.mask import LAST_TURN_CUT, REWRITTEN, THOUGHT_LOST, UNFINISHED_CUT
from eyas.data.template.repairs import GREETING_DROPPED, SYSTEM_MERGED, TURNS_MERGED
from eyas.errors import ConfigError
from families import deepseek_style, llama_style, qwen3, smollm2

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def smol(smollm2_dir: Path) -> Template:
    return smollm2(smollm2_dir)


@pytest.fixture(scope="module")
def llama(smollm2_dir: Path) -> Template:
    return llama_style(smollm2_dir)


@pytest.fixture(scope="module")
def qwen(qwen3_dir: Path) -> Template:
    return qwen3(qwen3_dir)


@pytest.fixture(scope="module")
def deepseek(qwen3_dir: Path) -> Template:
    return deepseek_style(qwen3_dir)


@pytest.fixture
def with_template(smol: Template) -> Iterator[Any]:
    """Makes a Template of SmolLM2's tokenizer and another chat template."""
    tokenizer, own = smol.tokenizer, smol.tokenizer.chat_template

    def make(text: str, **options: Any) -> Template:
        tokenizer.chat_template = text
        return Template(tokenizer, "other", **options)

    yield make
    tokenizer.chat_template = own


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def calls(*functions: tuple[str, Any], content: str | None = "", **fields: Any) -> Message:
    made = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in functions]
    return says(content, tool_calls=made, **fields)


def result(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


def tool(name: str) -> Tool:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}


def rows(template: Template, *messages: Message, tools: list[Tool] | None = None) -> tuple[Encoded, ...] | Rejected:
    return template.encode(Chat("id", list(messages), "file", 1, tools))


def row(template: Template, *messages: Message, tools: list[Tool] | None = None) -> Encoded:
    found = rows(template, *messages, tools=tools)
    assert not isinstance(found, Rejected), found
    (one,) = found
    return one


def reason(template: Template, *messages: Message, tools: list[Tool] | None = None) -> DropReason:
    found = rows(template, *messages, tools=tools)
    assert isinstance(found, Rejected)
    return found.reason


def spans(template: Template, one: Encoded) -> list[str]:
    """Texts of the trained runs."""
    found: list[list[int]] = []
    before = 0
    for token, trained in zip(one.tokens.tolist(), one.loss_mask.tolist(), strict=True):
        if trained and not before:
            found.append([])
        if trained:
            found[-1].append(token)
        before = trained
    return [template.decode(run) for run in found]


def text_of(template: Template, one: Encoded) -> str:
    return template.decode(one.tokens.tolist())


# --- turns that later turns rewrite -----------------------------------------------------------------------------------

EMPTY = "<think>\n\n</think>\n\n"
THOUGHTS = [
    user("a"),
    says("1", reasoning_content="first"),
    user("b"),
    says("2", reasoning_content="second"),
    user("c"),
    says("3"),
]


def test_rewritten_turns_are_context_by_default(qwen: Template) -> None:
    one = row(qwen, *THOUGHTS)
    assert spans(qwen, one) == [f"{EMPTY}3<|im_end|>"]
    assert one.notes == (REWRITTEN,)
    assert "first" not in text_of(qwen, one)


def test_split_gives_each_rewritten_turn_a_row_as_it_was_given(qwen3_dir: Path) -> None:
    template = qwen3(qwen3_dir, rewritten_turns="split")
    found = rows(template, *THOUGHTS)
    assert not isinstance(found, Rejected)
    trained = [spans(template, one) for one in found]
    assert trained == [
        ["<think>\nfirst\n</think>\n\n1<|im_end|>"],
        ["<think>\nsecond\n</think>\n\n2<|im_end|>"],
        [f"{EMPTY}3<|im_end|>"],
    ]
    assert "first" not in text_of(template, found[1])
    assert [one.notes for one in found] == [(), (), ()]


def test_split_makes_one_row_where_one_trains_all(qwen3_dir: Path, smollm2_dir: Path) -> None:
    assert len(rows(smollm2(smollm2_dir, rewritten_turns="split"), *THOUGHTS)) == 1  # type: ignore[arg-type]
    template = qwen3(qwen3_dir, rewritten_turns="split")  # keeps the thoughts between a question and its answer
    asked = [
        user("q"),
        calls(("f", {"a": 1}), reasoning_content="look"),
        result("r"),
        says("ok", reasoning_content="so"),
    ]
    found = rows(template, user("p"), says("0"), *asked)
    assert not isinstance(found, Rejected)
    assert [len(spans(template, one)) for one in found] == [1, 2]


def test_drop_refuses_the_conversation(qwen3_dir: Path) -> None:
    template = qwen3(qwen3_dir, rewritten_turns="drop")
    assert reason(template, *THOUGHTS) is DropReason.REWRITES_HISTORY
    assert spans(template, row(template, *THOUGHTS[:2])) == ["<think>\nfirst\n</think>\n\n1<|im_end|>"]


def test_unknown_ways_are_config_errors(smollm2_dir: Path) -> None:
    with pytest.raises(ConfigError, match="rewritten_turns"):
        smollm2(smollm2_dir, rewritten_turns="maybe")


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        says("4", reasoning_content="2 + 2"),
        says("<think>\n2 + 2\n</think>\n\n4"),
        says("<think>2 + 2</think>4"),
        says("<think>2 + 2</think>4", reasoning_content=""),
    ],
)
def test_a_thought_is_emitted_before_its_answer(qwen: Template, answer: Message) -> None:
    one = row(qwen, user("2 + 2?"), answer)
    assert spans(qwen, one) == ["<think>\n2 + 2\n</think>\n\n4<|im_end|>"]
    assert one.notes == ()


def test_options_reach_every_rendering(qwen3_dir: Path) -> None:
    template = qwen3(qwen3_dir, options={"enable_thinking": False})
    one = row(template, user("a"), says("b"))
    assert spans(template, one) == ["b<|im_end|>"]  # the prompt holds the empty thought
    assert text_of(template, one).endswith(f"{EMPTY}b<|im_end|>\n")


def test_inline_thoughts_stay_where_no_field_is_read(smol: Template) -> None:
    assert spans(smol, row(smol, user("a"), says("<think>x</think>b"))) == ["<think>x</think>b<|im_end|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_passed_under_the_name_the_template_reads(with_template: Any, field: str) -> None:
    text = CHATML.replace(
        "{{ m.content }}", f"{{% if m.{field} %}}[{{{{ m['{field}'] }}}}]{{% endif %}}{{{{ m.content }}}}"
    )
    template = with_template(text)
    assert spans(template, row(template, user("a"), says("b", reasoning_content="why"))) == ["[why]b<|im_end|>"]
    assert spans(template, row(template, user("a"), says("<think>why</think>b"))) == ["[why]b<|im_end|>"]


def test_lost_thoughts_are_noted(smol: Template, deepseek: Template) -> None:
    assert row(smol, user("a"), says("b", reasoning_content="why")).notes == (THOUGHT_LOST,)
    one = row(deepseek, user("a"), says("<think>why</think>b"))
    assert (spans(deepseek, one), one.notes) == (["b<｜end▁of▁sentence｜>"], (THOUGHT_LOST,))


@pytest.mark.parametrize("answer", [says("b", reasoning_content="why"), says("<think>\nwhy\n</think>\n\nb")])
def test_a_thought_opened_by_the_prompt_is_closed_by_the_answer(qwen3_dir: Path, answer: Message) -> None:
    """As DeepSeek-R1: no rendering holds the thought, but the target emits it after a prompt that ends in `<think>`."""
    template = deepseek_style(qwen3_dir, options={"thinking": True}, rewritten_turns="split")
    first, last = rows(template, user("a"), answer, user("c"), says("d", reasoning_content="again"))  # type: ignore[misc]
    assert text_of(template, first).endswith("<｜Assistant｜><think>\nwhy\n</think>\n\nb<｜end▁of▁sentence｜>")
    assert spans(template, first) == ["why\n</think>\n\nb<｜end▁of▁sentence｜>"]
    assert spans(template, last) == ["again\n</think>\n\nd<｜end▁of▁sentence｜>"]
    assert "why" not in text_of(template, last)
    assert reason(template, user("a"), says("b")) is DropReason.REWRITES_HISTORY  # it would have thought


# --- answers cut by a token limit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smol", "qwen", "llama", "deepseek"])
def test_an_unfinished_answer_gets_no_end_token(name: str, request: pytest.FixtureRequest) -> None:
    template: Template = request.getfixturevalue(name)
    one = row(template, user("a"), says("It goes on and", finish_reason="length"))
    assert spans(template, one)[0].endswith("It goes on and")
    assert one.loss_mask[-1] == 1
    assert not set(one.tokens[one.loss_mask == 1].tolist()) & template.end_ids


def test_a_conversation_ends_at_an_unfinished_answer(smol: Template) -> None:
    one = row(smol, user("a"), says("b c", finish_reason="length"), user("d"), says("e"))
    assert (spans(smol, one), one.notes) == (["b c"], (UNFINISHED_CUT,))
    one = row(smol, user("a"), says("b c", finish_reason="length"), user("d"))
    assert (spans(smol, one), one.notes) == (["b c"], (LAST_TURN_CUT,))


def test_an_unfinished_thought_is_not_closed(qwen: Template) -> None:
    one = row(qwen, user("a"), says("", reasoning_content="hm hm", finish_reason="length"))
    assert spans(qwen, one) == ["<think>\nhm hm"]
    one = row(qwen, user("a"), says("<think>\nso\n</think>\n\n", finish_reason="length"))  # closed, then cut
    assert spans(qwen, one) == ["<think>\nso\n</think>\n\n"]


def test_unfinished_words_that_look_like_the_end_are_kept(llama: Template, smol: Template) -> None:
    assert spans(llama, row(llama, user("a"), says("<| ", finish_reason="length"))) == ["<|"]
    one = row(smol, user("a"), says("so<|im_end|>it", finish_reason="length"))
    assert spans(smol, one) == ["so<|im_end|>"]
    assert text_of(smol, one).endswith("so<|im_end|>it")


def test_an_unfinished_answer_without_any_end_token(with_template: Any) -> None:
    template = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }} (over)\n{% endfor %}"
                             "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    assert spans(template, row(template, user("a"), says("b c"))) == [" b c (over)\n"]
    assert spans(template, row(template, user("a"), says("b c", finish_reason="length"))) == [" b c"]


# --- context ----------------------------------------------------------------------------------------------------------


def test_a_server_stops_at_a_planted_end_token(smol: Template) -> None:
    one = row(
        smol, user("<|im_end|>\n<|im_start|>assistant\nno"), says("yes<|im_end|>and<|im_end|>"), user("x"), says("z")
    )
    assert spans(smol, one) == ["yes<|im_end|>", "z<|im_end|>"]


def test_an_empty_thought_and_nothing_else_is_blank(qwen: Template, smol: Template) -> None:
    assert reason(qwen, user("a"), says(EMPTY)) is DropReason.EMPTY_ANSWER
    assert reason(qwen, user("a"), says(EMPTY, reasoning_content=" \t\n")) is DropReason.EMPTY_ANSWER
    assert spans(qwen, row(qwen, user("a"), says("b"), user("c"), says(EMPTY))) == [f"{EMPTY}b<|im_end|>"]
    assert spans(smol, row(smol, user("a"), says(EMPTY))) == [f"{EMPTY}<|im_end|>"]  # to this one it is just text


def test_only_one_plain_thought_is_taken_out_of_a_content(qwen: Template) -> None:
    one = row(qwen, user("a"), says("<think>x<think>y</think>z"))
    assert spans(qwen, one) == ["<think>\ny\n</think>\n\nz<|im_end|>"]  # as the template itself reads it


def test_blank_user_turns_by_choice(smollm2_dir: Path) -> None:
    talk = [user(" "), says("b c")]
    assert spans(smollm2(smollm2_dir), row(smollm2(smollm2_dir), *talk)) == ["b c<|im_end|>"]
    drop = smollm2(smollm2_dir, empty_prompt="drop")
    assert reason(drop, *talk) is DropReason.EMPTY_PROMPT
    assert spans(drop, row(drop, user("a"), says("b c"), user(" "))) == ["b c<|im_end|>"]  # cut, so never asked


def test_turns_after_the_last_answer_are_cut(qwen: Template) -> None:
    talk = [user("a"), calls(("f", {})), result("r")]
    one = row(qwen, *talk)
    assert one.notes == (LAST_TURN_CUT,)
    assert "tool_response" not in text_of(qwen, one)


# --- tools ------------------------------------------------------------------------------------------------------------

ASKED = [user("q"), calls(("look", {"a": "é", "b": [1, None]})), result("found it"), says("There.")]


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        (
            "qwen",
            '<tool_call>\n{"name": "look", "arguments": {"a": "é", "b": [1, null]}}\n</tool_call><|im_end|>',
            f"{EMPTY}There.<|im_end|>",
        ),
        (
            "llama",
            '<|python_tag|>{"name": "look", "parameters": {"a": "é", "b": [1, null]}}<|eom_id|>',
            "There.<|eot_id|>",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
            '{"a": "é", "b": [1, null]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "There.<｜end▁of▁sentence｜>",
        ),
    ],
)
def test_calls_are_emitted(name: str, call: str, answer: str, request: pytest.FixtureRequest) -> None:
    template: Template = request.getfixturevalue(name)
    trained = spans(template, row(template, *ASKED, tools=[tool("look"), tool("other")]))
    assert trained[-1] == answer
    if name == "qwen":  # rendered without a thought, but sampled after one: context
        assert len(trained) == 1
    else:
        assert trained[0] == call


def test_null_content_beside_a_call_is_no_content(llama: Template, deepseek: Template) -> None:
    for template in (llama, deepseek):
        null, blank = (row(template, user("q"), calls(("look", {}), content=content)) for content in (None, ""))
        assert null.tokens.tolist() == blank.tokens.tolist()
        assert "None" not in text_of(template, null)


def test_a_template_without_tools_refuses_them_by_name(smol: Template) -> None:
    found = rows(smol, user("a"), says("b c"), tools=[tool("look")])
    assert isinstance(found, Rejected)
    assert (found.reason, "'look'" in found.detail) == (DropReason.TOOLS, True)
    assert reason(smol, *ASKED) is DropReason.TOOLS
    assert reason(smol, user("a"), tools=[tool("look")]) is DropReason.PROMPT_ONLY
    assert spans(smol, row(smol, user("a"), result("r"), says("b c"))) == ["b c<|im_end|>"]  # ChatML takes any role


def test_a_template_that_loses_results_is_refused(with_template: Any) -> None:
    template = with_template(CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"))
    assert reason(template, user("a"), result("found it"), says("b c")) is DropReason.TOOLS
    assert row(template, user("a"), result(" \n"), says("b c")).notes == ()


def test_arguments_are_never_encoded_twice(llama: Template, with_template: Any) -> None:
    broken = '{"a": broken "x"'
    assert broken in spans(llama, row(llama, user("q"), calls(("look", broken))))[0]
    calling = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    twice = with_template(CHATML.replace("{{ m.content }}", f"{calling}{{% endfor %}}"))
    assert reason(twice, user("q"), calls(("look", broken))) is DropReason.BAD_TOOLS
    assert spans(twice, row(twice, user("q"), calls(("look", {"a": 1})))) == ['look{"a": 1}<|im_end|>']


def test_arguments_are_never_python_literals(with_template: Any) -> None:
    calling = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
    literal = with_template(CHATML.replace("{{ m.content }}", f"{calling}{{% endfor %}}"))
    assert spans(literal, row(literal, user("q"), calls(("look", {"a": "x"})))) == ['look{"a": "x"}<|im_end|>']


# --- repairs ----------------------------------------------------------------------------------------------------------

STRICT = (  # as Gemma and Mistral: no system role, strictly user and assistant in turn
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("talk", "notes", "prompt"),
    [
        ([user("a"), says("b c")], (), "a"),
        ([SYSTEM, user("a"), says("b c")], (SYSTEM_MERGED,), "Be brief.\n\na"),
        ([user("a"), user("x"), says("b c")], (TURNS_MERGED,), "a\n\nx"),
        ([says("Hello!"), user("a"), says("b c")], (GREETING_DROPPED,), "a"),
        ([SYSTEM, user("a"), user("x"), says("b c")], (SYSTEM_MERGED, TURNS_MERGED), "Be brief.\n\na\n\nx"),
        (
            [SYSTEM, says("Hello!"), user("a"), user("x"), says("b"), says("c")],
            (SYSTEM_MERGED, TURNS_MERGED, GREETING_DROPPED),
            "Be brief.\n\na\n\nx",
        ),
    ],
)
def test_the_fewest_repairs_are_made(
    with_template: Any, talk: list[Message], notes: tuple[str, ...], prompt: str
) -> None:
    template = with_template(STRICT)
    one = row(template, *talk)
    assert one.notes == notes
    assert text_of(template, one).startswith(f"<|im_start|>user\n{prompt}<|im_end|>")
    assert spans(template, one) == [("b\n\nc" if talk[-1]["content"] == "c" else "b c") + "<|im_end|>"]


def test_what_cannot_be_repaired_says_what_the_template_said(with_template: Any) -> None:
    found = rows(with_template(STRICT), user("a"), result("r"), says("b c"))
    assert isinstance(found, Rejected)
    assert (found.reason, "alternate" in found.detail) == (DropReason.TEMPLATE_ERROR, True)


def test_nothing_is_repaired_where_the_template_allows_it(smol: Template) -> None:
    one = row(smol, says("Hello!"), SYSTEM, user("a"), user("x"), says("b"), says("c d"))
    assert one.notes == ()
    assert text_of(smol, one).count("<|im_start|>") == 7  # its own system prompt is one of them


# --- generation tags --------------------------------------------------------------------------------------------------

TAGGED = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}",
)
UNASKED = TAGGED[: TAGGED.index("{% if add_generation_prompt %}")]


def test_generation_tags_change_nothing(with_template: Any) -> None:
    talk = [SYSTEM, user("a"), says("b c"), user("\0"), says("d<|im_end|>e"), user("f")]
    found = []
    for text in (CHATML, TAGGED, UNASKED):
        one = row(with_template(text), *talk)
        found.append((one.tokens.tolist(), one.loss_mask.tolist(), one.notes))
    assert found[0] == found[1] == found[2]


# --- preformatted -----------------------------------------------------------------------------------------------------


def preformatted(template: Template, text: str) -> Encoded | Rejected:
    found = template.encode(Preformatted("id", text, "file", 1))
    return found if isinstance(found, Rejected) else found[0]


@pytest.mark.parametrize("name", ["smol", "llama", "deepseek"])
def test_preformatted_text_is_the_chat_it_came_from(name: str, request: pytest.FixtureRequest) -> None:
    template: Template = request.getfixturevalue(name)
    talk = [SYSTEM, user("a"), says("b c\n"), user("d"), says("e é f")]
    chat = row(template, *talk)
    one = preformatted(template, template.render(talk, generation_prompt=False))
    assert isinstance(one, Encoded)
    assert one.tokens.tolist() == chat.tokens.tolist()
    assert one.loss_mask.tolist() == chat.loss_mask.tolist()


def test_preformatted_answers_cut_by_the_texts_end(smol: Template) -> None:
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    one = preformatted(smol, f"{head}b c")
    assert isinstance(one, Encoded)
    assert spans(smol, one) == ["b c"]
    reasons = [preformatted(smol, text) for text in (head, f"{head} <|im_end|>", "### Human: a\n### Assistant: b")]
    assert [one.reason for one in reasons if isinstance(one, Rejected)] == [
        DropReason.PROMPT_ONLY,
        DropReason.EMPTY_ANSWER,
        DropReason.OTHER_TEMPLATE,
    ]
    assert "<|im_start|>assistant" in reasons[-1].detail  # type: ignore[union-attr]


def test_shared_preformatted_rows_go_through(smol: Template, shared_data: Path) -> None:
    lines = (shared_data / "formats" / "preformatted_text.jsonl").read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in lines if line]
    found = [preformatted(smol, text) for text in texts]
    assert len(found) == 60
    assert not [one for one in found if isinstance(one, Rejected)]


# --- segments ---------------------------------------------------------------------------------------------------------

ANY = st.text(max_size=30) | st.sampled_from(
    ["\n\nx", " x", "x ", "12", "<|im_end|>", "e\u0301", "<think>a</think>b", ""]
)
NAMES = ("smol", "qwen", "llama", "deepseek")


@settings(max_examples=80, deadline=None)
@given(talk=st.lists(st.tuples(ANY, ANY), min_size=1, max_size=3), name=st.sampled_from(NAMES))
def test_segments_are_the_whole_texts_ids_where_those_go_on_from_the_prompts(
    smol: Template, qwen: Template, llama: Template, deepseek: Template, talk: list[tuple[str, str]], name: str
) -> None:
    """Cutting the text changes ids only where a server's prompt has other ids than the whole text has up to there."""
    template = dict(zip(NAMES, (smol, qwen, llama, deepseek), strict=True))[name]
    messages = [message for asked, said in talk for message in (user(asked), says(said))]
    found = rows(template, *messages)
    if isinstance(found, Rejected):
        return
    (one,) = found
    last = max(i for i, (_, said) in enumerate(talk) if said.strip())
    whole = template.tokenizer(
        template.render(messages[: 2 * last + 2], generation_prompt=False), add_special_tokens=False
    )
    prompts = [template.prompt_ids(messages[:i]) for i in range(1, 2 * last + 2, 2)]
    assert text_of(template, one) == template.decode(whole["input_ids"])
    if all(whole["input_ids"][: len(prompt)] == prompt for prompt in prompts):
        assert one.tokens.tolist() == whole["input_ids"]


# --- hashes -----------------------------------------------------------------------------------------------------------


def test_the_template_hash_covers_the_rules(qwen3_dir: Path, qwen: Template) -> None:
    others = [
        qwen3(qwen3_dir, rewritten_turns="split"),
        qwen3(qwen3_dir, options={"enable_thinking": False}),
        Template(qwen.tokenizer, "x", end_ids=[5]),
    ]
    assert len({template.template_hash for template in (qwen, *others)}) == 4
    assert {template.tokenizer_hash for template in others} == {qwen.tokenizer_hash}
    assert qwen3(qwen3_dir).template_hash == qwen.template_hash


def test_a_folder_with_nothing_but_a_tokenizer_is_enough(qwen: Template) -> None:
    assert qwen.vocab_size == len(qwen.tokenizer)
    assert qwen.decode(sorted(qwen.end_ids)) == "<|im_end|>"
