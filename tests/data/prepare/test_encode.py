from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.config import PrepareConfig
from eyas.data.prepare.decontaminate import EvaluationIndex
from eyas.data.prepare.encode import ChunkEncoder, EncodedChunk, EncodeSettings, Kept, Prompt
from eyas.data.rows import Dropped, DropReason, Raw
from eyas.data.template import Template

HI = [{"role": "user", "content": "Hi"}]
HELLO = [*HI, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


def encode(template: Template, *rows: Any, evaluations: EvaluationIndex | None = None, **options: Any) -> EncodedChunk:
    settings = EncodeSettings(template.model, PrepareConfig(**options), evaluations)
    raws = [Raw("a.jsonl", i, "a", json.dumps(row).encode()) for i, row in enumerate(rows, 1)]
    return ChunkEncoder(pickle.loads(pickle.dumps(settings)), template).encode(raws)


def test_each_row_has_one_outcome_in_order(template: Template) -> None:
    chunk = encode(template, {"messages": HELLO}, {"x": 1}, {"messages": HI}, {"messages": HELLO})
    assert [type(outcome) for outcome in chunk.outcomes] == [Kept, Dropped, Prompt, Kept]
    found = [(outcome, [row.tokens.tolist() for row in rows]) for outcome, rows in chunk.rows()]
    assert [len(rows) for _, rows in found] == [1, 0, 0, 1]
    assert found[0][1] == found[3][1]
    assert len(chunk.tokens) == len(chunk.loss_mask) == 2 * len(found[0][1][0])
    assert (chunk.tokens.dtype, chunk.loss_mask.dtype) == (np.int32, np.uint8)
    assert chunk.made_with == (template.tokenizer_hash, template.template_hash)
    kept = chunk.outcomes[0]
    assert isinstance(kept, Kept)
    assert (kept.id, kept.file, kept.line, kept.source) == ("a:1", "a.jsonl", 1, "a")


def test_a_chunk_without_rows_is_empty(template: Template) -> None:
    chunk = encode(template, {"x": 1})
    assert (len(chunk.tokens), len(chunk.loss_mask)) == (0, 0)
    assert list(encode(template).rows()) == []


def test_what_fits_of_several_pieces_is_kept(template: Template) -> None:
    """A template that strips earlier thoughts makes a row of each answer; a long one may lose its last."""
    thinking = "<think>why</think>Because."
    turns = [{"role": ("user", "assistant")[i % 2], "content": thinking if i % 2 else "Why?"} for i in range(6)]
    chunk = encode(template, {"messages": turns}, rewritten_turns="split", max_tokens=60)
    (kept,) = chunk.outcomes
    assert isinstance(kept, Kept)
    assert sum(kept.lengths) == len(chunk.tokens)
    assert max(kept.lengths) <= 60


def test_keys_are_made_only_where_they_are_asked_for(template: Template) -> None:
    def keys(**options: Any) -> tuple[bool, bool]:
        (kept,) = encode(template, {"messages": HELLO}, **options).outcomes
        assert isinstance(kept, Kept)
        return bool(kept.key), bool(kept.prompt_key)

    assert keys() == (False, False)
    assert keys(dedupe="conversation") == (True, False)
    assert keys(dedupe="prompt") == (True, True)
    assert keys(holdout=0.1) == (False, True)


def test_texts_in_the_targets_own_format_have_keys(template: Template) -> None:
    texts = [template.render(HELLO, generation_prompt=False), template.render(HELLO, generation_prompt=False) + " "]
    for by in ("conversation", "prompt"):
        one, other = encode(template, *({"text": text} for text in texts), dedupe=by).outcomes
        assert isinstance(one, Kept)
        assert isinstance(other, Kept)
        assert one.key == other.key != b""


def test_rows_of_every_form_are_compared_with_evaluation_sets(template: Template, tmp_path: Path) -> None:
    question = "How many clips did Natalia sell altogether in the months of April and May this year?"
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": [question]}) + "\n")
    index = EvaluationIndex.read([str(tmp_path / "eval.jsonl")])
    asked = [{"role": "user", "content": question}]
    answered = [*asked, {"role": "assistant", "content": "72."}]
    rows = [
        {"messages": answered},
        {"messages": asked},
        {"text": template.render(answered, generation_prompt=False)},
        {"prompt_ids": template.prompt_ids(asked), "answer_ids": [1, 2, 3]},
        {"messages": HELLO},
    ]
    outcomes = encode(template, *rows, evaluations=index).outcomes
    assert [one.reason for one in outcomes if isinstance(one, Dropped)] == [DropReason.CONTAMINATED] * 4
    assert isinstance(outcomes[4], Kept)
