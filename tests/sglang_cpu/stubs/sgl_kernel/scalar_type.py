"""Names of quantised number formats, compared but never computed with."""

from __future__ import annotations


class ScalarType:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"ScalarType({self.name})"


class _ScalarTypes:
    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        value = ScalarType(name)
        setattr(self, name, value)
        return value


scalar_types = _ScalarTypes()
