"""What makes the peers' code import and run where a package is missing that training never calls, or on a CPU."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import types
from typing import Any

from torch.nn.attention import flex_attention

#: What these libraries import for data loading, where it is missing.
_UNUSED = ("openai", "datasets", "loguru")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages that training never calls: any name in them is a class that cannot be made."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})

        module.__dict__["__getattr__"] = missing
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare_peers(device: str) -> None:
    """Before any peer is imported: nothing is fetched; on a CPU their Triton kernels are interpreted."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    importlib.import_module("sys").meta_path.append(
        _Absent({name for name in _UNUSED if importlib.util.find_spec(name) is None})
    )
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        flex_attention._validate_device = lambda *_: None  # refuses gradients on a CPU; its plain mathematics has them
