"""The bench: a tiny Llama, the plugin's own recorder, and an HTTP server that a real job of `eyas extract` talks to.

States are computed by transformers, chunk by chunk over a KV cache, and recorded by the very code that runs inside an
inference server. What the recorder published is held back, mutated, and given to the client.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel

from eyas.capture.assembler import Chunk
from eyas.capture.contract import (
    LAST_PARAM,
    PROBE_ROW,
    RECORD_METADATA,
    REPLY_KEY,
    SPEC_PARAM,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    RequestId,
    ServerHello,
    check_runs,
)
from eyas.capture.recorder import Recorder, Resources
from eyas.capture.settings import ServerSettings
from eyas.capture.spool import Spool
from eyas.capture.tensorfile import parse_header
from eyas.config import load
from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.extract.hf import load_model
from eyas.extract.runner import Summary, extract
from eyas.target.checkpoint import Target
from mutations.mutation import Held, Mutation, Parcel, Prefill, Stage, chunks_of
from sglang_cpu.models import tiny_llama

_PATIENCE_S: Final = 60.0
_TORCH: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def quiet() -> Console:
    return Console(file=io.StringIO())


def make_corpus(folder: Path, lengths: Sequence[int], seed: int = 0) -> Path:
    """Rows of random tokens, the first quarter of each a prompt."""
    rng = np.random.default_rng(seed)
    path = folder / f"corpus-{seed}.parquet"
    with CorpusWriter(path, CorpusMeta("tiny", "", "", 1024)) as writer:
        for row, length in enumerate(lengths):
            mask = np.ones(length, np.uint8)
            mask[: length // 4] = 0
            writer.add(str(row), rng.integers(0, 1000, length), mask)
    return path


class Target0:
    """The model behind the server, and a stranger that only its values tell from it."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_llama(folder / "model")
        self.spec = Target.load(str(self.path)).spec()
        self._model = _loaded(self.path)
        self._stranger = _loaded(tiny_llama(folder / "stranger", seed=5))
        self._known: dict[tuple[int, bool], Any] = {}
        self._lock = threading.Lock()

    def states(self, tokens: Sequence[int], stranger: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings [T, H], outputs of all layers [T, N, H] and final states [T, H]."""
        with self._lock:
            key = (hash(tuple(tokens)), stranger)
            if key not in self._known:
                self._known[key] = _chunked(self._stranger if stranger else self._model, tokens)
            return self._known[key]

    def log_probs(self, tokens: list[int]) -> dict[str, Any]:
        """What SGLang says of a prompt's log-probabilities."""
        _, _, last = self.states(tokens)
        with torch.inference_mode():
            every = self._model.lm_head(last).log_softmax(-1)
        known = every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        values = zip([None, *known], tokens, strict=True)
        return {
            "finish_reason": {"type": "length", "length": 1},
            "input_token_logprobs": [[value, token, None] for value, token in values],
        }


def _loaded(path: Path) -> PreTrainedModel:
    return load_model(Target.load(str(path)), device="cpu", dtype="f32")


def _chunked(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    decoder, cache = model.model, DynamicCache()
    before_norm: list[torch.Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    seen: list[list[torch.Tensor]] = []
    try:
        with torch.inference_mode():
            for start, stop in chunks_of(len(tokens)):
                ids = torch.tensor([list(tokens[start:stop])])
                out = decoder(input_ids=ids, cache=cache, use_cache=True, output_hidden_states=True)
                inner = torch.stack([states[0] for states in out.hidden_states[1:-1]], dim=1)
                layers = torch.cat([inner, before_norm[-1][:, None]], dim=1)
                seen.append([out.hidden_states[0][0], layers, out.last_hidden_state[0]])
    finally:
        hook.remove()
    embeddings, layers, last = (torch.cat(column).clone() for column in zip(*seen, strict=True))
    return embeddings, layers, last


class CaptureServer:
    """An inference server as the client sees it, whose records can be tampered with.

    Attributes:
        armed: which mutation strikes which row. Every attempt at the row, until it is taken out.
        errors: of the bench itself.
    """

    def __init__(self, target: Target0, corpus: Path, folder: Path) -> None:
        self.target, self.spec = target, target.spec
        self.armed: dict[int, Mutation] = {}
        self.row_tokens = [row.tokens.tolist() for row in Corpus.open(corpus).rows(0, None)]
        self.errors: list[Exception] = []
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Held]] = {}
        self._serial = 0
        self.spool = folder / "spool"
        self._recorder = _recorder(self.spec, folder / "staging")
        provenance = {"engine": "sglang", "sglang": "0.5.23", "host": "bench", "dtype": "float32"}
        hello = ServerHello(self.spec.to_dict(), self.spec.spec_id, provenance, 4000, 1 << 30)
        _spool(self.spec, self.spool).write_hello(hello.to_json())
        self._folder = folder
        self._http = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._recorder.close()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of the client; an exception is a fault of the bench, and kept in `errors`."""
        try:
            return self._generate(body)
        except Exception as error:
            self.errors.append(error)
            raise

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("return_logprob"):
            return {"text": "", "output_ids": [5], "meta_info": self.target.log_probs(body["input_ids"])}
        rid = RequestId.parse(body["rid"])
        assert rid is not None
        params, tokens = body["sampling_params"]["custom_params"], body["input_ids"]
        mutation = None if rid.row == PROBE_ROW else self.armed.get(rid.row)
        stage = mutation.stage if mutation else None
        prefill = self._prefill(tokens)
        if mutation and stage is Stage.FORWARD:
            prefill = mutation.inject(prefill)
        word = _feed(self._recorder, str(rid), prefill, params)
        if word is not None and word.status == "accepted":
            staged = _ended(self._recorder.spool.folder, str(rid))
            if staged.suffix == ".failed" or mutation is None or stage not in (Stage.RECORD, Stage.SPOOL):
                staged.rename(self.spool / staged.name)
            else:
                self._tamper(mutation, self._held(staged, rid, tokens, params[LAST_PARAM]), rid.row)
        told = None if word is None else word.to_dict()
        if told is not None and mutation and stage is Stage.REPLY:
            told = mutation.inject(told)
        meta: dict[str, Any] = {"id": str(rid), "finish_reason": {"type": "length", "length": 1}}
        return {"text": "", "output_ids": [5], "meta_info": meta | ({} if told is None else {REPLY_KEY: [told]})}

    def _prefill(self, tokens: list[int]) -> Prefill:
        prefill = _prefill_of(self.target, self.spec, tokens)

        def twin() -> Prefill:
            others = [row for row in self.row_tokens if len(row) == len(tokens) and row != tokens]
            return replace(prefill, **_states_only(_prefill_of(self.target, self.spec, others[0])))

        def stranger() -> Prefill:
            return replace(prefill, **_states_only(_prefill_of(self.target, self.spec, tokens, stranger=True)))

        return replace(prefill, twin=twin, stranger=stranger)

    def _tamper(self, mutation: Mutation, held: Held, row: int) -> None:
        if mutation.stage is Stage.RECORD:
            parcel = Parcel(self.spool, [held])
            parcel.put(parcel.path(), mutation.inject(held))
            return
        with self._lock:
            waiting = self._waiting.setdefault(id(mutation), [])
            waiting.append(held)
            if len(waiting) < mutation.rows:
                return
            del self._waiting[id(mutation)]
        mutation.inject(Parcel(self.spool, waiting))

    def _held(self, staged: Path, rid: RequestId, tokens: list[int], runs: list[int]) -> Held:
        data = staged.read_bytes()
        staged.unlink()
        return self._opened(data, rid, tokens, runs, self.spec)

    def _opened(self, data: bytes, rid: RequestId, tokens: list[int], runs: list[int], spec: CaptureSpec) -> Held:
        plan = parse_header(data, len(data))
        header = RecordHeader.from_json(plan.metadata[RECORD_METADATA])
        aux, last = (
            torch.frombuffer(bytearray(data[info.start : info.stop]), dtype=_TORCH[info.dtype]).view(info.shape)
            for info in (plan.tensors["aux"], plan.tensors["last"])
        )

        def again(**changes: Any) -> Held:
            return self._again(changes.pop("rid", rid), tokens, runs, **changes)

        return Held(data, header, aux, last, spec.dtype, again)

    def _again(
        self,
        rid: RequestId,
        tokens: list[int],
        runs: list[int],
        *,
        shift: int = 0,
        cut: int = 0,
        move: int = 0,
        drop: int = 0,
        spec: dict[str, Any] | None = None,
    ) -> Held:
        """What the recorder writes of the same row with other token ids, positions, agreement or id."""
        tokens = [(token + shift) % 1000 for token in tokens][: len(tokens) - cut]
        runs = [edge + move for edge in runs]
        runs[-1] -= drop + cut
        check_runs(runs, len(tokens))
        agreed = CaptureSpec.from_dict({**self.spec.to_dict(), **(spec or {})})
        with self._lock:
            self._serial += 1
            folder = self._folder / f"other-{self._serial}"
        recorder = _recorder(agreed, folder)
        try:
            params = {SPEC_PARAM: agreed.spec_id, LAST_PARAM: runs}
            word = _feed(recorder, str(rid), _prefill_of(self.target, agreed, tokens), params)
            assert word is not None
            assert word.status == "accepted", word
            return self._opened(_ended(folder, str(rid)).read_bytes(), rid, tokens, runs, agreed)
        finally:
            recorder.close()


def _never() -> Prefill:
    raise AssertionError("no twin of a twin")


def _prefill_of(target: Target0, spec: CaptureSpec, tokens: list[int], *, stranger: bool = False) -> Prefill:
    embeddings, layers, last = target.states(tokens, stranger)
    return Prefill(
        prompt=tokens,
        ids=torch.tensor(tokens),
        embeddings=embeddings,
        layers=layers,
        captured=spec.layers,
        aux=layers[:, list(spec.layers)],
        last=last,
        chunks=chunks_of(len(tokens)),
        twin=_never,
        stranger=_never,
    )


def _states_only(prefill: Prefill) -> dict[str, torch.Tensor]:
    return {"aux": prefill.aux, "last": prefill.last, "layers": prefill.layers}


class _Owner:
    """What stands for the server's own request object."""


def _feed(recorder: Recorder, rid: str, prefill: Prefill, params: dict[str, Any]) -> CaptureReply | None:
    owner, word = _Owner(), None
    for start, stop in prefill.chunks:
        chunk = Chunk(rid, start, stop, prefill.prompt, params, owner)
        rows = prefill.aux[start:stop], prefill.last[start:stop], prefill.ids[start:stop]
        word = recorder.capture(chunk, rows[0].flatten(1), rows[1], rows[2])
        if word is not None and word.status == "refused":
            return word
    return word


def _ended(folder: Path, rid: str) -> Path:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        for suffix in (".safetensors", ".failed"):
            if (path := folder / f"{rid}{suffix}").exists():
                return path
        time.sleep(0.002)
    raise AssertionError(f"neither record nor failure of {rid}")


def _spool(spec: CaptureSpec, folder: Path) -> Spool:
    return Spool(ServerSettings(spec.layers, str(folder), spec.last, spec.dtype))


def _recorder(spec: CaptureSpec, folder: Path) -> Recorder:
    return Recorder(spec, _spool(spec, folder), Resources(threads=1))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # connections that the window opens at once


def _handler(server: CaptureServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"model_path": "tiny", "dtype": "float32"})

        def do_POST(self) -> None:
            self._answer(server.generate(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Bench:
    """A corpus, its server, and the real job between the two.

    Args:
        folder: for everything.
        target: the model.
        lengths: tokens of each corpus row.
        shard_bytes: of the stores.
    """

    def __init__(self, folder: Path, target: Target0, lengths: Sequence[int], shard_bytes: int) -> None:
        folder.mkdir()
        self.folder, self.target, self._shard_bytes = folder, target, shard_bytes
        self.corpus = make_corpus(folder, lengths)
        self.server = CaptureServer(target, self.corpus, folder)

    def close(self) -> None:
        self.server.close()

    def extract(self, store: Path, *settings: str, retry_failed: bool = False) -> Summary:
        """One run of `eyas extract`, one attempt a row: a refusal is then the row's recorded failure."""
        cfg = load(
            overrides=[
                f"server.spool={self.server.spool}",
                "server.record_deadline_s=5",
                f"store.shard_bytes={self._shard_bytes}",
                "store.reserve_bytes=0",
                "extract.attempts=1",
                "extract.window_requests=32",
                *settings,
            ]
        )
        return extract(
            self.corpus,
            store,
            cfg=cfg,
            model=str(self.target.path),
            server=self.server.url,
            retry_failed=retry_failed,
            console=quiet(),
        )


@contextlib.contextmanager
def bench(folder: Path, target: Target0, lengths: Sequence[int], shard_bytes: int) -> Iterator[Bench]:
    made = Bench(folder, target, lengths, shard_bytes)
    try:
        yield made
    finally:
        made.close()


def store_bytes(store: Path) -> dict[str, bytes]:
    """Every file of a store but its run logs."""
    return {path.name: path.read_bytes() for path in sorted(store.iterdir()) if path.is_file()}


def notes(store: Path) -> list[str]:
    """What the runs that filled a store told the user beside their progress."""
    lines = [line for path in sorted((store / "events").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [event["text"] for event in map(json.loads, lines) if event["event"] == "note"]
