"""What every engine owes its caller, checked on each of them by the values of the states themselves."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_double import PluginServer, in_memory
from transformers import AutoModelForCausalLM

from eyas.capture.contract import CaptureSpec, RequestId, count_of, field_hash
from eyas.config import ServerConfig
from eyas.extract.engine import Captured, CaptureRequest, Engine, Failed, Retry
from eyas.extract.fake import FakeEngine
from eyas.extract.hf import HFEngine, hidden_states
from eyas.extract.sglang import SGLangEngine
from eyas.target.checkpoint import Target
from servers import sglang_server
from sglang_cpu.models import tiny_llama
from tiny_models import llama

SPEC = CaptureSpec((1, 2, 3), "loss", "bf16", 32, 300, 4, "f" * 32)
IN_FLIGHT = 16
Reference = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    Attributes:
        make: a new engine, not started.
        spec: its agreement.
        reference: token ids -> aux [T, A, H] and last [T, H] that are right.
        tolerance: largest difference from it that rounding explains; 0 where bytes must be equal.
    """

    make: Callable[[], Engine]
    spec: CaptureSpec
    reference: Reference
    tolerance: float


def fake_reference(spec: CaptureSpec) -> Reference:
    def states(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        request = CaptureRequest(RequestId("x" * 8, "y" * 8, 0, 0), tokens, [0, len(tokens)])
        made = asyncio.run(FakeEngine(spec).capture(request))
        assert isinstance(made, Captured)
        return made.aux, made.last

    return states


def model_reference(target: Target, spec: CaptureSpec) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(target.dir, dtype=torch.float32).eval()

    def states(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        layers, last = hidden_states(model, tokens, spec.layers)
        return torch.stack([layers[i] for i in spec.layers], dim=1), last

    return states


def hf_subject(folder: Path, **options: Any) -> Subject:
    llama().save_pretrained(folder)
    target = Target.load(str(folder))
    spec = target.spec((1, 2, 3), "loss", "f32")
    make = lambda: HFEngine(target, spec, device="cpu", **options)  # noqa: E731
    return Subject(make, spec, model_reference(target, spec), 1e-4)


def mock_subject(folder: Path) -> Subject:
    server = PluginServer(SPEC, folder, record_delay_s=0.02)

    def make() -> Engine:
        return SGLangEngine(server.url, SPEC, server.config(), "run00000", "ses00000", transport=server.transport)

    return Subject(make, SPEC, fake_reference(SPEC), 0.0)


def server_subject(folder: Path, stack: ExitStack) -> Subject:
    target = Target.load(str(tiny_llama(folder / "model")))
    spec = target.spec(None, "loss", "f32")
    flags = ["--chunked-prefill-size", "64"]
    server = stack.enter_context(sglang_server(target.dir, folder / "server", flags=flags))
    cfg = ServerConfig(spool=server.spool)
    make = lambda: SGLangEngine(server.url, spec, cfg, "run00000", "ses00000")  # noqa: E731
    return Subject(make, spec, model_reference(target, spec), 1e-3)


@pytest.fixture(
    scope="module",
    params=["fake", "hf", "hf-batched", "sglang-mock", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        match request.param:
            case "fake":
                yield Subject(lambda: FakeEngine(SPEC), SPEC, fake_reference(SPEC), 0.0)
            case "hf":
                yield hf_subject(folder)
            case "hf-batched":
                yield hf_subject(folder, batch_tokens=200)
            case "sglang-mock":
                yield mock_subject(folder)
            case _:
                yield server_subject(folder, stack)


def run(subject: Subject, work: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        engine = subject.make()
        try:
            info = await engine.start()
            assert info.spec == subject.spec
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(scenario())


def capture(subject: Subject, requests: list[CaptureRequest]) -> list[Captured]:
    """All of them, IN_FLIGHT at a time, in whatever order the engine answers."""

    async def work(engine: Engine) -> list[Captured | Failed]:
        window = asyncio.Semaphore(IN_FLIGHT)

        async def one(asked: CaptureRequest) -> Captured | Failed:
            async with window:
                return await engine.capture(asked)

        return await asyncio.gather(*(one(asked) for asked in requests))

    results = run(subject, work)
    assert [result for result in results if not isinstance(result, Captured)] == []
    return results


_SESSIONS = iter(range(10_000_000))


def requests_for(rows: list[list[int]], runs: list[list[int]] | None = None) -> list[CaptureRequest]:
    """Requests of a session of their own, so that ids never repeat on a server that lives through several tests."""
    session = f"{next(_SESSIONS):08d}"
    return [
        CaptureRequest(RequestId("run00000", session, row, 0), tokens, runs[row] if runs else [0, len(tokens)])
        for row, tokens in enumerate(rows)
    ]


def some_tokens(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}-{length}-{i}").randrange(6, 290) for i in range(length)]


def positions(runs: list[int]) -> list[int]:
    return [p for start, stop in zip(runs[0::2], runs[1::2], strict=True) for p in range(start, stop)]


def check(subject: Subject, asked: CaptureRequest, got: Captured) -> None:
    """Shapes, dtype, digests, and that the states are this row's."""
    got = in_memory(got)
    spec, rows = subject.spec, len(asked.tokens)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[spec.dtype]
    assert got.aux.shape == (rows, len(spec.layers), spec.hidden_size)
    assert got.last.shape == (count_of(asked.last_runs), spec.hidden_size)
    assert got.aux.dtype == got.last.dtype == dtype
    assert not got.aux.is_cuda
    for states, digest in ((got.aux, got.aux_xxh3), (got.last, got.last_xxh3)):
        assert field_hash(states.contiguous().view(torch.uint8).numpy()) == digest
    aux, last = subject.reference(asked.tokens)
    for states, right in ((got.aux, aux), (got.last, last[positions(asked.last_runs)])):
        assert bool(states.isfinite().all())
        torch.testing.assert_close(states, right, rtol=subject.tolerance, atol=subject.tolerance)


def check_all(subject: Subject, requests: list[CaptureRequest]) -> None:
    results = capture(subject, requests)
    for asked, got in zip(requests, results, strict=True):
        check(subject, asked, got)
        got.release()
        got.release()


def test_rows_of_many_lengths(subject: Subject) -> None:
    lengths = [1, 2, 63, 64, 65, 128, 129, 200, 7, 1, 300, 33]
    check_all(subject, requests_for([some_tokens(length, seed) for seed, length in enumerate(lengths)]))


def test_rows_of_equal_length_are_told_apart(subject: Subject) -> None:
    requests = requests_for([some_tokens(40, seed) for seed in range(48)])
    check_all(subject, requests)
    # The check can fail: a neighbour's states are never within the tolerance.
    references = [subject.reference(asked.tokens)[0].float() for asked in requests]
    apart = [(one - other).abs().max().item() for one, other in itertools.pairwise(references)]
    assert min(apart) > 0.1


def test_exact_duplicates_each_get_their_own_record(subject: Subject) -> None:
    requests = requests_for([some_tokens(50, seed % 3) for seed in range(24)])
    check_all(subject, requests)


def test_shared_prefixes_are_computed_in_full(subject: Subject) -> None:
    prefix = some_tokens(70, 99)
    rows = [prefix + some_tokens(length, length) for length in (0, 1, 5, 30, 64, 100)]
    check_all(subject, requests_for(rows + rows))


@pytest.mark.parametrize(
    "runs", [[], [0, 1], [89, 90], [0, 90], [3, 5, 7, 8, 60, 80], [0, 1, 2, 3, 63, 65]], ids=lambda runs: str(len(runs))
)
def test_last_is_kept_where_asked(subject: Subject, runs: list[int]) -> None:
    rows = [some_tokens(90, seed) for seed in range(3)]
    check_all(subject, requests_for(rows, [runs] * len(rows)))


def test_rows_of_one_token(subject: Subject) -> None:
    rows = [[token] for token in range(6, 30)]
    check_all(subject, requests_for(rows, [[], [0, 1]] * 12))


def test_another_attempt_gives_the_same_states(subject: Subject) -> None:
    (asked,) = requests_for([some_tokens(30, 1)])
    again = CaptureRequest(asked.rid._replace(attempt=1), asked.tokens, asked.last_runs)
    one, other = map(in_memory, capture(subject, [asked, again]))
    torch.testing.assert_close(one.aux, other.aux, rtol=subject.tolerance, atol=subject.tolerance)
    one.release()
    check(subject, again, other)
    other.release()


def test_states_in_memory_stay_when_their_origin_is_released(subject: Subject) -> None:
    requests = requests_for([some_tokens(20, seed) for seed in range(4)])
    captured = capture(subject, requests)
    results = [in_memory(got) for got in captured]
    for got in captured:
        got.release()
    for asked, got in zip(requests, results, strict=True):
        check(subject, asked, got)


def test_empty_row_fails_by_name(subject: Subject) -> None:
    (asked,) = requests_for([[]], [[]])
    assert run(subject, lambda engine: engine.capture(asked)) == Failed("empty-row", "", Retry.NEVER)


def test_reprobe_of_a_healthy_engine_changes_nothing(subject: Subject) -> None:
    (asked,) = requests_for([some_tokens(10, 5)])

    async def work(engine: Engine) -> Captured | Failed:
        await asyncio.gather(*(engine.reprobe() for _ in range(4)))
        return await engine.capture(asked)

    got = run(subject, work)
    assert isinstance(got, Captured)
    check(subject, asked, got)
    got.release()


def test_engine_can_be_closed_without_a_start(subject: Subject) -> None:
    asyncio.run(subject.make().close())
