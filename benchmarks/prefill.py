"""Plain prefill: what a server does for requests that are not ours. The yardstick of the benchmarks."""

from __future__ import annotations

import asyncio
import time

import httpx

from eyas.data.corpus import Corpus


async def plain(url: str, corpus: Corpus, window: int) -> float:
    """Tokens/s of prefill of a corpus's rows, `window` in flight; one token is generated each, as capture does."""
    gate = asyncio.Semaphore(window)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=window)) as client:

        async def one(tokens: list[int]) -> None:
            async with gate:
                body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                (await client.post(f"{url}/generate", json=body)).raise_for_status()

        rows = [row.tokens.tolist() for row in corpus.rows()]
        began = time.monotonic()
        await asyncio.gather(*(one(tokens) for tokens in rows))
        return sum(map(len, rows)) / (time.monotonic() - began)
