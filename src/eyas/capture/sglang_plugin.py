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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # pyright: ignore[reportMissingImports]
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]
from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

from eyas.capture.assembler import Chunk, Refused
from eyas.capture.contract import (
    REPLY_KEY,
    SETTINGS_ENV,
    CaptureReply,
    CaptureSpec,
    Refusal,
    ServerHello,
    ServerSettings,
    is_own_rid,
)
from eyas.capture.fingerprint import architecture_of, model_fingerprint, norm_key
from eyas.capture.hostcopy import host_bytes
from eyas.capture.recorder import Recorder, refusal
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
        try:
            if self._silent or batch is None or worker.is_draft_worker:
                return
            self._sweep()  # first: what an aborted request had reserved may be what the next one needs
            if batch.forward_mode.is_extend() and any(is_own_rid(request.rid) for request in batch.reqs):
                self._capture(result, batch)
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("forward", error)

    def before_weights_change(self, *_: Any, **__: Any) -> None:
        """Whatever comes of it, the agreement names the weights of before; records already accepted are of those."""
        if self.recorder is not None:
            logger.warning("eyas: the weights are being replaced: capture ends")
        self.recorder, self._failed = None, True
        self.failure = "capture is off: the weights were replaced in the running server; restart it"

    # --- capture ------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        try:
            if self.recorder is not None:
                self.recorder.sweep()
        except Exception as error:  # noqa: BLE001 - no reason to lose the rows of this forward
            self._log_once("sweep", error)

    def _capture(self, result: Any, batch: Any) -> None:
        try:
            for share in own_shares(result, batch):
                self._answer(share.request, share.capture)
        except Exception as error:  # noqa: BLE001 - never raise into the server
            self._log_once("batch", error)
            for request in batch.reqs:
                if is_own_rid(request.rid) and not has_reply(request):
                    self._answer(request, partial(_give_up, request, _plugin_error(error)))

    def _answer(self, request: Any, capture: Callable[[Recorder], CaptureReply | None]) -> None:
        """Put the reply, if there is one yet, on the request.

        On the request, not on the batch's output: other users' requests must not even get an empty entry.
        """
        if self.recorder is None:
            refused = Refused(Refusal.PLUGIN_ERROR, self.failure)
            reply = refusal("", request.origin_input_ids, refused)
        else:
            try:
                reply = capture(self.recorder)
            except Exception as error:  # noqa: BLE001 - never raise into the server
                self._log_once("capture", error)
                reply = _give_up(request, _plugin_error(error), self.recorder)
        if reply is not None:
            request.customized_info = {**(request.customized_info or {}), REPLY_KEY: [reply.to_dict()]}

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self, worker: Any, max_req_input_len: int) -> Recorder:
        check_parallel(worker.server_args)
        model = worker.model_runner.model
        checked = check_layers(model, self.settings.layers)
        if not checked and len(self.settings.layers) == 1:
            raise ValueError("a single layer of this model cannot be told from its last state: capture two or more")
        spec = spec_of(model, worker.model_config.hf_text_config, self.settings)
        spool = Spool(self.settings, shares=_data_parallel_ranks(worker))
        hello = ServerHello(
            spec=spec.to_dict(),
            spec_id=spec.spec_id,
            provenance=_provenance(worker) | {"layers_checked": "yes" if checked else "no"},
            max_row_tokens=max_req_input_len - 1,  # SGLang refuses prompts of this length or more
            quota_bytes=self.settings.quota_bytes,
        )
        recorder = Recorder(spec, spool, is_over=is_over)
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
    """An own request's part of one forward: positions [start, stop), and its rows of aux, last and token ids."""

    request: Any
    start: int
    stop: int
    rows: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def capture(self, recorder: Recorder) -> CaptureReply | None:
        """Hand it to the recorder."""
        request = self.request
        if named := beyond_tokens(request):
            refused = Refused(Refusal.BAD_REQUEST, f"its states depend on more than its token ids: {named}")
            return _give_up(request, refused, recorder)
        chunk = Chunk(
            rid=request.rid,
            start=self.start,
            stop=self.stop,
            prompt=request.origin_input_ids,
            params=request.sampling_params.custom_params or {},
            owner=request,
            retractions=request.retraction_count,
        )
        return recorder.capture(chunk, *self.rows)


def beyond_tokens(request: Any) -> str:
    """What besides token ids shapes a request's states, empty for plain text; a record's identity knows only those."""
    return ", ".join(name for name in _BEYOND_TOKENS if getattr(request, name, None) is not None)


def own_shares(result: Any, batch: Any) -> Iterator[Share]:
    """The own requests of a prefill batch that are still without a reply. Rows may end in padding."""
    output = result.logits_output
    aux = getattr(output, "hidden_states", None)
    last = getattr(output, "last_hidden_states", None)
    if getattr(output, "hidden_states_token_indices", None) is not None:
        aux = None  # rows of a subset of the tokens only
    # Fewer rows than tokens: some were left out, and those that are there may be anybody's.
    aux, last, fed = (
        None if rows is None or rows.shape[0] < sum(batch.extend_lens) else rows
        for rows in (aux, last, batch.input_ids)
    )
    decoding = {id(request) for request in batch.decoding_reqs or ()}
    row = 0
    for request, length, prefix in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        if is_own_rid(request.rid) and id(request) not in decoding and not has_reply(request):
            aux_rows, last_rows, ids = (None if t is None else t[row : row + length] for t in (aux, last, fed))
            yield Share(request, prefix, prefix + length, (aux_rows, last_rows, ids))
        row += length


def _plugin_error(error: Exception) -> Refused:
    return Refused(Refusal.PLUGIN_ERROR, f"{type(error).__name__}: {error}"[:200])


def _give_up(request: Any, refused: Refused, recorder: Recorder) -> CaptureReply:
    return recorder.refuse(request.rid, request.origin_input_ids, refused)


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


def spec_of(model: Any, text_config: Any, settings: ServerSettings) -> CaptureSpec:
    """The agreement, from the model as it is in memory. Raises ValueError for layers it does not have."""
    layers = int(text_config.num_hidden_layers)
    norms: dict[str, bytes] = {}
    for name, parameter in model.named_parameters():
        if key := norm_key(name, layers):
            host = parameter.detach().to(torch.bfloat16).cpu().contiguous()
            norms[key] = bytes(host_bytes(host))
    return CaptureSpec(
        layers=settings.layers,
        last=settings.last,
        dtype=settings.dtype,
        hidden_size=int(text_config.hidden_size),
        vocab_size=int(text_config.vocab_size),
        num_layers=layers,
        model=model_fingerprint(architecture_of(text_config), norms),
    )


def check_layers(model: Any, layers: Iterable[int]) -> bool:
    """Compare the model's own list of layers to keep with ours.

    SGLang keeps the *input* of each layer in `layers_to_capture`; the output of layer i is the input of layer i + 1.

    Returns:
        False where the model does not show such a list.

    Raises:
        ValueError: the server keeps other layers than the settings name.
    """
    want = {layer + 1 for layer in layers}
    for module in model.modules():
        kept = getattr(module, "layers_to_capture", None)
        if isinstance(kept, list | tuple | set | frozenset) and kept:
            if set(kept) != want:
                outputs = sorted(int(layer) - 1 for layer in kept)
                raise ValueError(f"the server keeps the outputs of layers {outputs}, EYAS_CAPTURE names {list(layers)}")
            return True
    return False


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
