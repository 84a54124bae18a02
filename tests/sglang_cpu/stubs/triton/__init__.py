"""Stand-in for triton: kernels can be decorated and configured, never launched."""

from __future__ import annotations

from typing import Any

from standin import stand_in

__version__ = "3.9.0"


class Kernel:
    """A decorated function that refuses to run."""

    def __init__(self, function: Any) -> None:
        self.fn = self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"Triton kernel {self.__name__} launched on the CPU test server")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self[None]


def _decorate(function: Any) -> Any:
    return function if isinstance(function, Kernel) else Kernel(function)


def jit(function: Any = None, **options: Any) -> Any:
    return _decorate if function is None else _decorate(function)


def autotune(*args: Any, **kwargs: Any) -> Any:
    return _decorate


heuristics = autotune


class Config:
    def __init__(self, kwargs: Any = None, **options: Any) -> None:
        self.kwargs = kwargs or options


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


stand_in(
    __name__,
    submodules=(
        "language",
        "language.core",
        "language.extra",
        "language.math",
        "compiler",
        "compiler.compiler",
        "runtime",
        "runtime.cache",
        "runtime.driver",
        "runtime.jit",
        "backends",
        "backends.compiler",
        "testing",
        "tools",
    ),
    special={
        "triton.language.constexpr": constexpr,
        "triton.language.core.constexpr": constexpr,
        "triton.backends.backends": {},
    },
)
