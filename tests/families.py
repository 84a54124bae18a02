"""Targets of several families for tests: real tokenizers and chat templates, and two written in others' style."""

# ruff: noqa: RUF001 (DeepSeek's control tokens hold fullwidth bars)
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eyas.data.template import Template

TEMPLATES = Path(__file__).parent / "fixtures" / "templates"
LLAMA_TOKENS = ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
DEEPSEEK_TOKENS = (
    *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep", "tool▁calls▁begin", "tool▁calls▁end"),
    *("tool▁call▁begin", "tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin"),
    "tool▁output▁end",
)

Make = Callable[..., Template]


def smollm2(folder: Path, **options: Any) -> Template:
    return Template.load(str(folder), **options)


def qwen3(folder: Path, **options: Any) -> Template:
    return Template.load(str(folder), **options)


def llama_style(folder: Path, **options: Any) -> Template:
    """Over SmolLM2's tokenizer."""
    tokens = [f"<|{name}|>" for name in LLAMA_TOKENS]
    return _written(folder, "llama_style", tokens, tokens[0], ["<|eot_id|>", "<|eom_id|>"], **options)


def deepseek_style(folder: Path, **options: Any) -> Template:
    """Over Qwen3's tokenizer."""
    tokens = [f"<｜{name}｜>" for name in DEEPSEEK_TOKENS]
    return _written(folder, "deepseek_style", tokens, tokens[0], [tokens[1]], **options)


def _written(folder: Path, name: str, tokens: list[str], bos: str, ends: list[str], **options: Any) -> Template:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = bos, ends[0]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return Template(tokenizer, name, end_ids=tokenizer.convert_tokens_to_ids(ends), **options)
