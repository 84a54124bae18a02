"""What drafters are worth, from prompts to the real server: one target, one corpus of its own answers, one store.

    run() { python benchmarks/quality_gpu.py "$@" --work W --target MODEL --gpus 0 1; }
    run corpus --answers benchmarks/data/smollm2-answers.jsonl.xz --store loss all fp8
    run train lr-1e-3 lr-3e-3 specforge-1e-3 specforge-3e-3
    run simulate
    run live lr-1e-3 specforge --questions eval/*/question.jsonl
    run collect --out acceptance.json

Every step is made of `eyas` commands, prints them, and is gone on with when it is called again: what is complete in W
is left alone. `W/heads/NAME` is an exported drafter and `W/heads/NAME.json` what is known of its training.

    corpus   the target answers the prompts, answers become a corpus, states of it a store for each of --store
    train    named runs of RUNS, and specforge-LR and speculators-LR by peers/train_on_store.py, each exported;
             `--at-once` on each GPU: seconds count only where it is 1
    simulate acceptance on rows that no trainer saw
    live     SGLang with each drafter and without: acceptance and tokens/s, by requests at a time; of a trainer that is
             named, its best by `simulate`
    collect  all of it as a list

`--pythonpath`, `--python`, `--sglang`, `--flags` say how SGLang runs there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import fleet
import numpy as np
import torch
from fleet import Options, Running, Wanted

from eyas.capture.contract import field_hash
from eyas.data.corpus import Corpus
from eyas.train.log import read_train_log
from eyas.train.sampler import is_held_out

#: Stores by name: settings of the server that captures, and of `eyas extract`.
STORES: Final[dict[str, dict[str, str]]] = {
    "loss": {"last": "loss", "dtype": "bf16"},
    "all": {"last": "all", "dtype": "bf16"},
    "fp8": {"last": "loss", "dtype": "fp8_e4m3"},
}
#: Rows that no trainer sees.
HELD_OUT: Final = 0.03
#: Trainers beside ours.
PEERS: Final = ("specforge", "speculators")
#: The server without a drafter.
PLAIN: Final = "plain"
#: Of every run, unless it says otherwise.
BASE: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "batch_tokens": 8192,
    "steps": 7,
    "epochs": 2,
    "seed": 0,
    "eval_share": HELD_OUT,
    "eval_every": 100_000,
    "save_every": 100_000,
}
#: What sets a run apart; "store" names the store.
RUNS: Final[dict[str, dict[str, Any]]] = {
    **{f"lr-{lr}": {"lr": lr} for lr in ("1e-4", "3e-4", "1e-3", "3e-3")},
    **{f"seed-{seed}": {"seed": seed} for seed in (1, 2)},
    "classic": {"mask": "classic", "normaliser": "classic", "store": "all"},  # it reads `last` elsewhere, too
    "drop": {"oov": "drop"},
    "vocab-8k": {"vocab_size": 8192},
    "vocab-49k": {"vocab_size": 49152},
    "fp8": {"store": "fp8"},
    "last-all": {"store": "all"},
    "eagle-3.1": {"draft": "{fc_norm: true, norm_output: true}"},
    "k3": {"steps": 3},
    "k5": {"steps": 5},
}


def eyas(*words: object, gpu: int | None = None, may_end_with: Sequence[int] = (0,)) -> None:
    """One command of the product. Raises CalledProcessError."""
    argv = [sys.executable, "-m", "eyas", *map(str, words)]
    print(f"$ eyas {shlex.join(argv[3:])}", flush=True)
    env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    done = subprocess.run(argv, env=env, check=False)
    if done.returncode not in may_end_with:
        raise subprocess.CalledProcessError(done.returncode, argv)


def settings(section: str, values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{section}.{key}={value}")]


def over_gpus(gpus: Sequence[int], at_once: int, jobs: Iterable[Callable[[int], Callable[[], None] | None]]) -> None:
    """Run jobs, each told its GPU, `at_once` on each; the first failure is raised when all have ended.

    What a job returns is called when its GPU is given to the next already.
    """
    free: queue.Queue[int] = queue.Queue()
    for gpu in list(gpus) * at_once:
        free.put(gpu)

    def one(job: Callable[[int], Callable[[], None] | None]) -> None:
        gpu = free.get()
        try:
            then = job(gpu)
        finally:
            free.put(gpu)
        if then is not None:
            then()

    with ThreadPoolExecutor(2 * len(gpus) * at_once) as pool:
        for future in [pool.submit(one, job) for job in jobs]:
            future.result()


# --- corpus and stores ------------------------------------------------------------------------------------------------


def corpus(args: argparse.Namespace) -> None:
    """Answers, corpus, stores; the servers stay only as long."""
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    missing = [name for name in args.store if not (work / f"store-{name}" / "manifest.json").exists()]
    if args.answers and not (work / "corpus").exists():
        with lzma.open(args.answers) as packed, (work / "answers.jsonl").open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        tokenise(args)
    if not missing and (work / "corpus").exists():
        return
    flags = ("--max-running-requests", "256", "--chunked-prefill-size", "8192")
    wanted = [
        Wanted(f"capture-{name}", args.target, flags, args.gpus[0], settings=STORES[name], chats=True)
        for name in missing or args.store[:1]
    ]
    with fleet.started(Options.of(args), wanted, work / "servers") as running:
        if not (work / "corpus").exists():
            answer(args, next(iter(running.values())).url)
            tokenise(args)
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda name: extract(args, name, running[f"capture-{name}"]), missing))
    for name in missing:
        store = work / f"store-{name}"
        eyas("verify", store, "--corpus", work / "corpus", "--against", args.target, "--sample", 16, gpu=args.gpus[0])


def answer(args: argparse.Namespace, url: str) -> None:
    """The target answers every prompt."""
    began = time.monotonic()
    said = {"temperature": 0.7, "seed": 0, "max_tokens": 512, "in_flight": 256, "stream": "false"}
    words = ("regenerate", *args.prompts, "--server", url, "--out", args.work / "answers.jsonl")
    eyas(*words, *settings("regenerate", said), may_end_with=(0, 6))
    print(f"answered in {time.monotonic() - began:.0f} s", flush=True)


def tokenise(args: argparse.Namespace) -> None:
    """The corpus of the answers, and the numbers of its rows that are trained on, for trainers that take them."""
    folder = args.work / "corpus"
    eyas("prepare", args.work / "answers.jsonl", "--target", args.target, "--out", folder)
    tokens = [row.tokens.astype(np.int32).tobytes() for row in Corpus.open(folder).rows()]
    out = is_held_out(np.array(list(map(field_hash, tokens)), dtype=np.uint64), HELD_OUT)
    (args.work / "rows.txt").write_text("".join(f"{row}\n" for row in np.flatnonzero(~out)))


def extract(args: argparse.Namespace, name: str, server: Running) -> None:
    said = [*settings("capture", STORES[name]), *settings("server", {"spool": server.spool})]
    said += settings("extract", {"window_requests": 128})
    eyas("extract", args.work / "corpus", args.work / f"store-{name}", "--server", server.url, *said)


# --- drafters ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """The named runs, each exported."""
    (args.work / "heads").mkdir(exist_ok=True)

    def run(name: str) -> Callable[[int], Callable[[], None]]:
        by = train_peer if name.startswith(PEERS) else train_ours

        def job(gpu: int) -> Callable[[], None]:
            source, known, more = by(args, name, gpu)
            return lambda: export(args, name, source, gpu, known | {"at_once": args.at_once}, more)

        return job

    todo = [name for name in args.names if not (args.work / "heads" / f"{name}.json").exists()]
    over_gpus(args.gpus, args.at_once, map(run, todo))


Trained = tuple[Path, dict[str, Any], Sequence[str]]  # what to export, what is known of it, more words of the export


def train_ours(args: argparse.Namespace, name: str, gpu: int) -> Trained:
    work: Path = args.work
    said = BASE | {"lr": args.lr, "epochs": args.epochs} | RUNS[name]
    store = work / f"store-{said.pop('store', 'loss')}"
    out = work / "runs" / name
    eyas("train", "--store", store, "--corpus", work / "corpus", "--out", out, *settings("train", said), gpu=gpu)
    return out, training_of(out) | {"settings": RUNS[name]}, ()


def train_peer(args: argparse.Namespace, name: str, gpu: int) -> Trained:
    """NAME-LR by NAME's own code; NAME-LR-try is another run of the same settings."""
    work: Path = args.work
    trainer, _, lr = name.removesuffix("-try").partition("-")
    out = work / "peers" / name
    if not (out / "result.json").exists():
        flags = {
            "store": work / "store-all",
            "corpus": work / "corpus",
            "target": args.target,
            "out": out,
            "layout": work / f"layout-{trainer}",
            "rows": work / "rows.txt",
            "lr": lr,
            "epochs": args.epochs,
            "draft-vocab": BASE["vocab_size"],
            "batch-tokens": BASE["batch_tokens"],
            "steps": BASE["steps"],
        }
        flags |= {"max-steps": args.max_steps} if args.max_steps else {}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        print(f"$ train_on_store.py {trainer} {shlex.join(words)}", flush=True)
        script = Path(__file__).parent / "peers" / "train_on_store.py"
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        subprocess.run([sys.executable, script, trainer, *words], env=env, check=True)
    known = json.loads((out / "result.json").read_text())
    return out / "head", known, settings("export", {"store": work / "store-loss"})


def training_of(run: Path) -> dict[str, Any]:
    """What the log of a run says of it: tokens, and seconds from the first event of a session to its last."""
    log = read_train_log(run)
    assert log.end is not None
    held_out = log.evals[-1]
    return {
        "trainer": "eyas",
        "seed": log.settings["seed"],
        "lr": log.settings["lr"],
        "steps": log.end.step,
        "train_tokens": log.end.tokens,
        "gpu_seconds": round(log.seconds, 1),
        "tokens_per_s": log.steps[-1].tokens_per_s,
        "first_loss": log.steps[0].loss,
        "last_loss": log.steps[-1].loss,
        "held_out": {
            "prompts": held_out.rows,
            "accept_length": held_out.length,
            "ci95": [held_out.low, held_out.high],
            "accept_by_position": held_out.acceptance,
        },
        "versions": {"torch": torch.__version__}
        | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {"cpu": "a rehearsal"}),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def export(
    args: argparse.Namespace, name: str, source: Path, gpu: int, known: dict[str, Any], more: Sequence[str]
) -> None:
    head = args.work / "heads" / name
    eyas("export", source, "--out", head, "--target", args.target, "--force", *more, gpu=gpu)
    (args.work / "heads" / f"{name}.json").write_text(json.dumps({"head": name} | known, indent=1) + "\n")


def simulate(args: argparse.Namespace) -> None:
    """Acceptance on the held-out rows of the store: what chooses among learning rates."""

    def job(name: str) -> Callable[[int], None]:
        def run(gpu: int) -> None:
            words = ("--store", args.work / "store-loss", "--corpus", args.work / "corpus", "--target", args.target)
            said = {"held_out": HELD_OUT, "out": args.work / "results" / name, "limit": args.limit}
            eyas("evaluate", args.work / "heads" / name, *words, *settings("evaluate", said), gpu=gpu)

        return run

    over_gpus(args.gpus, args.at_once, map(job, args.names or named(args.work)))


def named(work: Path) -> list[str]:
    return sorted(path.stem for path in (work / "heads").glob("*.json"))


def best_of(work: Path, trainer: str) -> str:
    """The trainer's drafter of the longest simulated acceptance."""
    lengths: dict[str, float] = {}
    for path in (work / "results").glob(f"{trainer}-*/evaluation-*-offline-simulated-*.json"):
        found = json.loads(path.read_text())["results"]
        lengths[path.parent.name] = next(one["accept_length"] for one in found if one["category"] == "all")
    print(f"{trainer}: {lengths}", flush=True)
    return max(lengths, key=lengths.__getitem__)


# --- in servers -------------------------------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> None:
    """All servers start together, spread over the GPUs; on each GPU one at a time is asked, first of all the plain one.

    Another GPU's follow that one by a benchmark: they compare themselves with what it left.
    """
    work, gpus = args.work, args.gpus
    flags = ("--max-running-requests", str(max(args.at_a_time)), "--disable-radix-cache")
    names = [best_of(work, name) if name in PEERS else name for name in args.names or named(work)]
    wanted = [Wanted(PLAIN, args.target, flags, gpus[0], capture=False, chats=True)]
    for number, name in enumerate(names, 1):
        gpu = gpus[number % len(gpus)]
        wanted.append(Wanted(name, args.target, flags, gpu, draft=work / "heads" / name, chats=True))
    plain, known = work / "results" / PLAIN, {questions: threading.Event() for questions in args.questions}

    with fleet.started(Options.of(args), wanted, work / "servers") as running:

        def lane(number: int) -> None:
            for name in [PLAIN, *names][number :: len(gpus)]:
                url, out = running[name].url, work / "results" / name
                for questions, ended in known.items():
                    if name == PLAIN:
                        try:
                            ask(args, questions, work / "heads" / names[0], baseline=url, out=out)
                        finally:
                            ended.set()
                    else:
                        ended.wait()
                        earlier = plain / f"evaluation-{questions.parent.name}-sglang-live-d0.json"
                        ask(args, questions, work / "heads" / name, earlier, url, out=out)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(lane, range(len(gpus))))


def ask(
    args: argparse.Namespace, questions: Path, head: Path, baseline: str | Path, server: str = "", *, out: Path
) -> None:
    said = {"concurrency": json.dumps(args.at_a_time), "max_new_tokens": args.max_new_tokens, "out": out}
    words = ["evaluate", head, "--target", args.target, "--questions", questions, "--baseline-server", baseline]
    words += ["--server", server] if server else []
    more = ["--set", f"evaluate.limit={args.limit}"] if args.limit else []
    eyas(*words, *settings("evaluate", said), *more)


# --- results ----------------------------------------------------------------------------------------------------------


def collect(args: argparse.Namespace) -> None:
    """An entry for each drafter, benchmark, mode and number of requests at a time; and one for each of our runs."""
    if args.runs:
        known = [json.loads((args.work / "heads" / f"{name}.json").read_text()) for name in named(args.work)]
        ours = [run | run.pop("held_out") for run in known if "held_out" in run]
        args.runs.write_text(json.dumps(ours, indent=1) + "\n")
        print(f"{len(ours)} runs in {args.runs}")
    rows: list[dict[str, Any]] = []
    for path in sorted((args.work / "results").glob("*/evaluation-*.json")):
        known_file = args.work / "heads" / f"{path.parent.name}.json"
        if path.parent.name == PLAIN or not known_file.exists():
            continue
        known, found = json.loads(known_file.read_text()), json.loads(path.read_text())
        rows += [entry(known, found, result) for result in found["results"] if result["category"] == "all"]
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} entries in {args.out}")


def entry(known: dict[str, Any], found: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    keys = ("head", "trainer", "seed", "lr", "train_tokens", "gpu_seconds", "settings")
    measured = ("prompts", "tokens", "cycles", "accept_length", "accept_by_position", "ci95", "concurrency")
    return {
        **{key: known.get(key) for key in keys},
        **{key: found[key] for key in ("benchmark", "engine", "mode", "depth", "topk", "sampling")},
        **{key: result[key] for key in (*measured, "tokens_per_s", "speedup", "ttft_ms")},
        **{key: found[key] for key in ("versions", "notes", "date")},
        "command": shlex.join("PATH" if word.startswith("/") else word for word in shlex.split(found["command"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {each.__name__: each for each in (corpus, train, simulate, live, collect)}
    parser.add_argument("step", choices=list(steps))
    parser.add_argument("names", nargs="*", help="runs, or heads; default: all heads")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="the model's folder")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], help="chat files; none: W/answers.jsonl is there"
    )
    parser.add_argument("--answers", type=Path, help=".jsonl.xz of them, instead of prompts")
    parser.add_argument("--max-steps", type=int, default=0, help="of other trainers: a rehearsal")
    parser.add_argument("--store", nargs="+", choices=list(STORES), default=["loss"])
    parser.add_argument("--lr", default="1e-3", help="of runs that name none")
    parser.add_argument("--epochs", type=int, default=BASE["epochs"])
    parser.add_argument("--at-once", type=int, default=1, help="runs on each GPU")
    parser.add_argument("--questions", type=Path, nargs="+", default=[])
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 8, 32], help="requests")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=0, help="questions, or rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, help="our runs by their held-out rows, as training evaluated them")
    Options.add_to(parser)
    args = parser.parse_args()
    steps[args.step](args)


if __name__ == "__main__":
    main()
