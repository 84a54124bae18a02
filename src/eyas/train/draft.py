"""The EAGLE-3 draft model: its shape, and its parameters under the names they are published with.

One decoder layer whose queries, keys and values read `[norm(embed(x)) | norm(h)]`, a projection `fc` of the target's
layer outputs into it, and a head over the draft vocabulary. What is computed with them is the objective's matter.
Source: EAGLE-3 (arXiv 2503.01840), and the draft models of SGLang (llama_eagle3.py) and vLLM (llama_eagle3.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import nn

from eyas.capture.contract import default_layers
from eyas.errors import ConfigError
from eyas.target.checkpoint import Target
from eyas.train.rope import Rope, RopeConfig

_EPS_KEYS: Final = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
_DEFAULT_EPS: Final = 1e-6
_LATENT_HEAD_DIM: Final = 128  # of draft layers for targets with latent attention, whose heads no Llama layer has
_LATENT_QUERIES: Final = 8  # query heads that share keys and values in them


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The draft's shape.

    Attributes:
        hidden_size: H.
        intermediate_size: F, of the MLP.
        num_heads, num_kv_heads, head_dim: of attention.
        vocab_size: V, of the target.
        draft_vocab_size: Vd, of the head.
        target_hidden_size: Ht, of the target's layer outputs.
        aux_layers: 0-based decoder layers of the target whose outputs are read, shallow to deep: A of them.
        rope: of the draft's own layer.
        rms_norm_eps: of every norm.
        fc_norm: each layer output has a norm of its own before `fc` (EAGLE-3.1).
        norm_output: the next step reads the state after the final norm, not before it (EAGLE-3.1).
        hidden_act: of the MLP; the servers' draft layer knows `silu` only.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    rms_norm_eps: float = _DEFAULT_EPS
    fc_norm: bool = False
    norm_output: bool = False
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        """Raises ConfigError for a shape that cannot be computed or served."""
        where = "the draft's shape"
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "draft_vocab_size", "target_hidden_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}", where, "a positive whole number is needed")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} keys and values", where)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE turns pairs", where)
        if self.draft_vocab_size > self.vocab_size:
            what = f"a draft vocabulary of {self.draft_vocab_size} in one of {self.vocab_size}"
            raise ConfigError(what, where, "at most all of the target's tokens")
        layers = list(self.aux_layers)
        if not layers or any(type(layer) is not int for layer in layers):
            raise ConfigError(f"aux_layers must be whole numbers, got {layers}", where)
        if layers != sorted(set(layers)) or layers[0] < 0:
            raise ConfigError(f"aux_layers must be ascending and distinct, got {layers}", where)
        if self.num_aux * self.target_hidden_size == self.hidden_size:
            # SGLang tells the target's states from the draft's own by their width alone, and would leave out `fc`.
            hint = "capture more layers, or choose another hidden_size"
            raise ConfigError("the target's states are as wide as the draft's", where, hint)
        if self.hidden_act != "silu":
            raise ConfigError(f"hidden_act {self.hidden_act!r}", where, "the servers' draft layer knows silu only")

    @property
    def num_aux(self) -> int:
        """A: how many of the target's layers are read."""
        return len(self.aux_layers)

    @property
    def aux_size(self) -> int:
        """A * Ht: width of what `fc` reads."""
        return self.num_aux * self.target_hidden_size

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        """The shape of one layer of the target, but with SiLU, and RoPE over whole heads.

        Args:
            target: its config is read, no weights.
            **overrides: fields of this class, as Python or YAML has them: `aux_layers=[1, 5, 9]`,
                `rope={"rope_theta": 1e6}` (keys as in config.json). None is no override. The draft vocabulary is the
                target's whole one unless `draft_vocab_size` is given.

        Raises:
            ConfigError: the config lacks a size, has a RoPE that a draft cannot have, or the shape cannot be; or an
                override is of the wrong type.
        """
        given = _checked({key: value for key, value in overrides.items() if value is not None}, target)
        found = {**_shape(target.full_config(), given, target), **given}
        for key in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if not found.get(key):
                raise ConfigError(f"the target's config does not tell the draft's {key}", target.dir, f"give {key}")
        if "rope" not in given:
            found["rope"] = RopeConfig.from_config(target.full_config(), target.dir / "config.json").portable()
        if "aux_layers" not in given:
            try:
                found["aux_layers"] = default_layers(target.num_layers)
            except ValueError as error:
                raise ConfigError(str(error), target.model) from error
        return cls(**found)

    def with_draft_vocab(self, size: int) -> Self:
        """The same with a draft vocabulary of `size` tokens."""
        return replace(self, draft_vocab_size=size)


def _checked(given: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Overrides in the types of `Eagle3Config`."""
    known = {field.name: field.type for field in fields(Eagle3Config)}
    checked = {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"the draft has no {key}", "train.draft", hint)
        is_bool = isinstance(value, bool)
        match str(known[key]):
            case "int" if isinstance(value, int) and not is_bool:
                checked[key] = value
            case "float" if isinstance(value, int | float) and not is_bool:
                checked[key] = float(value)
            case "bool" if is_bool:
                checked[key] = value
            case "str" if isinstance(value, str):
                checked[key] = value
            case "tuple[int, ...]" if isinstance(value, list | tuple) and all(type(item) is int for item in value):
                checked[key] = tuple(value)
            case "RopeConfig" if isinstance(value, RopeConfig):
                checked[key] = value
            case "RopeConfig" if isinstance(value, Mapping):
                checked[key] = RopeConfig.from_override(value, target.full_config())
            case kind:
                raise ConfigError(f"{key} is {value!r}", "train.draft", f"it must be {kind}")
    return checked


def _shape(config: Mapping[str, Any], given: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Sizes of a draft layer by the target's config; those that it does not tell are left out or None."""
    hidden = given.get("hidden_size") or target.hidden_size
    heads = given.get("num_heads") or config.get("num_attention_heads")
    if config.get("kv_lora_rank"):
        head_dim = given.get("head_dim") or _LATENT_HEAD_DIM
        heads = given.get("num_heads") or max(1, hidden // head_dim)
        kv_heads = next(count for count in range(max(1, heads // _LATENT_QUERIES), heads + 1) if heads % count == 0)
    else:
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or (hidden // heads if heads else None)
    eps = next((config[key] for key in _EPS_KEYS if config.get(key)), _DEFAULT_EPS)
    return {
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "rms_norm_eps": float(eps),
    }


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (float64 stays) and given in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight_H.shape, weight_H.to(wide.dtype), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * config.hidden_size, config.q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, config.kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """The decoder layer: `input_layernorm` is the embedding's norm, `hidden_norm` the state's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(nn.Module):
    """The draft's parameters, float32 as built, and the target's embeddings, which are not trained.

    Its `state_dict` holds exactly the published tensors but `d2t`, `t2d` and `embed_tokens`.

    Args:
        config: the shape.
        embed_tokens: [V, H], the target's input embeddings (`eyas.target.embeddings`); used as they are, not copied.
            Servers do not scale them for a draft, whatever the target does, and the norm behind would undo it.
        generator: of the initial weights; the same one gives the same weights.

    Attributes:
        midlayer: the decoder layer. fc, norm, lm_head: as published.
        fc_norm: list of A norms, or None.
        rope: of the layer.
        embed_tokens: [V, H] buffer, not part of the state.
    """

    embed_tokens: torch.Tensor

    def __init__(
        self, config: Eagle3Config, embed_tokens: torch.Tensor, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        wanted = (config.vocab_size, config.hidden_size)
        if tuple(embed_tokens.shape) != wanted:
            hint = "frozen embeddings are as wide as the draft"
            raise ConfigError(f"embed_tokens is {list(embed_tokens.shape)}, not {list(wanted)}", "", hint)
        self.config = config
        self.fc = nn.Linear(config.aux_size, config.hidden_size, bias=False)
        norms = (RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.rope, config.head_dim)
        self.register_buffer("embed_tokens", embed_tokens.detach(), persistent=False)
        self.initialise(generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draws every weight anew.

        A matrix is normal with variance 1 / inputs, which keeps the size of what it reads; the two that write to the
        residual stream have half that variance, so that together they add as much as one; norms are 1.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = (parameter.shape[1] * (2 if adds else 1)) ** -0.5
            parameter.normal_(0.0, std, generator=generator)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """h_0: [..., A * Ht] layer outputs, shallow to deep -> [..., H]."""
        if self.fc_norm is not None:
            parts = aux.chunk(self.config.num_aux, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """norm(embed(x)): [...] token ids -> [..., H], the embedding half of what attention reads."""
        return self.midlayer.input_layernorm(F.embedding(tokens, self.embed_tokens))

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())


def embedding_half(weight: torch.Tensor) -> torch.Tensor:
    """The columns of q, k or v that read the normed embedding: a view, [out, 2H] -> [out, H]."""
    return weight[:, : weight.shape[1] // 2]


def hidden_half(weight: torch.Tensor) -> torch.Tensor:
    """The columns of q, k or v that read the normed state: a view, [out, 2H] -> [out, H]."""
    return weight[:, weight.shape[1] // 2 :]
