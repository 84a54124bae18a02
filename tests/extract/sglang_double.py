"""An SGLang server with our plugin, as a client sees it: HTTP answers by httpx.MockTransport, real record files.

    server = PluginServer(spec, folder)
    engine = SGLangEngine(server.url, spec, server.config(), "run00000", "ses00000", transport=server.transport)

Everything that can go wrong is a field of the server; `asked` says what it was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from eyas.capture.contract import (
    DTYPES,
    LAST_PARAM,
    PROBE_ROW,
    RECORD_METADATA,
    SPEC_FILE,
    SPEC_PARAM,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    RequestId,
    ServerHello,
    count_of,
    runs_hash,
    token_hash,
)
from eyas.capture.tensorfile import layout
from eyas.config import ServerConfig
from eyas.extract.engine import Captured, CaptureRequest, Failed
from eyas.extract.fake import FakeEngine
from eyas.extract.record import tensors_of

CHUNK = 64


@dataclass
class PluginServer:
    """The double. States are FakeEngine's.

    Attributes:
        spec: what it captures.
        spool: its folder.
        answers: called with each /generate body that is not a probe's, first: a response, or None to go on.
        probe_answers: the same for probes.
        reply: changes the plugin's word before it is sent; None leaves it out of the reply.
        header: changes the record's header before it is written.
        record: changes the file's bytes before they are written; None writes no file.
        record_delay_s: time from the reply to the file.
        seed: of its weights.
    """

    spec: CaptureSpec
    spool: Path
    url: str = "http://mock:30000"
    info_path: str = "/model_info"
    info: dict[str, Any] | None = None
    hello: ServerHello | None = None
    max_row_tokens: int = 2000
    api_key: str = ""
    answers: Callable[[dict[str, Any]], httpx.Response | None] = lambda _: None
    probe_answers: Callable[[dict[str, Any]], httpx.Response | None] = lambda _: None
    reply: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda word: word
    header: Callable[[RecordHeader], RecordHeader] = lambda header: header
    record: Callable[[bytes], bytes | None] = lambda data: data
    record_delay_s: float = 0.0
    seed: int = 0
    faults_hit_probes: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    _writing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.spool.mkdir(parents=True, exist_ok=True)
        self.restart()

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    def config(self, **changes: Any) -> ServerConfig:
        settings = {"spool": self.spool, "record_deadline_s": 2.0, "restart_timeout_s": 5.0, **changes}
        return ServerConfig(**settings)

    def restart(self, spec: CaptureSpec | None = None) -> None:
        """Write spec.json as a server does that has loaded its model."""
        self.spec = spec or self.spec
        self.hello = ServerHello(
            self.spec.to_dict(),
            self.spec.spec_id,
            {"engine": "sglang", "sglang": "0.5.23", "host": "mock"},
            self.max_row_tokens,
            1 << 30,
        )
        (self.spool / SPEC_FILE).write_text(self.hello.to_json())
        os.utime(
            self.spool / SPEC_FILE, ns=(time.time_ns(),) * 2
        )  # the kernel's own clock ticks every few milliseconds

    def records(self) -> list[str]:
        return sorted(path.name for path in self.spool.iterdir() if path.name != SPEC_FILE)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if request.url.path == self.info_path:
            return httpx.Response(200, json={"model_path": "target"} if self.info is None else self.info)
        if request.url.path != "/generate":
            return httpx.Response(404, json={"detail": "Not Found"})
        await asyncio.sleep(0)
        return await self._generate(json.loads(request.content))

    async def _generate(self, body: dict[str, Any]) -> httpx.Response:
        self.asked.append(body)
        rid = RequestId.parse(body["rid"])
        assert rid is not None
        assert body["extra_key"] == body["rid"]
        is_probe = rid.row == PROBE_ROW
        if (answer := (self.probe_answers if is_probe else self.answers)(body)) is not None:
            return answer
        faulty = self.faults_hit_probes or not is_probe
        params = body["sampling_params"]["custom_params"]
        tokens, runs = body["input_ids"], params[LAST_PARAM]
        word = CaptureReply("accepted", self.spec.spec_id, token_hash(tokens), len(tokens)).to_dict()
        if params[SPEC_PARAM] != self.spec.spec_id:
            word |= {"status": "refused", "reason": "spec-differs"}
        shown = self.reply(word) if faulty else word
        if shown is not None and shown["status"] == "accepted":
            data = await self._record(rid, tokens, runs, faulty)
            if data is not None:
                self._publish(body["rid"], data)
        return reply_of(shown)

    async def _record(self, rid: RequestId, tokens: list[int], runs: list[int], faulty: bool) -> bytes | None:
        states = await FakeEngine(self.spec, seed=self.seed).capture(CaptureRequest(rid, tokens, runs))
        assert isinstance(states, Captured)
        edges = [*range(0, len(tokens), CHUNK), len(tokens)]
        header = RecordHeader(
            rid=str(rid),
            spec_id=self.spec.spec_id,
            tokens=token_hash(tokens),
            rows=len(tokens),
            positions=count_of(runs),
            runs=f"{runs_hash(runs):016x}",
            chunks=[list(pair) for pair in itertools.pairwise(edges)],
            aux=f"{states.aux_xxh3:016x}",
            last=f"{states.last_xxh3:016x}",
        )
        data = record_bytes(self.header(header) if faulty else header, states.aux, states.last, self.spec.dtype)
        return self.record(data) if faulty else data

    def _publish(self, rid: str, data: bytes) -> None:
        async def later() -> None:
            await asyncio.sleep(self.record_delay_s)
            (self.spool / f".{rid}.tmp").write_bytes(data)
            (self.spool / f".{rid}.tmp").rename(self.spool / f"{rid}.safetensors")

        task = asyncio.create_task(later())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)


def reply_of(word: dict[str, Any] | None) -> httpx.Response:
    """A reply of /generate that carries the plugin's word, or none."""
    meta: dict[str, Any] = {"id": "x", "finish_reason": {"type": "length", "length": 1}, "completion_tokens": 1}
    if word is not None:
        meta["eyas"] = [word]
    return httpx.Response(200, json={"text": "", "output_ids": [5], "meta_info": meta})


def in_memory(states: Captured) -> Captured:
    """What an engine delivered, as tensors."""
    tensors = tensors_of(states)
    assert not isinstance(tensors, Failed), tensors
    return dataclasses.replace(states, aux=tensors[0], last=tensors[1])


def record_bytes(header: RecordHeader, aux: torch.Tensor, last: torch.Tensor, dtype: str) -> bytes:
    """A record file as the contract describes it."""
    name = DTYPES[dtype][0]
    plan = layout(
        [("aux", name, tuple(aux.shape)), ("last", name, tuple(last.shape))], {RECORD_METADATA: header.to_json()}
    )
    states = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (aux, last))
    return plan.header + b"".join(states)


def changed(**fields: Any) -> Callable[[RecordHeader], RecordHeader]:
    """A header with other fields."""
    return lambda header: dataclasses.replace(header, **fields)
