"""The product's ids and mask against a server that is played, row by row: not one may differ."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hostile_chats import hostile_chats
from mask_oracle import Expected, Oracle

from eyas.data.rows import Chat
from eyas.data.sources import read_chats
from eyas.data.template import Encoded, Rejected, Template
from families import deepseek_style, llama_style, qwen3, smollm2

ROWS = 2000
FAMILIES = {"smollm2": smollm2, "qwen3": qwen3, "llama_style": llama_style, "deepseek_style": deepseek_style}
REASONS = {
    "empty-answer or nothing-to-learn": {"empty-answer", "nothing-to-learn"},
    "tools": {"tools-unsupported", "bad-tools"},
}


@dataclass
class Tally:
    rows: int = 0
    answers: int = 0
    trained: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def templates(smollm2_dir: Path, qwen3_dir: Path) -> dict[str, Template]:
    folders = {"smollm2": smollm2_dir, "llama_style": smollm2_dir}
    return {name: make(folders.get(name, qwen3_dir)) for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def oracles(templates: dict[str, Template]) -> dict[str, Oracle]:
    return {
        name: Oracle(
            template.tokenizer,
            set(template.end_ids),
            null_content=name == "deepseek_style",
            reads_thoughts=name == "qwen3",
        )
        for name, template in templates.items()
    }


def real_rows() -> list[Chat]:
    folder = Path(__file__).parents[4] / "shared" / "data" / "train"
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read_chats(path)]
    return [row for row in rows if isinstance(row, Chat) and any(m["role"] == "assistant" for m in row.messages)]


def check(tally: Tally, name: str, row: Chat, got: tuple[Encoded, ...] | Rejected, expected: Expected) -> None:
    tally.rows += 1
    tally.answers += expected.answers
    place = f"{name} {row.file}:{row.line}"
    if isinstance(got, Rejected):
        tally.refused[got.reason] += 1
        if got.reason not in REASONS.get(expected.refusal, {expected.refusal}):
            tally.disagreements.append(f"{place}: refused, {got}; expected {expected.refusal or 'a row'}")
        return
    tally.trained += expected.trained
    (one,) = got
    if expected.refusal:
        tally.disagreements.append(f"{place}: kept; expected {expected.refusal}")
    elif one.tokens.tolist() != expected.ids:
        tally.disagreements.append(f"{place}: other ids")
    elif one.loss_mask.tolist() != expected.mask:
        tally.disagreements.append(f"{place}: other mask")


def test_two_thousand_mixed_rows_agree(templates: dict[str, Template], oracles: dict[str, Oracle]) -> None:
    real = real_rows()
    random.Random(1).shuffle(real)
    real = real[: ROWS * 3 // 5]
    rows = [*real, *hostile_chats(ROWS - len(real), seed=7)]
    random.Random(2).shuffle(rows)
    tally = Tally()
    names = list(FAMILIES)
    for turn, name in enumerate(names):
        mine = rows[turn :: len(names)]
        for row, got in zip(mine, templates[name].encode_batch(mine), strict=True):
            check(tally, name, row, got, oracles[name].row(row.messages, row.tools))
    print(f"{tally.rows} rows, {tally.answers} answers, {tally.trained} trained; refused {dict(tally.refused)}")
    assert tally.disagreements == []
    assert tally.rows == ROWS
    assert tally.trained > ROWS / 2  # the test says something
