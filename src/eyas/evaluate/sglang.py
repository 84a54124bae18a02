"""SGLang as a server that is measured: each reply tells its own cycles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import EngineError
from eyas.evaluate.counters import Cycles, sglang_reply
from eyas.evaluate.served import BUSY, NO_DRAFTS, POLL_S, SETTLE_S, Answer, Asking, ServedModel, make_answer, whole
from eyas.extract.http import json_object


class SglangServer(ServedModel):
    """SGLang: each reply tells its own cycles."""

    engine = "sglang"

    async def identify(self, card: Mapping[str, Any]) -> None:
        info = await self._first("/model_info", "/get_model_info")
        settings = await self._first("/server_info", "/get_server_info")
        self.model, self.version = str(info.get("model_path") or card.get("id")), str(settings.get("version") or "")
        self.longest = whole(card.get("max_model_len"))
        self.draft = str(settings.get("speculative_draft_model_path") or "")
        # A server that captures states names an algorithm too, and drafts nothing.
        if settings.get("speculative_algorithm") and self.draft:
            self.depth = whole(settings.get("speculative_num_steps")) or 0
            self.topk = whole(settings.get("speculative_eagle_topk")) or 1
            self.draft_tokens = (whole(settings.get("speculative_num_draft_tokens")) or self.depth + 1) - 1
            if not self.depth:
                raise EngineError("the server does not tell how far it drafts", self.where, "no speculative_num_steps")

    async def answer(self, prompt: Sequence[int], asking: Asking, salt: str) -> Answer:
        body = {
            "input_ids": list(prompt),
            "extra_key": salt,
            "stream": True,
            "sampling_params": {  # said in full, because --preferred-sampling-params fills in what is not
                "temperature": asking.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "max_new_tokens": asking.max_new_tokens,
                "stop_token_ids": list(asking.ends),
                "skip_special_tokens": False,
            },
        }
        tokens: list[int] = []
        times: list[float] = []
        last: dict[str, Any] = {}

        def take(event: dict[str, Any]) -> None:
            ids, meta = event.get("output_ids"), event.get("meta_info")
            if not isinstance(meta, dict) or not isinstance(ids, list):
                raise EngineError("the server's answer holds no token ids", self.where, "is it SGLang?")
            # By default each event holds the whole answer so far; --incremental-streaming-output sends what is new.
            whole = meta.get("completion_tokens") == len(ids)
            tokens[:] = ids if whole else [*tokens, *ids]
            if tokens:
                times.append(time.perf_counter())
            last.update(meta)

        began = time.perf_counter()
        await self._http.stream("/generate", body, take)
        finish = last.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise EngineError("the server broke off an answer", self.where, str(finish.get("message", ""))[:300])
        try:
            cycles = sglang_reply(last, self.depth) if self.depth else None
        except ValueError as error:
            raise EngineError("the server's counts contradict each other", self.where, str(error)) from error
        if not self.depth and last.get("spec_verify_ct"):
            raise EngineError("the server speculates", self.where, "and does not tell so at /server_info")
        return make_answer(tokens, last.get("completion_tokens"), times, began, cycles, self.where, asking)

    async def begin(self) -> None:
        await self._idle()

    async def settle(self, answers: Sequence[Answer], prompted: int) -> Cycles | None:
        await self._idle()
        if not self.depth:
            return None
        if (told := self._told(answers)) is None:
            raise EngineError("a reply tells nothing of its drafts", self.where, NO_DRAFTS[self.engine])
        return self._fitting(told, answers)

    async def _idle(self) -> None:
        """Raises EngineError if the server still works on requests: they are not ours."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            loads = json_object(await self._http.get("/v1/loads?include=core")).get("loads")
            if not isinstance(loads, list):
                return  # a release that does not tell
            names = ("num_running_reqs", "num_waiting_reqs")
            at_work = sum(whole(load.get(name)) or 0 for load in loads if isinstance(load, dict) for name in names)
            if not at_work:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"the server works on {at_work:,} requests of others", self.where, BUSY)
            await asyncio.sleep(POLL_S)

    async def _first(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            response = await self._http.get(path)
            if response.status_code == 200 and (found := json_object(response)):
                return found
        raise EngineError("the server does not tell about itself", self.where, f"no {' or '.join(paths)}")
