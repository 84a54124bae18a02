"""What a request costs, on the client and on the server, and how many rows a second one client can take in.

    python benchmarks/http_cost.py client      # processor time of one request on the client, by rows in flight
    python benchmarks/http_cost.py server      # the same inside a real server: single requests and batched /generate
    python benchmarks/http_cost.py run         # rows/s of `eyas extract` from a server that answers at once

`client` and `run` talk to a process of their own that answers at once and, for `run`, writes true records. `server`
starts SGLang on the CPU with a tiny target; both sides' shares are read from /proc. Times are processor time, so other
work on the machine matters little; every figure is the least of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the CPU server's harness lives with the tests

from http_answers import answering  # noqa: E402

from eyas.capture.contract import CaptureSpec, RequestId  # noqa: E402
from eyas.config import ServerConfig, load  # noqa: E402
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter  # noqa: E402
from eyas.extract.engine import CaptureRequest, Failed  # noqa: E402
from eyas.extract.runner import extract  # noqa: E402
from eyas.extract.sglang_client import SGLangClient, prefill_body  # noqa: E402
from servers import Server, sglang_server  # noqa: E402
from sglang_cpu.models import VOCAB_SIZE, tiny_llama  # noqa: E402

LENGTHS = (100, 2048)
IN_FLIGHT = (1, 32, 256)
ROUNDS = 3
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def body(length: int, row: int = 0) -> dict[str, Any]:
    """A capture request of one row."""
    rng = random.Random(row)
    tokens = [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]
    asked = prefill_body(CaptureRequest(RequestId("run00000", "ses00000", row, 0), tokens, [1, length]))
    asked["sampling_params"]["custom_params"] = {"eyas_spec": "0" * 32, "eyas_last": [1, length]}
    return asked


async def drive(send: Callable[[int], Awaitable[object]], requests: int, in_flight: int) -> None:
    """Send that many requests, so many at a time."""
    numbers = iter(range(requests))

    async def one_after_another() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))


def cpu_us(work: Callable[[], object], times: int) -> float:
    """Processor time of one of `times`, microseconds; the least of the rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best / times * 1e6


# --- the client's side ------------------------------------------------------------------------------------------------


def client_costs() -> list[dict[str, Any]]:
    """By length and rows in flight: JSON alone, our client, the same over httpx's pool, and on uvloop if it is here."""
    rows: list[dict[str, Any]] = []
    with answering() as url:
        for length, in_flight in itertools.product(LENGTHS, IN_FLIGHT):
            asked, requests = body(length), max(500, 4 * in_flight)
            talk = functools.partial(_talk, url, asked, requests, in_flight)
            costs = {
                "json.dumps": cpu_us(
                    lambda asked=asked: [json.dumps(asked, separators=(",", ":")) for _ in "x" * 200], 200
                ),
                "client": cpu_us(lambda talk=talk: asyncio.run(talk()), requests),
                "over httpx's pool": cpu_us(lambda talk=talk: asyncio.run(talk(pool=True)), requests),
            }
            if importlib.util.find_spec("uvloop"):
                run = importlib.import_module("uvloop").run
                costs["client on uvloop"] = cpu_us(lambda talk=talk, run=run: run(talk()), requests)
            rows.append({"tokens": length, "in flight": in_flight} | {f"{k}, us": round(v) for k, v in costs.items()})
            print(rows[-1], flush=True)
    return rows


async def _talk(url: str, asked: dict[str, Any], requests: int, in_flight: int, pool: bool = False) -> None:
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    client = SGLangClient(url, ServerConfig(), httpx.AsyncHTTPTransport(limits=unbounded) if pool else None)
    await drive(lambda _: client.post(asked), requests, in_flight)
    await client.close()


# --- the server's side ------------------------------------------------------------------------------------------------


def server_costs() -> list[dict[str, Any]]:
    """Processor time a row of a real server's processes, for single requests and batches of them."""
    rows: list[dict[str, Any]] = []
    flags = ("--disable-radix-cache", "--chunked-prefill-size", "2048", "--context-length", "4096")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "model")
        with sglang_server(model, Path(folder) / "server", flags=flags, capture=False) as server:
            for length, batch in ((100, 1), (100, 8), (100, 32), (2048, 1), (2048, 8)):
                rounds = [_round(server, length, batch, number) for number in range(ROUNDS + 1)][1:]
                least = {key: min(one[key] for one in rounds) for key in rounds[0]}
                rows.append({"tokens": length, "rows a request": batch} | {k: round(v) for k, v in least.items()})
                print(rows[-1], flush=True)
    return rows


def _round(server: Server, length: int, batch: int, number: int) -> dict[str, float]:
    total = 256 if length < 1000 else 32
    bodies = [body(length, number * total + row) for row in range(total)]
    asked = bodies if batch == 1 else [_batched(bodies[i : i + batch]) for i in range(0, total, batch)]
    before, began = _cpu(server.pid), time.process_time()

    async def talk() -> None:
        client = SGLangClient(server.url, ServerConfig())

        async def send(index: int) -> None:
            answer = await (client.post(asked[index]) if batch == 1 else _post_batch(client, asked[index]))
            assert not isinstance(answer, Failed), answer

        await drive(send, len(asked), max(1, 64 // batch))
        await client.close()

    asyncio.run(talk())
    client_s, after = time.process_time() - began, _cpu(server.pid)
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    return {
        "client, us a row": client_s / total * 1e6,
        "server's HTTP process, us a row": spent["http"] / total * 1e6,
        "server's scheduler, us a row": spent["scheduler"] / total * 1e6,
    }


async def _post_batch(client: SGLangClient, asked: dict[str, Any]) -> object:
    content = json.dumps(asked, separators=(",", ":"))
    async with client._http.stream("POST", "/generate", content=content, timeout=600) as response:
        answer = json.loads(await response.aread())
    assert [one["meta_info"]["id"] for one in answer] == asked["rid"]
    return answer


def _batched(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """One request of several rows: every field a list."""
    return {key: [one[key] for one in bodies] for key in bodies[0]}


def _cpu(leader: int) -> dict[str, float]:
    """Processor seconds so far of the server's HTTP process (the leader) and of its scheduler."""
    spent = {"http": 0.0, "scheduler": 0.0}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                fields = rest.split()
                if int(fields[2]) == leader:  # process group
                    kind = (
                        "http" if int(folder.name) == leader else "scheduler" if "schedul" in name else ""
                    )  # cut to 15 letters
                    if kind:
                        spent[kind] += (int(fields[11]) + int(fields[12])) * _TICK_S
    return spent


# --- a whole run ------------------------------------------------------------------------------------------------------


def run_speed(rows: int, length: int) -> list[dict[str, Any]]:
    """Rows/s of `eyas extract` with one worker, by rows in flight, from a server that answers at once."""
    told: list[dict[str, Any]] = []
    spec = CaptureSpec((1, 3, 6), "loss", "bf16", 64, VOCAB_SIZE, 10, "f" * 32)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        corpus = _corpus(Path(folder) / "corpus.parquet", rows, length)
        for in_flight in (32, 256):
            spool = Path(folder) / f"spool{in_flight}"
            with answering(spool, spec) as url:
                best = max(_run(corpus, Path(folder), url, spool, in_flight, spec) for _ in range(ROUNDS))
            told.append(
                {"tokens": length, "in flight": in_flight, "rows/s": round(best[0]), "client, us": round(best[1])}
            )
            print(told[-1], flush=True)
    return told


def _run(corpus: Path, folder: Path, url: str, spool: Path, in_flight: int, spec: CaptureSpec) -> tuple[float, float]:
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    target = folder / "target"
    if not target.exists():
        target.mkdir()
        config = {"hidden_size": spec.hidden_size, "vocab_size": VOCAB_SIZE, "num_hidden_layers": spec.num_layers}
        (target / "config.json").write_text(
            json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        )
    cfg = load(
        overrides=[
            f"server.spool={spool}",
            "capture.layers=[1,3,6]",
            f"extract.window_requests={in_flight}",
            "store.reserve_bytes=0",
        ]
    )
    began = time.process_time()
    run = extract(corpus, store, cfg=cfg, model=str(target), server=url, console=Console(file=io.StringIO()))
    assert run.rows_done == run.rows, run.first_failures
    return run.rows_now / run.seconds, (time.process_time() - began) / run.rows * 1e6


def _corpus(path: Path, rows: int, length: int) -> Path:
    rng = np.random.default_rng(0)
    meta = CorpusMeta(model="made-up", tokenizer_hash="", template_hash="", vocab_size=VOCAB_SIZE)
    with CorpusWriter(path, meta) as writer:
        for row in range(rows):
            mask = np.ones(length, np.uint8)
            mask[: length // 3] = 0
            writer.add(str(row), rng.integers(10, VOCAB_SIZE, length), mask)
    return Corpus.open(path).path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["client", "server", "run"])
    parser.add_argument("--rows", type=int, default=4000, help="run: rows of the corpus")
    parser.add_argument("--tokens", type=int, default=100, help="run: tokens of a row")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, httpx {httpx.__version__}, {platform.python_version()}")
    match options.what:
        case "client":
            client_costs()
        case "server":
            server_costs()
        case _:
            run_speed(options.rows, options.tokens)


if __name__ == "__main__":
    main()
