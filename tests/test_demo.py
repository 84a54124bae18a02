from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from eyas import demo
from eyas.capture.contract import field_hash
from eyas.data.corpus import Corpus
from eyas.data.rows import Chat, Sampled
from eyas.data.sources import read_chats
from eyas.data.template import Template
from eyas.demo import AnswersReport, Prompt, demo_corpus, make_answers, make_corpus, read_prompts
from eyas.demo.worth import write_questions
from eyas.errors import ConfigError
from eyas.evaluate.questions import read_questions
from eyas.train.sampler import is_held_out

SHIPPED = Path(demo.__file__).parents[1] / demo.PROMPTS
LIMIT = 10


@pytest.fixture(scope="module")
def template(smollm2_dir: Path) -> Template:
    return Template.load(str(smollm2_dir))


@pytest.fixture(scope="module")
def prompts(template: Template, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    questions = [
        "What is the capital of France?",
        "Name a colour.",
        "Write a very long story about " + "cats and " * 20,
        "2+2?",
    ]
    rows = [{"id": f"q{i}", "conversations": [{"role": "user", "content": text}]} for i, text in enumerate(questions)]
    rows.append({**rows[0], "id": "again"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(path, template)


@pytest.fixture(scope="module")
def answered(
    smollm2_dir: Path, template: Template, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("answered")
    report = answer(out, smollm2_dir, template, prompts)
    assert (report.rows, report.generated, report.reused) == (5, 4, 0)
    return out


def answer(out: Path, model: Path, template: Template, prompts: list[Prompt], limit: int = LIMIT) -> AnswersReport:
    return make_answers(out, model, template, prompts, max_new_tokens=limit, console=Console(file=io.StringIO()))


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / demo.ANSWERS).read_text(encoding="utf-8").split("\n") if line]


def test_answers_are_in_the_order_of_the_prompts(answered: Path, template: Template, prompts: list[Prompt]) -> None:
    rows = rows_of(answered)
    assert [row["id"] for row in rows] == ["q0", "q1", "q2", "q3", "again"]
    assert [row["prompt_ids"] for row in rows] == [prompt.ids for prompt in prompts]
    assert rows[0]["answer_ids"] == rows[4]["answer_ids"]
    for row in rows:
        ends = [token in template.end_ids for token in row["answer_ids"]]
        assert row["finished"] == ends[-1]
        assert not any(ends[:-1])
        assert row["finished"] or len(row["answer_ids"]) == LIMIT
    assert {row["finished"] for row in rows} == {True, False}


def test_answers_are_the_targets_greedy_choice(answered: Path, smollm2_dir: Path) -> None:
    """Each token is the best, but for rounding, of a forward of that row alone: padding has not leaked in."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for row in rows_of(answered):
        tokens = torch.tensor([row["prompt_ids"] + row["answer_ids"]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, len(row["prompt_ids"]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row["answer_ids"])[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 0.5


def test_corpus_rows_are_the_ids_that_were_sampled(answered: Path, template: Template) -> None:
    report = make_corpus(answered, template, console=Console(file=io.StringIO()))
    rows = rows_of(answered)
    assert (report.read, report.kept) == (5, 5)
    for row, kept in zip(rows, Corpus.open(answered / demo.CORPUS).rows(), strict=True):
        assert kept.tokens.tolist() == row["prompt_ids"] + row["answer_ids"]
        assert kept.loss_mask.tolist() == [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
        assert (kept.tokens[-1] in template.end_ids) == row["finished"]


def test_finished_answers_equal_their_chat_rendered(answered: Path, template: Template) -> None:
    """Ids as sampled are what `prepare` would make of the chat, but for the newline the template adds after the end."""
    finished = [row for row in rows_of(answered) if row["finished"]]
    assert finished
    for row in finished:
        (encoded,) = template.encode(Chat("id", row["conversations"], "file", 1))  # type: ignore[misc]
        ids = row["prompt_ids"] + row["answer_ids"]
        assert encoded.tokens[: len(ids)].tolist() == ids


def test_a_second_run_reuses_everything(
    answered: Path, smollm2_dir: Path, template: Template, prompts: list[Prompt]
) -> None:
    before = (answered / demo.ANSWERS).read_bytes()
    report = answer(answered, smollm2_dir, template, prompts)
    assert (report.generated, report.reused, report.tokens) == (0, 4, 0)
    assert (answered / demo.ANSWERS).read_bytes() == before


@pytest.mark.parametrize("torn", [b"", b'{"id":"q2","conv', b"\xff\xfe", b"null", b'{"settings":3}'])
def test_a_killed_run_is_resumed(
    answered: Path, smollm2_dir: Path, template: Template, prompts: list[Prompt], tmp_path: Path, torn: bytes
) -> None:
    lines = (answered / demo.ANSWERS).read_bytes().split(b"\n")
    (tmp_path / demo.ANSWERS).write_bytes(b"\n".join([lines[3], lines[1], lines[2], torn]))
    report = answer(tmp_path, smollm2_dir, template, prompts)
    assert (report.generated, report.reused) == (1, 3)
    assert [row["id"] for row in rows_of(tmp_path)] == ["q0", "q1", "q2", "q3", "again"]
    assert (tmp_path / demo.ANSWERS).read_bytes().split(b"\n")[1:4] == lines[1:4]


def test_answers_of_other_settings_are_made_anew(
    answered: Path, smollm2_dir: Path, template: Template, prompts: list[Prompt], tmp_path: Path
) -> None:
    (tmp_path / demo.ANSWERS).write_bytes((answered / demo.ANSWERS).read_bytes())
    report = answer(tmp_path, smollm2_dir, template, prompts[:2], limit=3)
    assert (report.rows, report.generated, report.reused) == (2, 2, 0)
    assert all(len(row["answer_ids"]) <= 3 for row in rows_of(tmp_path))


def test_the_first_half_in_one_call(model_cache: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    questions = tmp_path / "mine.jsonl"
    questions.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    done = demo_corpus(
        tmp_path / "out", model_cache, prompts=questions, max_new_tokens=4, console=Console(file=io.StringIO())
    )
    assert (done.model, done.answers.rows, done.report.kept) == (smollm2_dir, 1, 1)
    assert len(Corpus.open(done.corpus)) == 1


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_shipped_prompts(template: Template) -> None:
    rows = list(read_chats(SHIPPED))
    assert len(rows) == 96
    texts = [row.messages[0]["content"] for row in rows if isinstance(row, Chat)]
    assert len(set(texts)) == 96
    assert all([message["role"] for message in row.messages] == ["user"] for row in rows if isinstance(row, Chat))
    assert max(len(prompt.ids) for prompt in read_prompts(SHIPPED, template)) < 400
    notice = Path(__file__).parents[1].joinpath("NOTICE").read_text(encoding="utf-8")
    kinds = {row.id.rstrip("0123456789") for row in rows if not isinstance(row, Sampled) and isinstance(row, Chat)}
    assert all(f"{kind}*" in notice for kind in kinds), kinds


def test_no_shipped_prompt_is_an_evaluation_question(shared_data: Path) -> None:
    asked = set()
    for path in (shared_data / "eval").glob("*/question.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            asked.update(" ".join(turn.lower().split()) for turn in json.loads(line or b'{"turns": []}')["turns"])
    assert len(asked) > 1000
    shipped = {
        " ".join(row.messages[0]["content"].lower().split()) for row in read_chats(SHIPPED) if isinstance(row, Chat)
    }
    assert not asked & shipped


@pytest.mark.parametrize(
    "line",
    ["{", '{"prompt_ids": [1], "answer_ids": [2]}', '{"messages": [{"role": "assistant", "content": "x"}]}', ""],
)
def test_prompts_must_be_prompts(template: Template, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        read_prompts(path, template)


def test_a_chat_is_asked_again_at_its_last_user_turn(template: Template, tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    (prompt,) = read_prompts(path, template)
    assert prompt.messages == turns[:4]
    assert template.decode(prompt.ids).endswith("<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_the_whole_demo_ends_with_a_drafter_and_a_second_one_reuses_it(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": f"Count to {i}."}]} for i in range(2, 8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = demo.TRAINING.model_copy(update={"max_steps": 2, "eval_share": 0.4, "vocab_size": 256})
    said = io.StringIO()
    folder = tmp_path / "demo"

    def whole() -> dict[str, Any]:
        console = Console(file=said, width=200)
        return demo.run_demo(
            folder, smollm2_dir.parent, prompts=path, max_new_tokens=12, training=training, console=console
        )

    first = whole()
    made = {path: path.stat().st_mtime_ns for path in (folder / demo.CHECK, *folder.glob("evaluation-*.json"))}
    for one in [one for one in made if one.name != demo.CHECK]:  # other measurements of it lie there, too
        other = json.loads(one.read_text())
        other |= {"benchmark": "other", "command": "eyas evaluate other", "results": [{"accept_length": 9.0}]}
        one.with_name(f"evaluation-0-{one.name}").write_text(json.dumps(other))
    (folder / "evaluation-00.json").write_bytes(b'{"head_di')
    second = whole()
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert json.loads((tmp_path / "demo" / demo.SUMMARY).read_text()) == second
    assert (first["rows"], first["mismatches"], first["train_steps"]) == (6, 0, 2)
    assert 1 <= first["accept_length_untrained"] <= 4
    assert first["accept_length"] is not None
    assert (second["rows_reused"], second["answers_reused"]) == (6, 6)
    for key in ("accept_length", "accept_length_untrained", "train_steps"):
        assert second[key] == first[key]
    assert (tmp_path / "demo" / demo.TRAIN / "draft" / "model.safetensors").is_file()
    assert "tokens a cycle at step 2, untrained" in said.getvalue()
    assert (first["check"], first["exported"]) == ("passed", str(folder / demo.EXPORTED))
    assert json.loads((folder / demo.CHECK).read_text())["refused"] == 0
    for mode in ("simulated", "decoded"):
        assert 1 <= first[f"accept_length_{mode}"] <= 4
        assert second[f"accept_length_{mode}"] == first[f"accept_length_{mode}"]
    assert len(made) == 3
    page = Path(second["report"]).read_text(encoding="utf-8")
    assert page.count("<figure") >= 13
    for part in ("Corpus", "Store", "Extraction", "Verification", "Training", "Evaluation", "Exported drafter"):
        assert f"<h2>{part}</h2>" in page
    assert re.findall("<li><strong>([^<]*)", page) == ["a live measurement"]  # all that is missing


def test_questions_are_the_prompts_that_training_holds_out(tmp_path: Path) -> None:
    """By the same hash of a row's tokens: none of them was trained on."""
    rows = [
        {"id": f"kind-{n}", "prompt_ids": [n, 2], "answer_ids": [3, n], "conversations": [
            {"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "!"}]}
        for n in range(100)
    ]  # fmt: skip
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = write_questions(answers, tmp_path / "q" / "question.jsonl", 0.2)
    questions = read_questions(tmp_path / "q" / "question.jsonl")
    hashes = np.array([field_hash(np.array([n, 2, 3, n], np.int32).tobytes()) for n in range(100)], np.uint64)
    expected = [f"kind-{n}" for n in np.flatnonzero(is_held_out(hashes, 0.2))]
    assert [question.id for question in questions] == expected
    assert asked == len(expected) > 8
    assert {question.category for question in questions} == {"kind"}
    assert write_questions(answers, tmp_path / "q" / "question.jsonl", 0.0) == 0
