"""The command that serves a target with an exported drafter, by SGLang or vLLM.

It does not capture: SGLang refuses a draft model beside `--enable-return-aux-hidden-states`, and states are wanted of
prompts anyway, where nothing is drafted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from eyas.disk import is_folder_there
from eyas.errors import ConfigError
from eyas.export.engines import TITLES
from eyas.export.launch import Drafting, Engine, draft_flags
from eyas.serve.capturing import installed_sglang
from eyas.serve.command import LOOPBACK, SOME_PYTHON, ServeCommand, exposure, option_of

_PORTS: Final[dict[str, int]] = {"sglang": 30000, "vllm": 8000}
#: Flags by which SGLang and vLLM are told what this module says.
_OURS: Final[dict[str, tuple[str, ...]]] = {
    "sglang": ("--speculative-algorithm", "--speculative-draft-model-path", "--enable-return-aux-hidden-states"),
    "vllm": ("--speculative-config", "-sc"),
}


def draft_command(
    model: str,
    draft: str | Path,
    *,
    engine: Engine = "sglang",
    drafting: Drafting | None = None,
    port: int | None = None,
    host: str = LOOPBACK,
    python: str | None = None,
    extra: Sequence[str] = (),
) -> ServeCommand:
    """Plan the server; nothing is looked at but paths (`eyas.export.check` looks at the draft).

    Args:
        model: the target, a folder or name on the hub.
        draft: the exported folder, or its name on the hub.
        engine: whose command.
        drafting: tokens, branches and verified tokens of a cycle.
        port: default 30000 for SGLang and 8000 for vLLM, as theirs.
        host: address it listens on; a `--host` among `extra` goes before it.
        python: interpreter that has the engine; None is this one where SGLang is installed, else `python`, and the
            program `vllm`.
        extra: further arguments of the engine's, appended as they are.

    Raises:
        ConfigError: not a port, a flag that is said twice, or drafting that the engine cannot do.
    """
    port = _PORTS[engine] if port is None else port
    if not 0 < port < 1 << 16:
        raise ConfigError("not a port", port, "choose one from 1 to 65535")
    for flag in _OURS[engine]:
        if option_of(extra, flag) is not None or flag in extra:
            raise ConfigError(f"{flag} beside --draft", flag, "eyas says it: serve.draft_steps, serve.draft_topk")
    target, head = _place(model), _place(str(draft))
    match engine:
        case "sglang":
            program = python or (sys.executable if installed_sglang() else SOME_PYTHON)
            words = (program, "-m", "sglang.launch_server", "--model-path", target)
        case "vllm" if python:
            words = (python, "-m", "vllm.entrypoints.cli.main", "serve", target)
        case "vllm":
            words = ("vllm", "serve", target)
    flags = draft_flags(engine, head, drafting or Drafting())
    said = option_of(extra, "--host")
    listens = () if said is not None else ("--host", host)
    warning = exposure(host if said is None else said, extra, TITLES[engine])
    return ServeCommand((*words, "--port", str(port), *listens, *flags, *extra), {}, TITLES[engine], warning=warning)


def _place(name: str) -> str:
    """A folder so that it is found from whatever folder the command is pasted into; a hub name as it is."""
    return str(Path(name).resolve()) if is_folder_there(Path(name)) else name
