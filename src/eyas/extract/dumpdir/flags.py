"""What a dump does not say of itself, and a person must."""

from __future__ import annotations

from typing import Final

from eyas.errors import ConfigError

_MISSING: Final = {
    "--dump-dir": "the folder in which the server makes its req_N folders",
    "--server": "the URL of the server that makes the dumps",
    "--layers": "the 0-based decoder layers whose outputs are dumped, in the order of the columns, such as 2,30,57",
    "--last": "pre-norm or post-norm: whether the dumped last states are from before or after the final norm",
}


def missing(flag: str) -> ConfigError:
    """A dump says nothing of itself, so these are given, never guessed."""
    return ConfigError("a dump folder does not say what is in it", flag, f"add {flag}: {_MISSING[flag]}")
