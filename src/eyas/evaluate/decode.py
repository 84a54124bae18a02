"""Speculative decoding with a transformers target in this process, one sequence at a time.

A cycle: the drafter drafts behind the last token; one forward of the target reads that token and all drafts, in a tree
under a mask by which each sees its ancestors only; what it accepts stays in its cache, the rest is dropped; the drafter
takes in the target's states of the accepted rows. The text is the target's own, token for token where it is greedy, in
distribution where it is sampled (`eyas.evaluate.verifying`).

Floating point adds one exception: a forward of several rows rounds otherwise than one of a single row, so that the
likeliest of two tokens as likely as each other to five digits may be another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eyas.errors import ConfigError, EngineError
from eyas.evaluate import verifying
from eyas.evaluate.drafting import Drafter, Drafting, Tree
from eyas.target import cpu_math
from eyas.target.decoder import decoders, layers_of

_WHOLE: Final = ("full_attention",)  # layers that a mask of our own can be given to


class Seen(NamedTuple):
    """What the target says of n rows: [n, V] logits in float32, [n, A * H] outputs of the layers the drafter reads."""

    logits: Tensor
    aux: Tensor


class TargetModel:
    """A transformers model with a cache that can be rolled back, watched at some of its layers.

    Args:
        model: any causal language model of transformers whose cache is keys and values.
        layers: decoder layers whose outputs are wanted, ascending.
        num_layers: N.

    Raises:
        EngineError: no such layers in the model.
        ConfigError: its layers keep a state that cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], num_layers: int) -> None:
        cpu_math.settle()
        self._model = model
        self.device: torch.device = next(model.parameters()).device
        text = model.config.get_text_config(decoder=True)
        self._kinds = tuple(getattr(text, "layer_types", None) or ())
        self._window = any("sliding" in kind or "chunked" in kind for kind in self._kinds) or bool(
            not self._kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        )
        if state := next((kind for kind in self._kinds if "attention" not in kind or "linear" in kind), None):
            what = f"the target has {state} layers, whose state cannot be rolled back"
            raise ConfigError(what, type(model).__name__, "simulate on a store, or measure on a server")
        longest = getattr(text, "max_position_embeddings", None)
        self.longest: int | None = int(longest) if longest else None
        found = next((all_ for one in decoders(model) if len(all_ := layers_of(one)) >= num_layers), None)
        if found is None:
            raise EngineError("found no decoder layers in the model", type(model).__name__)
        self._outputs: dict[int, Tensor] = {}
        self._hooks = [found[layer].register_forward_hook(self._keeper(layer)) for layer in layers]
        self._layers = tuple(layers)
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # the older name
        self._keeps_logits = "logits_to_keep" in known
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Forget the sequence."""
        # Without a config all layers keep all keys, those with a sliding window too: they can be rolled back.
        self._cache, self.rows, self._pending = DynamicCache(), 0, 0

    def prefill(self, tokens: Sequence[int]) -> Seen:
        """Read a prompt: logits of its last row, outputs of all."""
        seen = self._forward(torch.tensor(tokens, device=self.device), {"logits_to_keep": 1})
        self.rows = len(tokens)
        return Seen(seen.logits[-1:], seen.aux)

    def read(self, token: int, tree: Tree | None = None) -> Seen:
        """Read the text's last token and the drafts behind it; `keep` must follow."""
        drafts = tree or Tree((), (), ())
        tokens = torch.tensor([token, *drafts.tokens], device=self.device)
        options: dict[str, Any] = {}
        if tree is not None and tree.parents != tuple(range(-1, len(tree.parents) - 1)):
            options["attention_mask"] = self._tree_mask(tree)
        depths = torch.tensor([0, *(depth + 1 for depth in drafts.depths)], device=self.device)
        options["position_ids"] = (self.rows + depths)[None]
        self._pending = len(tokens)
        return self._forward(tokens, options)

    def keep(self, path: Sequence[int]) -> None:
        """Of what was read last keep the token and these drafts, in the order of the text."""
        kept, dropped = 1 + len(path), self._pending - 1 - len(path)
        if tuple(path) == tuple(range(len(path))):
            if dropped:
                self._cache.crop(-dropped)
        else:
            drafts = torch.tensor([0, *(1 + node for node in path)], device=self.device)
            at = torch.cat([torch.arange(self.rows, device=self.device), self.rows + drafts])
            for layer in self._cache.layers:
                layer.keys = layer.keys.index_select(-2, at.to(layer.keys.device))  # pyright: ignore
                layer.values = layer.values.index_select(-2, at.to(layer.values.device))  # pyright: ignore
        self.rows, self._pending = self.rows + kept, 0

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, options: dict[str, Any]) -> Seen:
        if not self._keeps_logits:
            options.pop("logits_to_keep", None)
        out = self._model(input_ids=tokens[None], use_cache=True, **{self._cache_name: self._cache}, **options)
        outputs = [self._outputs.pop(layer)[0] for layer in self._layers] or [out.logits.new_empty((len(tokens), 0))]
        return Seen(out.logits[0].float(), torch.cat(outputs, -1))

    def _tree_mask(self, tree: Tree) -> Tensor:
        """[1, 1, 1 + n, rows + 1 + n] added to attention's scores: each sees the text, its ancestors and itself."""
        if self._window or any(kind not in _WHOLE for kind in self._kinds):
            hint = "a chain is: topk 1. Or simulate on a store, or measure on a server"
            raise ConfigError("trees are not verified for a target with attention windows", self._kinds, hint)
        count = 1 + len(tree.tokens)
        sees = torch.eye(count, dtype=torch.bool)
        sees[:, 0] = True
        for node, parent in enumerate(tree.parents):
            sees[node + 1] |= sees[parent + 1]
        dtype = self._model.dtype
        mask = torch.zeros((count, self.rows + count), dtype=dtype)
        mask[:, self.rows :].masked_fill_(~sees, torch.finfo(dtype).min)
        return mask[None, None].to(self.device)

    def _keeper(self, layer: int) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return keep


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target chooses.

    Attributes:
        temperature: 0 takes the likeliest token.
        max_new_tokens: longest answer.
        ends: tokens that end it.
    """

    temperature: float = 0.0
    max_new_tokens: int = 256
    ends: Collection[int] = ()

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V], for a temperature that is not 0."""
        return (logits / self.temperature).softmax(-1)


class Decoded(NamedTuple):
    """One answer.

    Attributes:
        tokens: of the answer, its end token included.
        cycles: (accepted, possible) of each cycle, within the answer: for `eyas.acceptance.cycle_counts`.
        accepted: of each cycle as a server counts it, what lies behind the answer's end included.
    """

    tokens: list[int]
    cycles: list[tuple[int, int]]
    accepted: list[int]


def decode(
    model: TargetModel,
    drafter: Drafter,
    plan: Drafting,
    prompt: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Decoded:
    """The target's answer, by speculative decoding.

    Args:
        model, drafter: reset here.
        plan: how to draft; a temperature here asks for one in `sampling`.
        prompt: token ids.
        sampling: the target's.
        generator: of what is sampled, on the target's device.
    """
    model.reset()
    drafter.reset()
    seen = model.prefill(prompt)
    tokens = [_choose(seen.logits[-1], sampling, generator)]
    drafter.extend(seen.aux, torch.tensor([*prompt[1:], tokens[0]]))
    begins: list[int] = []
    accepted: list[int] = []
    while not _is_over(tokens, sampling):
        begins.append(len(tokens))
        tree = drafter.draft(plan, generator=generator)
        seen = model.read(tokens[-1], tree)
        verdict = _verify(drafter, tree, seen.logits, sampling, generator)
        model.keep(verdict.path)
        new = [*(tree.tokens[node] for node in verdict.path), verdict.token]
        rows = torch.tensor([0, *(1 + node for node in verdict.path)], device=seen.aux.device)
        drafter.extend(seen.aux[rows], torch.tensor(new))
        accepted.append(len(verdict.path))
        tokens += new
    answer = _until_end(tokens, sampling)
    room = [min(plan.depth, len(answer) - begin) for begin in begins]
    cycles = [(min(a, left), left) for a, left in zip(accepted, room, strict=True)]
    return Decoded(answer, cycles, accepted)


def decode_plainly(
    model: TargetModel, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None = None
) -> list[int]:
    """The target's answer, a forward a token."""
    model.reset()
    tokens = [_choose(model.prefill(prompt).logits[-1], sampling, generator)]
    while not _is_over(tokens, sampling):
        logits = model.read(tokens[-1]).logits
        model.keep(())
        tokens.append(_choose(logits[-1], sampling, generator))
    return tokens


def _verify(
    drafter: Drafter, tree: Tree, logits_nV: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> verifying.Verdict:
    if not sampling.temperature:
        return verifying.greedy(tree, logits_nV.argmax(-1).tolist())
    probs_nV = sampling.probabilities(logits_nV)
    if tree.probs is None:
        return verifying.drawn(tree, probs_nV, generator)
    drafted = torch.stack([drafter.probabilities(one, probs_nV.shape[1]) for one in tree.probs])
    return verifying.ratio(tree, probs_nV, drafted.to(probs_nV.device), generator)


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if not sampling.temperature:
        return int(logits_V.argmax())
    return verifying.draw(sampling.probabilities(logits_V), generator)


def _is_over(tokens: Sequence[int], sampling: Sampling) -> bool:
    return len(tokens) >= sampling.max_new_tokens or any(token in sampling.ends for token in tokens)


def _until_end(tokens: list[int], sampling: Sampling) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(tokens) if token in sampling.ends), len(tokens))
    return tokens[: min(stop, sampling.max_new_tokens)]
