from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from eyas.capture.contract import RequestId
from eyas.errors import ConfigError, EngineError
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.hf import EMBEDDINGS, HFEngine, hidden_states, take_batch
from eyas.target.checkpoint import Target
from tiny_models import MODELS, llama, qwen3

ALL = range(EMBEDDINGS, 4)


def tokens(row: int, length: int) -> list[int]:
    return torch.randint(0, 290, (length,), generator=torch.Generator().manual_seed(row)).tolist()


def request(row: int, length: int, runs: list[int] | None = None) -> CaptureRequest:
    rid = RequestId("run00000", "ses00000", row, 0)
    return CaptureRequest(rid, tokens(row, length), [0, length] if runs is None else runs)


def run(engine: HFEngine, requests: Sequence[CaptureRequest]) -> tuple[EngineInfo, list[Captured | Failed]]:
    async def all_() -> tuple[EngineInfo, list[Captured | Failed]]:
        info = await engine.start()
        results = await asyncio.gather(*(engine.capture(r) for r in requests))
        await engine.close()
        return info, results

    return asyncio.run(all_())


def saved(model: PreTrainedModel, folder: Path) -> Target:
    model.save_pretrained(folder)
    return Target.load(str(folder))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_states_are_those_of_transformers(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    ids = tokens(0, 23)
    states, last = hidden_states(model, ids, ALL)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        logits = output.logits[0]
    # transformers' list is: embeddings, then every layer's output, save that the last entry is already normed.
    for layer in range(EMBEDDINGS, 3):
        torch.testing.assert_close(states[layer], output.hidden_states[layer + 1][0])
    torch.testing.assert_close(last, output.hidden_states[-1][0])
    torch.testing.assert_close(model.get_output_embeddings()(last).float(), logits.float())
    torch.testing.assert_close(model.get_decoder().norm(states[3]), last)
    assert not torch.allclose(states[3], last, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("batch_tokens", [0, 100, 10_000])
def test_rows_are_their_own_whatever_they_run_beside(
    make: Callable[[], PreTrainedModel], batch_tokens: int, tmp_path: Path
) -> None:
    model = make()
    target = saved(model, tmp_path)
    spec = target.spec((0, 2, 3), "all", "f32")
    requests = [request(row, length) for row, length in enumerate([1, 7, 7, 7, 30, 2, 65, 1, 7, 64])]
    _, results = run(HFEngine(target, spec, device="cpu", batch_tokens=batch_tokens), requests)
    for asked, result in zip(requests, results, strict=True):
        assert isinstance(result, Captured)
        states, last = hidden_states(model, asked.tokens, (0, 2, 3))
        torch.testing.assert_close(result.aux, torch.stack([states[i] for i in (0, 2, 3)], 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result.last, last, rtol=1e-4, atol=1e-4)


def test_hooks_do_not_stay() -> None:
    model = llama()
    hidden_states(model, [1, 2, 3], ALL)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_lm_head_never_runs(tmp_path: Path) -> None:
    model = llama()
    target = saved(model, tmp_path)

    def refuse(*_: Any) -> None:
        raise AssertionError("lm_head ran")

    model.get_output_embeddings().register_forward_pre_hook(refuse)
    _, (result,) = run(HFEngine(target, target.spec((1,)), device="cpu", model=model), [request(0, 5)])
    assert isinstance(result, Captured)


def test_info_says_what_ran(tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    info, _ = run(HFEngine(target, target.spec((1, 2)), device="cpu", dtype="bf16"), [])
    assert info.spec == target.spec((1, 2))
    assert info.max_row_tokens == 512
    assert info.spool_bytes is None
    assert set(info.provenance) == {"engine", "transformers", "torch", "host", "dtype", "device"}
    assert (info.provenance["engine"], info.provenance["dtype"], info.provenance["device"]) == ("hf", "bfloat16", "cpu")


def test_auto_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    target = saved(llama().to(torch.bfloat16), tmp_path)
    info, _ = run(HFEngine(target, target.spec((1,)), device="cpu"), [])
    assert info.provenance["dtype"] == "bfloat16"


def test_open_spec_gets_the_live_models_fingerprint(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    spec = Target.load(str(tmp_path)).spec((1,))
    info, _ = run(HFEngine(Target.load(str(tmp_path)), spec, device="cpu", model=model), [])
    assert spec.model == ""
    assert info.spec == saved(model, tmp_path).spec((1,))


def test_another_model_is_refused(tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    other = llama()
    other.get_decoder().norm.weight.data[0] += 0.5
    with pytest.raises(EngineError, match="not the agreed one"):
        run(HFEngine(target, target.spec((1,)), device="cpu", model=other), [])


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    with pytest.raises(EngineError, match="not the agreed one"):
        run(HFEngine(target, target.spec((1,)), device="cpu", model=qwen3(hidden_size=16, head_dim=4)), [])


def test_checkpoint_without_weights_cannot_be_loaded(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    with pytest.raises(EngineError, match="cannot load the target") as error:
        run(HFEngine(target, target.spec((1,)), device="cpu"), [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ids", "reason"), [([], "empty-row"), ([1] * 513, "row-too-long"), ([5, 300], "bad-token"), ([-1], "bad-token")]
)
def test_rows_it_cannot_take_fail_by_name(ids: list[int], reason: str, tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    asked = CaptureRequest(RequestId("run00000", "ses00000", 0, 0), ids, [])
    _, (failed, fine) = run(HFEngine(target, target.spec((1,)), device="cpu"), [asked, request(1, 4)])
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retry) == (reason, Retry.NEVER)
    assert isinstance(fine, Captured)


def out_of_memory_above(model: PreTrainedModel, size: int) -> None:
    """Let the model run out of memory for more than `size` tokens in a forward."""

    def check(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].numel() > size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    model.get_decoder().register_forward_pre_hook(check, with_kwargs=True)


def test_out_of_memory_splits_the_batch_then_fails_the_row(tmp_path: Path) -> None:
    model = llama()
    target = saved(model, tmp_path)
    out_of_memory_above(model, 50)
    engine = HFEngine(target, target.spec((1,)), device="cpu", batch_tokens=1000, model=model)
    _, results = run(engine, [request(0, 5), request(1, 40), request(2, 40), request(3, 60)])
    assert [isinstance(result, Captured) for result in results] == [True, True, True, False]
    assert results[3] == Failed("out-of-memory", "CUDA out of memory. Tried to allocate 2 GiB.", Retry.NEVER)


def test_a_bug_in_the_forward_reaches_every_caller_and_not_the_next(tmp_path: Path) -> None:
    model = llama()
    target = saved(model, tmp_path)
    handle = model.get_decoder().register_forward_pre_hook(lambda *_: 1 / 0)

    async def scenario() -> None:
        engine = HFEngine(target, target.spec((1,)), device="cpu", batch_tokens=1000, model=model)
        await engine.start()
        results = await asyncio.gather(*(engine.capture(request(i, 5)) for i in range(3)), return_exceptions=True)
        assert all(isinstance(result, ZeroDivisionError) for result in results)
        handle.remove()
        assert isinstance(await engine.capture(request(0, 5)), Captured)
        await engine.close()

    asyncio.run(scenario())


def test_cancelled_rows_are_left_out(tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)

    async def scenario() -> None:
        engine = HFEngine(target, target.spec((1,)), device="cpu")
        await engine.start()
        jobs = [asyncio.create_task(engine.capture(request(i, 5))) for i in range(4)]
        await asyncio.sleep(0)
        jobs[2].cancel()
        done = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(result, Captured) for result in done] == [True, True, False, True]
        await engine.close()

    asyncio.run(scenario())


def test_capture_before_start_is_refused(tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(HFEngine(target, target.spec((1,)), device="cpu").capture(request(0, 3)))


@pytest.mark.parametrize("options", [{"device": "toaster"}, {"dtype": "f64"}])
def test_unknown_device_or_dtype_names_the_setting(options: dict[str, str], tmp_path: Path) -> None:
    target = saved(llama(), tmp_path)
    with pytest.raises(ConfigError, match=r"extract\.(device|model_dtype)"):
        HFEngine(target, target.spec((1,)), **options)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 200))
def test_batches_fit_keep_order_and_waste_little(lengths: list[int], batch_tokens: int) -> None:
    chosen = take_batch(lengths, batch_tokens)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    longest = max(lengths[i] for i in chosen)
    padding = sum(longest - lengths[i] for i in chosen)
    assert len(chosen) == 1 or longest * len(chosen) <= batch_tokens
    assert padding * 16 <= batch_tokens * (len(chosen) - 1)
    same = [i for i in range(len(lengths)) if lengths[i] == lengths[0]]
    if len(same) * lengths[0] <= batch_tokens:
        assert set(same) <= set(chosen)


def test_every_waiting_row_is_taken_in_the_end() -> None:
    lengths, sizes = [700, 30, 31, 5, 300, 29, 30, 640, 30], []
    while lengths:
        chosen = take_batch(lengths, 2048)
        sizes.append([lengths[i] for i in chosen])
        lengths = [length for i, length in enumerate(lengths) if i not in chosen]
    assert sizes == [[700, 640], [30, 31, 5, 29, 30, 30], [300]]
