"""A chat file as large as wanted, made from the real texts of a few small ones, for measuring `eyas prepare`.

    python benchmarks/made_corpus.py --rows 37312 --out made.jsonl

Each row holds a system message and one or several turns. Prompts are real prompts, some with other real texts below
them; an answer is several real texts one after another, until it is as long as drawn. Row i depends on the seed and i
alone: the same options give the same bytes, and a shorter file is the beginning of a longer one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

ROOT: Final = Path(__file__).resolve().parents[1]
TEXTS: Final = ROOT.parent / "shared" / "data" / "train"
TARGET: Final = ROOT / ".cache" / "SmolLM2-135M-Instruct"

SEED_RUN_ROWS: Final = 37_312  # with 2,353 tokens a row: 87.8 million

#: Tokens of a row: log-normal, cut at both ends; these give a mean of about 2,353, a median of 2,000.
MEDIAN_TOKENS: Final = 1_928
SPREAD: Final = 0.62
SHORTEST, LONGEST = 96, 7_400

SINGLE_TURN: Final = 0.5  # share of rows with one turn; the others have 2 to 6
MORE_TURNS: Final = (2, 2, 2, 3, 3, 4, 5, 6)
PASTED: Final = 0.4  # share of prompts with texts below them, of up to half the turn
TEMPLATE_TOKENS: Final = 5  # a message's header and end in ChatML

#: The system messages; every row has one, so that no tool adds its own.
SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a careful assistant. Say so when you do not know something.",
    "Answer in the language of the question.",
    "You help a customer with questions about an account. Be brief and polite.",
    "You are a programmer who explains each step. Show code where it helps.",
)


class Piece(NamedTuple):
    """A real text and its length in tokens."""

    text: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Real texts: what people asked, and what was answered to it or can stand inside an answer."""

    prompts: list[Piece]
    answers: list[Piece]


def read_pool(folder: Path, tokenizer: Tokenizer) -> Pool:
    """The user and assistant texts of every `*.jsonl` in `folder`, each once, without those that hold control tokens.

    Answers are the assistants' texts and a third as many prompts, which bring numbers and code.
    """
    prompts: dict[str, None] = {}
    answers: dict[str, None] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            for message in json.loads(line)["conversations"] if line else ():
                text = (message.get("content") or "").strip()
                plain = text and not any(mark in text for mark in ("<|", "|>", "<think", "</think", "[INST]"))
                if plain and message["role"] in ("user", "assistant"):
                    (prompts if message["role"] == "user" else answers)[text] = None
    extra = random.Random("extra").sample(sorted(prompts), min(len(prompts), len(answers) // 3))
    return Pool(_measured(list(prompts), tokenizer), _measured([*answers, *extra], tokenizer))


def rows(pool: Pool, n_rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Conversations `{"id", "conversations": [{"role", "content"}, ...]}`."""
    for number in range(n_rows):
        rng = random.Random(f"{seed}:{number}")
        length = round(min(LONGEST, max(SHORTEST, rng.lognormvariate(0, SPREAD) * MEDIAN_TOKENS)))
        yield {"id": f"made-{seed}-{number}", "conversations": _conversation(pool, length, rng)}


def write(path: Path, pool: Pool, n_rows: int, seed: int = 0) -> None:
    """Writes `n_rows` rows as JSON lines."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows(pool, n_rows, seed):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _conversation(pool: Pool, length: int, rng: random.Random) -> list[dict[str, str]]:
    turns = 1 if rng.random() < SINGLE_TURN else rng.choice(MORE_TURNS)
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}]
    left = length - 15
    for turn in range(turns):
        share = (left / (turns - turn)) * (rng.uniform(0.6, 1.4) if turn < turns - 1 else 1.0)
        prompt = rng.choice(pool.prompts)
        if rng.random() < PASTED:
            text, n_tokens = _texts(pool, share * rng.uniform(0, 0.5), rng)
            prompt = Piece(f"{prompt.text}\n\n{text}", prompt.n_tokens + 1 + n_tokens)
        answer, n_tokens = _texts(pool, share - prompt.n_tokens - 2 * TEMPLATE_TOKENS, rng)
        messages += [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer}]
        left -= prompt.n_tokens + n_tokens + 2 * TEMPLATE_TOKENS
    return messages


def _texts(pool: Pool, length: float, rng: random.Random) -> tuple[str, int]:
    """Real texts up to about `length` tokens: the last is left out where that comes nearer. At least one."""
    parts, total = [], 0
    while True:
        piece = rng.choice(pool.answers)
        if parts and total + piece.n_tokens / 2 > length:
            return "\n\n".join(parts), total
        parts.append(piece.text)
        total += piece.n_tokens + 1  # the blank line between


def _measured(texts: list[str], tokenizer: Tokenizer) -> list[Piece]:
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [Piece(text, len(ids)) for text, ids in zip(texts, encoded, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=SEED_RUN_ROWS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder of chat files (*.jsonl)")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder with the tokenizer that lengths are in")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pool = read_pool(args.texts, Tokenizer.from_file(str(args.target / "tokenizer.json")))
    write(args.out, pool, args.rows, args.seed)
    print(f"{args.rows:,} rows, {args.out.stat().st_size:,} bytes, from {len(pool.prompts):,} prompts and")
    print(f"{len(pool.answers):,} texts for answers: {args.out}")


if __name__ == "__main__":
    main()
