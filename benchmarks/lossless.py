"""Is greedy speculative decoding in process the target's own text, token for token?

    python benchmarks/lossless.py RUN --questions mt_bench/question.jsonl [--max-new-tokens 64] [--topk 4]

Every turn of every question is answered twice in float32: a forward a token, and by drafting. Where the two differ, the
first differing token must be one of two that the target finds equally likely: its logits less than 1e-4 from the best.
Resumable: each answer is a line of `--journal`, and the same command goes on. Exit code 1 for a difference that is
none of rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from eyas.data.template import Template
from eyas.evaluate.conversation import Conversations
from eyas.evaluate.decode import Sampling, TargetModel, decode, decode_plainly
from eyas.evaluate.drafting import Drafter, Drafting
from eyas.evaluate.head import Head, load_drafter
from eyas.evaluate.questions import benchmark_of, read_questions
from eyas.extract.hf import load_model

TIE = 1e-4


def main() -> None:
    given = arguments()
    journal = given.journal or Path(
        f"lossless-{benchmark_of(given.questions)}-{given.max_new_tokens}-k{given.topk}.jsonl"
    )
    done = {(line["question"], line["turn"]): line for line in lines(journal)}
    questions = read_questions(given.questions, given.limit)
    wanted = [(question.id, turn) for question in questions for turn in range(len(question.turns))]
    if any(key not in done for key in wanted):
        head = Head.find(given.draft)
        target = head.target(given.target, None)
        template = Template.load(str(target.dir))
        drafter, _ = load_drafter(head, target, torch.device("cpu"), torch.float32)
        model = load_model(target, "cpu", "f32")
        sampling = Sampling(0.0, given.max_new_tokens, template.end_ids)
        plan = Drafting.of(given.depth, given.topk)
        conversations = Conversations(template, None)
        with TargetModel(model, drafter.config.aux_layers, target.num_layers) as watched, journal.open("a") as file:
            for number, question in enumerate(questions):
                talk = conversations.begin(number, question)
                while (prompt := talk.prompt) is not None:
                    key = question.id, prompt.turn
                    if key not in done:
                        found = compared(watched, drafter, plan, list(prompt.ids), sampling)
                        done[key] = {"question": question.id, "turn": prompt.turn, **found}
                        file.write(json.dumps(done[key]) + "\n")
                        file.flush()
                    talk.answer(done[key]["tokens"])
    report([done[key] for key in wanted], len(questions))


def compared(
    model: TargetModel, drafter: Drafter, plan: Drafting, prompt: list[int], sampling: Sampling
) -> dict[str, Any]:
    """One answer both ways; of the first difference how far its logit lies from the target's best."""
    plain = decode_plainly(model, prompt, sampling)
    found = decode(model, drafter, plan, prompt, sampling)
    line = {"tokens": plain, "cycles": len(found.cycles), "drafted": len(found.tokens), "gap": None}
    if found.tokens != plain:
        at = next((i for i, (a, b) in enumerate(zip(plain, found.tokens, strict=False)) if a != b), None)
        if at is None:
            return line | {"gap": float("inf"), "at": min(len(plain), len(found.tokens))}
        model.reset()
        logits = model.prefill([*prompt, *plain[:at]]).logits[-1]
        line |= {"at": at, "gap": float(logits.max() - logits[found.tokens[at]].min(logits[plain[at]]))}
    return line


def report(answers: list[dict[str, Any]], questions: int) -> None:
    tokens, cycles = sum(len(line["tokens"]) for line in answers), sum(line["cycles"] for line in answers)
    ties = [line for line in answers if line["gap"] is not None and line["gap"] <= TIE]
    wrong = [line for line in answers if line["gap"] is not None and line["gap"] > TIE]
    same = len(answers) - len(ties) - len(wrong)
    print(f"{questions} questions, {len(answers)} answers, {tokens:,} tokens in {cycles:,} cycles")
    print(f"{same} are the target's own, {len(ties)} part at a tie (logits within {TIE:g}), {len(wrong)} are wrong")
    for line in wrong:
        print(f"question {line['question']} turn {line['turn'] + 1}: token {line['at']}, gap {line['gap']:.2e}")
    sys.exit(1 if wrong else 0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a drafter's folder, or its run's")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
