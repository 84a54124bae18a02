"""Hypothesis strategies for what a parser may meet: anything at all, nasty JSON, valid documents changed a little."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("EYAS_FUZZ_EXAMPLES", "60"))  # a long run by hand: EYAS_FUZZ_EXAMPLES=20000
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=5000,  # ms: what takes longer is a fault of its own
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

NASTY = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, 1.5, -0.0, 1e308),
        *(float("nan"), float("inf"), "", "0", "-1", "\u0667", "\x00", "/etc/passwd", "../x", "\ud800", "a" * 3000),
        *([], [[]], {}, {"": ""}, [0, 2], ["x"], {"a": {"b": 1}}, [1] * 300, "0" * 16, "f" * 32),
    ]
).map(copy.deepcopy)  # each its own: they are put into one another
ANY_JSON = st.recursive(
    NASTY | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> Any:
    """A valid document with one to three of its values replaced, removed or joined by others."""
    made = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(made))
        path = places[draw(st.integers(0, len(places) - 1))]
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(ANY_JSON)
            continue
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                holder[path[-1]] = draw(NASTY | ANY_JSON)
            case "remove":
                del holder[path[-1]]
            case _ if isinstance(holder, list):
                holder.append(draw(NASTY))
            case _:
                holder[draw(st.text(max_size=8))] = draw(NASTY)
    return made


def as_text(value: Any) -> str:
    """JSON as Python writes it, NaN and half surrogates included."""
    try:
        return json.dumps(value)
    except ValueError:  # an integer of too many digits for text
        return "9" * 5000


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes, cut, flipped, doubled or filled with others."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "set", "cut", "double", "insert", "drop"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at] = draw(st.sampled_from(b'\x00\xff"{}[]:,0129-e\\ \n'))
            case "cut":
                del data[at:]
            case "double":
                data += data[at : at + draw(st.integers(1, 200))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=12))
            case _:
                del data[at : at + draw(st.integers(1, 20))]
    return bytes(data)


def changed_document(valid: Any, text: str | None = None) -> st.SearchStrategy[bytes]:
    """A JSON document as bytes: anything, or the valid one changed in its values or its bytes."""
    whole = (json.dumps(valid) if text is None else text).encode()
    return st.one_of(
        changed_json(valid).map(lambda value: as_text(value).encode()),
        changed_bytes(whole),
        ANY_JSON.map(lambda value: as_text(value).encode()),
        st.binary(max_size=200),
    )
