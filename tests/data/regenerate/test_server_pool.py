"""Servers of one model: agreed on before anything is asked, and told of when they go."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from openai_server import MODEL, Act, OpenAIServer, running

from eyas.data.regenerate.openai_client import Listing, OpenAIClient, Request
from eyas.data.regenerate.openai_faults import Fault
from eyas.data.regenerate.server_pool import ServerPool
from eyas.errors import ConfigError, EngineError

ASK = Request({"model": MODEL, "messages": [{"role": "user", "content": "q"}]}, 5.0)


async def listing_of(pool: ServerPool) -> Listing:
    try:
        return await pool.listing()
    finally:
        await pool.close()


def pool_of(*servers: OpenAIServer, notes: list[str] | None = None, away_s: float = 1.0) -> ServerPool:
    told = [] if notes is None else notes
    return ServerPool([OpenAIClient(server.url) for server in servers], away_s, told.append)


def test_servers_of_different_models_are_refused() -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(OpenAIServer(models=names))) for names in (["a", "b"], ["b", "c"], ["c"])
        ]
        assert asyncio.run(listing_of(pool_of(*servers[:2]))).names == ("b",)
        with pytest.raises(ConfigError, match="different models"):
            asyncio.run(listing_of(pool_of(*servers)))


def test_one_of_two_is_enough_to_begin_and_the_other_is_told_of() -> None:
    notes: list[str] = []
    with running(OpenAIServer()) as server:
        gone = OpenAIServer(port=9)
        assert asyncio.run(listing_of(pool_of(gone, server, notes=notes))).names == (MODEL,)
    assert "127.0.0.1:9" in notes[0]


def test_requests_pass_a_server_that_is_away_and_it_is_tried_again() -> None:
    notes: list[str] = []

    async def ask(pool: ServerPool) -> None:
        try:
            await asyncio.gather(*(pool.ask(ASK) for _ in range(6)))
        finally:
            await pool.close()

    with running(OpenAIServer()) as server:
        asyncio.run(ask(pool_of(OpenAIServer(port=9), server, notes=notes)))
        assert len(server.asked) == 6
    assert len(notes) == 1


def test_a_busy_server_is_left_alone_for_as_long_as_it_asked() -> None:
    busy = OpenAIServer(plan=lambda *_: Act("status", status=429, headers=(("Retry-After", "60"),)))

    async def ask(pool: ServerPool) -> list[object]:
        try:
            first = await asyncio.gather(pool.ask(ASK), pool.ask(ASK), return_exceptions=True)
            assert pool.has_free()
            return [*first, *[await pool.ask(ASK) for _ in range(3)]]
        finally:
            await pool.close()

    with running(busy), running(OpenAIServer()) as free:
        met = asyncio.run(ask(pool_of(busy, free)))
        assert len(busy.asked) == 1
        assert len(free.asked) == 4
    assert sum(isinstance(one, Fault) for one in met) == 1


def test_all_away_for_too_long_is_an_engine_error() -> None:
    async def ask(pool: ServerPool) -> None:
        try:
            await pool.ask(ASK)
        finally:
            await pool.close()

    with pytest.raises(EngineError, match=r"no server has answered for 0.3 s"):
        asyncio.run(ask(pool_of(OpenAIServer(port=9), away_s=0.3)))
