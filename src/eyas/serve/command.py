"""A server's command line: printed for another machine, or become by this process."""

from __future__ import annotations

import ipaddress
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from eyas.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
SOME_PYTHON: Final = "python"  # on the machine where a printed command will be run


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A command line and what it needs in the environment.

    Attributes:
        argv: the program and its arguments.
        env: variables to add to the environment.
        engine: whose server it is, for messages.
        note: what was assumed and may be wrong elsewhere.
        warning: what makes the server a danger where it stands.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    engine: str = "SGLang"
    note: str = ""
    warning: str = ""

    def shell(self) -> str:
        """One line to paste into a POSIX shell: environment first, everything quoted."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])

    def run(self) -> NoReturn:
        """Replace this process by the server.

        Raises:
            ConfigError: when the program cannot be started.
        """
        if self.argv[0] == SOME_PYTHON:
            hint = "set serve.python to the interpreter that has it"
            raise ConfigError(f"{self.engine} is not installed in this environment", sys.prefix, hint)
        try:
            os.execvpe(self.argv[0], list(self.argv), {**os.environ, **self.env})
        except OSError as error:
            hint = f"set serve.python to the interpreter that has {self.engine}"
            raise ConfigError(f"cannot start the server ({error.strerror})", self.argv[0], hint) from error


def option_of(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option among the server's own arguments, the last one said; None where it is not said."""
    said = None
    for at, argument in enumerate(arguments):
        if argument == name:
            said = arguments[at + 1] if at + 1 < len(arguments) else ""
        elif argument.startswith(f"{name}="):
            said = argument.partition("=")[2]
    return said


def exposure(host: str, extra: Sequence[str], engine: str = "SGLang") -> str:
    """What listening on `host` means; empty for this machine's own addresses and for a server that asks for a key."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if local or option_of(extra, "--api-key") is not None:
        return ""
    return (
        f"whoever reaches {host} may use this server and stop it: give {engine} an --api-key, or listen on {LOOPBACK}"
    )
