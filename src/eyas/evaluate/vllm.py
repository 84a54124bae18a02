"""vLLM as a server that is measured: counters of the whole server, or of each reply where it is asked to tell them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import EngineError
from eyas.evaluate.counters import Cycles, VllmCounters, vllm_reply
from eyas.evaluate.http import Http
from eyas.evaluate.served import BUSY, POLL_S, SETTLE_S, Answer, Asking, ServedModel, make_answer, whole
from eyas.extract.http import json_object


class VllmServer(ServedModel):
    """vLLM: counters of the whole server, and of each reply with --per-request-spec-decode-metrics."""

    engine = "vllm"

    def __init__(self, http: Http) -> None:
        super().__init__(http)
        self._id = ""
        self._before: VllmCounters | None = None

    async def identify(self, card: Mapping[str, Any]) -> None:
        self._id, self.model = str(card.get("id")), str(card.get("root") or card.get("id"))
        self.longest = whole(card.get("max_model_len"))
        self.version = str(json_object(await self._http.get("/version")).get("version", ""))
        counters = await self._read()
        if counters.drafts is not None:
            self.depth = self.draft_tokens = len(counters.accepted)

    async def answer(self, prompt: Sequence[int], asking: Asking, salt: str) -> Answer:
        body = {
            "model": self._id,
            "prompt": list(prompt),
            "cache_salt": salt,
            "temperature": asking.temperature,
            # Said, because vLLM takes what is not from the target's generation_config.json.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": asking.max_new_tokens,
            "stop_token_ids": list(asking.ends),
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"seed": asking.seed} if asking.temperature else {}),
        }
        tokens: list[int] = []
        times: list[float] = []
        last: dict[str, Any] = {}

        def take(event: dict[str, Any]) -> None:
            choices = event.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                ids = choice.get("token_ids")
                if not isinstance(ids, list):
                    hint = "vLLM 0.10.2 or newer is needed"
                    raise EngineError("the server's answer holds no token ids", self.where, hint)
                if ids:
                    tokens.extend(ids)
                    times.append(time.perf_counter())
            last.update({key: event[key] for key in ("usage", "metrics") if event.get(key)})

        began = time.perf_counter()
        await self._http.stream("/v1/completions", body, take)
        usage = last.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        try:
            cycles = vllm_reply(last.get("metrics"))
        except ValueError as error:
            raise EngineError("the server's counts contradict each other", self.where, str(error)) from error
        return make_answer(tokens, counted, times, began, cycles, self.where, asking)

    async def begin(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while (counters := await self._read()).running:
            if time.monotonic() > deadline:
                raise EngineError(f"the server works on {counters.running:,} requests of others", self.where, BUSY)
            await asyncio.sleep(POLL_S)
        self._before = counters

    async def settle(self, answers: Sequence[Answer], prompted: int) -> Cycles | None:
        added = await self._added(len(answers), sum(len(answer.tokens) for answer in answers), prompted)
        if not self.depth:
            return None
        told = self._told(answers)
        if told is None:
            if added.draft_tokens != (added.drafts or 0) * self.depth:
                what = f"{added.drafts:,} cycles drafted {added.draft_tokens:,} tokens, not {self.depth} each"
                hint = "acceptance by position needs cycles of one depth, or --per-request-spec-decode-metrics summary"
                raise EngineError(what, self.where, hint)
            try:
                told = added.cycles()
            except ValueError as error:
                raise EngineError("the server's counts contradict each other", self.where, str(error)) from error
        return self._fitting(told, answers)

    async def _added(self, requests: int, tokens: int, prompted: int) -> VllmCounters:
        """What was counted since `begin` or the last time, once it is all there.

        Raises:
            EngineError: more than was asked for, or less after all.
        """
        assert self._before is not None
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = await self._read()
            try:
                added = now.since(self._before)
            except ValueError as error:
                hint = "it drafts to another depth: was it restarted?"
                raise EngineError("the server's counters went back", self.where, hint) from error
            ours, theirs = (tokens, requests, prompted), (added.generated, added.finished, added.prompted)
            if min(theirs) < 0:
                raise EngineError("the server's counters went back", self.where, "was it restarted?")
            if any(mine < counted for mine, counted in zip(ours, theirs, strict=True)):
                what = (
                    f"the server counts {added.generated:,} tokens of {added.finished:,} answers to "
                    f"{added.prompted:,} tokens; ours are {tokens:,} of {requests:,} to {prompted:,}"
                )
                raise EngineError(what, self.where, f"others use it: {BUSY}")
            if ours == theirs and not added.running:
                self._before = now
                return added
            if time.monotonic() > deadline:
                what = f"the server counts {added.generated:,} tokens of the {tokens:,} that it sent"
                hint = "others use it, or behind one URL there are several servers; name one"
                raise EngineError(what, self.where, hint)
            await asyncio.sleep(POLL_S)

    async def _read(self) -> VllmCounters:
        response = await self._http.get("/metrics")
        found = VllmCounters.read(response.text) if response.status_code == 200 else None
        if found is None:
            raise EngineError(
                "the server's counters are missing", f"{self.where}/metrics", "no --disable-log-stats, please"
            )
        return found
