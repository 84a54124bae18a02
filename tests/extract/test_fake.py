from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.capture.contract import DTYPES, CaptureSpec, RequestId
from eyas.capture.encoding import decode, encode
from eyas.extract.engine import Captured, CaptureRequest, Failed, Retry
from eyas.extract.fake import FakeEngine

SPEC = CaptureSpec((1, 3, 6), "loss", "bf16", 24, 1000, 10, "f" * 32)


def request(tokens: list[int], runs: list[int] | None = None, row: int = 0, attempt: int = 0) -> CaptureRequest:
    return CaptureRequest(
        RequestId("run00000", "ses00000", row, attempt), tokens, [0, len(tokens)] if runs is None else runs
    )


def captured(engine: FakeEngine, asked: CaptureRequest) -> Captured:
    result = asyncio.run(engine.capture(asked))
    assert isinstance(result, Captured)
    return result


def test_bytes_never_change_between_releases() -> None:
    states = captured(FakeEngine(SPEC, seed=7), request([5, 6, 7]))
    assert (f"{states.aux_xxh3:016x}", f"{states.last_xxh3:016x}") == ("7f027fe6b7693574", "98c4d2f05bd20107")


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(0, 50), st.sampled_from(sorted(DTYPES)))
@settings(deadline=None, max_examples=50)
def test_only_tokens_and_seed_matter(tokens: list[int], row: int, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype)
    one = captured(FakeEngine(spec), request(tokens, row=row))
    other = captured(FakeEngine(spec), request(tokens, row=row + 1, attempt=3))
    assert torch.equal(one.aux, other.aux)
    assert torch.equal(one.last, other.last)
    assert one.aux.shape == spec.aux_shape(len(tokens))
    for states in (one.aux, one.last):
        read = decode(states, dtype, spec.hidden_size)
        assert bool(read.isfinite().all()) and read.unique().numel() > 1
        assert torch.equal(decode(encode(read, dtype), dtype, spec.hidden_size).isfinite(), read.isfinite())


def test_rows_of_equal_length_layers_positions_and_seeds_all_differ() -> None:
    rows = [
        captured(FakeEngine(SPEC, seed=seed), request(tokens)) for seed in (0, 1) for tokens in ([1, 2], [2, 1], [1, 3])
    ]
    states = [state for row in rows for state in (*row.aux.flatten(0, 1), *row.last)]
    assert len({state.float().numpy().tobytes() for state in states}) == len(states) == 6 * (2 * 3 + 2)


def test_a_layer_is_the_same_whichever_others_are_captured() -> None:
    wide = captured(FakeEngine(SPEC), request([1, 2, 3]))
    narrow = captured(FakeEngine(replace(SPEC, layers=(3,))), request([1, 2, 3]))
    assert torch.equal(wide.aux[:, 1], narrow.aux[:, 0])


def test_last_is_the_same_whichever_positions_are_kept() -> None:
    engine = FakeEngine(SPEC)
    every = captured(engine, request([1, 2, 3, 4, 5]))
    some = captured(engine, request([1, 2, 3, 4, 5], [0, 1, 2, 4]))
    none = captured(engine, request([1, 2, 3, 4, 5], []))
    assert torch.equal(some.last, every.last[[0, 2, 3]])
    assert none.last.shape == (0, 24)


def test_faults_by_row_and_by_request() -> None:
    failure = Failed("made-up", retry=Retry.WAIT)
    by_row = FakeEngine(SPEC, faults={4: failure})
    assert asyncio.run(by_row.capture(request([1], row=4, attempt=2))) is failure
    captured(by_row, request([1], row=5))
    first_only = FakeEngine(SPEC, faults=lambda asked: failure if asked.rid.attempt == 0 else None)
    assert asyncio.run(first_only.capture(request([1]))) is failure
    captured(first_only, request([1], attempt=1))


@pytest.mark.parametrize(("tokens", "reason"), [([], "empty-row"), ([1] * 9, "row-too-long")])
def test_rows_it_does_not_admit(tokens: list[int], reason: str) -> None:
    engine = FakeEngine(SPEC, max_row_tokens=8)
    failed = asyncio.run(engine.capture(request(tokens)))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, Retry.NEVER)
    assert asyncio.run(engine.start()).max_row_tokens == 8


def test_delays_overlap() -> None:
    async def ten() -> float:
        engine = FakeEngine(SPEC, delay_s=0.5)
        started = time.monotonic()
        jobs: list[Coroutine[Any, Any, Captured | Failed]] = [engine.capture(request([row])) for row in range(10)]
        await asyncio.gather(*jobs)
        return time.monotonic() - started

    assert 0.5 <= asyncio.run(ten()) < 4
