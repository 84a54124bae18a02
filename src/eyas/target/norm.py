"""The target's final norm alone: the module that transformers would run, with the checkpoint's weights."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from eyas.capture.fingerprint import is_outside_layers
from eyas.errors import ConfigError, first_line
from eyas.target.checkpoint import Target
from eyas.target.decoder import decoders, layers_of

_NAMES: Final = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
_ROWS: Final = 8192  # rows that are held in float32 at once


class FinalNorm:
    """[L, H] states before the final norm -> [L, H] after it, computed in float32.

    Args:
        module: the norm, with float32 weights.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module.eval()
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    @classmethod
    def load(cls, target: Target, device: str | torch.device = "cpu") -> FinalNorm:
        """Take the norm's class and settings from transformers' model of this config, and its weights from the files.

        Raises:
            ConfigError: transformers does not know the architecture, or the checkpoint does not have the norm.
        """
        name, module = _find_norm(_skeleton(target), target)
        if any(True for _ in module.buffers()):
            raise ConfigError("the final norm has state of its own", target.dir, type(module).__name__)
        wanted = dict(module.named_parameters())
        names: dict[str, str] = {}
        for known in target.weight_map():
            match = re.search(rf"(?:^|\.){name}\.(\w+)$", known)
            if match and match[1] in wanted and is_outside_layers(known):
                if match[1] in names:
                    raise ConfigError("the checkpoint has two final norms", target.dir, f"{names[match[1]]}, {known}")
                names[match[1]] = known
        if missing := wanted.keys() - names.keys():
            raise ConfigError(f"the checkpoint has no {name}.{min(missing)}", target.dir, "a complete one is needed")
        tensors = target.tensors(list(names.values()))
        module = module.to_empty(device=device).float()
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                if tensors[names[key]].shape != parameter.shape:
                    raise ConfigError(f"{names[key]} has another shape than the config says", target.dir)
                parameter.copy_(tensors[names[key]])
        return cls(module.requires_grad_(False))

    @torch.no_grad()
    def __call__(self, states_LH: torch.Tensor) -> torch.Tensor:
        """States after the norm, in the dtype and on the device of those before it."""
        parts = [self._module(part.to(self._device).float()) for part in states_LH.split(_ROWS)]
        return torch.cat(parts).to(states_LH.device, states_LH.dtype)


def _skeleton(target: Target) -> torch.nn.Module:
    """The target's model without any memory behind its weights."""
    config = target.text_config()
    if config is None:
        raise ConfigError("transformers does not know the model", target.dir, "does extract.trust_remote_code help?")
    try:
        with torch.device("meta"):
            if (build := _named_class(target, config)) is not None:
                return build(config)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=target.trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError, ImportError) as error:
        raise ConfigError("transformers cannot build the model", target.dir, first_line(error)) from error


def _named_class(target: Target, config: PreTrainedConfig) -> Any:
    """transformers' class of the name the text config gives, where it takes this config."""
    for name in target.config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and getattr(found, "config_class", None) is type(config):
            return found
    return None


def _find_norm(model: Any, target: Target) -> tuple[str, torch.nn.Module]:
    for module in decoders(model):
        if layers_of(module):
            for name in _NAMES:
                if isinstance(norm := getattr(module, name, None), torch.nn.Module):
                    return name, norm
    raise ConfigError("found no final norm in the model", target.dir, type(model).__name__)
