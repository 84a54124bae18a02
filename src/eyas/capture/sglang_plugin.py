"""SGLang general plugin: hooks that hand every own request's rows to the recorder.

SGLang loads `register` in each of its processes (entry point group `sglang.srt.plugins`); without EYAS_CAPTURE it does
nothing. No source is patched. Hooks, all on releases 0.5.17 to 0.5.23:

    AFTER   TpModelWorker.get_worker_info            model and pools exist: make spec and spool, write spec.json
    AFTER   TpModelWorker.forward_batch_generation   slice the rows of own requests, answer on the request
    AROUND  SchedulerOutputStreamer.stream_output    own and other requests' outputs go out separately
    BEFORE  SchedulerWeightUpdaterManager.update_*   other weights than agreed on: capture ends

and where the server cannot keep the state after the final norm itself (before 0.5.23):

    BEFORE  ModelRunner.init_attention_backends      tell the model which layers to keep
    AFTER   LogitsProcessor.forward                  attach what lm_head reads to its own output

A hook never raises into the server: whatever goes wrong refuses the request by name, and is logged once per kind.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # pyright: ignore[reportMissingImports]
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]
from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

from eyas.capture.assembler import Chunk
from eyas.capture.contract import REPLY_KEY, CaptureReply, Refusal, Refused, ServerHello, is_own_rid
from eyas.capture.live_model import check_layers, forward_tokens, spec_of
from eyas.capture.recorder import Forward, Recorder, Resources, refusal
from eyas.capture.settings import SETTINGS_ENV, ServerSettings
from eyas.capture.spool import Spool

logger = logging.getLogger(__name__)

_MAX_REQ_INPUT_LEN: Final = 5  # position in get_worker_info's tuple, the same on every supported release
_WORKER: Final = "sglang.srt.managers.tp_worker.TpModelWorker"
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_LOGITS: Final = "sglang.srt.layers.logits_processor.LogitsProcessor"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WEIGHT_SOURCES: Final = ("disk", "distributed", "tensor", "ipc")
_DELIMITERS: Final = "multi_item_delimiter_indices"  # another attention mask
_BEYOND_TOKENS: Final = ("lora_id", "input_embeds", "positional_embed_overrides", "multimodal_inputs", _DELIMITERS)
_STREAMER: Final = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

#: From 0.5.23 the server's own flags bring the last state; before, our hooks attach it under the same name.
SERVER_KEEPS_LAST: Final = "last_hidden_states" in LogitsProcessorOutput.__dataclass_fields__


def register() -> None:
    """Entry point. Raises ValueError for settings that are not ours; SGLang logs it and runs on without capture."""
    text = os.environ.get(SETTINGS_ENV)
    if not text:
        return
    plugin = Plugin(ServerSettings.from_env(text))
    HookRegistry.register(f"{_WORKER}.get_worker_info", plugin.after_worker_info, HookType.AFTER)
    HookRegistry.register(f"{_WORKER}.forward_batch_generation", plugin.after_forward, HookType.AFTER)
    HookRegistry.register(f"{_STREAMER}.stream_output", around_stream_output, HookType.AROUND)
    for source in _WEIGHT_SOURCES:
        target = f"{_UPDATER}.update_weights_from_{source}"
        HookRegistry.register(target, plugin.before_weights_change, HookType.BEFORE)
    if not SERVER_KEEPS_LAST:
        HookRegistry.register(f"{_RUNNER}.init_attention_backends", plugin.before_attention_backends, HookType.BEFORE)
        HookRegistry.register(f"{_LOGITS}.forward", attach_last, HookType.AFTER)


class Plugin:
    """The hooks of one server process."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.recorder: Recorder | None = None
        self.failure = "the model is not loaded yet"
        self._failed = False
        self._silent = False  # another rank of the attention-TP group answers for this one
        self._logged: set[str] = set()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def before_attention_backends(self, runner: Any, *_: Any, **__: Any) -> None:
        """Graphs are captured after this: the layers to keep must be known now."""
        try:
            if not runner.is_draft_worker:
                check_parallel(runner.server_args)  # first: a model that cannot keep a layer dies in its first forward
                if not runner.spec_algorithm.is_none():
                    raise ValueError("a server that decodes speculatively keeps layers of its own for its drafts")
                _set_layers(runner.model, self.settings.layers, int(runner.model_config.num_hidden_layers))
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._fail("layers", error)

    def after_worker_info(self, result: tuple[Any, ...], worker: Any, *_: Any, **__: Any) -> None:
        """The model is loaded and its pools are sized: agree on the spec and open the spool."""
        try:
            if worker.is_draft_worker or self.recorder is not None or self._failed:
                return
            if get_parallel().attn_tp_rank != 0:  # rows are replicated over the attention-TP group
                self._silent = True
                return
            self.recorder = self._start(worker, int(result[_MAX_REQ_INPUT_LEN]))
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._fail("start", error)

    def after_forward(self, result: Any, worker: Any, batch: Any = None, *_: Any, **__: Any) -> None:
        """Hand over the rows of own requests in prefill."""
        began_s = time.perf_counter()
        try:
            if self._silent or batch is None or worker.is_draft_worker:
                return
            self._sweep()  # first: what an aborted request had reserved may be what the next one needs
            if batch.forward_mode.is_extend() and any(is_own_rid(request.rid) for request in batch.reqs):
                self._capture(result, batch)
                if self.recorder is not None:
                    self.recorder.cost.add(time.perf_counter() - began_s)
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("forward", error)

    def before_weights_change(self, *_: Any, **__: Any) -> None:
        """Whatever comes of it, the agreement names the weights of before; records already accepted are of those."""
        recorder, self.recorder, self._failed = self.recorder, None, True
        self.failure = "capture is off: the weights were replaced in the running server; restart it"
        try:
            if recorder is not None:
                logger.warning("eyas: the weights are being replaced: capture ends")
                recorder.end()
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("end", error)

    # --- capture ------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        try:
            if self.recorder is not None:
                self.recorder.sweep()
        except Exception as error:  # noqa: BLE001 - no reason to lose the rows of this forward
            self._log_once("sweep", error)

    def _capture(self, result: Any, batch: Any) -> None:
        """Take the rows of own requests, then answer: an answer is true once the rows are on their way."""
        forward: Forward | None = None
        answers: list[tuple[Any, dict[str, Any]]] = []
        try:
            if self.recorder is not None:
                forward = self.recorder.forward(*states_of(result, batch))
            for share in own_shares(batch):
                self._answer(share, forward, answers)
            if forward is not None:
                forward.send()
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("batch", error)
            if forward is not None:
                forward.abandon()
            answers = [
                (request, self._refusal(request, _plugin_error(error)).to_dict())
                for request in batch.reqs
                if is_own_rid(request.rid) and not has_reply(request)
            ]
        for request, reply in answers:
            # On the request, not on the batch's output: other users' requests must not even get an empty entry.
            request.customized_info = {**(request.customized_info or {}), REPLY_KEY: [reply]}

    def _answer(self, share: Share, forward: Forward | None, answers: list[tuple[Any, dict[str, Any]]]) -> None:
        """Take a request's rows; the reply, if there is one yet, goes to `answers`."""
        request = share.request
        try:
            if forward is None:
                reply = self._refusal(request, Refused(Refusal.PLUGIN_ERROR, self.failure))
            elif named := beyond_tokens(request):
                text = f"its states depend on more than its token ids: {named}"
                reply = self._refusal(request, Refused(Refusal.BAD_REQUEST, text))
            else:
                reply = share.take(forward)
            told = None if reply is None else reply.to_dict()
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("capture", error)
            if forward is not None:
                forward.abandon(request.rid)
            told = self._refusal(request, _plugin_error(error)).to_dict()
        if told is not None:
            answers.append((request, told))

    def _refusal(self, request: Any, refused: Refused) -> CaptureReply:
        if self.recorder is None:
            return refusal("", request.origin_input_ids, refused)
        return self.recorder.refuse(request.rid, request.origin_input_ids, refused)

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self, worker: Any, max_req_input_len: int) -> Recorder:
        check_parallel(worker.server_args)
        model = worker.model_runner.model
        checked = check_layers(model, self.settings.layers)
        if not checked and len(self.settings.layers) == 1:
            raise ValueError("a single layer of this model cannot be told from its last state: capture two or more")
        spec = spec_of(model, worker.model_config.hf_text_config, self.settings)
        ranks = _data_parallel_ranks(worker)
        spool = Spool(self.settings, shares=ranks)
        device = next(model.parameters()).device
        tokens = forward_tokens(worker.server_args, max_req_input_len)
        resources = Resources.of(self.settings, device, tokens, ranks)
        hello = ServerHello(
            spec=spec.to_dict(),
            spec_id=spec.spec_id,
            provenance=_provenance(worker) | {"layers_checked": "yes" if checked else "no"},
            max_row_tokens=max_req_input_len - 1,  # SGLang refuses prompts of this length or more
            quota_bytes=self.settings.quota_bytes,
        )
        recorder = Recorder(spec, spool, resources, is_over=is_over)
        spool.write_hello(hello.to_json())
        logger.info("eyas: capturing %s into %s", spec.to_dict(), spool.folder)
        return recorder

    def _fail(self, kind: str, error: Exception) -> None:
        self._failed = True
        self.failure = f"capture is off: {error}"
        self._log_once(kind, error)

    def _log_once(self, kind: str, error: Exception) -> None:
        key = f"{kind}:{type(error).__name__}"
        if key not in self._logged:
            self._logged.add(key)
            logger.error("eyas: %s: %s (logged once)", kind, error, exc_info=error)


@dataclass(frozen=True, slots=True)
class Share:
    """An own request's part of one forward: positions [start, stop), and the row where they begin."""

    request: Any
    start: int
    stop: int
    row: int

    def take(self, forward: Forward) -> CaptureReply | None:
        """Hand it over."""
        request = self.request
        chunk = Chunk(
            rid=request.rid,
            start=self.start,
            stop=self.stop,
            prompt=request.origin_input_ids,
            params=request.sampling_params.custom_params or {},
            owner=request,
            retractions=request.retraction_count,
        )
        return forward.take(chunk, self.row)


def beyond_tokens(request: Any) -> str:
    """What besides token ids shapes a request's states, empty for plain text; a record's identity knows only those."""
    return ", ".join(name for name in _BEYOND_TOKENS if getattr(request, name, None) is not None)


def states_of(result: Any, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What a forward brought: aux, last and token ids of all of its rows, None where any is missing."""
    output = result.logits_output
    aux = getattr(output, "hidden_states", None)
    last = getattr(output, "last_hidden_states", None)
    if getattr(output, "hidden_states_token_indices", None) is not None:
        aux = None  # rows of a subset of the tokens only
    # Fewer rows than tokens: some were left out, and those that are there may be anybody's.
    tokens = sum(batch.extend_lens)
    aux, last, fed = (None if rows is None or rows.shape[0] < tokens else rows for rows in (aux, last, batch.input_ids))
    return aux, last, fed


def own_shares(batch: Any) -> Iterator[Share]:
    """The own requests of a prefill batch that are still without a reply. Rows may end in padding."""
    decoding = {id(request) for request in batch.decoding_reqs or ()}
    row = 0
    for request, length, prefix in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        if is_own_rid(request.rid) and id(request) not in decoding and not has_reply(request):
            yield Share(request, prefix, prefix + length, row)
        row += length


def _plugin_error(error: Exception) -> Refused:
    return Refused(Refusal.PLUGIN_ERROR, f"{type(error).__name__}: {error}"[:200])


# --- hooks without state ----------------------------------------------------------------------------------------------


def attach_last(result: Any, processor: Any, input_ids: Any, hidden_states: Any, *_: Any, **__: Any) -> None:
    """What lm_head reads travels on the output it belongs to, so that it can never be taken for another forward's."""
    if result is not None and isinstance(hidden_states, torch.Tensor):
        result.last_hidden_states = hidden_states


def around_stream_output(original: Callable[..., Any], streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang pads a request's extra info with None for every other request of the same message: send two messages."""
    own, others = [], []
    try:
        for request in reqs:  # asked once: a second answer might be another, or none
            (own if has_reply(request) else others).append(request)
    except Exception:  # never raise into the server
        logger.exception("eyas: outputs not told apart: own requests go without a reply")
        own = _withdraw_replies(reqs)
    if not own or not others:
        return original(streamer, reqs, *args, **kwargs)
    original(streamer, others, *args, **kwargs)
    return original(streamer, own, *args, **kwargs)


def _withdraw_replies(reqs: Any) -> list[Any]:
    """No reply is better than another user's entry: a client takes its absence for a failed attempt."""
    for request in reqs:
        if info := getattr(request, "customized_info", None):
            request.customized_info = {key: value for key, value in info.items() if key != REPLY_KEY} or None
    return []


def has_reply(request: Any) -> bool:
    """Whether the request already carries our answer."""
    return REPLY_KEY in (getattr(request, "customized_info", None) or ())


def is_over(request: Any) -> bool:
    """Whether SGLang is done with a request: finished, aborted, or about to be."""
    return request.finished_reason is not None or request.to_finish is not None


# --- the live model ---------------------------------------------------------------------------------------------------


def check_parallel(server_args: Any) -> None:
    """Raises ValueError for ways to split a forward that leave a rank without all layers, or all rows in order."""
    splits = {
        "pipeline parallelism": int(getattr(server_args, "pp_size", 1) or 1) > 1,
        "context parallelism": int(getattr(get_parallel(), "attn_cp_size", 1) or 1) > 1,
        "two-batch overlap": bool(getattr(server_args, "enable_two_batch_overlap", False)),
    }
    if named := [name for name, on in splits.items() if on]:
        raise ValueError(f"states cannot be captured under {' and '.join(named)}")


def _set_layers(model: Any, layers: Sequence[int], depth: int) -> None:
    """Both setters take layer *outputs* on the models that get here; `check_layers` proves it afterwards."""
    if layers[-1] > depth - 2:
        raise ValueError(f"layers {list(layers)}: this server keeps the outputs of layers 0 to {depth - 2}")
    for name in ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"):
        if setter := getattr(model, name, None):
            setter(list(layers))
            return
    raise ValueError(f"{type(model).__name__} cannot keep hidden states of its layers")


def _data_parallel_ranks(worker: Any) -> int:
    ranks = getattr(get_parallel(), "num_dp_ranks", None)
    return max(int(ranks or getattr(worker.server_args, "dp_size", 1) or 1), 1)


def _provenance(worker: Any) -> dict[str, str]:
    return {
        "engine": "sglang",
        "sglang": _version("sglang"),
        "eyas": _version("eyas"),
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "dtype": str(worker.model_config.dtype).removeprefix("torch."),
        "tp_size": str(getattr(worker.server_args, "tp_size", "")),
        "dp_size": str(_data_parallel_ranks(worker)),
        "capture": "server flags" if SERVER_KEEPS_LAST else "hooks",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
