"""`lm_head` read from the checkpoint alone: from states after the final norm to log-probabilities, model not loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from eyas.errors import ConfigError
from eyas.target import cpu_math
from eyas.target.checkpoint import Target
from eyas.target.embeddings import EMBEDDINGS, HEADS, check_rows, check_token_matrix, find_tensor, read_present

_ROWS: Final = 4096  # positions whose logits of one block of the vocabulary are held at once
_BLOCK: Final = 8192  # of the vocabulary: 4096 x 8192 float32 are 128 MiB
# Config keys that speak of logits but change none that lm_head gives: attention's and routers' caps, memory, training.
_HARMLESS: Final = re.compile(
    r"router|attn|attention|mlp_|gate_|_init_value$|logits_to_keep$|^lm_head_bias$|^output_aux|^freeze_|^chunk_size"
    r"|^tie_|^average_|temperature$|_threshold$|^mup_enabled$"
)
_SUSPECT: Final = re.compile(r"logit|lm_head|soft_?cap|(?:^|_)mup_|output_mult|^dim_model_base$")


@dataclass(frozen=True, slots=True)
class Head:
    """The target's last linear layer and what its config does to the logits after it.

    Attributes:
        weight: [V, H] in the checkpoint's dtype; of a head read in part, only the rows asked for.
        bias: [V] likewise, where the checkpoint has one.
        scale: factor of the logits.
        softcap: logits become softcap * tanh(logits / softcap); None for no cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def load(cls, target: Target, device: str | torch.device = "cpu", rows: torch.Tensor | None = None) -> Head:
        """Read `lm_head`, or the input embedding it is tied to; only the shard that holds it has to be there.

        Args:
            target: the checkpoint.
            device: where the tensors go.
            rows: [R] token ids; only theirs are kept, in this order. None keeps all.

        Raises:
            ConfigError: the checkpoint has none, or it is quantised, of another shape, or its file is missing; or the
                config names a change of the logits that is not known here.
            ValueError: rows outside the vocabulary.
        """
        cpu_math.settle()
        scale, softcap = _transform(target.full_config(), target)
        files = target.weight_map()
        head, embedding = find_tensor(files, HEADS, target), find_tensor(files, EMBEDDINGS, target)
        ties = target.tie_flags()
        if head is None and not (embedding and any(ties)):
            hint = "name a complete checkpoint with --target" if files else "its safetensors files are needed here"
            raise ConfigError("the checkpoint has no lm_head", target.dir, hint)
        name = head or embedding
        assert name is not None
        bias_name = f"{name.removesuffix('weight')}bias" if head else None
        other = embedding if head and ties and all(ties) else None  # tied, and yet stored twice
        names = [name, *([bias_name] if bias_name in files else []), *([other] if other else [])]
        tensors = read_present(target, names, "lm_head")
        weight = check_token_matrix(tensors[name], name, target)
        if other and not torch.equal(weight, tensors[other]):
            hint = "engines disagree on which of the two counts: set tie_word_embeddings to false, or remove lm_head"
            raise ConfigError("the config ties lm_head to the embedding, but they differ", target.dir, hint)
        bias = tensors.get(bias_name or "")
        if rows is not None:
            rows = check_rows(rows, target.vocab_size)
            weight, bias = weight[rows], bias if bias is None else bias[rows]
        return cls(weight.to(device), bias if bias is None else bias.to(device), scale, softcap)

    @torch.no_grad()
    def log_probs(self, last_LH: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
        """log p(ids[l] | last[l]), computed in float32 over blocks of rows and vocabulary: never [L, V].

        Args:
            last_LH: [L, H] states after the final norm, any float dtype.
            ids_L: [L] token ids.

        Returns:
            [L] float32 on the head's device.

        Raises:
            ValueError: the shapes do not fit, or an id is outside the vocabulary.
        """
        vocab_size, hidden_size = self.weight.shape
        if last_LH.shape != (len(ids_L), hidden_size):
            raise ValueError(f"states {tuple(last_LH.shape)} for {len(ids_L)} ids of hidden size {hidden_size}")
        if len(ids_L) and not (int(ids_L.min()) >= 0 and int(ids_L.max()) < vocab_size):
            raise ValueError(f"token ids outside [0, {vocab_size})")
        parts = [self._log_probs(*part) for part in zip(last_LH.split(_ROWS), ids_L.split(_ROWS), strict=True)]
        return torch.cat(parts)

    @torch.no_grad()
    def logits(self, last_LH: torch.Tensor) -> torch.Tensor:
        """[L, rows] float32, all at once: for a few states, or a head read in part."""
        return self._logits(last_LH.to(self.weight.device).float(), slice(None))

    @torch.no_grad()
    def best(self, last_LH: torch.Tensor) -> torch.Tensor:
        """[L] int64 the most likely token after each state [L, H]; of a head read in part, among its rows."""
        parts = [self._best(part.to(self.weight.device).float()) for part in last_LH.split(_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def _best(self, states: torch.Tensor) -> torch.Tensor:
        best = torch.full((len(states),), -torch.inf, device=states.device)
        ids = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        for start in range(0, len(self.weight), _BLOCK):
            found = self._logits(states, slice(start, start + _BLOCK)).max(-1)
            ids = torch.where(found.values > best, found.indices + start, ids)
            best = torch.maximum(best, found.values)
        return ids

    def _log_probs(self, last_RH: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        states = last_RH.to(self.weight.device).float()
        ids = ids_R.to(self.weight.device).long()
        total = torch.full((len(ids),), -torch.inf, device=states.device)
        chosen = torch.zeros(len(ids), device=states.device)
        for start in range(0, len(self.weight), _BLOCK):
            logits = self._logits(states, slice(start, start + _BLOCK))
            total = torch.logaddexp(total, logits.logsumexp(-1))
            inside = (ids >= start) & (ids < start + logits.shape[1])
            picked = logits.gather(1, (ids - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            chosen = torch.where(inside, picked, chosen)
        return chosen - total

    def _logits(self, states_RH: torch.Tensor, block: slice) -> torch.Tensor:
        logits = states_RH @ self.weight[block].float().T
        if self.bias is not None:
            logits += self.bias[block].float()
        logits *= self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _transform(config: Mapping[str, Any], target: Target) -> tuple[float, float | None]:
    """Factor and soft cap of the logits, by the config; the same key means other things in other families."""
    family = str(config.get("model_type", ""))
    scale, softcap = 1.0, None
    for key, value in config.items():
        if not _SUSPECT.search(key) or _HARMLESS.search(key) or value is None or isinstance(value, bool):
            continue
        match key:
            case "final_logit_softcapping":
                softcap = float(value) if value else None
            case "logits_scaling" if family.startswith("granite"):
                scale = 1 / float(value)
            case "logits_scaling" if family.startswith("hyperclovax"):
                scale = float(value)
            case "logit_scale" if family.startswith("cohere"):
                scale = float(value)
            case _ if value not in (0, 1):
                hint = f"{family or 'this'} models are not known to the audit by logits"
                raise ConfigError(f"unknown change of the logits: {key} = {value}", target.dir / "config.json", hint)
    return scale, softcap
