"""A server that was patched to dump hidden states into folders, with every fault such servers have in practice.

    with DumpServer(model_folder, dumps, layers=(1, 2, 3), faults=Faults(...)) as server:
        extract(..., server=server.url, ...)
        server.truth(tokens)                     # (aux [T, A, H], last [T, H]) that are right

Real HTTP, a real (tiny) model by transformers, real files. Faults are probabilities a request, drawn from one seed.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from eyas.extract.hf import hidden_states

#: An HTTP status and what is said with it.
Refusal = tuple[int, dict[str, Any]]


@dataclass
class Faults:
    """What goes wrong, each a probability for every request unless it says otherwise.

    Attributes:
        warmups: how many dumps the server makes of its own accord when it starts.
        probes: a health probe is served, and dumped, before the request.
        foreign: a foreign client's request of a random length is served with it.
        twin: a foreign client's request of the very same length is served with it.
        retried: the server runs the request twice, so that two dumps of it come.
        dropped: the dump never comes.
        late_s: longest delay between the reply and the dump; drawn evenly.
        late: probability of that delay.
        done_early: the marker is written before the files.
        decode: number of one-token dumps that are made meanwhile.
        restarts: which requests (by their number) are cut off by a restart that begins counting anew.
        down_s: how long a restart takes.
        reordered: the dump is held back until the next request's has been written.
    """

    warmups: int = 0
    probes: float = 0.0
    foreign: float = 0.0
    twin: float = 0.0
    retried: float = 0.0
    dropped: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    done_early: float = 0.0
    decode: int = 0
    restarts: tuple[int, ...] = ()
    down_s: float = 0.3
    reordered: float = 0.0


@dataclass
class DumpServer:
    """The emulator.

    Attributes:
        model: the target's folder.
        dumps: where it makes `req_N` folders.
        layers: whose outputs it dumps.
        pre_norm: dump the last state from before the final norm.
        faults, seed: what goes wrong, and when.
        chunk: rows a file; 0 for one file.
        log_probs: whether replies carry log-probabilities.
        shift: rows by which dumped states are shifted.
        prefill_s: time a forward takes at least, besides its own.
        counter: N of the next folder.
        outside: how many token ids came that are not in the vocabulary; a real server dies of one.
        most_at_once: most requests that were in their forward at once.
    """

    model: Path
    dumps: Path
    layers: Sequence[int] = (1, 2, 3)
    pre_norm: bool = False
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    chunk: int = 0
    log_probs: bool = True
    shift: int = 0
    prefill_s: float = 0.0
    counter: int = 0
    served: int = 0
    outside: int = 0
    most_at_once: int = 0
    dumped: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.dumps.mkdir(exist_ok=True)
        self._random = random.Random(self.seed)
        self._network = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        self._num_layers = self._network.config.num_hidden_layers
        self._vocab = self._network.config.vocab_size
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._truths: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._life, self._down_until, self._at_once = 0, 0.0, 0
        self._held: list[Any] = []
        self._writers: list[threading.Thread] = []
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.emulator = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self._warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._life += 1  # writers of the old life stop
        for writer in self._writers:
            writer.join()

    def leave(self, count: int, lengths: Sequence[int]) -> None:
        """Finished dumps of an earlier run, of these lengths in turn; the counter begins at 0 again."""
        for number in range(count):
            self._write(self._forward(self._tokens(lengths[number % len(lengths)])), self.dumps / f"req_{number}")

    def truth(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [T, A, H] and the state after the final norm [T, H]."""
        aux, last, _ = self._forward(list(tokens))
        return aux, last

    # --- requests -----------------------------------------------------------------------------------------------------

    def handle(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | Refusal | int | None:
        """A reply, an HTTP status, or None to break the connection."""
        if time.monotonic() < self._down_until:
            return None
        if path in ("/model_info", "/get_model_info"):
            return {"model_path": str(self.model)}
        if path != "/generate" or body is None:
            return 404
        return self._generate(body)

    def _generate(self, body: dict[str, Any]) -> dict[str, Any] | Refusal | None:
        faults, life = self.faults, self._life
        with self._counting:
            self.served += 1
            number = self.served
            draw = {name: self._random.random() for name in ("probe", "foreign", "twin", "retried", "dropped")}
            draw |= {name: self._random.random() for name in ("late", "early", "order", "side", "wait")}
        if number in faults.restarts:
            self._restart()
            return None
        tokens = body["input_ids"]
        if any(int(token) >= self._vocab for token in body.get("sampling_params", {}).get("logit_bias") or ()):
            return 400, {"error": {"message": f"logit_bias must has keys in [0, {self._vocab - 1}]"}}  # SGLang's words
        self.outside += sum(token >= self._vocab for token in tokens)
        if draw["probe"] < faults.probes:
            self._dump(self._tokens(4), life)
        if draw["foreign"] < faults.foreign:
            self._dump(self._tokens(2 + int(draw["wait"] * 30)), life)
        twin_first = draw["side"] < 0.5
        if draw["twin"] < faults.twin and twin_first:
            self._dump(self._tokens(len(tokens)), life)
        for _ in range(faults.decode):
            self._dump(self._tokens(1), life)
        with self._counting:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.prefill_s)
        with self._counting:
            self._at_once -= 1
        _, last, _ = self._forward(tokens)
        if draw["dropped"] >= faults.dropped:
            for _ in range(2 if draw["retried"] < faults.retried else 1):
                delay_s = faults.late_s * draw["wait"] if draw["late"] < faults.late else 0.0
                early, hold = draw["early"] < faults.done_early, draw["order"] < faults.reordered
                self._dump(tokens, life, delay_s, early=early, hold=hold)
        if draw["twin"] < faults.twin and not twin_first:
            self._dump(self._tokens(len(tokens)), life)
        return {"text": "", "meta_info": self._meta(body, last)}

    def _meta(self, body: dict[str, Any], last_TH: torch.Tensor) -> dict[str, Any]:
        tokens = body["input_ids"]
        meta: dict[str, Any] = {"prompt_tokens": len(tokens), "cached_tokens": 0, "finish_reason": {"type": "length"}}
        if not (body.get("return_logprob") and self.log_probs):
            return meta
        with torch.no_grad():
            log_probs = self._network.lm_head(last_TH).log_softmax(-1)
        values, ids = log_probs[-1].topk(max(1, body.get("top_logprobs_num", 0)))
        top = [[value, token, None] for value, token in zip(values.tolist(), ids.tolist(), strict=True)]
        meta["output_token_logprobs"] = top[:1]
        meta["output_top_logprobs"] = [top]
        if (start := body["logprob_start_len"]) >= 0:
            rest = [log_probs[p - 1, tokens[p]].item() for p in range(start + 1, len(tokens))]
            # As SGLang does: the last id comes back as 0.
            ids = [token if token < self._vocab - 1 else 0 for token in tokens[start:]]
            meta["input_token_logprobs"] = [
                [value, token, None] for value, token in zip([None, *rest], ids, strict=True)
            ]
        return meta

    def _restart(self) -> None:
        self._life += 1
        self._down_until = time.monotonic() + self.faults.down_s
        with self._counting:
            self.counter = 0
            self._held.clear()
        self._warm_up()

    def _warm_up(self) -> None:
        for _ in range(self.faults.warmups):
            self._dump(self._tokens(6), self._life)

    # --- dumps --------------------------------------------------------------------------------------------------------

    def _dump(
        self, tokens: Sequence[int], life: int, delay_s: float = 0.0, *, early: bool = False, hold: bool = False
    ) -> None:
        """Count, and write beside the server's own work, as such patches do."""
        with self._counting:
            folder = self.dumps / f"req_{self.counter}"
            self.counter += 1
        work = (list(tokens), folder, life, delay_s, early)
        with self._counting:
            if hold:
                self._held.append(work)
                return
            works = [work, *self._held]
            self._held.clear()
        writer = threading.Thread(target=lambda: [self._write_later(*one) for one in works])
        self._writers.append(writer)
        writer.start()
        if not delay_s:
            writer.join()

    def _write_later(self, tokens: list[int], folder: Path, life: int, delay_s: float, early: bool) -> None:
        states = self._forward(tokens)
        time.sleep(delay_s)
        if life == self._life:
            with contextlib.suppress(FileNotFoundError):  # somebody cleared the folder under it
                self._write(states, folder, early=early)

    def _write(
        self, states: tuple[torch.Tensor, torch.Tensor, torch.Tensor], folder: Path, *, early: bool = False
    ) -> None:
        aux, last, before = states
        last = (before if self.pre_norm else last).roll(self.shift, 0)
        aux = aux.flatten(1).roll(self.shift, 0)
        folder.mkdir(exist_ok=True)
        if early:
            (folder / "done").write_text("")
            time.sleep(0.03)
        (folder / "meta.json").write_text(json.dumps({"num_tokens": len(aux)}))
        step = self.chunk or len(aux)
        for number, start in enumerate(range(0, len(aux), step)):
            suffix = f"_{number}" if self.chunk else ""
            torch.save(aux[start : start + step].clone(), folder / f"aux{suffix}.pt")
            torch.save(last[start : start + step].clone(), folder / f"last{suffix}.pt")
            if early:
                time.sleep(0.02)
        if not early:
            (folder / "done").write_text("")
        self.dumped.append(folder.name)

    def _tokens(self, length: int) -> list[int]:
        with self._counting:
            return [self._random.randrange(self._vocab) for _ in range(length)]

    def _forward(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """aux [T, A, H], after the norm [T, H], before it [T, H]; one at a time, as on one device."""
        with self._lock:
            if (known := self._truths.get(tuple(tokens))) is None:
                end = self._num_layers - 1
                states, last = hidden_states(self._network, tokens, sorted({*self.layers, end}))
                known = torch.stack([states[layer] for layer in self.layers], dim=1), last, states[end]
                self._truths[tuple(tokens)] = known
            return known


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # joined when it closes
    request_queue_size = 128  # a window of rows connects at once
    emulator: DumpServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of the server."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer(self.server.emulator.handle(self.path, None))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.server.emulator.handle(self.path, body))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self, answer: dict[str, Any] | Refusal | int | None) -> None:
        self.close_connection = True
        if answer is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(answer, int):
            answer = answer, {}
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


# --- the two methods that failed in practice ------------------------------------------------------------------------


def by_counter(server: DumpServer, ask: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    """Counter prediction: the k-th request of ours is in the folder N + k, N being where the counter stands now."""
    start = server.counter
    results = []
    for number, tokens in enumerate(rows):
        ask(tokens)
        results.append(_read_plainly(server, server.dumps / f"req_{start + number}"))
    return results


def by_clearing(server: DumpServer, ask: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    """Clear before each request: whatever dump is there afterwards must be ours."""
    results = []
    for tokens in rows:
        for folder in server.dumps.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        ask(tokens)
        done = sorted(server.dumps.glob("req_*/done"))
        results.append(_read_plainly(server, done[0].parent) if done else None)
    return results


def _read_plainly(server: DumpServer, folder: Path) -> Any:
    """What such scripts do: wait a little for the marker, then load."""
    for _ in range(30):
        if (folder / "done").exists():
            break
        time.sleep(0.01)
    try:
        aux, last = torch.load(folder / "aux.pt", weights_only=True), torch.load(folder / "last.pt", weights_only=True)
    except Exception:
        return None
    return aux.reshape(len(aux), len(server.layers), -1), last
