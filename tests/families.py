"""Targets of several families for tests: real tokenizers and chat templates, and two written in others' style."""

# ruff: noqa: RUF001 (DeepSeek's control tokens hold fullwidth bars)
from __future__ import annotations

import json
from functools import cache
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


def smollm2(folder: Path, **options: Any) -> Template:
    return _loaded("smollm2", folder, options)


def qwen3(folder: Path, **options: Any) -> Template:
    return _loaded("qwen3", folder, options)


def llama_style(folder: Path, **options: Any) -> Template:
    """Over SmolLM2's tokenizer."""
    return _loaded("llama_style", folder, options)


def deepseek_style(folder: Path, **options: Any) -> Template:
    """Over Qwen3's tokenizer."""
    return _loaded("deepseek_style", folder, options)


def _loaded(name: str, folder: Path, options: dict[str, Any]) -> Template:
    return _template(name, str(folder), json.dumps(options, sort_keys=True))


@cache
def _template(name: str, folder: str, options: str) -> Template:
    match name:
        case "llama_style":
            tokens = [f"<|{part}|>" for part in LLAMA_TOKENS]
            tokenizer = _written(name, folder, tuple(tokens))
            ends = ["<|eot_id|>", "<|eom_id|>"]
        case "deepseek_style":
            tokens = [f"<｜{part}｜>" for part in DEEPSEEK_TOKENS]
            tokenizer = _written(name, folder, tuple(tokens))
            ends = [tokens[1]]
        case _:
            return Template.load(folder, **json.loads(options))
    return Template(tokenizer, name, end_ids=tokenizer.convert_tokens_to_ids(ends), **json.loads(options))


@cache
def _written(name: str, folder: str, tokens: tuple[str, ...]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = tokens[0], tokens[3] if name == "llama_style" else tokens[1]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer
