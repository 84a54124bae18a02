"""The embedded engine: transformers in this process, one model, no server.

States are taken by forward hooks on the decoder layers, never from `output_hidden_states`: its last entry is already
normed. The decoder alone runs, `lm_head` never does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from eyas.capture.contract import CaptureSpec, field_hash
from eyas.capture.encoding import encode
from eyas.capture.fingerprint import architecture_of, model_fingerprint
from eyas.errors import ConfigError, EngineError, first_line
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.target import cpu_math
from eyas.target.checkpoint import Target, norm_bytes
from eyas.target.decoder import decoders, layers_of

_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_BATCH_TOKENS: Final = {True: 1024, False: 16384}  # on a CPU: yes, no
_PADDING_SHARE: Final = 16  # a row joins a batch for at most 1/16 of the batch in padding
EMBEDDINGS: Final = -1  # the "layer" whose output is the input of layer 0


class HFEngine:
    """Engine over a transformers model in this process.

    Rows run in a worker thread, one forward at a time; while one runs, others wait and are then padded together up to
    `batch_tokens`. Padding is on the right, where a causal decoder's real rows cannot see it.

    Args:
        target: the checkpoint.
        spec: what to capture.
        device: torch device; `auto` is CUDA where there is one.
        dtype: what the model runs in: bf16, f16, f32, or `auto`, the checkpoint's own.
        batch_tokens: most tokens of one forward, padding included; a longer row goes alone, and 0 sends every row
            alone. None: 1024 on a CPU, 16384 on an accelerator.
        model: an already loaded model to use instead of the checkpoint's weights.
    """

    def __init__(
        self,
        target: Target,
        spec: CaptureSpec,
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch_tokens: int | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        if dtype != "auto" and dtype not in _DTYPES:
            raise ConfigError(f"unknown dtype {dtype}", "extract.model_dtype", f"one of auto, {', '.join(_DTYPES)}")
        self._target, self._spec = target, spec
        self._device = torch_device(device)
        self._dtype = dtype
        self._batch_tokens = batch_tokens if batch_tokens is not None else _BATCH_TOKENS[self._device.type == "cpu"]
        self._model = model
        self._decoder: _Decoder | None = None
        self._waiting: list[tuple[CaptureRequest, asyncio.Future[Captured | Failed]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Load the model and check that it is the spec's.

        Raises:
            EngineError: it cannot be loaded, or is another model.
        """
        model = self._model = await asyncio.to_thread(self._load)
        architecture = architecture_of(model.config.get_text_config(decoder=True))
        live = model_fingerprint(architecture, norm_bytes(model.named_parameters(), self._spec.num_layers))
        if self._spec.model and live != self._spec.model:
            raise EngineError(
                "the loaded model is not the agreed one", self._target.model, f"{live} instead of {self._spec.model}"
            )
        self._decoder = _Decoder.of(model, self._spec.num_layers)
        provenance = {
            "engine": "hf",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "host": socket.gethostname(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": _device_name(self._device),
        }
        spec = CaptureSpec.from_dict({**self._spec.to_dict(), "model": live})
        return EngineInfo(spec, provenance, _longest_row(model))

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        if self._decoder is None or self._model is None:
            raise EngineError("the engine is not started", self._target.model)
        if (failure := self._refusal(request, self._model)) is not None:
            return failure
        future: asyncio.Future[Captured | Failed] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def reprobe(self) -> None:
        """Nothing restarts in process."""

    async def close(self) -> None:
        """Wait for the forward that runs, drop the model."""
        for _, future in self._waiting:
            future.cancel()
        if self._worker is not None:
            await asyncio.wait([self._worker])
        self._model = self._decoder = None

    def _load(self) -> PreTrainedModel:
        if self._model is not None:
            return self._model.to(self._device).eval()  # pyright: ignore[reportArgumentType]
        return load_model(self._target, self._device, self._dtype)

    def _refusal(self, request: CaptureRequest, model: PreTrainedModel) -> Failed | None:
        if not request.tokens:
            return Failed("empty-row", retry=Retry.NEVER)
        longest = _longest_row(model)
        if longest is not None and len(request.tokens) > longest:
            return Failed("row-too-long", f"{len(request.tokens)} tokens, the model takes {longest}", Retry.NEVER)
        if min(request.tokens) < 0 or max(request.tokens) >= self._spec.vocab_size:
            return Failed("bad-token", f"token ids outside [0, {self._spec.vocab_size})", Retry.NEVER)
        return None

    async def _work(self) -> None:
        while self._waiting:
            chosen = take_batch([len(request.tokens) for request, _ in self._waiting], self._batch_tokens)
            batch = [self._waiting[index] for index in chosen]
            self._waiting = [item for index, item in enumerate(self._waiting) if index not in set(chosen)]
            wanted = [item for item in batch if not item[1].cancelled()]
            if not wanted:
                continue
            try:
                results = await asyncio.to_thread(self._forward, [request for request, _ in wanted])
            except Exception as error:  # noqa: BLE001 - a bug in the forward belongs to the callers, whatever it is
                results = [error] * len(wanted)
            for (_, future), result in zip(wanted, results, strict=True):
                if future.cancelled():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _forward(self, requests: Sequence[CaptureRequest]) -> list[Captured | Failed]:
        assert self._decoder is not None
        try:
            aux_BTAH, last_BTH = self._decoder.run([r.tokens for r in requests], self._spec.layers, self._spec.dtype)
            return [_captured(request, aux_BTAH[i], last_BTH[i]) for i, request in enumerate(requests)]
        except torch.OutOfMemoryError as error:
            if len(requests) == 1:
                return [Failed("out-of-memory", first_line(error), Retry.NEVER)]
        torch.cuda.empty_cache()
        return [result for request in requests for result in self._forward([request])]


def load_model(target: Target, device: str | torch.device = "auto", dtype: str = "auto") -> PreTrainedModel:
    """The target as transformers loads it, in evaluation mode.

    Args:
        target: the checkpoint.
        device: torch device; `auto` is CUDA where there is one.
        dtype: bf16, f16, f32, or `auto`, the checkpoint's own.

    Raises:
        EngineError: transformers cannot load it.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "dtype": "auto" if dtype == "auto" else _DTYPES[dtype],
        "trust_remote_code": target.trust_remote_code,
    }
    try:
        try:
            model = AutoModelForCausalLM.from_pretrained(target.dir, **options)
        except ValueError:  # a wrapper that is registered as a multimodal model only
            model = AutoModelForImageTextToText.from_pretrained(target.dir, **options)
        model.to(device if isinstance(device, torch.device) else torch_device(device))  # pyright: ignore[reportArgumentType]
        return model.eval()
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise EngineError("cannot load the target", target.model, first_line(error)) from error


def take_batch(lengths: Sequence[int], batch_tokens: int) -> list[int]:
    """Which waiting rows run together: the oldest, and those near it in length while the padded batch fits.

    A forward costs as much as some hundred tokens before it computes any, so a row may add up to 1/16 of `batch_tokens`
    of padding rather than wait for a forward of its own.

    Args:
        lengths: tokens of the waiting rows, oldest first; not empty.
        batch_tokens: most tokens of a batch, padding included; the oldest row goes whatever its length.

    Returns:
        Indices into `lengths`, ascending, 0 among them.
    """
    chosen, longest = [0], lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda i: (abs(lengths[i] - lengths[0]), i)):
        length = max(longest, lengths[index])
        padded = length * (len(chosen) + 1)
        padding = padded - longest * len(chosen) - lengths[index]
        if padded <= batch_tokens and padding * _PADDING_SHARE <= batch_tokens:
            chosen.append(index)
            longest = length
    return sorted(chosen)


def hidden_states(
    model: PreTrainedModel, tokens: Sequence[int], layers: Iterable[int]
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """States of one row as transformers computes them, to compare a store with.

    Args:
        model: any causal language model of transformers.
        tokens: token ids, length T.
        layers: decoder layers whose output is wanted; EMBEDDINGS (-1) is the input of layer 0.

    Returns:
        layer -> [T, H] in the model's dtype, and the state after the final norm [T, H].
    """
    num_layers = architecture_of(model.config.get_text_config(decoder=True))["num_hidden_layers"]
    states, last = _Decoder.of(model, num_layers).states([list(tokens)], tuple(layers))
    return {layer: state[0] for layer, state in states.items()}, last[0]


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The text decoder inside a model: everything but `lm_head` and other towers."""

    module: torch.nn.Module
    layers: Sequence[torch.nn.Module]
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel, num_layers: int) -> _Decoder:
        cpu_math.settle()
        for module in decoders(model):
            if len(layers := layers_of(module)) >= num_layers:
                return cls(module, layers[:num_layers], next(model.parameters()).device)
        raise EngineError(
            "found no decoder layers in the model", type(model).__name__, f"{num_layers} in a list named `layers`"
        )

    @torch.no_grad()
    def run(
        self, rows: Sequence[Sequence[int]], layers: Sequence[int], dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [B, T, A, *] and last [B, T, *] as stored in `dtype`; row b is right up to its length."""
        states, last_BTH = self.states(rows, layers)
        aux_BTAH = torch.stack([encode(states[layer], dtype) for layer in layers], dim=2)
        return aux_BTAH, encode(last_BTH, dtype)

    @torch.no_grad()
    def states(
        self, rows: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """layer -> [B, T, H] and last [B, T, H] in the model's dtype."""
        longest = max(len(row) for row in rows)
        # No attention mask: the padding lies behind every real token, where causal attention does not look.
        ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        with self._hooked(layers) as states:
            last_BTH = self.module(input_ids=ids_BT, use_cache=False).last_hidden_state
        return states, last_BTH

    @contextmanager
    def _hooked(self, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        states: dict[int, torch.Tensor] = {}

        def output_of(layer: int) -> Callable[..., None]:
            def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        def inputs(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[EMBEDDINGS] = args[0] if args else kwargs["hidden_states"]

        handles = [self.layers[i].register_forward_hook(output_of(i)) for i in layers if i != EMBEDDINGS]
        if EMBEDDINGS in layers:
            handles.append(self.layers[0].register_forward_pre_hook(inputs, with_kwargs=True))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


def _captured(request: CaptureRequest, aux_TAH: torch.Tensor, last_TH: torch.Tensor) -> Captured:
    rows = len(request.tokens)
    pairs = zip(request.last_runs[0::2], request.last_runs[1::2], strict=True)
    aux = aux_TAH[:rows].cpu().contiguous()
    last = torch.cat([last_TH[start:stop] for start, stop in pairs] or [last_TH[:0]]).cpu()
    return Captured(aux, last, _hash(aux), _hash(last))


def _hash(tensor: torch.Tensor) -> int:
    return field_hash(tensor.view(torch.uint8).numpy())


def _longest_row(model: PreTrainedModel) -> int | None:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(longest) if longest else None


def torch_device(name: str) -> torch.device:
    """A device by its name; `auto` is CUDA where there is one.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name}", "extract.device", first_line(error)) from error


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
