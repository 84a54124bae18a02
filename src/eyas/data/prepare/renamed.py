"""Which role names a file uses for the template's roles: for the account, so that a mapping is never silent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from eyas.data.sources.messages import CALL_ROLES, ROLES

#: A role in JSON text. Inside a text the quotes are escaped, and do not match.
_WRITTEN: Final = re.compile(rb'"(?:role|from)"\s*:\s*"([^"\\]{1,60})"')
_KEYS: Final = ("role", "from")


def renamed_roles(payload: Any, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name as written, role given to the template) of each message whose role is not written as it is given.

    Args:
        payload: a row as `Raw` has it.
        roles: further names, as `prepare.roles` has them.
    """
    for name in _written(payload):
        folded = name.strip().lower()
        known = next((role for own, role in roles.items() if own.strip().lower() == folded), None)
        role = known or ROLES.get(folded) or ("assistant" if folded in CALL_ROLES else name)
        if role != name:
            yield name, role


def _written(payload: Any) -> Iterator[str]:
    match payload:
        case bytes():
            for name in _WRITTEN.findall(payload):
                yield name.decode("utf-8", "replace")
        case dict():
            yield from (value for key in _KEYS if isinstance(value := payload.get(key), str))
            for value in payload.values():
                yield from _written(value)
        case list():
            for value in payload:
                yield from _written(value)
