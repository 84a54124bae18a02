"""Writers as threads of the server or as a process of their own: what they cost the forward thread, without a GPU.

    python benchmarks/writers_cpu.py [--gb-per-s 1.0] [--hidden 2048] [--tokens 8192] [--prompt 2048] [--rounds 3]

A thread stands for the server's forward thread: it does small torch operations, as many as take a forward's time at the
asked rate, then hands a forward's states to the recorder. Modes alternate: `plain` (no capture), `threads`, `process`.
Meanwhile another process removes finished records, as a client does. Reported, medians over the rounds:

    ops_ratio   time of the small operations beside that of `plain` in the same round: what waiting for the GIL and for
                processor cores costs
    hook_us     time in the recorder itself, p50 and p99; here it holds the copy that a GPU would make by itself
    gb_per_s    states that reached their files, over the time of the round
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eyas.capture.assembler import Chunk
from eyas.capture.contract import LAST_PARAM, SPEC_PARAM, CaptureSpec, RequestId
from eyas.capture.recorder import Recorder, Resources
from eyas.capture.settings import WRITER_MODES, ServerSettings
from eyas.capture.spool import Spool

LAYERS = (1, 7, 12)
CLIENT = """
import os, sys, time
folder, seen = sys.argv[1], set()
while os.path.isdir(folder):
    for name in os.listdir(folder):
        if name.endswith(('.safetensors', '.failed')):
            os.unlink(os.path.join(folder, name))
            print(name, flush=True)
    time.sleep(0.005)
"""


class Owner:
    """Stands for the server's request object."""


def operations(count: int) -> float:
    """Seconds of `count` small operations, each of which gives up the GIL and takes it again, as launches do."""
    tensor = torch.zeros(64)
    began = time.perf_counter()
    for _ in range(count):
        tensor.add_(1.0)
    return time.perf_counter() - began


def plain_round(forwards: int, ops: int) -> float:
    return sum(operations(ops) for _ in range(forwards))


def capture_round(args: argparse.Namespace, mode: str, forwards: int, ops: int, folder: Path) -> dict[str, Any]:
    """One round with capture: seconds of the small operations, of the hook, and bytes that became files."""
    spec = CaptureSpec(LAYERS, "all", "bf16", args.hidden, 128_000, 16, "f" * 32)
    settings = ServerSettings(LAYERS, str(folder), last="all", quota_bytes=args.quota << 30)
    spool = Spool(settings)
    recorder = Recorder(
        spec, spool, Resources(forward_tokens=args.tokens, arena_bytes=2 << 30, writers=mode, threads=args.threads)
    )
    aux = torch.randn(args.tokens, len(LAYERS) * args.hidden).to(torch.bfloat16)
    last, ids = torch.randn(args.tokens, args.hidden).to(torch.bfloat16), torch.arange(args.tokens)
    prompts = [ids[at : at + args.prompt].tolist() for at in range(0, args.tokens, args.prompt)]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(folder)], stdout=subprocess.PIPE, text=True)
    spent, refused, row = 0.0, 0, 0
    params = {SPEC_PARAM: spec.spec_id, LAST_PARAM: []}
    began = time.perf_counter()
    for _ in range(forwards):
        spent += operations(ops)
        hook = time.perf_counter()
        forward = recorder.forward(aux, last, ids)
        at = 0
        for prompt in prompts:
            rid = str(RequestId("run00000", "sess0000", row, 0))
            reply = forward.take(Chunk(rid, 0, len(prompt), prompt, params, Owner()), at)
            refused += reply is None or reply.status != "accepted"
            at, row = at + len(prompt), row + 1
        forward.send()
        recorder.cost.add(time.perf_counter() - hook)
    recorder.close()  # writes what was accepted
    seconds = time.perf_counter() - began
    time.sleep(0.2)
    left = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    names = client.communicate()[0].split()
    written = sum(name.endswith(".safetensors") for name in [*names, *left])
    assert written + refused == row, (written, refused, row)
    return {
        "ops_s": spent,
        "hook_us_p50": recorder.cost.p50_us,
        "hook_us_p99": recorder.cost.p99_us,
        "gb_per_s": written * spec.record_bytes(args.prompt, args.prompt) / seconds / 1e9,
        "refused": refused,
        "rows": row,
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, default=1.0, help="states that the server makes")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of a forward")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=4, help="writers")
    parser.add_argument("--quota", type=int, default=8, help="GiB of the spool")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/writers_cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    forward_bytes = args.tokens * (len(LAYERS) + 1) * args.hidden * 2
    forward_s = forward_bytes / args.gb_per_s / 1e9
    operations(100_000)
    ops = max(int(forward_s / (min(operations(100_000) for _ in range(3)) / 100_000)), 1)
    forwards = max(int(args.seconds / forward_s), 3)
    print(f"{forwards} forwards of {forward_bytes / 1e6:.0f} MB and {ops} operations a round", flush=True)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="eyas-writers-", dir="/dev/shm") as work:
        for number in range(args.rounds):
            plain_s = plain_round(forwards, ops)
            for mode in WRITER_MODES[:: 1 if number % 2 else -1]:
                got = capture_round(args, mode, forwards, ops, Path(work, f"{mode}-{number}"))
                rounds.append({"mode": mode, "ops_ratio": got.pop("ops_s") / plain_s, **got})
                print(json.dumps(rounds[-1]), flush=True)
    keys = ("ops_ratio", "hook_us_p50", "hook_us_p99", "gb_per_s", "refused")
    medians = {
        mode: {key: round(statistics.median(r[key] for r in rounds if r["mode"] == mode), 3) for key in keys}
        for mode in WRITER_MODES
    }
    result = {
        "medians": medians,
        "rounds": rounds,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
