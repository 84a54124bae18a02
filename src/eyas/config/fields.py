"""What every section's fields are made of: sizes, lists of numbers, octal modes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]i?b)?", value.strip().lower().replace("_", ""))
    if match is None:
        raise ValueError("not a size; write one such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS.get(match[2], 1))


def _parse_ints(value: object) -> object:
    if isinstance(value, int):
        return (value,)
    return value.replace(",", " ").split() if isinstance(value, str) else value


def check_mode(text: str) -> str:
    if re.fullmatch("0?[0-7]{2}[0145]", text) is None:
        raise ValueError("not octal permission bits that keep others from writing; write one such as 600 or 660")
    return text


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
"""A positive number of bytes; text such as `2GiB` or `500MB` is understood."""


Ints = Annotated[tuple[int, ...], BeforeValidator(_parse_ints)]
"""Whole numbers: `[1, 2]`, `1,2` or `1`."""


PositiveInts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_parse_ints)]
"""As `Ints`, each at least 1."""


class Section(BaseModel):
    """A part of the settings: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
