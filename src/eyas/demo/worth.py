"""The demo's end: the folder that servers load, checked, and what the drafter is worth on prompts it never saw."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from eyas.capture.contract import field_hash
from eyas.config import EvaluateConfig, ExportConfig, TrainConfig
from eyas.evaluate.head import Head
from eyas.evaluate.run import evaluate
from eyas.export.check import check_draft
from eyas.export.run import export_draft
from eyas.train.checkpoint_format import CONFIG_FILE, SECTION
from eyas.train.sampler import is_held_out

EXPORTED: Final = "exported"
CHECK: Final = "check.json"
#: Named as benchmarks are: the folder is the benchmark's name.
QUESTIONS: Final = "held-out/question.jsonl"
_ASKED: Final = 6
_ANSWER_TOKENS: Final = 48
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Worth:
    """What the demo's drafter is worth.

    Attributes:
        exported: the folder.
        verdict: of its check, which it passed.
        simulated, decoded: tokens a cycle on the store's rows held out, and on their questions answered anew; None
            where nothing was held out.
    """

    exported: Path
    verdict: str
    simulated: float | None = None
    decoded: float | None = None

    def lines(self) -> list[tuple[str, str]]:
        """For the closing table."""
        told = [
            (name, f"{length:.3f} tokens a cycle on prompts held out")
            for name, length in (("simulated", self.simulated), ("decoded", self.decoded))
            if length is not None
        ]
        return [*told, ("check", self.verdict), ("exported", str(self.exported))]


def export_and_measure(
    out: Path, store: Path, corpus: Path, train: Path, answers: Path, model: Path, training: TrainConfig, say: Say
) -> Worth:
    """Export the drafter, hold the folder against both servers' rules and the target, and measure it.

    Args:
        out: the demo's folder.
        store, corpus, train, answers: its parts.
        model: the target's folder.
        training: how the drafter was trained: its `eval_share` says which prompts it never saw.
        say: is told what goes on.

    Raises:
        IntegrityError: the drafter or its folder is refused. EyasError: as the steps do.
    """
    exported, share = out / EXPORTED, training.eval_share
    worth = Worth(exported, _export(train, exported, store, model, out / CHECK, say))
    digest = Head.find(str(exported)).digest()
    plan: dict[str, Any] = {"target": str(model), "depth": min(3, training.steps), "out": out}
    asked = write_questions(answers, out / QUESTIONS, share)
    if not asked:
        return worth
    say("evaluate: cycles as a server would make them, on the states of prompts held out")
    rows = EvaluateConfig(store=store, corpus=corpus, held_out=share, **plan)
    simulated = _accept_length(exported, rows, digest, "offline-simulated")
    say(f"evaluate: {min(asked, _ASKED)} of these prompts answered anew, drafts verified by the target")
    decoding = EvaluateConfig(questions=out / QUESTIONS, limit=_ASKED, max_new_tokens=_ANSWER_TOKENS, **plan)
    decoded = _accept_length(exported, decoding, digest, "offline-decoded")
    return replace(worth, simulated=simulated, decoded=decoded)


def _export(train: Path, exported: Path, store: Path, model: Path, kept: Path, say: Say) -> str:
    """Make and check the folder, unless it is of the very same weights and passed already; the verdict."""
    same = exported.is_dir() and Head.find(str(exported)).digest() == Head.find(str(train)).digest()
    if same and kept.is_file():
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["tensors"] == _record(exported) and not known["refused"]:
            return known["lines"][-1][1]
    say("export: the folder that SGLang and vLLM load, held against the rules of both and against the target")
    export_draft(train, exported, ExportConfig(target=str(model), store=store), force=True, say=say)
    report = check_draft(exported, ExportConfig(target=str(model)), say=say)
    told = {
        "tensors": _record(exported),
        "refused": len(report.refused),
        "unproven": len(report.unproven),
        "lines": report.lines(),
    }
    kept.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    report.check()
    return report.lines()[-1][1]


def _record(exported: Path) -> str:
    """The digest of the weights by the folder's own record."""
    config = json.loads((exported / CONFIG_FILE).read_text(encoding="utf-8"))
    return config[SECTION]["export"]["tensors"]


def write_questions(answers: Path, path: Path, share: float) -> int:
    """The prompts that training with `eval_share` holds out, as questions; how many there are.

    Rows are held out by a hash of their tokens, and a row is a prompt's ids with its answer's.
    """
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").split("\n") if line]
    rows = [np.array(line["prompt_ids"] + line["answer_ids"], np.int32) for line in lines]
    held_out = is_held_out(np.array([field_hash(row.tobytes()) for row in rows], np.uint64), share)
    questions = [
        {"question_id": line["id"], "category": line["id"].rstrip("0123456789").rstrip("-"), "turns": [turn["content"]]}
        for line, out in zip(lines, held_out.tolist(), strict=True)
        for turn in line["conversations"][:1]
        if out and len(line["conversations"]) == 2
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in questions), encoding="utf-8")
    return len(questions)


def _accept_length(exported: Path, cfg: EvaluateConfig, digest: str, mode: str) -> float | None:
    """Tokens a cycle; an evaluation of the very same weights is not made again."""
    assert cfg.out is not None
    for path in sorted(cfg.out.glob("evaluation-*.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        if (known["head_digest"], known["mode"], known["depth"]) == (digest, mode, cfg.depth):
            return known["results"][0]["accept_length"]
    done = evaluate(exported, cfg, console=Console(quiet=True), command=_command(exported, cfg))
    return done.evaluation.results[0].accept_length


def _command(exported: Path, cfg: EvaluateConfig) -> str:
    """What does the same by hand."""
    words = ["eyas", "evaluate", str(exported)]
    for name in ("store", "corpus", "questions", "target"):
        if (value := getattr(cfg, name)) is not None:
            words += [f"--{name}", str(value)]
    for name in sorted(cfg.model_fields_set - {"store", "corpus", "questions", "target"}):
        words += ["--set", f"evaluate.{name}={getattr(cfg, name)}"]
    return shlex.join(words)
