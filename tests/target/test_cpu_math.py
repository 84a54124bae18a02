"""Before a function runs over many numbers, in several threads, it has run over one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.extract.hf import hidden_states, load_model
from eyas.target import cpu_math
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from tiny_models import llama


class FirstCalls(TorchDispatchMode):
    """How many numbers each elementwise function was first called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], torch.Tensor):
            self.first.setdefault(name, args[0].numel())
        return func(*args, **(kwargs or {}))


def forward(target: Target) -> None:
    hidden_states(load_model(target, device="cpu", dtype="f32"), list(range(5, 25)), [1])


def log_probs(target: Target) -> None:
    Head.load(target).log_probs(torch.randn(20, target.hidden_size), torch.arange(20))


@pytest.mark.parametrize("work", [forward, log_probs])
def test_the_first_call_of_each_function_is_on_one_number(work: Callable[[Target], None], tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    cpu_math.settle.cache_clear()  # as in a process that has not computed yet
    with FirstCalls() as calls:
        work(Target.load(str(tmp_path)))
    assert {name for name in ("cos", "sin", "exp", "log", "sqrt", "tanh", "erf") if calls.first.get(name) != 1} == set()
