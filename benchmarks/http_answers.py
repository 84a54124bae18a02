"""A server of benchmarks in a process of its own: it answers /generate at once, and writes true records where asked.

It takes so little time that what is measured is its client. Its states are zeros; hashes and headers are right.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from eyas.capture.contract import (
    LAST_PARAM,
    RECORD_METADATA,
    SPEC_FILE,
    CaptureReply,
    CaptureSpec,
    RecordHeader,
    ServerHello,
    count_of,
    field_hash,
    runs_hash,
    token_hash,
)
from eyas.capture.tensorfile import layout


@contextmanager
def answering(spool: Path | None = None, spec: CaptureSpec | None = None) -> Iterator[str]:
    """Its URL, while the body runs; with a spool and a spec, it captures."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, spool, spec), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(link: Connection, spool: Path | None, spec: CaptureSpec | None) -> None:
    answers = Answers(spool, spec)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Exchange(answers), "127.0.0.1", 0)
        link.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class Answers:
    """What it says to a request's body; without a spec, always the same."""

    def __init__(self, spool: Path | None, spec: CaptureSpec | None) -> None:
        self._spool, self._spec = spool, spec
        word = CaptureReply("accepted", "0" * 32, "0" * 32, 100)
        self._fixed = self._reply(word)
        self._states: dict[tuple[int, int], tuple[bytes, int, int]] = {}
        if spool is not None and spec is not None:
            spool.mkdir(exist_ok=True)
            hello = ServerHello(spec.to_dict(), spec.spec_id, {"engine": "sglang", "host": "here"}, 100_000, 1 << 30)
            (spool / SPEC_FILE).write_text(hello.to_json())

    def to(self, body: bytes) -> bytes:
        if not body:
            return b'{"model_path": "made-up"}'
        if self._spool is None or self._spec is None:
            return self._fixed
        asked = json.loads(body)
        tokens, runs = asked["input_ids"], asked["sampling_params"]["custom_params"][LAST_PARAM]
        hashed = token_hash(tokens)
        self._record(self._spool, self._spec, asked["rid"], hashed, len(tokens), runs)
        return self._reply(CaptureReply("accepted", self._spec.spec_id, hashed, len(tokens)))

    def _record(self, spool: Path, spec: CaptureSpec, rid: str, hashed: str, rows: int, runs: list[int]) -> None:
        positions = count_of(runs)
        shapes = spec.aux_shape(rows), spec.last_shape(positions)
        if (rows, positions) not in self._states:
            aux, last = (bytes(torch.Size(shape).numel() * 2) for shape in shapes)
            self._states[rows, positions] = aux + last, field_hash(aux), field_hash(last)
        states, aux_hash, last_hash = self._states[rows, positions]
        header = RecordHeader(
            rid=rid,
            spec_id=spec.spec_id,
            tokens=hashed,
            rows=rows,
            positions=positions,
            runs=f"{runs_hash(runs):016x}",
            chunks=[[0, rows]],
            aux=f"{aux_hash:016x}",
            last=f"{last_hash:016x}",
        )
        fields = [(name, spec.stored_dtype, shape) for name, shape in zip(("aux", "last"), shapes, strict=True)]
        (spool / f".{rid}.tmp").write_bytes(layout(fields, {RECORD_METADATA: header.to_json()}).header + states)
        (spool / f".{rid}.tmp").rename(spool / f"{rid}.safetensors")

    @staticmethod
    def _reply(word: CaptureReply) -> bytes:
        meta: dict[str, Any] = {"id": "x", "finish_reason": {"type": "length", "length": 1}, "completion_tokens": 1}
        return json.dumps({"text": "", "output_ids": [5], "meta_info": meta | {"eyas": [word.to_dict()]}}).encode()


class _Exchange(asyncio.Protocol):
    """HTTP with one client connection, as little as it takes."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._came = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        while (end := self._came.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._came[:end]).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._came) < end + 4 + size:
                return
            answer = self._answers.to(bytes(self._came[end + 4 : end + 4 + size]))
            del self._came[: end + 4 + size]
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
