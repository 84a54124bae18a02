"""The demo's end: the folder that servers load, checked, and what the drafter is worth on prompts it never saw."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from eyas.capture.contract import field_hash
from eyas.capture.strictjson import loads
from eyas.config import EvaluateConfig, ExportConfig, TrainConfig
from eyas.evaluate.head import Head
from eyas.evaluate.run import evaluate
from eyas.export.check import check_draft
from eyas.export.run import export_draft
from eyas.store.files import disk_errors, write_atomic
from eyas.train.checkpoint_format import CONFIG_FILE, SECTION
from eyas.train.sampler import is_held_out

EXPORTED: Final = "exported"
CHECK: Final = "check.json"
#: Named as benchmarks are: the folder is the benchmark's name.
QUESTIONS: Final = "held-out/question.jsonl"
_MAX_DOCUMENT_BYTES: Final = 16 << 20
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
    known = earlier_verdict(kept, exported)
    if known is not None and Head.find(str(exported)).digest() == Head.find(str(train)).digest():
        return known
    say("export: the folder that SGLang and vLLM load, held against the rules of both and against the target")
    export_draft(train, exported, ExportConfig(target=str(model), store=store), force=True, say=say)
    report = check_draft(exported, ExportConfig(target=str(model)), say=say)
    told = {
        "tensors": _record(exported),
        "refused": len(report.refused),
        "unproven": len(report.unproven),
        "lines": report.lines(),
    }
    with disk_errors(kept):
        write_atomic(kept, (json.dumps(told, indent=1) + "\n").encode())
    report.check()
    return report.lines()[-1][1]


def earlier_verdict(kept: Path, exported: Path) -> str | None:
    """What an earlier check said that the folder's weights passed; None where there is none, or nothing to rely on.

    Args:
        kept: where it was written.
        exported: the folder.
    """
    record = _record(exported)
    match _document(kept):
        case {"tensors": str(tensors), "refused": 0, "lines": [*_, [_, str(verdict)]]} if tensors == record:
            return verdict
    return None


def _record(exported: Path) -> str | None:
    """The digest of the weights by the folder's own record, if it has one."""
    match _document(exported / CONFIG_FILE).get(SECTION):
        case {"export": {"tensors": str(tensors)}}:
            return tensors
    return None


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read: what was torn or is a stranger's is made anew."""
    try:
        found = loads(path.read_bytes(), _MAX_DOCUMENT_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
    """Tokens a cycle; what was measured of the very same weights is not measured again."""
    assert cfg.out is not None
    command = _command(exported, cfg)
    known = earlier_length(cfg.out, {"head_digest": digest, "mode": mode, "depth": cfg.depth, "command": command})
    if known is not None:
        return known
    done = evaluate(exported, cfg, console=Console(quiet=True), command=command)
    return done.evaluation.results[0].accept_length


def earlier_length(folder: Path, made: Mapping[str, object]) -> float | None:
    """Tokens a cycle by an evaluation in `folder`; None where there is no such one.

    Args:
        folder: may hold others, torn ones and strangers'.
        made: what the file must say. By the command it is of the same benchmark, prompts and lengths.
    """
    for path in sorted(folder.glob("evaluation-*.json")):
        known = _document(path)
        if {name: known.get(name) for name in made} != made:
            continue
        match known.get("results"):
            case [{"accept_length": float(length)}, *_]:
                return length
    return None


def _command(exported: Path, cfg: EvaluateConfig) -> str:
    """What does the same by hand."""
    words = ["eyas", "evaluate", str(exported)]
    for name in ("store", "corpus", "questions", "target"):
        if (value := getattr(cfg, name)) is not None:
            words += [f"--{name}", str(value)]
    for name in sorted(cfg.model_fields_set - {"store", "corpus", "questions", "target"}):
        words += ["--set", f"evaluate.{name}={getattr(cfg, name)}"]
    return shlex.join(words)
