"""Stored `last` times `lm_head` against a server's prompt log-probabilities: the audit of targets too large to load."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any, Final

import httpx
import stamina
import torch
from rich.console import Console
from rich.progress import Progress

from eyas.capture.contract import CaptureSpec
from eyas.config import Config, ServerConfig
from eyas.errors import ConfigError, EngineError
from eyas.extract.engine import Failed, Retry
from eyas.extract.hf import torch_device
from eyas.extract.sglang_client import OTHER_VOCABULARY, SGLangClient, aborted, is_echo, vocabulary_guard
from eyas.store.reader import StoreReader, StoreRow
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from eyas.target.norm import FinalNorm
from eyas.verify.audit import Audit, Auditor, ServedRow, log_tolerance
from eyas.verify.sampling import NAME_THE_MODEL, TORCH_NAMES, coarsest, coarsest_dtype, sample_rows

_IN_FLIGHT: Final = 4
_ATTEMPTS: Final = 5
_WAIT_S: Final = (0.5, 10.0)  # before the second attempt, and at most


class _NotServed(Exception):
    """An attempt brought nothing; another one may."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure)
        self.failure = failure


def audit_by_logits(
    reader: StoreReader,
    url: str,
    model: str,
    sample: int,
    cfg: Config,
    console: Console,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Audit:
    """Ask a server for the prompt log-probabilities of sampled rows and compare what the stored `last` gives.

    Args:
        reader: the store.
        url: an SGLang server of the same model, capturing or not.
        model: the checkpoint whose lm_head is used: folder or hub id. Only the files that hold it are read.
        sample: how many rows, spread evenly over the store; 0 is all.
        cfg: `server` (key, certificates, patience) and `extract` (device, trust_remote_code).
        console: where progress goes.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: the checkpoint cannot be read, has no usable lm_head, or is not the store's target.
        EngineError: no server, one of another model, or one that gives no log-probabilities.
    """
    target = Target.load(model, trust_remote_code=cfg.extract.trust_remote_code, weights=False)
    notes = _check_target(target, reader.spec)
    device = torch_device(cfg.extract.device)
    head = Head.load(target, device)
    rows = [reader[index] for index in sample_rows(len(reader), sample)]
    served, refused, dtype = asyncio.run(_ask(url, rows, target, cfg.server, console, transport))
    if not served and refused:
        raise EngineError("the server takes none of the sampled rows", url, next(iter(refused.values())))
    dtype = coarsest(dtype, coarsest_dtype(reader))
    result = Audit(_shown(url), dtype, refused=refused, notes=notes)
    try:
        norm = FinalNorm.load(target, device)
    except ConfigError as error:
        norm = None
        result.notes.append(f"controls of the final norm: {error}")
    tolerance = log_tolerance(dtype, target.is_routed)
    auditor = Auditor(head.log_probs, tolerance, reader.spec.num_layers, reader.spec.layers, norm)
    for row in served:
        auditor.judge(row, [other for other in served if other is not row], result)
    if set(result.rows) <= set(result.unjudged):
        result.notes.append("values of `last`: no sampled row can be told from another; look at more with --sample")
    return result


def _check_target(target: Target, spec: CaptureSpec) -> list[str]:
    """Refuse another model than the store's; returns what could not be compared."""
    mine = (target.hidden_size, target.vocab_size, target.num_layers)
    theirs = (spec.hidden_size, spec.vocab_size, spec.num_layers)
    if mine != theirs:
        names = ("hidden size", "vocabulary", "layers")
        differing = [f"{name} {a}, in the store {b}" for name, a, b in zip(names, mine, theirs, strict=True) if a != b]
        what = f"the store was captured from another model ({'; '.join(differing)})"
        raise ConfigError(what, target.model, NAME_THE_MODEL)
    if not target.has_all_norms():
        return ["the checkpoint's fingerprint: only a part of it is here"]
    if (live := target.fingerprint()) and live != spec.model:
        what = f"the store was captured from another model (fingerprint {live}, in the store {spec.model})"
        raise ConfigError(what, target.model, NAME_THE_MODEL)
    return []


async def _ask(
    url: str,
    rows: Sequence[StoreRow],
    target: Target,
    cfg: ServerConfig,
    console: Console,
    transport: httpx.AsyncBaseTransport | None,
) -> tuple[list[ServedRow], dict[int, str], str]:
    """The rows with the server's log-probabilities, those it refuses, and the dtype it computes in."""
    client = SGLangClient(url, cfg, transport)
    served: list[ServedRow] = []
    refused: dict[int, str] = {}
    window = asyncio.Semaphore(_IN_FLIGHT)
    try:
        _check_server(await client.identify(), target, client.where)
        dtype = _server_dtype(await client.settings(), target)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("asking the server", total=len(rows))

            async def one(row: StoreRow) -> None:
                async with window:
                    found = await _log_probs(client, row, target.vocab_size)
                if isinstance(found, Failed):
                    refused[row.row] = f"{found.reason}: {found.detail}"
                else:
                    served.append(ServedRow(row, found))
                progress.advance(task)

            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(one(row))
    except* EngineError as errors:
        raise _first(errors) from None
    finally:
        await client.close()
    return sorted(served, key=lambda one: one.row.row), dict(sorted(refused.items())), dtype


def _first(group: BaseExceptionGroup[EngineError]) -> EngineError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _log_probs(client: SGLangClient, row: StoreRow, vocab_size: int) -> torch.Tensor | Failed:
    """[T] float64, entry 0 NaN; or why the server will never take this row.

    Raises:
        EngineError: it gives no answer, or none that can be used.
    """
    tokens = row.tokens.tolist()
    try:
        async for attempt in stamina.retry_context(
            on=_NotServed, attempts=_ATTEMPTS, timeout=None, wait_initial=_WAIT_S[0], wait_max=_WAIT_S[1]
        ):
            with attempt:
                answer = await client.post(_body(tokens, vocab_size))
                found = (
                    answer if isinstance(answer, Failed) else read_log_probs(answer, tokens, vocab_size, client.where)
                )
                if isinstance(found, Failed) and found.retry != Retry.NEVER:
                    raise _NotServed(found)
                if isinstance(found, Failed) and found.reason == OTHER_VOCABULARY:
                    raise EngineError("the server runs another model", client.where, found.detail)
                if isinstance(found, Failed) and found.reason != "row-too-long":
                    raise EngineError("the server refuses a row", client.where, f"row {row.row}: {found.detail}")
                return found
    except _NotServed as error:
        why = f"row {row.row}, {error.failure.reason}: {error.failure.detail}"
        raise EngineError("the server gave no log-probabilities", client.where, why) from None
    raise AssertionError("stamina ends by a result or an error")


def _body(tokens: list[int], vocab_size: int) -> dict[str, Any]:
    return {
        "rid": f"audit-{uuid.uuid4().hex}",  # a stranger to the capture plugin, whose own begin otherwise
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0} | vocabulary_guard(vocab_size),
        "return_logprob": True,
        "logprob_start_len": 0,  # nothing is taken from the prefix cache then
    }


def read_log_probs(body: dict[str, Any], tokens: Sequence[int], vocab_size: int, where: str) -> torch.Tensor | Failed:
    """The prompt's log-probabilities in a reply of /generate.

    Args:
        body: the reply.
        tokens: the T token ids that were sent.
        vocab_size: the target's.
        where: the server, for errors.

    Returns:
        [T] float64, entry t is log p(token[t] | before), entry 0 NaN; or the name of a failure.

    Raises:
        EngineError: there are none in it, or they are of other tokens.
    """
    meta = body.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    if (failure := aborted(meta)) is not None:
        return failure
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or not entries:
        hint = "an SGLang server that answers return_logprob is needed"
        raise EngineError("the server gives no prompt log-probabilities", where, hint)
    try:
        values = [entry[0] for entry in entries]
        ids = [int(entry[1]) for entry in entries]
        found = torch.tensor([float("nan"), *(float(value) for value in values[1:])], dtype=torch.float64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        shown = json.dumps(entries[:2])[:100]
        raise EngineError("the server's log-probabilities cannot be read", where, shown) from error
    if not is_echo(ids, tokens, vocab_size):
        hint = f"{len(ids)} of {len(tokens)} tokens came back; --allow-auto-truncate must be off"
        raise EngineError("the server's log-probabilities are of other tokens", where, hint)
    return found


def _check_server(info: dict[str, Any], target: Target, where: str) -> None:
    theirs, mine = info.get("architectures"), target.architectures()
    if isinstance(theirs, list) and theirs and mine and set(theirs).isdisjoint(mine):
        hint = f"{', '.join(map(str, theirs))} there, {', '.join(mine)} in {target.model}"
        raise EngineError("the server runs another model", where, hint)
    if info.get("is_generation") is False:
        raise EngineError("the server generates nothing", where, "it runs an embedding model")


def _server_dtype(settings: dict[str, Any], target: Target) -> str:
    """bf16, f16 or f32: what the server computes in; bf16 where that cannot be told."""
    named = str(settings.get("dtype", "auto")).removeprefix("torch.")
    if settings.get("quantization"):
        return "bf16"
    if named == "auto":  # the checkpoint's own; SGLang halves float32, to float16 or bfloat16 by the family
        own = TORCH_NAMES.get(str(target.config.get("dtype") or target.config.get("torch_dtype")).split(".")[-1])
        return own if own in ("f16", "bf16") else "bf16"
    return TORCH_NAMES.get({"half": "float16", "float": "float32"}.get(named, named), "bf16")


def _shown(url: str) -> str:
    return str(httpx.URL(url).copy_with(username=None, password=None)).rstrip("/")
