"""Rotary positions of the draft layer: what the target's config says, in a form that every engine reads alike.

The frequencies are transformers' (`ROPE_INIT_FUNCTIONS`); here is only which settings a draft takes over. Heads are
rotated whole and by halves (element i with i + D/2), as Llama's are: the servers' draft layer is a Llama layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.errors import ConfigError

#: Kind -> the options it has, and whether it cannot do without them.
KINDS: Final[Mapping[str, Mapping[str, bool]]] = {
    "default": {},
    "linear": {"factor": True},
    "dynamic": {"factor": True},
    "llama3": {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": True,
    },
    "yarn": {
        "factor": True,
        "original_max_position_embeddings": True,
        "beta_fast": False,
        "beta_slow": False,
        "truncate": False,
        "attention_factor": False,
        "mscale": False,
        "mscale_all_dim": False,
    },
}
_DEFAULT_THETA: Final = 10_000.0  # what transformers and both servers take where a config names none
_DEFAULT_POSITIONS: Final = 2048  # transformers' LlamaConfig
_GLOBAL_LAYERS: Final = "full_attention"  # of configs with one setting for each kind of layer


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys.

    Attributes:
        kind: a key of KINDS.
        theta: base wavelength.
        max_positions: longest sequence the settings are made for.
        options: of the kind.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    max_positions: int = _DEFAULT_POSITIONS
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"rope {self.kind}"
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise ConfigError(f"a draft layer has no RoPE of kind {self.kind!r}", where, f"name one of {known}")
        if self.theta <= 1 or self.max_positions < 1:
            raise ConfigError(f"theta {self.theta} over {self.max_positions} positions", where)
        if missing := [key for key, needed in KINDS[self.kind].items() if needed and self.options.get(key) is None]:
            raise ConfigError(f"rope {self.kind} needs {missing[0]}", where, f"given: {sorted(self.options)}")
        if unknown := self.options.keys() - KINDS[self.kind].keys():
            raise ConfigError(f"rope {self.kind} has no option {min(unknown)}", where)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: object = "") -> Self:
        """The setting of a model's config, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

        Where layers differ (Gemma 3), it is that of full attention. What has no meaning for text in a Llama layer is
        left out: sections of images and video, a part of each head that stays unrotated.

        Args:
            config: of the text decoder, defaults filled in.
            where: named in errors.

        Raises:
            ConfigError: a kind that a draft layer cannot have (longrope), or options missing.
        """
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if isinstance(given.get(_GLOBAL_LAYERS), Mapping):
            given = given[_GLOBAL_LAYERS]
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if kind == "mrope":  # sections of a multimodal model's positions: for text all three are equal
            kind = "default"
        positions = int(config.get("max_position_embeddings") or _DEFAULT_POSITIONS)
        theta = given.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
        options = {key: given[key] for key in KINDS.get(kind, {}) if given.get(key) is not None}
        original = "original_max_position_embeddings"
        if original in KINDS.get(kind, {}) and original not in options:  # as transformers fills it in
            options[original] = config.get(original) or positions
        try:
            return cls(kind, float(theta), positions, options)
        except ConfigError as error:
            hint = error.hint or "name the draft's own RoPE"
            raise ConfigError(error.what, where or error.where, hint) from error

    @classmethod
    def from_override(cls, given: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """A draft's own setting: `rope_parameters` as in config.json, and `max_position_embeddings` if it differs.

        Args:
            given: every key must have a meaning.
            config: the target's, for `max_position_embeddings`.

        Raises:
            ConfigError: a kind that a draft layer cannot have, options missing, or an unknown key.
        """
        where, positions = "train.draft.rope", "max_position_embeddings"
        found = cls.from_config({positions: config.get(positions), **given, "rope_parameters": given}, where)
        if unknown := given.keys() - {"rope_type", "rope_theta", positions, *KINDS[found.kind]}:
            raise ConfigError(f"rope {found.kind} has no option {min(unknown)}", where)
        return found

    def portable(self) -> Self:
        """The same where every server computes it alike; else what is the same within `max_positions`.

        `dynamic` changes with the sequence's length in transformers, is no scaling at all in vLLM, and in SGLang always
        the one for the longest sequence (its DynamicNTKScalingRotaryEmbedding).
        """
        return replace(self, kind="default", options={}) if self.kind == "dynamic" else self

    def to_config(self) -> dict[str, Any]:
        """Keys of config.json, in both spellings."""
        options = dict(self.options)
        if attention := options.get("attention_factor"):
            # SGLang does not know this option: it multiplies what follows from the factor by `attn_factor`.
            options["attn_factor"] = attention / self._attention_by_factor()
        scaling = None if self.kind == "default" else {"rope_type": self.kind, **options}
        return {
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": self.kind, "rope_theta": self.theta, **options},
        }

    def _attention_by_factor(self) -> float:
        options = {key: value for key, value in self.options.items() if key != "attention_factor"}
        return replace(self, options=options).frequencies(2)[1]

    def frequencies(self, head_dim: int, longest: int | None = None) -> tuple[torch.Tensor, float]:
        """Angle by which each pair of a head turns a position, and the factor of cosines and sines.

        Args:
            head_dim: D, even.
            longest: positions of the longest sequence, which `dynamic` depends on beyond `max_positions`.

        Returns:
            [D / 2] float32 on the CPU, and the factor (1 but for yarn).
        """
        # The default is the linear kind without scaling; transformers keeps it in its model classes only.
        kind, options = ("linear", {"factor": 1.0}) if self.kind == "default" else (self.kind, dict(self.options))
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": kind, "rope_theta": self.theta, **options},
        )
        with torch.device("cpu"):  # a model may be built on the meta device
            angles_D, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=longest)
        return angles_D.float(), float(factor)


class Rope(nn.Module):
    """Cosines and sines of positions.

    Args:
        config: the setting.
        head_dim: D, even.
        longest: see `RopeConfig.frequencies`.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: RopeConfig, head_dim: int, longest: int | None = None) -> None:
        super().__init__()
        self.config = config
        inv_freq, self.factor = config.frequencies(head_dim, longest)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, for `rotate`.

        Args:
            positions: any shape [...], integers; those of step k are `positions + k`.

        Returns:
            Two of [..., D / 2], float32: a position of some thousands times an angle needs more than bfloat16.
        """
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos() * self.factor, angles.sin() * self.factor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves between devices, and stays in float32 when the model around it is cast."""
        kept = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(self.inv_freq.device)
        return self


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys at their positions.

    Args:
        x: [..., heads, D].
        cos, sin: [..., D / 2], of `Rope`.

    Returns:
        [..., heads, D] in the dtype of x, computed in that of `cos` where it is wider.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
