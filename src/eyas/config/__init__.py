"""Frozen settings, one section per part of the product.

    cfg = load(Path("run.yaml"), ["extract.attempts=5", "capture.layers=[1, 14, 26]"])

A key that does not exist is an error that names the nearest one that does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from eyas.config.data import PrepareConfig, RegenerateConfig, SourceConfig
from eyas.config.evaluate import EvaluateConfig
from eyas.config.export import ExportConfig
from eyas.config.extraction import (
    CaptureConfig,
    DumpdirConfig,
    ExtractConfig,
    FakeConfig,
    ServeConfig,
    ServerConfig,
    StoreConfig,
)
from eyas.config.fields import Bytes, Ints, Section
from eyas.config.report import ReportConfig
from eyas.config.train import TrainConfig
from eyas.errors import ConfigError

__all__ = [
    "Bytes",
    "CaptureConfig",
    "Config",
    "DumpdirConfig",
    "EvaluateConfig",
    "ExportConfig",
    "ExtractConfig",
    "FakeConfig",
    "Ints",
    "PrepareConfig",
    "RegenerateConfig",
    "ReportConfig",
    "Section",
    "ServeConfig",
    "ServerConfig",
    "SourceConfig",
    "StoreConfig",
    "TrainConfig",
    "load",
]


class Config(Section):
    """All settings. Sections may be left out; every value has a default."""

    prepare: PrepareConfig = PrepareConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    capture: CaptureConfig = CaptureConfig()
    serve: ServeConfig = ServeConfig()
    server: ServerConfig = ServerConfig()
    extract: ExtractConfig = ExtractConfig()
    dumpdir: DumpdirConfig = DumpdirConfig()
    store: StoreConfig = StoreConfig()
    fake: FakeConfig = FakeConfig()
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = ReportConfig()


def load(
    path: Path | None = None, overrides: Sequence[str] = (), flags: Mapping[str, tuple[str, object]] | None = None
) -> Config:
    """Settings from a YAML file, then `section.key=value` overrides (values are YAML), then a command's own flags.

    Args:
        path: the file.
        overrides: as `--set` takes them.
        flags: flag -> its key and its value; None as a value is a flag that was not given.

    Raises:
        ConfigError: unreadable file, unknown key (the nearest known one is named), or a value of the wrong type.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("cannot read the config file", path, str(error)) from error
        except yaml.YAMLError as error:
            raise ConfigError("the config file is not YAML", path, " ".join(str(error).split())) from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError("the config file must hold sections", path, "for example 'extract: {attempts: 5}'")
        data = {key: {} if value is None else value for key, value in (loaded or {}).items()}
    where = str(path) if path else "--set"
    said: dict[str, str] = {}  # key -> who said it, the last one
    for text in overrides:
        said[_override(data, text)] = f"--set {text}"
    for flag, (key, value) in (flags or {}).items():
        if value is not None:
            said[_override(data, f"{key}={value}")] = f"{flag} {value}"
    _reject_unknown(data, Config, where)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"bad value for {key}: {first['msg'].removeprefix('Value error, ')}"
        raise ConfigError(what, said.get(".".join(key.split(".")[:2]), where)) from error


def _override(data: dict[str, Any], text: str) -> str:
    """Set one value; returns its key."""
    key, sign, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (sign and dot and section and name):
        raise ConfigError("not an override", f"--set {text}", "write --set section.key=value")
    try:
        parsed = value if _is_text(section, name) else yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError("the value is not YAML", f"--set {text}") from error
    into = data[section] = data.get(section) or {}
    if not isinstance(into, dict):
        raise ConfigError(f"section {section} must hold keys", f"--set {text}")
    into[name] = parsed
    return f"{section}.{name}"


def _is_text(section: str, name: str) -> bool:
    """Whether a key holds text, which is taken as typed: `serve.spool_mode=0660` is no number."""
    known = Config.model_fields.get(section)
    field = known.annotation.model_fields.get(name) if known and known.annotation else None  # pyright: ignore[reportAttributeAccessIssue]
    return field is not None and field.annotation in (str, str | None, SecretStr | None, Path | None)


def _reject_unknown(data: Mapping[str, Any], model: type[BaseModel], where: str, prefix: str = "") -> None:
    for key, value in data.items():
        field = model.model_fields.get(str(key))
        if field is None:
            raise ConfigError(f"unknown config key {prefix}{key}", where, _nearest(str(key), model, prefix))
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            if not isinstance(value, Mapping):
                known = ", ".join(field.annotation.model_fields)
                raise ConfigError(f"section {key} must hold keys", where, f"known: {known}")
            _reject_unknown(value, field.annotation, where, f"{key}.")


def _nearest(key: str, model: type[BaseModel], prefix: str) -> str:
    known = {prefix + name: name for name in model.model_fields}
    if not prefix:  # a key of some section, written without it
        for section, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                known |= {f"{section}.{name}": name for name in field.annotation.model_fields}
    near = difflib.get_close_matches(key, known.values(), n=1, cutoff=0.5)
    if near:
        return f"did you mean {next(full for full, name in known.items() if name == near[0])}?"
    return f"known: {', '.join(name for name in known if prefix or '.' not in name)}"
