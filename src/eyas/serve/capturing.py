"""The exact command that starts an SGLang server with the capture plugin active.

`serve_command` is a pure plan: flags by release, plugin settings by environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.capture.contract import DTYPES, LAST_MODES, default_layers
from eyas.capture.settings import SETTINGS_ENV, WRITER_MODES, ServerSettings
from eyas.errors import ConfigError
from eyas.serve.command import LOOPBACK, SOME_PYTHON, ServeCommand, exposure, option_of

NEWEST_TESTED: Final = "0.5.23"
OLDEST_SUPPORTED: Final = "0.5.17"
_OWN_FLAGS_SINCE: Final = (0, 5, 23)  # the first release with --enable-return-aux-hidden-states

#: Models that have only SGLang's older setter of layers to keep. Its numbering differs between models; on these the
#: ids are layer outputs, as DFLASH's are (read in 0.5.23, and the plugin checks it at start).
_EAGLE3_ONLY: Final = frozenset(
    {
        "ApertusForCausalLM",
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "Llama4ForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
    }
)


def installed_sglang() -> str | None:
    """Version of SGLang in this environment, None when there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def serve_command(  # noqa: PLR0913 - every argument is one documented choice of the user
    model: str,
    *,
    layers: Sequence[int] | None = None,
    last: str = "loss",
    dtype: str = "bf16",
    spool: str | Path | None = None,
    quota_bytes: int = 8 << 30,
    port: int = 30000,
    host: str = LOOPBACK,
    sglang_version: str | None = None,
    extra: Sequence[str] = (),
    python: str | None = None,
    mode: int = 0o600,
    group: str | None = None,
    writers: str = "process",
    writer_threads: int = 8,
    arena_bytes: int = 0,
) -> ServeCommand:
    """Plan the server for a target.

    Args:
        model: folder, or name on the Hugging Face hub.
        layers: 0-based layers whose output is captured; None takes `contract.default_layers` of the model's config.
        last, dtype, quota_bytes, mode, group, writers, writer_threads, arena_bytes: as in `contract.ServerSettings`.
        spool: folder for finished records, shared by server and client; None is /dev/shm/eyas-<port>.
        port: where the server listens.
        host: address it listens on; a `--host` among `extra` goes before it.
        sglang_version: the release that will run the command; None takes the installed one, else the newest tested.
        extra: further SGLang arguments, appended as they are.
        python: interpreter that has SGLang; None is this one where SGLang is installed, else `python`.

    Raises:
        ConfigError: an unsupported release, unreadable config, or layers that must be named and are not.
    """
    _check_choices(last, dtype, writers, quota_bytes, port)
    version, is_installed, note = _release_there(sglang_version, python)
    config = read_config(model) if not layers or Path(model).is_dir() else {}
    chosen = _chosen_layers(model, text_config(config), layers)
    settings = ServerSettings(
        layers=chosen,
        spool=str(Path(spool).absolute()) if spool is not None else f"/dev/shm/eyas-{port}",
        last=last,
        dtype=dtype,
        quota_bytes=quota_bytes,
        mode=mode,
        group=group,
        writers=writers,
        writer_threads=writer_threads,
        arena_bytes=arena_bytes,
    )
    program = python or (sys.executable if is_installed else SOME_PYTHON)
    # A path that holds from whatever folder the command is pasted into.
    served = str(Path(model).resolve()) if Path(model).is_dir() else model
    said = option_of(extra, "--host")
    listens = () if said is not None else ("--host", host)
    flags = _capture_flags(version, chosen, config.get("architectures"))
    argv = (program, "-m", "sglang.launch_server", "--model-path", served, "--port", str(port))
    argv, env = (*argv, *listens, *flags, *extra), {SETTINGS_ENV: settings.to_env()}
    return ServeCommand(argv, env, note=note, warning=exposure(host if said is None else said, extra))


def _check_choices(last: str, dtype: str, writers: str, quota_bytes: int, port: int) -> None:
    if last not in LAST_MODES or dtype not in DTYPES:
        choices = f"last: {', '.join(LAST_MODES)}; dtype: {', '.join(DTYPES)}"
        raise ConfigError("unknown capture setting", f"last={last}, dtype={dtype}", choices)
    if writers not in WRITER_MODES:
        raise ConfigError("unknown capture setting", f"writers={writers}", f"one of {', '.join(WRITER_MODES)}")
    if quota_bytes < 1:
        raise ConfigError("the spool quota must be positive", f"quota_bytes={quota_bytes}")
    if not 0 < port < 1 << 16:
        raise ConfigError("not a port", port, "choose one from 1 to 65535")


def _release_there(named: str | None, python: str | None) -> tuple[str, bool, str]:
    """(the release that will run the command, whether SGLang was found there, what to say where it is assumed)."""
    installed = installed_sglang() if python is None else None if named else _sglang_of(python)
    if known := named or installed:
        return known, installed is not None, ""
    place = python or "this environment"
    assumed = f"the flags are for {NEWEST_TESTED}; serve.sglang_version names another release"
    return NEWEST_TESTED, False, f"no SGLang found in {place}: {assumed}"


def _sglang_of(python: str) -> str | None:
    """The release another interpreter has; None where it cannot be asked (it may be on another machine)."""
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None


def _capture_flags(version: str, layers: Sequence[int], architectures: Any) -> tuple[str, ...]:
    release = _release(version)
    if release < _release(OLDEST_SUPPORTED):
        raise ConfigError(
            "this SGLang release is not supported", f"sglang {version}", f"use {OLDEST_SUPPORTED} or newer"
        )
    if release >= _OWN_FLAGS_SINCE:
        # The algorithm only names the convention for layer ids (the output of layer i); no draft is loaded.
        older = isinstance(architectures, list) and not _EAGLE3_ONLY.isdisjoint(map(str, architectures))
        return (
            "--enable-return-aux-hidden-states",
            "--speculative-algorithm",
            "EAGLE3" if older else "DFLASH",
            "--return-aux-hidden-state-layer-ids",
            *map(str, layers),
        )
    # The plugin takes the last state in a Python hook, which the replay of a prefill graph would not run.
    return (
        "--enable-return-hidden-states",
        "--return-hidden-states-mode",
        "full",
        "--cuda-graph-backend-prefill",
        "disabled",
    )


def _release(version: str) -> tuple[int, int, int]:
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError("not an SGLang version", version, f"give one like {NEWEST_TESTED}")
    return int(match[1]), int(match[2]), int(match[3])


def _chosen_layers(model: str, config: Mapping[str, Any], layers: Sequence[int] | None) -> tuple[int, ...]:
    depth = config.get("num_hidden_layers")
    if not layers:
        if not isinstance(depth, int):
            raise ConfigError("the config names no num_hidden_layers", model, "name the layers to capture")
        try:
            return default_layers(depth)
        except ValueError as error:
            raise ConfigError(str(error), model, f"name ascending layers from 0 to {depth - 2}") from error
    chosen = tuple(layers)
    if list(chosen) != sorted(set(chosen)) or chosen[0] < 0:
        raise ConfigError("layers must be ascending, distinct and not negative", f"layers={list(chosen)}")
    if isinstance(depth, int) and chosen[-1] > depth - 2:
        # The last layer's output has no following layer whose input SGLang could keep.
        raise ConfigError(
            f"SGLang keeps the outputs of layers 0 to {depth - 2} of this model",
            f"layers={list(chosen)}",
            "the last layer's state is captured as `last`, after the final norm",
        )
    return chosen


def read_config(model: str) -> dict[str, Any]:
    """A model's config.json (folder or hub name).

    Raises:
        ConfigError: missing, unreachable or not a JSON object.
    """
    try:
        path = Path(model, "config.json") if Path(model).is_dir() else Path(hf_hub_download(model, "config.json"))
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        hint = "give a checkpoint's folder, or OWNER/NAME on the hub"
        hint += "" if isinstance(error, HFValidationError) else f"; {_reason(error)}"  # that one speaks to programmers
        raise ConfigError("no such folder or hub model, or no config.json there", model, hint) from error
    if not isinstance(config, dict):
        raise ConfigError("config.json is not an object", model)
    return config


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
