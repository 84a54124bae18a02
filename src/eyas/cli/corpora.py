"""Verbs on chats and corpora: prepare, regenerate, corpus stats, corpus merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import eyas
from eyas.cli.console import err, out, say_lines, say_table
from eyas.cli.options import ConfigFile, Overrides


def prepare(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Files, folders, globs or `hf:NAME`; default: prepare.sources.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "--model", help="Whose tokenizer and template are used: folder or hub id.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the corpus and the accounts.")] = Path("corpus"),
    show: Annotated[int, typer.Option(help="Print this many samples with the trained tokens marked.", min=0)] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one a core.", min=1)] = None,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006  typer copies it
) -> None:
    """Turn chats into a tokenised corpus with a loss mask, and account for every row.

    Example: `eyas prepare chats.jsonl --target HuggingFaceTB/SmolLM2-135M-Instruct --out corpus --show 2`
    """
    flags = {"--strict": ("prepare.strict", strict or None), "--workers": ("prepare.workers", workers)}
    cfg = eyas.load_config(config, overrides, flags).prepare
    if not (target := target or cfg.target):
        raise eyas.ConfigError("no target is named", "--target", "the model whose tokenizer and template are used")
    report = eyas.prepare_corpus(inputs or cfg.sources, target, folder, cfg=cfg, show=show, console=out)
    say_lines(report.lines(min(out.width, 100)))


def regenerate(
    answers: Annotated[Path, typer.Option("--out", help="JSON lines to write; what is there is gone on with.")],
    inputs: Annotated[list[str] | None, typer.Argument(help="Chat files, as for prepare.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="Base URL; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="The server's name of the target; default: the only one.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Dollars that are never passed.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Ask rows again that failed earlier.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have the target answer every assistant turn anew, on any OpenAI-compatible server; a killed run goes on.

    Example: `eyas regenerate chats.jsonl --server http://localhost:30000/v1 --out answers.jsonl`
    """
    cfg = eyas.load_config(config, overrides, {"--max-cost": ("regenerate.max_cost", max_cost)}).regenerate
    report = eyas.regenerate_answers(
        inputs or cfg.sources,
        answers,
        servers=server or (),
        model=model,
        cfg=cfg,
        retry_failed=retry_failed,
        console=err,
    )
    for line in report.lines():
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if report.over_budget:
        raise eyas.RowsFailed("max_cost would be passed", answers, "with a higher one the same command goes on")
    if failed := report.failed.total():
        raise eyas.RowsFailed(f"{failed:,} rows have no answer", answers, "--retry-failed tries again")


def corpus_stats(
    corpora: Annotated[list[Path], typer.Argument(help="Folders of `eyas prepare`, or .parquet files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what corpora hold: lengths, trained share, sources, and how far a draft vocabulary reaches.

    Example: `eyas corpus stats corpus`
    """
    found = eyas.corpus_statistics(corpora)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))  # noqa: T201  rich would wrap it
        return
    say_lines(found.lines())


def corpus_merge(
    corpora: Annotated[list[Path], typer.Argument(help="Folders of `eyas prepare`, or .parquet files.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the joined corpus.")],
) -> None:
    """Join corpora of one tokenizer and template, one after another.

    Example: `eyas corpus merge first second --out both`
    """
    merged = eyas.merge_corpora(corpora, folder)
    totals = [("rows", f"{len(merged):,}"), ("tokens", f"{merged.meta.tokens:,}"), ("digest", merged.digest)]
    say_table([*totals, ("next", f"eyas extract {folder} STORE --server URL")])
