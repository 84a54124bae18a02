"""Import stand-ins: packages SGLang imports at start-up but text serving on CPU never runs.

`stand_in(package)` turns a package's module into one whose every submodule can be imported and whose every attribute
exists. What is only named at import time (decorators, base classes, annotations) works; what is *called* raises, so a
code path that really needs the package can never pass unnoticed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, NoReturn


def _refuse(qualified: str) -> NoReturn:
    raise RuntimeError(f"{qualified} is a stand-in for imports; it cannot run on this CPU test server")


def _placeholder(qualified: str, name: str) -> Any:
    if name[:1].isupper():  # a class by convention: may be subclassed or annotated with, never instantiated
        return type(name, (), {"__init__": lambda self, *args, **kwargs: _refuse(qualified)})

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(qualified)

    function.__name__ = name
    return function


class StandIn(ModuleType):
    """A module that invents attributes on demand. `special` overrides single names by qualified name."""

    special: ClassVar[dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        qualified = f"{self.__name__}.{name}"
        if qualified in self.special:
            value = self.special[qualified]
        elif qualified in sys.modules:
            value = sys.modules[qualified]
        else:
            value = _placeholder(qualified, name)
        setattr(self, name, value)
        return value


class _Submodules(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self.prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


def stand_in(package: str, *, submodules: tuple[str, ...] = (), special: dict[str, Any] | None = None) -> None:
    """Make `package` a stand-in.

    Args:
        package: its `__name__`; call from its `__init__`.
        submodules: dotted names reached by attribute without an import of their own, parents first.
        special: qualified name -> object, where a placeholder will not do.
    """
    sys.modules[package].__class__ = StandIn
    StandIn.special |= special or {}
    sys.meta_path.append(_Submodules(package))
    for name in submodules:
        import_module(f"{package}.{name}")
