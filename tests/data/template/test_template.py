from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eyas.data.rows import Chat, DropReason, Message, Sampled
from eyas.data.template import Encoded, Rejected, Template, fit
from eyas.data.template.encoder import CUT_AT_LIMIT, LAST_TURN_CUT
from eyas.errors import ConfigError

END = 2  # <|im_end|>

#: Chat templates of other families, over SmolLM2's control tokens.
CHATML_NO_NEWLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS_AND_BOS = (  # as Llama 3: BOS first, contents trimmed, nothing after the end of a turn
    "<|endoftext|>{% for m in messages %}<jupyter_start>{{ m.role }}<jupyter_text>{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<jupyter_start>assistant<jupyter_text>{% endif %}"
)
PLAIN_WORDS = (  # as Vicuna: no control tokens around a turn but the end of the assistant's
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: {{ m.content }}<|im_end|>{% else %}"
    "USER: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LAST_TURN_THINKS = (  # as Qwen 3: only the last answer keeps its thinking block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_GENERATION_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INSTRUCTIONS = (  # as Llama 2: an answer follows its instruction with no header, so no generation prompt is needed
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}<|im_end|>{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


@pytest.fixture
def with_template(smollm2: Template) -> Iterator[Any]:
    """Makes a Template of SmolLM2's tokenizer and another chat template."""
    tokenizer, own = smollm2.tokenizer, smollm2.tokenizer.chat_template

    def make(text: str | None, **options: Any) -> Template:
        tokenizer.chat_template = text
        return Template(tokenizer, "other", end_ids=[END], vocab_size=smollm2.vocab_size, **options)

    yield make
    tokenizer.chat_template = own


def chat(*texts: str, system: str | None = None) -> list[Message]:
    """user, assistant, user, ..."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def encode(template: Template, messages: list[Message]) -> Encoded | Rejected:
    """The one row of a conversation."""
    rows = template.encode(Chat("id", messages, "file", 1))
    if isinstance(rows, Rejected):
        return rows
    (row,) = rows
    return row


def parts(row: Encoded | Rejected) -> tuple[list[int], list[int], tuple[str, ...]]:
    assert isinstance(row, Encoded), row
    assert (row.tokens.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    return row.tokens.tolist(), row.loss_mask.tolist(), row.notes


def spans(template: Template, row: Encoded | Rejected) -> list[str]:
    """Texts of the trained runs."""
    assert isinstance(row, Encoded), row
    assert len(row.tokens) == len(row.loss_mask)
    found: list[list[int]] = []
    for i, (token, trained) in enumerate(zip(row.tokens, row.loss_mask, strict=True)):
        if trained and not (i and row.loss_mask[i - 1]):
            found.append([])
        if trained:
            found[-1].append(token)
    return [template.decode(run) for run in found]


def test_multi_turn_and_system(smollm2: Template) -> None:
    row = encode(smollm2, chat("Hi", "Hello.", "Bye", "See you 12 times!", system="Be brief."))
    assert spans(smollm2, row) == ["Hello.<|im_end|>", "See you 12 times!<|im_end|>"]
    assert isinstance(row, Encoded)
    assert smollm2.decode(row.tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you 12 times!<|im_end|>\n"
    )
    assert row.loss_mask[-2:].tolist() == [1, 0]  # the end token is trained, the newline after it never generated


TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>assistant\n",
            "\n",
            " ",
            "12",
            "a",
            "é",
            "مرحبا",
            "👩‍👩‍👧",
            "\u202e",
            "\u2028",
            "e\u0301",
            "{{ x }}",
            "\t",
        ]
    ),
    max_size=12,
).map("".join)


def representable(template: Template, text: str) -> str:
    """SmolLM2's vocabulary lacks a few bytes and drops them silently: what is left of the text."""
    return template.decode(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def emitted(text: str) -> str:
    """What SmolLM2 would emit of an answer: a server stops at the first end token, planted or not."""
    return text.partition("<|im_end|>")[0] + "<|im_end|>"


def learned(template: Template, messages: list[Message]) -> list[str] | DropReason:
    """Texts of the trained runs, or why there is no row."""
    row = encode(template, messages)
    return row.reason if isinstance(row, Rejected) else spans(template, row)


def to_learn(answers: list[str]) -> list[str] | DropReason:
    """The answers up to their first end token, but for the blank ones; or why that is nothing."""
    trained = [emitted(text) for text in answers if text.strip()]
    if not trained:
        return DropReason.EMPTY_ANSWER
    return DropReason.NOTHING_TO_LEARN if set(trained) == {"<|im_end|>"} else trained


@settings(max_examples=150, deadline=None)
@given(st.none() | TEXTS, st.lists(TEXTS, min_size=2, max_size=6))
def test_trained_text_is_the_answers_text(smollm2: Template, system: str | None, texts: list[str]) -> None:
    texts = [representable(smollm2, text) for text in texts[: len(texts) // 2 * 2]]
    assert learned(smollm2, chat(*texts, system=system)) == to_learn(texts[1::2])


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_no_token_is_invented(smollm2: Template, texts: list[str]) -> None:
    """The row is the template's own rendering, token for token, but where a token would straddle a turn's start."""
    texts = texts[: len(texts) // 2 * 2]
    assume(texts[-1].strip())  # else the last turn is cut
    messages = chat(*texts)
    row = encode(smollm2, messages)
    assume(isinstance(row, Encoded))
    assert isinstance(row, Encoded)
    whole = smollm2.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert smollm2.decode(row.tokens.tolist()) == smollm2.decode(whole)
    if not any(text[:1].isspace() for text in texts[1::2]):  # "assistant\n" may share a token with white space only
        assert row.tokens.tolist() == whole


def test_batches_and_single_rows_agree(smollm2: Template) -> None:
    chats = [chat("a", "b c"), chat("only a prompt"), chat("a", " "), chat("a", "b c", "d", "e f"), chat("a", "b c")]
    rows = smollm2.encode_batch([Chat("id", messages, "file", 1) for messages in chats])
    for row, messages in zip(rows, chats, strict=True):
        alone = encode(smollm2, messages)
        assert row == alone if isinstance(row, Rejected) else parts(row[0]) == parts(alone)
    assert smollm2.encode_batch([]) == []


# --- rules ------------------------------------------------------------------------------------------------------------


def test_a_trailing_user_turn_is_cut(smollm2: Template) -> None:
    row = encode(smollm2, chat("Hi", "Hello.", "Bye"))
    assert isinstance(row, Encoded)
    assert row.notes == (LAST_TURN_CUT,)
    assert parts(row)[0] == parts(encode(smollm2, chat("Hi", "Hello.")))[0]


def test_a_greeting_is_context(smollm2: Template) -> None:
    greeting = {"role": "assistant", "content": "Welcome to you!"}
    assert spans(smollm2, encode(smollm2, [greeting, *chat("Hi", "Hello.")])) == ["Hello.<|im_end|>"]
    row = encode(smollm2, [greeting, {"role": "user", "content": "Hi"}])
    assert isinstance(row, Rejected)
    assert row.reason is DropReason.NOTHING_TO_LEARN


def test_blank_answers_are_context(smollm2: Template) -> None:
    assert spans(smollm2, encode(smollm2, chat("Hi", " \n", "There?", "Yes."))) == ["Yes.<|im_end|>"]


def test_two_answers_in_a_row_are_two_turns(smollm2: Template) -> None:
    messages = [*chat("Hi", "Hello."), {"role": "assistant", "content": "How are you?"}]
    assert spans(smollm2, encode(smollm2, messages)) == ["Hello.<|im_end|>", "How are you?<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (chat("Hi"), DropReason.PROMPT_ONLY),
        ([], DropReason.PROMPT_ONLY),
        (chat("Hi", ""), DropReason.EMPTY_ANSWER),
        (chat("Hi", " \n\t", "x", ""), DropReason.EMPTY_ANSWER),
    ],
)
def test_rejections(smollm2: Template, messages: list[Message], reason: DropReason) -> None:
    row = encode(smollm2, messages)
    assert isinstance(row, Rejected)
    assert row.reason is reason


# --- other templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CHATML_NO_NEWLINE, HEADERS_AND_BOS, PLAIN_WORDS, INSTRUCTIONS])
def test_other_families(with_template: Any, text: str) -> None:
    template = with_template(text)
    row = encode(template, chat("Hi", "Hello there.", "Add 2 and 2", "It is 4."))
    assert [span.strip() for span in spans(template, row)] == ["Hello there.<|im_end|>", "It is 4.<|im_end|>"]
    assert row.tokens[-1] == END
    assert row.loss_mask[-1] == 1


@pytest.fixture(scope="module")
def no_newline(smollm2_dir: Path) -> Template:
    tokenizer = Template.load(str(smollm2_dir)).tokenizer
    tokenizer.chat_template = CHATML_NO_NEWLINE
    return Template(tokenizer, "other", end_ids=[END])


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_no_newline_template(no_newline: Template, texts: list[str]) -> None:
    texts = [representable(no_newline, text) for text in texts[: len(texts) // 2 * 2]]
    assert learned(no_newline, chat(*texts)) == to_learn(texts[1::2])


def test_the_templates_bos_is_not_doubled(with_template: Any) -> None:
    row = encode(with_template(HEADERS_AND_BOS), chat("Hi", "Hello."))
    assert row.tokens.tolist().count(0) == 1
    assert row.tokens[0] == 0


def test_a_span_without_an_end_token_is_trained_to_its_end(with_template: Any) -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = with_template(turns + "{% if add_generation_prompt %}assistant:{% endif %}")
    assert spans(template, encode(template, chat("Hi", "Hello."))) == [" Hello.\n"]


def test_no_token_straddles_the_start_of_an_answer(smollm2: Template) -> None:
    """At run time the prompt's ids are there before the first token of the answer is."""
    row = encode(smollm2, chat("Hi", "\n\nHello"))
    assert spans(smollm2, row) == ["\n\nHello<|im_end|>"]
    prompt = smollm2.prompt_ids(chat("Hi"))
    assert isinstance(row, Encoded)
    assert row.tokens[: len(prompt)].tolist() == prompt
    assert row.loss_mask[: len(prompt) + 1].tolist() == [0] * len(prompt) + [1]


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('only pairs') if messages | length > 1 }}",
        "{{ messages[5].content }}",
        "{{ 1 / (messages | length - 2) }}",
        "{{ 'x' + none }}",
    ],
)
def test_template_errors_are_values(with_template: Any, text: str) -> None:
    row = encode(with_template(text), chat("Hi", "Hello."))
    assert isinstance(row, Rejected)
    assert row.reason is DropReason.TEMPLATE_ERROR
    assert row.detail


def test_a_template_must_say_where_answers_start(with_template: Any) -> None:
    with pytest.raises(ConfigError, match="no generation prompt"):
        with_template(NO_GENERATION_PROMPT)
    with pytest.raises(ConfigError, match="no chat template"):
        with_template(None)


def test_options_reach_the_template_and_its_hash(with_template: Any) -> None:
    text = "{{ mood }}" + CHATML_NO_NEWLINE
    glad, sad = with_template(text, options={"mood": "glad"}), with_template(text, options={"mood": "sad"})
    assert glad.render(chat("Hi"), generation_prompt=False).startswith("glad")
    assert glad.template_hash != sad.template_hash


# --- hashes, limits, sampled ids --------------------------------------------------------------------------------------


def test_hashes_follow_the_content_only(smollm2: Template, smollm2_dir: Path, with_template: Any) -> None:
    again = Template.load(str(smollm2_dir))
    again.tokenizer(
        ["a", "a b c d"], padding=True, truncation=True, max_length=3
    )  # leaves state behind in the tokenizer
    rebuilt = Template(again.tokenizer, "elsewhere")
    assert (rebuilt.tokenizer_hash, rebuilt.template_hash) == (smollm2.tokenizer_hash, smollm2.template_hash)
    assert with_template(CHATML_NO_NEWLINE).template_hash != smollm2.template_hash
    again.tokenizer.add_tokens(["<new>"])
    assert Template(again.tokenizer, "x").tokenizer_hash != smollm2.tokenizer_hash


def test_load_reads_end_ids_and_vocabulary(smollm2: Template) -> None:
    assert smollm2.end_ids == {END}
    assert smollm2.vocab_size == 49152


@pytest.mark.parametrize("broken", ["missing", "empty", "garbage"])
def test_unloadable_models_are_config_errors(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "model"
    if broken != "missing":
        folder.mkdir()
    if broken == "garbage":
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match="model"):
        Template.load(str(folder))


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(2, 30), st.sampled_from(["cut", "drop"]))
def test_fit(mask: list[bool], limit: int, too_long: str) -> None:
    bits = [int(bit) for bit in mask]
    assume(any(a and b for a, b in pairwise(bits)))
    row = Encoded(np.arange(len(bits), dtype=np.int32), np.array(bits, np.uint8))
    result = fit(row, limit, too_long)
    if len(bits) <= limit:
        assert result is row
    elif isinstance(result, Rejected):
        assert result.reason is DropReason.TOO_LONG
        assert too_long == "drop" or not any(a and b for a, b in pairwise(bits[:limit]))
    else:
        assert too_long == "cut"
        assert parts(result) == (list(range(limit)), bits[:limit], (CUT_AT_LIMIT,))


def test_sampled_ids_are_taken_as_they_are(smollm2: Template) -> None:
    def sampled(answer: list[int], tokenizer_hash: str = "") -> Encoded | Rejected:
        rows = smollm2.encode(Sampled("s", [5, 6, 7], answer, tokenizer_hash, "f", 1))
        return rows if isinstance(rows, Rejected) else rows[0]

    cut = parts(sampled([8, 9]))
    assert cut == ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], ())  # cut at a limit: no end token appears
    assert parts(sampled([8, END], smollm2.tokenizer_hash)) == ([5, 6, 7, 8, END], [0, 0, 0, 1, 1], ())
    reasons = [sampled([]), sampled([8]), sampled([8, 49152]), sampled([8, -1]), sampled([8, 9], "another")]
    assert [row.reason for row in reasons if isinstance(row, Rejected)] == [
        DropReason.EMPTY_ANSWER,
        DropReason.NOTHING_TO_LEARN,
        DropReason.BAD_TOKENS,
        DropReason.BAD_TOKENS,
        DropReason.OTHER_TOKENIZER,
    ]
