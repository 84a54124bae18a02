"""The server's other users: what they get must be what they got alone, and must not speak of us.

Deterministic requests with and without ids, streams, one who imitates our ids, disconnects and aborts in the middle,
health probes at 20 Hz, cache flushes. What each prompt's answer is was asked before the run, one at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import httpx

from eyas.capture.contract import LAST_PARAM, REPLY_KEY, SPEC_PARAM

NEIGHBOUR: Final = "nextdoor"  # the run name in ids that imitate ours
_PROMPTS: Final = 24
_HEALTH_PERIOD_S: Final = 0.05
_PROBERS: Final = 8  # a probe waits for its answer, the next one need not
_PAUSE_S: Final = 0.8  # of each habit; much more would leave the server no time for our own requests


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: list[int]
    answer_tokens: int

    def payload(self, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": self.answer_tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": self.ids, "sampling_params": sampling | more.pop("sampling", {}), **more}


class Neighbours:
    """Traffic of other users, in a thread with an event loop of its own.

    Args:
        url: the server.
        vocab_size: of the target.
        seed: of prompts and habits.
        is_right: whether the target is what is served now; answers of another model are not compared.
        spec_id: what an imitator asks for, when it knows it.

    Attributes:
        requests: by habit; `differences`: what was not as it was alone.
    """

    def __init__(
        self, url: str, vocab_size: int, seed: int, is_right: Callable[[], bool], spec_id: Callable[[], str]
    ) -> None:
        self._url, self._is_right, self._spec_id = url, is_right, spec_id
        random = Random(f"{seed}:neighbours")
        self._prompts = [
            _Prompt(random.choices(range(10, vocab_size), k=random.randint(3, 40)), random.choice([4, 8, 16, 48]))
            for _ in range(_PROMPTS)
        ]
        self._alone: list[list[int]] = []
        self._random = random
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="neighbours", daemon=True)
        self.requests: Counter[str] = Counter()
        self.unanswered = 0
        self.differences: list[str] = []

    def ask_alone(self) -> None:
        """What every prompt's answer is while nobody else is there."""
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            self._alone = [client.post("/generate", json=p.payload()).json()["output_ids"] for p in self._prompts]

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    async def _main(self) -> None:
        habits = (self._plain, self._named, self._imitate, self._stream, self._disconnect, self._abort, self._crowd)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False, limits=limits) as client:
            loops = [self._keep(habit, client, _PAUSE_S) for habit in habits]
            probes = [self._keep(self._health, client, _PROBERS * _HEALTH_PERIOD_S) for _ in range(_PROBERS)]
            await asyncio.gather(*loops, *probes, self._keep(self._flush, client, 3.0))

    async def _keep(
        self, habit: Callable[[httpx.AsyncClient], Awaitable[None]], client: httpx.AsyncClient, pause_s: float
    ) -> None:
        name = habit.__name__.strip("_")
        while not self._stop.is_set():
            try:
                await habit(client)
                self.requests[name] += 1
            except (httpx.HTTPError, ValueError, KeyError):  # killed in the middle, not there yet, or shutting down
                self.unanswered += 1
                await asyncio.sleep(0.5)
            await asyncio.sleep(pause_s)

    # --- habits -------------------------------------------------------------------------------------------------------

    async def _plain(self, client: httpx.AsyncClient) -> None:
        await self._ask(client, "plain")

    async def _named(self, client: httpx.AsyncClient) -> None:
        await self._ask(client, "named", rid=f"user-{self._random.getrandbits(64):x}")

    async def _crowd(self, client: httpx.AsyncClient) -> None:
        """Many who decode at once: the pool fills."""
        asked = await asyncio.gather(*(self._ask(client, "crowd") for _ in range(8)), return_exceptions=True)
        for error in asked:
            if error is not None:
                raise error
        await asyncio.sleep(self._random.uniform(0, 4))

    async def _imitate(self, client: httpx.AsyncClient) -> None:
        """Our prefix, in ids that are malformed or well-formed, without and with what we would ask for."""
        number = self._random.randrange(10**7)
        rid = self._random.choice(
            [
                f"eyas.{number}",
                f"eyas.{NEIGHBOUR}.{'x' * 8}.{number:08d}.00",
                "eyas.../../etc/passwd",
                f"eyas.{'9' * 200}",
            ]
        )
        asked: dict[str, Any] = {}
        if self._random.random() < 0.5:
            asked = {"sampling": {"custom_params": {SPEC_PARAM: self._spec_id(), LAST_PARAM: [0, 2]}}}
        await self._ask(client, "imitator", imitating=True, rid=f"{rid}", **asked)

    async def _stream(self, client: httpx.AsyncClient) -> None:
        number, right = self._random.randrange(_PROMPTS), self._is_right()
        seen: dict[str, Any] = {}
        async with client.stream("POST", "/generate", json=self._prompts[number].payload(stream=True)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen = json.loads(line.removeprefix("data: "))
        if seen:
            self._compare("stream", number, seen, right)

    async def _disconnect(self, client: httpx.AsyncClient) -> None:
        number = self._random.randrange(_PROMPTS)
        async with client.stream("POST", "/generate", json=self._prompts[number].payload(stream=True)) as response:
            async for _ in response.aiter_lines():
                if self._random.random() < 0.4:
                    return

    async def _abort(self, client: httpx.AsyncClient) -> None:
        rid = f"user-{self._random.getrandbits(64):x}"
        asked = asyncio.create_task(self._ask(client, "aborted", rid=rid))
        try:
            await asyncio.sleep(self._random.uniform(0, 0.1))
            await client.post("/abort_request", json={"rid": rid})
        finally:
            (error,) = await asyncio.gather(asked, return_exceptions=True)
        if error is not None:
            raise error

    async def _health(self, client: httpx.AsyncClient) -> None:
        await client.get("/health_generate")

    async def _flush(self, client: httpx.AsyncClient) -> None:
        await client.post("/flush_cache")

    # --- judging ------------------------------------------------------------------------------------------------------

    async def _ask(self, client: httpx.AsyncClient, who: str, *, imitating: bool = False, **more: Any) -> None:
        number, right = self._random.randrange(_PROMPTS), self._is_right()
        response = await client.post("/generate", json=self._prompts[number].payload(**more))
        response.raise_for_status()
        self._compare(who, number, response.json(), right, imitating=imitating)

    def _compare(self, who: str, number: int, reply: dict[str, Any], right: bool, *, imitating: bool = False) -> None:
        meta, got, alone = reply["meta_info"], reply["output_ids"], self._alone[number]
        if not imitating and REPLY_KEY in meta:
            self.differences.append(f"{who}: the reply carries {REPLY_KEY!r}: {meta[REPLY_KEY]}")
        if not (right and self._is_right()):
            return
        aborted = (meta.get("finish_reason") or {}).get("type") == "abort"
        if (got != alone[: len(got)]) if aborted else (got != alone):
            self.differences.append(f"{who}: prompt {number} was answered {got}, alone {alone}")
