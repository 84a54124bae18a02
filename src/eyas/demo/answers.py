"""The target's own greedy answers to the demo's prompts; those of an earlier run are reused."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from eyas.capture.contract import token_hash
from eyas.data.rows import Chat, Dropped, Message
from eyas.data.sources import read_chats
from eyas.data.template import Template
from eyas.errors import ConfigError

ANSWERS: Final = "answers.jsonl"
BATCH_ROWS: Final = 48


@dataclass(frozen=True, slots=True)
class AnswersReport:
    """What `make_answers` did.

    Attributes:
        path: JSON lines, one a prompt: id, conversations (for people), prompt_ids and answer_ids (for the corpus),
            finished (whether the target ended the answer itself), tokenizer_hash, settings.
        rows, generated, reused: answers in the file, made now, and taken from an earlier run; in number.
        tokens: answer tokens made now.
        seconds: wall time, loading the model included.
    """

    path: Path
    rows: int
    generated: int
    reused: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is asked: `ids` are the messages rendered with the generation prompt."""

    id: str
    messages: list[Message]
    ids: list[int]

    @property
    def key(self) -> str:
        """Greedy answers depend on the prompt's ids alone."""
        return token_hash(self.ids)


def make_answers(
    out: Path,
    model: Path,
    template: Template,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    console: Console | None = None,
) -> AnswersReport:
    """The target's greedy answers to `prompts`, in `out/answers.jsonl` in the order of the prompts.

    Each batch is appended as soon as it is there. Answers of another model or other settings are not reused.
    """
    console, began = console or Console(stderr=True), time.monotonic()
    dtype = fast_dtype()
    settings = _settings(model, template, dtype, max_new_tokens)
    path = out / ANSWERS
    out.mkdir(parents=True, exist_ok=True)
    wanted = {prompt.key: prompt for prompt in prompts}
    done = {key: answer for key, answer in _reusable(path, settings).items() if key in wanted}
    reused, tokens = len(done), 0
    pending = sorted((prompt for key, prompt in wanted.items() if key not in done), key=lambda prompt: len(prompt.ids))
    if reused:
        console.print(f"answers: {reused} of {len(wanted)} reused from {path}", highlight=False, soft_wrap=True)
    _write(path, done.values())  # drops a torn last line and answers of other settings before anything is appended
    with path.open("a", encoding="utf-8") as file:
        for batch, generated in _generate(model, template, pending, dtype, max_new_tokens):
            for prompt, ids in zip(batch, generated, strict=True):
                done[prompt.key] = _answer(prompt, ids, template, settings)
                file.write(_line(done[prompt.key]))
                tokens += len(ids)
            file.flush()
            os.fsync(file.fileno())
            rate = tokens / (time.monotonic() - began)
            line = f"answers: {len(done)} of {len(wanted)}, {tokens:,} tokens, {rate:.0f} tokens/s"
            console.print(line, highlight=False, soft_wrap=True)
    # Same bytes however often the run was interrupted: in the order of the prompts, each under its own id.
    _write(path, ({**done[prompt.key], "id": prompt.id} for prompt in prompts))
    return AnswersReport(path, len(prompts), len(pending), reused, tokens, time.monotonic() - began)


# --- prompts and answers ----------------------------------------------------------------------------------------------


def read_prompts(path: Path, template: Template) -> list[Prompt]:
    """The chats of `path` up to their last user turn.

    Raises:
        ConfigError: a row is no chat (the demo's input is small: it should be right), or there is none.
    """
    prompts: list[Prompt] = []
    for row in read_chats(path):
        if not isinstance(row, Chat):
            detail = row.detail if isinstance(row, Dropped) else "it holds token ids or formatted text"
            raise ConfigError("not a prompt", f"{path}:{row.line}", detail)
        roles = [message["role"] for message in row.messages]
        if "user" not in roles:
            raise ConfigError("not a prompt", f"{path}:{row.line}", "no user turn")
        messages = row.messages[: len(roles) - roles[::-1].index("user")]
        prompts.append(Prompt(row.id, messages, template.prompt_ids(messages)))
    if not prompts:
        raise ConfigError("no prompts", path)
    return prompts


def _settings(model: Path, template: Template, dtype: torch.dtype, max_new_tokens: int) -> str:
    """32 hex digits of all that decides an answer but the prompt."""
    digest = hashlib.sha256(f"{template.tokenizer_hash} {template.template_hash} {dtype} {max_new_tokens}".encode())
    for path in sorted([*model.glob("*.safetensors"), *model.glob("*config.json")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _answer(prompt: Prompt, ids: list[int], template: Template, settings: str) -> dict[str, Any]:
    finished = ids[-1] in template.end_ids
    text = template.decode(ids[:-1] if finished else ids)
    return {
        "id": prompt.id,
        "conversations": [*prompt.messages, {"role": "assistant", "content": text}],
        "prompt_ids": prompt.ids,
        "answer_ids": ids,
        "finished": finished,
        "tokenizer_hash": template.tokenizer_hash,
        "settings": settings,
    }


def _reusable(path: Path, settings: str) -> dict[str, dict[str, Any]]:
    """Answers of the same settings in an earlier run's file, by prompt; lines that are none are passed over."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            match json.loads(line):
                case {"settings": made_with, "prompt_ids": list(prompt), "answer_ids": [_, *_]} as answer:
                    if made_with == settings:
                        found[token_hash(prompt)] = answer
        except (ValueError, TypeError):
            continue
    return found


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")) + "\n"


def _write(path: Path, answers: Iterable[dict[str, Any]]) -> None:
    part = path.with_name(f".{path.name}.tmp")
    part.write_text("".join(map(_line, answers)), encoding="utf-8", newline="\n")
    part.replace(path)


# --- generation -------------------------------------------------------------------------------------------------------


def fast_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it in hardware, else float32: emulated bfloat16 is several times slower."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else torch.float32


def _generate(
    model_dir: Path, template: Template, prompts: Sequence[Prompt], dtype: torch.dtype, max_new_tokens: int
) -> Iterator[tuple[Sequence[Prompt], list[list[int]]]]:
    """Greedy answers, batch by batch; ids end with the first end token, or without one at `max_new_tokens`."""
    if not prompts:
        return
    transformers_logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=dtype)
    ends = sorted(template.end_ids)
    for start in range(0, len(prompts), BATCH_ROWS):
        batch = prompts[start : start + BATCH_ROWS]
        width = max(len(prompt.ids) for prompt in batch)
        tokens = torch.full((len(batch), width), ends[0])
        attention = torch.zeros_like(tokens)
        for row, prompt in enumerate(batch):  # padded on the left: the answers start in one column
            tokens[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            attention[row, width - len(prompt.ids) :] = 1
        with torch.inference_mode():
            output = model.generate(
                input_ids=tokens,
                attention_mask=attention,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        yield batch, [_until_end(ids, template.end_ids) for ids in cast(torch.Tensor, output)[:, width:].tolist()]


def _until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]
