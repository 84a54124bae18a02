"""The server's part of capture on a GPU without a server: right bytes, and what it costs the forward thread.

    python benchmarks/capture_cuda.py --out capture-cuda.json [--seconds 4] [--shapes 8b 1b kimi]

A forward is made of matrix products that take as long as the shape's does on an H200, launched as many small kernels by
one Python thread, as a server launches them; four prompts of 2,048 tokens each. It is timed alone and with capture, in
turns, for both kinds of writers. Records go to RAM disk and are removed by a process of its own, which checks some of
them against what the forward brought.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, Shape

from eyas.capture.assembler import Chunk
from eyas.capture.contract import (
    LAST_PARAM,
    RECORD_METADATA,
    RECORD_SUFFIX,
    SPEC_PARAM,
    CaptureSpec,
    RecordHeader,
    RequestId,
)
from eyas.capture.encoding import encode
from eyas.capture.hostcopy import host_bytes
from eyas.capture.recorder import Recorder, Resources
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Spool
from eyas.capture.tensorfile import parse_header

PROMPT, PROMPTS = 2048, 4
FORWARD = PROMPT * PROMPTS
#: Tokens/s of plain prefill that a forward imitates.
PLAIN = {"8b": 40_000, "1b": 225_000, "kimi": 76_000, "tiny": 20_000}
LAUNCHES = {"8b": 600, "1b": 300, "kimi": 150, "tiny": 50}


class Request:
    """Stands for the server's request object."""


def _drain(folder: str, orders: Connection) -> None:
    """Remove records as they come; keep digests of their tensors' bytes for one in fifty."""
    spool, seen, digests, last = Path(folder), 0, {}, False
    while True:
        found = list(spool.glob(f"eyas.*{RECORD_SUFFIX}"))
        for path in found:
            if int(path.stem.split(".")[3]) % 50 < PROMPTS:
                data = path.read_bytes()
                plan = parse_header(data, len(data))
                header = RecordHeader.from_json(plan.metadata[RECORD_METADATA])
                parts = {name: data[info.start : info.stop] for name, info in plan.tensors.items()}
                digests[header.rid] = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
            path.unlink()
        seen += len(found)
        failed = [path.read_text() for path in spool.glob("*.failed")]
        if last and not found:
            orders.send((seen, digests, failed))
            return
        last = last or orders.poll(0 if found else 0.005)


class Imitation:
    """Forwards of one shape, and their capture."""

    def __init__(
        self, shape: Shape, dtype: str, writers: str, threads: int, folder: Path, device: torch.device
    ) -> None:
        config = shape.config
        hidden = int(config["hidden_size"])
        self._shape, self._device = shape, device
        self.spec = CaptureSpec(
            shape.layers, "loss", dtype, hidden, shape.vocab_size, int(config["num_hidden_layers"]), "0" * 32
        )
        self._spool = folder / f"spool-{shape.name}-{dtype}-{writers}"
        settings = ServerSettings(
            shape.layers, str(self._spool), quota_bytes=16 << 30, writers=writers, writer_threads=threads
        )
        self.recorder = Recorder(self.spec, Spool(settings), Resources.of(settings, device, FORWARD, 1))
        self._aux = torch.randn(2, FORWARD, 3 * hidden, device=device).to(torch.bfloat16)
        self._last = torch.randn(2, FORWARD, hidden, device=device).to(torch.bfloat16)
        self._ids = torch.randint(10, shape.vocab_size, (2, FORWARD), device=device)
        self._prompts = [[half[i * PROMPT : (i + 1) * PROMPT].tolist() for i in range(PROMPTS)] for half in self._ids]
        self._runs = [PROMPT // 3, PROMPT]
        self._matrix = torch.randn(1024, 1024, device=device).to(torch.bfloat16)
        self._launches, self._repeats = LAUNCHES[shape.name], 1
        self._halves: list[int] = []  # by row: which of the two forwards brought it
        self.refused = 0
        self._live: list[Request] = []
        self._calibrate()

    def _sync(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _work(self) -> None:
        """As many launches as a forward has; each is a product of some size and a small operation."""
        for _ in range(self._launches):
            torch.mm(self._matrix[: self._size], self._matrix.t())
            self._matrix[:8].neg_()

    def _calibrate(self) -> None:
        wanted_s, self._size = FORWARD / PLAIN[self._shape.name], 64
        for _ in range(12):
            self._work()
            self._sync()
            began = time.perf_counter()
            self._work()
            self._sync()
            took = time.perf_counter() - began
            if abs(took - wanted_s) < 0.05 * wanted_s:
                break
            rows = self._matrix.shape[0]
            self._size = min(rows, max(8, round(self._size * wanted_s / took)))
            if self._size == rows:  # a larger product
                self._matrix = torch.randn(rows * 3 // 2, rows * 3 // 2, device=self._device).to(torch.bfloat16)

    def run(self, seconds: float, *, capture: bool) -> tuple[float, float]:
        """Forwards for so long; tokens/s of the forward thread, and until the last record is in the spool."""
        began, forwards = time.perf_counter(), 0
        events: list[Any] = []
        while time.perf_counter() - began < seconds:
            self._work()
            half = forwards % 2
            if capture:
                self._capture(half)
            forwards += 1
            if self._device.type == "cuda":  # a server is one forward ahead of the device, no more
                event = torch.cuda.Event()
                event.record()
                events.append(event)
                if len(events) > 1:
                    events.pop(0).synchronize()
        self._sync()
        thread = forwards * FORWARD / (time.perf_counter() - began)
        while len(self.recorder.arena.ring):
            time.sleep(0.001)
        return thread, forwards * FORWARD / (time.perf_counter() - began)

    def _capture(self, half: int) -> None:
        # What a hook does: the outputs of this forward, copied on its stream.
        began = time.perf_counter()
        self._live = self._live[-64:]
        forward = self.recorder.forward(self._aux[half], self._last[half], self._ids[half])
        for number in range(PROMPTS):
            request = Request()
            self._live.append(request)
            rid = str(RequestId("bench000", "bench000", len(self._halves), 0))
            params = {SPEC_PARAM: self.recorder.spec_id, LAST_PARAM: self._runs}
            prompt = self._prompts[half][number]
            reply = forward.take(Chunk(rid, 0, PROMPT, prompt, params, request), number * PROMPT)
            assert reply is not None
            self.refused += reply.status != "accepted"
            self._halves.append(half)
        forward.send()
        self.recorder.cost.add(time.perf_counter() - began)

    def expected(self, row: int) -> dict[str, str]:
        """Digests of the bytes that the record of a row must have."""
        half, number = self._halves[row], row % PROMPTS
        rows = slice(number * PROMPT, (number + 1) * PROMPT)
        aux = self._aux[half, rows].view(PROMPT, 3, -1)
        last = self._last[half, rows][self._runs[0] : self._runs[1]]
        parts = {"aux": encode(aux, self.spec.dtype).cpu(), "last": encode(last, self.spec.dtype).cpu()}
        return {name: hashlib.sha256(host_bytes(part.contiguous())).hexdigest() for name, part in parts.items()}

    def measure(self, seconds: float, rounds: int) -> dict[str, Any]:
        """In turns; the records of all rounds are counted, and some compared."""
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        drain = multiprocessing.get_context("spawn").Process(target=_drain, args=(str(self._spool), theirs))
        drain.start()
        self.run(0.5, capture=True)
        plains, threads, ends = [], [], []
        for _ in range(rounds):
            plains.append(self.run(seconds, capture=False)[0])
            thread, end = self.run(seconds, capture=True)
            threads.append(thread)
            ends.append(end)
        self.recorder.close()
        mine.send("done")
        seen, digests, failed = mine.recv()
        drain.join()
        wrong = [rid for rid, found in digests.items() if found != self.expected(int(rid.split(".")[3]))]
        rate = statistics.median(ends)
        kept = self._runs[1] - self._runs[0]
        return {
            "plain tokens/s": round(statistics.median(plains)),
            "forward thread, of plain": round(
                statistics.median(t / p for t, p in zip(threads, plains, strict=True)), 4
            ),
            "until written, of plain": round(statistics.median(e / p for e, p in zip(ends, plains, strict=True)), 4),
            "GB/s": round(rate * self.spec.record_bytes(PROMPT, kept) / PROMPT / 1e9, 3),
            "forward us p50": self.recorder.cost.p50_us,
            "forward us p99": self.recorder.cost.p99_us,
            "rows": len(self._halves),
            "refused": self.refused,
            "records": seen,
            "compared": len(digests),
            "wrong": len(wrong),
            "failed": len(failed),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["8b", "1b", "kimi"])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp8_e4m3"])
    parser.add_argument("--writers", nargs="+", default=["process", "threads"])
    parser.add_argument("--threads", nargs="+", type=int, default=[4], help="of the writers")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    words = shlex.join("PATH" if "/" in word else word for word in sys.argv[1:])
    result: dict[str, Any] = {
        "title": f"Capture without a server on {gpu}",
        "what": "The server's part of capture beside an imitated forward, until the records are in the spool.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{gpu}, {os.cpu_count()} CPU cores",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/capture_cuda.py {words}",
        "rows": [],
    }
    for name, dtype, writers, threads in itertools.product(args.shapes, args.dtypes, args.writers, args.threads):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            bench = Imitation(SHAPES[name], dtype, writers, threads, Path(folder), device)
            figures = bench.measure(args.seconds, args.rounds)
        row = {"shape": name, "states": dtype, "writers": writers, "threads": threads} | figures
        result["rows"].append(row)
        print(row, flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
