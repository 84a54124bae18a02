"""The exact commands that start a server: capturing a target's states, or drafting for it.

capturing.py  SGLang with the capture plugin       drafting.py  SGLang or vLLM with an exported drafter
command.py    a command line, printed or run
"""

from __future__ import annotations

from eyas.serve.capturing import NEWEST_TESTED, OLDEST_SUPPORTED, installed_sglang, serve_command
from eyas.serve.command import LOOPBACK, ServeCommand
from eyas.serve.drafting import draft_command

__all__ = [
    "LOOPBACK",
    "NEWEST_TESTED",
    "OLDEST_SUPPORTED",
    "ServeCommand",
    "draft_command",
    "installed_sglang",
    "serve_command",
]
