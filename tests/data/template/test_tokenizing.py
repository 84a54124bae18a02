from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile_chats import PIECES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from eyas.data.rows import Chat
from eyas.data.template import Encoded, Template
from eyas.data.template.tokenizing import Tokenize, tokenizer_hash
from families import llama_style, qwen3, smollm2

INSTRUCTIONS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama_style"])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_ids_are_the_tokenizers_own(name: str, texts: list[str], smollm2_dir: Path, qwen3_dir: Path) -> None:
    make = {"smollm2": smollm2, "qwen3": qwen3, "llama_style": llama_style}[name]
    tokenizer = make(qwen3_dir if name == "qwen3" else smollm2_dir).tokenizer
    own = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert Tokenize(tokenizer)(texts, [False] * len(texts)) == own
    assert Tokenize(tokenizer)(texts, [True] * len(texts)) == own  # byte-level: going on changes nothing


def test_state_that_others_left_is_not_used(smollm2_dir: Path) -> None:
    tokenizer = smollm2(smollm2_dir).tokenizer
    tokenize, before = Tokenize(tokenizer), tokenizer_hash(tokenizer)
    ids = tokenize(["a b c d e f", "a"], [False, False])
    tokenizer(["a b c d", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before
    assert tokenize(["a b c d e f", "a"], [False, False]) == ids


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """As Llama 2's: spaces are part of words, and one is put before a text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=words, show_progress=False)
    backend.train_from_iterator(["Hello there, the answer is 4.", "[INST] Add 2 and 2 [/INST] It is"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = INSTRUCTIONS
    return tokenizer


def test_no_space_is_put_before_an_answer(sentencepiece: Any) -> None:
    template = Template(sentencepiece, "sentencepiece")
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["Add", "It is"] * 2)]
    (row,) = template.encode(Chat("id", messages, "file", 1))  # type: ignore[misc]
    assert isinstance(row, Encoded)
    words = sentencepiece.convert_ids_to_tokens(row.tokens.tolist())
    trained = [word for word, one in zip(words, row.loss_mask, strict=True) if one]
    assert "".join(trained) == "It▁is</s>It▁is</s>"
    whole = sentencepiece(template.render(messages, generation_prompt=False), add_special_tokens=False)["input_ids"]
    assert "".join(words) == "".join(sentencepiece.convert_ids_to_tokens(whole))


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python, as Kimi's and Qwen's first were: no offsets, no backend."""

    def __init__(self, **options: Any) -> None:
        self.letters = {chr(i): i for i in range(256)}
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {**self.letters, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_tokenizer_in_python_is_called_itself() -> None:
    tokenizer = Letters(eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = Template(tokenizer, "letters")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    (row,) = template.encode(Chat("id", messages, "file", 1))  # type: ignore[misc]
    assert template.decode(row.tokens.tolist()) == "user: a<|end|>assistant: b c<|end|>"
    assert template.decode(row.tokens[row.loss_mask == 1].tolist()) == "b c<|end|>"
    other = Letters(eos_token="<|stop|>")
    assert tokenizer_hash(tokenizer) != tokenizer_hash(other)
