"""A chat-completions server for tests: real sockets, and a plan that says how each request is answered.

It keeps a log of all requests, and a ledger of what its operator would charge: every reply that states its usage.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

MODEL = "tiny-target"
KEY = "sk-test-0123456789abcdef-do-not-store"


@dataclass(frozen=True)
class Act:
    """What is done with one request.

    Attributes:
        kind: answer, status, hang, cut, reset, malformed, error-chunk, plain (unstreamed), no-done, no-usage,
            murmur (a stream of keep-alives, for ever).
        status, headers, body: of `status`.
        text, reasoning, calls, finish: of an answer.
        pause_s: before the first byte.
        cost: the reply states it.
        usage_with: `last` chunk of its own, or with the `finish` chunk.
    """

    kind: str = "answer"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: Any = None
    text: str | None = None
    reasoning: str = ""
    reasoning_name: str = "reasoning_content"
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = "stop"
    pause_s: float = 0.0
    cost: str | None = None
    usage_with: str = "last"
    chunks: tuple[Any, ...] | None = None


Plan = Callable[[dict[str, Any], int], Act]


@dataclass
class Asked:
    """One request as it came: how many like it came before, when, and what was done."""

    body: dict[str, Any]
    before: int
    at_s: float
    act: Act
    authorization: str

    @property
    def prompt(self) -> str:
        return self.body["messages"][-1].get("content") or ""


def echo(body: dict[str, Any]) -> str:
    """The answer every plan gives by default: it depends on the whole conversation and on nothing else."""
    said = [message.get("content") or "" for message in body["messages"]]
    return f"answer {len(said)} to «{said[-1]}»"


def usage_of(body: dict[str, Any], text: str) -> tuple[int, int]:
    """Tokens as this server counts them."""
    prompt = sum(len((message.get("content") or "").split()) + 4 for message in body["messages"])
    return prompt, len(text.split()) + 1


@dataclass
class OpenAIServer:
    """See the module. `prices` are dollars per million tokens, which the ledger is kept in."""

    plan: Plan = lambda body, before: Act()
    models: Sequence[Any] = (MODEL,)
    prices: tuple[str, str] = ("1", "2")
    port: int = 0
    refuse_stream_options: bool = False
    asked: list[Asked] = field(default_factory=list)
    ledger: Decimal = Decimal(0)
    highest: int = 0
    working: int = 0  # on requests that were accepted
    _now: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def charge(self, prompt: int, completion: int, cost: str | None) -> None:
        million = Decimal(10**6)
        amount = prompt * Decimal(self.prices[0]) / million + completion * Decimal(self.prices[1]) / million
        self.ledger += amount if cost is None else Decimal(cost)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled at the end of `running`, which streams would report as an error
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return False
        first, *rest = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        if method == "GET" and path.endswith("/models"):
            entries = [entry if isinstance(entry, dict) else {"id": entry} for entry in self.models]
            await _reply(writer, 200, {"object": "list", "data": entries})
            return True
        if not path.endswith("/chat/completions"):
            await _reply(writer, 404, {"error": {"message": "no such page"}})
            return True
        return await self._completion(json.loads(body), headers, writer)

    async def _completion(self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        if self.refuse_stream_options and "stream_options" in body:
            await _reply(writer, 400, {"error": {"message": "Unknown parameter: 'stream_options'"}})
            return True
        name = json.dumps(body["messages"])
        with self._lock:
            before = self._counts.get(name, 0)
            self._counts[name] = before + 1
            act = self.plan(body, before)
            self.asked.append(Asked(body, before, time.monotonic(), act, headers.get("authorization", "")))
            self._now += 1
            self.highest = max(self.highest, self._now)
        accepted = act.kind != "status"
        self.working += accepted
        try:
            return await self._act(act, body, writer)
        finally:
            self._now -= 1
            self.working -= accepted

    async def _act(self, act: Act, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if act.pause_s:
            await asyncio.sleep(act.pause_s)
        text = echo(body) if act.text is None else act.text
        usage, completion = self._usage(act, body, text)
        match act.kind:
            case "status":
                await _reply(writer, act.status, act.body or {"error": {"message": "no"}}, act.headers)
            case "hang":
                await asyncio.sleep(3600)
            case "reset":
                writer.transport.abort()
                return False
            case "malformed":
                await _reply(writer, 200, act.body or b"<html>welcome</html>", (("Content-Type", "text/html"),))
            case "plain":
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": act.finish}
                self.charge(*completion)
                await _reply(writer, 200, {"choices": [choice], "usage": usage})
            case "half-plain":
                data = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data[:-9])
                await writer.drain()
                return False
            case _:
                return await self._stream(act, text, usage, completion, writer)
        return True

    def _usage(self, act: Act, body: dict[str, Any], text: str) -> tuple[dict[str, Any], tuple[int, int, str | None]]:
        prompt, completion = usage_of(body, text)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if act.cost is not None:
            usage["cost"] = float(act.cost)
        return usage, (prompt, completion, act.cost)

    async def _stream(
        self,
        act: Act,
        text: str,
        usage: dict[str, Any],
        completion: tuple[int, int, str | None],
        writer: asyncio.StreamWriter,
    ) -> bool:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        await _chunk(writer, b": keep-alive\n\n")
        while act.kind == "murmur":
            await asyncio.sleep(0.05)
            await _chunk(writer, b": keep-alive\n\n")
        if act.chunks is not None:
            for raw in act.chunks:
                await _event(writer, raw)
            await _chunk(writer, b"data: [DONE]\n\n")
            await _chunk(writer, b"")
            return True
        half = len(text) // 2
        if act.reasoning:
            await _event(writer, _delta({act.reasoning_name: act.reasoning}))
        await _event(writer, _delta({"role": "assistant", "content": text[:half]}))
        if act.kind == "cut":
            writer.transport.abort() if act.status == 200 else await _chunk(writer, b"")
            return False
        if act.kind == "error-chunk":
            await _event(writer, act.body or {"error": {"message": "the engine died", "code": 502}})
            await _chunk(writer, b"")
            return True
        await _event(writer, _delta({"content": text[half:]}))
        for index, (name, arguments) in enumerate(act.calls):
            for function in (
                {"name": name, "arguments": ""},
                {"arguments": arguments[:3]},
                {"arguments": arguments[3:]},
            ):
                call = {"index": index, "id": f"c{index}" if "name" in function else None, "function": function}
                await _event(writer, _delta({"tool_calls": [call]}))
        told = act.kind != "no-usage"
        if told:
            self.charge(*completion)
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": act.finish}]}
        await _event(writer, last | ({"usage": usage} if told and act.usage_with == "finish" else {}))
        if told and act.usage_with == "last":
            await _event(writer, {"choices": [], "usage": usage})
        if act.kind == "no-done":
            await asyncio.sleep(3600)
        await _chunk(writer, b"data: [DONE]\n\n")
        await _chunk(writer, b"")
        return True


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}


async def _event(writer: asyncio.StreamWriter, payload: Any) -> None:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    await _chunk(writer, b"data: " + data + b"\n\n")


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


async def _reply(writer: asyncio.StreamWriter, status: int, body: Any, headers: Sequence[tuple[str, str]] = ()) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}"]
    if not any(name == "Content-Type" for name, _ in headers):
        lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()


ServerT = TypeVar("ServerT", "OpenAIServer", "CountingProxy")


@contextmanager
def running(server: ServerT) -> Iterator[ServerT]:
    """Serve from a thread until the block ends."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", server.port, limit=64 << 20)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    if not started.wait(10):
        raise RuntimeError("the server did not start")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@dataclass
class CountingProxy:
    """Hands requests on to a real server, and keeps what was asked of /chat/completions, in order."""

    target: tuple[str, int]
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lines = [line for line in head if line and not line.lower().startswith("connection:")]
            length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            if "/chat/completions" in lines[0]:
                self.asked.append(json.loads(body))
            there, back = await asyncio.open_connection(*self.target)
            # One request a connection: what follows is the answer and nothing else.
            back.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
            try:
                while data := await there.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            finally:
                back.close()
        writer.close()
