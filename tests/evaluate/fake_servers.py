"""SGLang and vLLM as a client sees them: token ids in, a stream of token ids out, and counters of drafts. No network.

What they answer depends on the prompt alone, speculating or not. Their replies and metrics are as SGLang 0.5.23 and
vLLM 0.32 give them; faults are switched on by attribute.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

END = 2


def answer_to(prompt: list[int], longest: int) -> list[int]:
    """The target's answer: 9 to 20 tokens, the last one ends it where there is room."""
    length = 9 + sum(prompt) % 12
    made = [100 + (sum(prompt) * 31 + n * n) % 500 for n in range(length - 1)] + [END]
    return made[:longest]


def drafts_for(prompt: list[int], tokens: int, depth: int) -> list[int]:
    """How many drafts each cycle of an answer accepted; the last one may reach beyond its end."""
    accepted: list[int] = []
    while 1 + sum(accepted) + len(accepted) < tokens:
        accepted.append((len(prompt) + 3 * len(accepted) + len(accepted) ** 2) % (depth + 1))
    return accepted


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """One server.

    Attributes:
        engine: vllm or sglang.
        depth: steps drafted; 0 is a server without a drafter.
        model, draft, version: as it names them.
        longest: its context.
        told: vLLM tells the cycles of each reply (--per-request-spec-decode-metrics).
        increments: SGLang sends what is new, not the answer so far.
        lag: how often /metrics is read before it knows of a reply.
        dies_after: answers before it is gone. falls_silent: its replies end without their last word.
        deeper_after: requests until it is another vLLM, which drafts one step more.
        hook: called with each request's body, and may change what it is answered with by raising or returning a reply.
        asked: bodies of all requests for answers.
        busy: requests of others at work. foreign: (requests, prompt tokens, tokens) of others, added to each answer.
    """

    engine: str = "vllm"
    depth: int = 3
    model: str = "/models/SmolLM2-135M-Instruct"
    draft: str = ""
    version: str = "0.32.0"
    longest: int = 2048
    told: bool = False
    increments: bool = False
    lag: int = 0
    dies_after: int | None = None
    falls_silent: bool = False
    deeper_after: int | None = None
    metrics: bool = True
    busy: int = 0
    foreign: tuple[int, int, int] = (0, 0, 0)
    most: int = 0
    hook: Callable[[dict[str, Any]], list[dict[str, Any]] | httpx.Response | None] = lambda _: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    _at_work: int = 0
    _late: int = 0
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("requests", "prompted", "tokens"), 0))
    _drafts: list[int] = field(default_factory=list)
    _shown: str = ""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:  # noqa: PLR0911  one an address
        match request.method, request.url.path:
            case "GET", "/v1/models":
                card = {"id": self.model, "root": self.model, "owned_by": self.engine, "max_model_len": self.longest}
                return httpx.Response(200, json={"object": "list", "data": [card]})
            case "GET", "/version" if self.engine == "vllm":
                return httpx.Response(200, json={"version": self.version})
            case "GET", "/metrics" if self.engine == "vllm":
                return httpx.Response(200, text=self._metrics() if self.metrics else "python_info 1.0\n")
            case "GET", "/model_info" if self.engine == "sglang":
                return httpx.Response(200, json={"model_path": self.model, "is_generation": True})
            case "GET", "/server_info" if self.engine == "sglang":
                return httpx.Response(200, json=self._settings())
            case "GET", "/v1/loads" if self.engine == "sglang":
                load = {"num_running_reqs": self._at_work + self.busy, "num_waiting_reqs": 0}
                return httpx.Response(200, json={"version": self.version, "loads": [load]})
            case "POST", "/v1/completions" if self.engine == "vllm":
                return await self._reply(json.loads(request.content), self._vllm)
            case "POST", "/generate" if self.engine == "sglang":
                return await self._reply(json.loads(request.content), self._sglang)
        return httpx.Response(404, json={"detail": "Not Found"})

    async def _reply(
        self, body: dict[str, Any], events: Callable[[dict[str, Any]], list[dict[str, Any]]]
    ) -> httpx.Response:
        self.asked.append(body)
        changed = self.hook(body)
        if isinstance(changed, httpx.Response):
            return changed
        if self.dies_after is not None and len(self.asked) > self.dies_after + 1:
            raise httpx.ConnectError("refused")
        torn = self.dies_after is not None and len(self.asked) == self.dies_after + 1
        return httpx.Response(200, stream=_Events(self, changed or events(body), torn))

    def _vllm(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, tokens, drafts = self._answer(body["prompt"], body["max_tokens"])
        events: list[dict[str, Any]] = []
        for part in _pieces(tokens, drafts):
            finish = ("stop" if tokens[-1] == END else "length") if part[-1:] == tokens[-1:] else None
            choice = {"index": 0, "text": "x", "finish_reason": finish, "token_ids": part}
            events.append({"object": "text_completion", "choices": [choice]})
        last: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        metrics = None
        if self.told and self.depth:
            histogram = [drafts.count(n) for n in range(self.depth + 1)]
            metrics = {"speculative_decoding": {
                "acceptance_histogram": histogram, "num_spec_steps": len(drafts), "num_spec_tokens": self.depth,
            }}  # fmt: skip
        return [*events, {"choices": [], "usage": last, **({"metrics": metrics} if metrics else {})}]

    def _sglang(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        _, tokens, drafts = self._answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        events, sent = [], 0
        for part in _pieces(tokens, drafts):
            sent += len(part)
            meta: dict[str, Any] = {"completion_tokens": sent, "finish_reason": None}
            if sent == len(tokens):
                meta["finish_reason"] = {"type": "stop" if tokens[-1] == END else "length"}
                if drafts:
                    # As SGLang does: no longer than the most that were accepted.
                    histogram = [drafts.count(n) for n in range(max(drafts) + 1)]
                    meta |= {"spec_verify_ct": len(drafts), "spec_correct_drafts_histogram": histogram}
            events.append({"output_ids": part if self.increments else tokens[:sent], "meta_info": meta})
        return events

    def _answer(self, prompt: list[int], longest: int) -> tuple[list[int], list[int], list[int]]:
        tokens = answer_to(prompt, longest)
        drafts = drafts_for(prompt, len(tokens), self.depth) if self.depth else []
        more = self.foreign
        for name, ours, theirs in zip(self._counts, (1, len(prompt), len(tokens)), more, strict=True):
            self._counts[name] += ours + theirs
        self._drafts += drafts
        self._late = self.lag
        return prompt, tokens, drafts

    def _metrics(self) -> str:
        if self.deeper_after is not None and len(self.asked) > self.deeper_after:
            self.depth, self.deeper_after = self.depth + 1, None
        if self._shown and self._late:
            self._late -= 1
            return self._shown
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{{{labels}}} {float(self._counts['tokens'])}",
            f"vllm:prompt_tokens_total{{{labels}}} {float(self._counts['prompted'])}",
            f'vllm:request_success_total{{finished_reason="stop",model_name="m"}} {self._counts["requests"]}.0',
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 0.0',
            f"vllm:num_requests_running{{{labels}}} {float(self._at_work + self.busy)}",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f"vllm:generation_tokens_created{{{labels}}} 1.7960431199206533e+09",
        ]
        if self.depth:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(len(self._drafts))}",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(len(self._drafts) * self.depth)}",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{k}"}} '
                    f"{float(sum(n > k for n in self._drafts))}"
                    for k in range(self.depth)
                ),
            ]
        self._shown = "\n".join(lines) + "\n"
        return self._shown

    def _settings(self) -> dict[str, Any]:
        told: dict[str, Any] = {"version": self.version, "speculative_algorithm": None}
        if self.depth:
            told |= {
                "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": self.draft or "/drafts/some",
                "speculative_num_steps": self.depth, "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": self.depth + 1,
            }  # fmt: skip
        return told


@dataclass
class Net(httpx.AsyncBaseTransport):
    """Several servers, by host."""

    servers: dict[str, FakeServer]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host not in self.servers:
            raise httpx.ConnectError("refused")
        return await self.servers[request.url.host].handle_async_request(request)


class _Events(httpx.AsyncByteStream):
    def __init__(self, server: FakeServer, events: list[dict[str, Any]], torn: bool) -> None:
        self._server, self._events, self._torn = server, events, torn

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server = self._server
        server._at_work += 1
        server.most = max(server.most, server._at_work)
        try:
            for event in self._events[:1] if self._torn else self._events:
                await asyncio.sleep(0)
                yield f"data: {json.dumps(event)}\n\n".encode()
            if self._torn:
                raise httpx.ReadError("reset")
        finally:
            server._at_work -= 1
        if not server.falls_silent:
            yield b"data: [DONE]\n\n"


def _pieces(tokens: list[int], drafts: list[int]) -> list[list[int]]:
    """The tokens as they come: the first alone, then those of each cycle; without drafts one by one."""
    pieces, at = [tokens[:1]], 1
    for accepted in drafts or [0] * (len(tokens) - 1):
        pieces.append(tokens[at : at + accepted + 1])
        at += accepted + 1
    return [piece for piece in pieces if piece]
