"""The main job on a small real model, CPU only and without a server.

    prompts -> answers.jsonl (token ids as the target sampled them) -> corpus/ -> store/ -> train/
    -> exported/ -> check.json, evaluation-*.json -> summary.json, report.html

A second run reuses every answer made by the same model with the same settings, every row that is stored, every
training step that is saved, and evaluations of the same weights; a killed one loses a batch of answers, or 25 steps, at
most.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.text import Text

from eyas.config import Config, ExtractConfig, StoreConfig, TrainConfig
from eyas.data.prepare import PrepareReport, prepare
from eyas.data.template import Template
from eyas.demo.answers import ANSWERS, AnswersReport, fast_dtype, make_answers, read_prompts
from eyas.demo.worth import CHECK, EXPORTED, Worth, export_and_measure
from eyas.extract.forecast import last_rate
from eyas.extract.runner import Summary, extract
from eyas.report import write_report
from eyas.smollm2 import smollm2_dir
from eyas.store.documents import read_store_info
from eyas.store.format import STORE_FILE
from eyas.train.run import TrainSummary, train
from eyas.verify import Comparison, VerifyReport, verify

PROMPTS: Final = "demo_prompts.jsonl"  # shipped with the package; sources and licences in NOTICE
CORPUS: Final = "corpus"  # the folder that prepare writes
STORE: Final = "store"
TRAIN: Final = "train"
SUMMARY: Final = "summary.json"
SHARD_BYTES: Final = 16 << 20  # several shards, so that the demo shows some
VERIFIED_ROWS: Final = 24
#: Enough for a drafter to beat chance on prompts of the kind it saw, in a minute or two; far from enough to serve.
TRAINING: Final = TrainConfig(
    steps=3,
    vocab_size=2048,
    batch_tokens=512,
    epochs=4,
    lr=1e-3,
    eval_share=0.15,
    eval_every=25,
    save_every=25,
    dtype="f32",
    device="cpu",
    readers=1,
)


@dataclass(frozen=True, slots=True)
class DemoCorpus:
    """The first half's outcome."""

    model: Path
    corpus: Path
    answers: AnswersReport
    report: PrepareReport


def run_demo(
    out: Path,
    cache: Path | None = None,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 128,
    training: TrainConfig = TRAINING,
    console: Console | None = None,
) -> dict[str, Any]:
    """Everything, from prompts to a checked folder for servers; ends with `out/summary.json` and a report page.

    Args:
        out: the demo's folder.
        cache: where the converted model is kept; None is EYAS_CACHE, else ~/.cache/eyas.
        prompts, max_new_tokens: as for `demo_corpus`.
        training: how the drafter is trained; its places are set here.
        console: where progress and the table go.

    Returns:
        What summary.json holds: rows, tokens, tokens_per_s (of the session that stored last), bytes, failed,
        mismatches, verified_rows, how much was reused; where nothing was wrong accept_length and
        accept_length_untrained (simulated on held-out prompts, with and without training), exported (a folder), check
        ("passed") and what was evaluated there; report (the page).

    Raises:
        EyasError: as the steps do; IntegrityError when a row is not what it should be.
    """
    console, began = console or Console(stderr=True), time.monotonic()
    made = demo_corpus(out, cache, prompts=prompts, max_new_tokens=max_new_tokens, console=console)
    for line in made.report.lines():
        _say(console, line)
    store = out / STORE
    if _is_of_another_corpus(store, made.report.digest):
        _say(console, f"store: {store} is of another corpus and is made anew")
        _remove_store(out)
    dtype: Any = {torch.bfloat16: "bf16", torch.float32: "f32"}[fast_dtype()]
    cfg = Config(extract=ExtractConfig(engine="hf", model_dtype=dtype), store=StoreConfig(shard_bytes=SHARD_BYTES))
    _say(console, "extract: hidden states of every row, by transformers in this process")
    run = extract(made.corpus, store, cfg=cfg, model=str(made.model), console=console)
    _say(console, f"verify: every byte, and {VERIFIED_ROWS} rows recomputed in float32 with controls")
    report = verify(store, corpus=made.corpus, against=str(made.model), sample=VERIFIED_ROWS, console=console)
    summary = _stored(run, report, store) | {"answers_reused": made.answers.reused}
    lines = [*run.lines(), *report.lines()[1:]]
    if not summary["mismatches"]:
        trained, worth = _drafter(out, made, training, console)
        summary |= _trained(trained) | _worth(worth, out)
        lines += [(name, text) for name, text in trained.lines() if name in ("steps", "accepted", "draft")]
        lines += worth.lines()
    summary["seconds"] = round(time.monotonic() - began, 1)
    summary["report"] = str(write_report(out).path)
    (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, text in [*lines, ("report", summary["report"]), ("summary", str(out / SUMMARY))]:
        _say(console, f"{name:<10}  {text}")
    report.check()
    return summary


def _remove_store(out: Path) -> None:
    """The store, and all that was made of it."""
    shutil.rmtree(out / STORE)
    for made_of_it in (TRAIN, EXPORTED):
        shutil.rmtree(out / made_of_it, ignore_errors=True)
    for path in (out / CHECK, *out.glob("evaluation-*.json")):
        path.unlink(missing_ok=True)


def _drafter(out: Path, made: DemoCorpus, training: TrainConfig, console: Console) -> tuple[TrainSummary, Worth]:
    """The second half: a drafter, and what it is worth."""
    store = out / STORE
    _say(console, f"train: a drafter on the CPU, {training.eval_share:.0%} of the prompts held out")
    places = {"store": store, "corpus": made.corpus, "target": str(made.model), "out": out / TRAIN}
    trained = train(training.model_copy(update=places), console=console)
    worth = export_and_measure(
        out, store, made.corpus, out / TRAIN, out / ANSWERS, made.model, training, lambda text: _say(console, text)
    )
    return trained, worth


def _stored(run: Summary, report: VerifyReport, store: Path) -> dict[str, Any]:
    """The extraction's and the verification's part of summary.json."""
    found = report.comparison or Comparison()
    return {
        "rows": run.rows_done,
        "tokens": run.tokens_done,
        "tokens_per_s": round(last_rate(store) or 0.0, 1),
        "bytes": run.bytes,
        "failed": run.failed,
        "mismatches": len(report.problems) + len(found.mismatches),
        "verified_rows": found.rows,
        "rows_reused": run.rows_done - run.rows_now,
    }


def _worth(worth: Worth, out: Path) -> dict[str, Any]:
    """The end's part of summary.json."""
    lengths = {"accept_length_simulated": worth.simulated, "accept_length_decoded": worth.decoded}
    rounded = {name: None if length is None else round(length, 3) for name, length in lengths.items()}
    return {**rounded, "exported": str(out / EXPORTED), "check": "passed"}


def _trained(found: TrainSummary) -> dict[str, Any]:
    """The training's part of summary.json."""
    lengths = {"accept_length": found.accept_length, "accept_length_untrained": found.untrained}
    rounded = {name: None if length is None else round(length, 3) for name, length in lengths.items()}
    return {**rounded, "train_steps": found.steps, "train_seconds": round(found.seconds, 1)}


def _say(console: Console, line: str | Text) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _is_of_another_corpus(store: Path, digest: str) -> bool:
    return (store / STORE_FILE).exists() and read_store_info(store).corpus["digest"] != digest


def demo_corpus(
    out: Path,
    cache: Path | None = None,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 128,
    console: Console | None = None,
) -> DemoCorpus:
    """Model, answers and corpus under `out`; each step is skipped or resumed where an earlier run did it.

    Args:
        out: the demo's folder.
        cache: where the converted model is kept.
        prompts: JSONL of chats, answered at their last user turn; the shipped prompts when not given.
        max_new_tokens: longest answer; a longer one stops there, without an end token.

    Raises:
        EyasError: as `smollm2_dir`, `make_answers` and `prepare`.
    """
    console = console or Console(stderr=True)
    model = smollm2_dir(cache)
    template = Template.load(str(model))
    with as_file(files("eyas") / PROMPTS) as shipped:
        chats = read_prompts(prompts or shipped, template)
    answers = make_answers(out, model, template, chats, max_new_tokens=max_new_tokens, console=console)
    report = make_corpus(out, template, console=console)
    return DemoCorpus(model, out / CORPUS, answers, report)


def make_corpus(out: Path, template: Template, *, console: Console | None = None) -> PrepareReport:
    """`out/answers.jsonl` -> the folder `out/corpus`: rows are the prompt's and the answer's ids as they are."""
    return prepare([out / ANSWERS], template.model, out / CORPUS, console=console, template=template)
