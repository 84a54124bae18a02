"""JSON from a wire or a disk that others may write to: what is not plain, small and unambiguous is a ValueError."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Final, NoReturn, get_args, get_origin, get_type_hints

_MAX_SAFE_INT: Final = 2**63 - 1


def loads(text: str | bytes, limit: int) -> Any:
    """Parse a document.

    Args:
        text: UTF-8 where it is bytes.
        limit: most bytes (characters of a str) it may have; nothing larger is looked at.

    Raises:
        ValueError: too long, not JSON, too deep, a key twice, a number that is not finite, an integer of more than 64
            bits, or text that is no Unicode (and could not be written again).
    """
    if len(text) > limit:
        raise ValueError(f"{len(text)} bytes, at most {limit} are read")
    try:
        decoded = text if isinstance(text, str) else str(text, "utf-8")
        value = _DECODER.decode(decoded)
        if "\\u" in decoded:  # the only way to half a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}"[:300]) from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else _MAX_SAFE_INT + 1
    if not -_MAX_SAFE_INT - 1 <= value <= _MAX_SAFE_INT:
        raise ValueError("an integer of more than 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number that is not finite")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_no_constant
)


def shown(value: object) -> str:
    """A value of whatever type and size, for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"


def build(cls: type[Any], data: object, what: str = "") -> Any:
    """An instance of a dataclass from an object's fields, each of the type that the class declares.

    Args:
        cls: a dataclass.
        data: what was read.
        what: its name in messages; default: the class's.

    Raises:
        ValueError: a missing, unknown or ill-typed field, or what the class itself refuses.
    """
    what = what or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"not a {what}: not an object")  # noqa: TRY004  the one error of all parsers
    for name, hint in _hints(cls).items():
        if name in data and not _is(data[name], hint):
            raise ValueError(f"not a {what}: {name} is ill-typed")
    try:
        return cls(**data)
    except TypeError as error:
        raise ValueError(f"not a {what}: {error}"[:300]) from None


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _is(value: object, hint: Any) -> bool:
    """Whether a value is of a declared type: no bool for a number, an integer for a float."""
    match get_origin(hint) or hint:
        case origin if origin is UnionType:
            return any(_is(value, one) for one in get_args(hint))
        case origin if origin is dict:
            key, item = get_args(hint)
            return isinstance(value, dict) and all(_is(k, key) and _is(v, item) for k, v in value.items())
        case origin if origin in (list, tuple):
            return isinstance(value, origin) and all(_is(item, get_args(hint)[0]) for item in value)
        case origin if origin is float:
            return type(value) in (int, float)
        case origin if origin is Any:
            return True
        case origin:
            return type(value) is origin
