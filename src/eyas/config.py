"""Frozen settings, one section per part of the product.

    cfg = load(Path("run.yaml"), ["extract.attempts=5", "capture.layers=[1, 14, 26]"])

A key that does not exist is an error that names the nearest one that does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from eyas.errors import ConfigError

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _parse_bytes(value: object) -> object:
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


def _check_mode(text: str) -> str:
    if re.fullmatch("0?[0-7]{2}[0145]", text) is None:
        raise ValueError("not octal permission bits that keep others from writing; write one such as 600 or 660")
    return text


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0)]
"""A positive number of bytes; text such as `2GiB` or `500MB` is understood."""


Ints = Annotated[tuple[int, ...], BeforeValidator(_parse_ints)]
"""Whole numbers: `[1, 2]`, `1,2` or `1`."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _parse_source(value: object) -> object:
    return {"path": str(value)} if isinstance(value, str | Path) else value


class SourceConfig(Section):
    """One input: a path as plain text, or these keys."""

    path: str
    """A file, a folder, a glob such as `data/*.jsonl.gz`, or a Hugging Face data set: `hf:NAME` or `hf:NAME:SPLIT`."""
    name: str | None = None
    """Label in the statistics; default: the file's name without its suffixes."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often its rows are seen: 0.5 keeps a seeded half, 2 gives each row twice."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """At most so many rows are read, the first ones."""
    field: str | None = None
    """Key of the list of rows inside a JSON object, such as `data` or `result.rows`."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set."""


Source = Annotated[SourceConfig, BeforeValidator(_parse_source)]


class PrepareConfig(Section):
    """Chats to corpus."""

    target: str | None = None
    """The model whose tokenizer and chat template are used: a folder or hub id."""
    sources: tuple[Source, ...] = ()
    """Inputs, read in this order: paths, or `{path, name, weight, max_rows, field, subset}`."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest row in tokens."""
    too_long: Literal["cut", "drop"] = "cut"
    """What happens to a longer row; a cut row gets no invented end token."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template at every rendering, as the server will: `{enable_thinking: false}`."""
    rewritten_turns: Literal["context", "split", "drop"] = "context"
    """Earlier answers that the template renders otherwise once more turns follow (thoughts stripped): context, not
    trained; or each in a row of its own, as it was given; or the whole conversation is dropped."""
    empty_prompt: Literal["keep", "drop"] = "keep"
    """What happens to a conversation with a blank user turn."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names: `{my_model_v2: assistant}`."""
    dedupe: Literal["off", "conversation", "prompt"] = "off"
    """Drop rows whose whole conversation, or whose user turns, equal an earlier row's (case, spacing and punctuation
    apart)."""
    decontaminate: tuple[str, ...] = ()
    """Evaluation sets (files, folders or globs): rows that share 13 words in a row with one of them are dropped."""
    shuffle: bool = False
    """Mix the rows of all inputs; else they keep their order."""
    seed: int = 0
    """Of shuffle, weights and holdout."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of conversations set aside in `holdout.parquet`; the same ones whatever else is prepared with them."""
    strict: bool = False
    """Stop at the first row that cannot be used."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes; default: one a core, at most 16. The corpus does not depend on it."""
    trust_remote_code: bool = False
    """Run the tokenizer code that the model's folder ships."""


class RegenerateConfig(Section):
    """Answers by the target itself, from any OpenAI-compatible server."""

    sources: tuple[Source, ...] = ()
    """Inputs, as for prepare."""
    servers: tuple[str, ...] = ()
    """Base URLs, such as `http://localhost:30000/v1`; requests go to the one with the fewest in flight."""
    model: str | None = None
    """Name the server knows the target by; default: the only one it lists."""
    in_flight: Annotated[int, Field(ge=1)] = 64
    """Conversations asked at once, over all servers."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for one answer."""
    stream: bool = True
    """Answers come piece by piece, and the server stops where nobody listens any more. Whole ones cost less work here,
    which tells from about 10,000 tokens/s."""
    attempts: Annotated[int, Field(ge=1)] = 6
    """Tries of one request before its conversation is recorded as failed."""
    retry_wait_s: Annotated[float, Field(gt=0)] = 1.0
    """Pause before the second try; it doubles with each further one, up to a minute, with jitter. A server's
    `Retry-After` goes first."""
    away_s: Annotated[float, Field(ge=0)] = 300.0
    """How long all servers may refuse connections before the run stops."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """How long Ctrl-C waits for answers in flight; a second Ctrl-C does not wait."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer; one that is cut there gets no invented end token."""
    on_length: Literal["keep", "drop"] = "keep"
    """What happens to an answer that was cut at max_tokens."""
    seed: int | None = None
    system: str | None = None
    """System prompt for conversations that have none."""
    extra_body: dict[str, Any] = {}
    """Further fields of each request, as the server takes them: `{top_k: 20}`, `{reasoning: {effort: high}}`,
    `{provider: {order: [deepinfra]}}`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; a server without keys needs none."""
    price_prompt: Annotated[float, Field(ge=0)] = 0.0
    """Dollars per million prompt tokens; default: what the server lists. A reply that states its cost is believed."""
    price_completion: Annotated[float, Field(ge=0)] = 0.0
    """Dollars per million answer tokens."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """Dollars, over all sessions of one output; requests that could pass it are not sent."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names: `{my_model_v2: assistant}`."""


class CaptureConfig(Section):
    """Which states are captured: the same on the server (`eyas serve`) and on the client."""

    layers: Ints | None = None
    """0-based decoder layers whose output is captured; default (1, N//2 - 1, N - 4) for models of 7 layers or more."""
    last: Literal["loss", "all"] = "loss"
    """Where the final state is kept: only the positions that training reads, or all."""
    dtype: Literal["bf16", "f16", "f32", "fp8_e4m3"] = "bf16"
    """What the states are stored in. fp8_e4m3: 8-bit floats and one scale a state, quantised before they leave the
    device; half the bytes of bf16."""


class ServerConfig(Section):
    """The inference server, or several, and the spool that each shares with us."""

    urls: tuple[str, ...] = ()
    """What `eyas extract` asks where no `--server` is given. Several share the rows."""
    spool: Path | None = None
    """Folder the plugin writes records to; default: `eyas-<port>` in shared memory, as `eyas serve` sets it."""
    spools: tuple[Path, ...] = ()
    """Instead of `spool` where there are several servers: one folder each, in the servers' order."""
    spool_owner: str | None = None
    """User (name or number) whose spool folder is trusted besides root's, our own, and those of groups we belong to."""
    api_key: SecretStr | None = None
    """Bearer token; better given in the environment variable EYAS_API_KEY. Never logged."""
    ca_file: Path | None = None
    """Certificate authority for https URLs; default: the system's."""
    verify_tls: bool = True
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for one reply."""
    record_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for an accepted record to appear in the spool."""
    restart_timeout_s: Annotated[float, Field(ge=0)] = 300.0
    """How long a server that went away may take to come back."""


class ServeConfig(Section):
    """The server command that `eyas serve` prints or runs."""

    quota_bytes: Bytes = 8 << 30
    """Most bytes of records waiting in the spool, over all ranks."""
    spool_mode: Annotated[str, AfterValidator(_check_mode)] = "600"
    """Permission bits of record files, octal, in quotes; none that let everybody write."""
    spool_group: str | None = None
    """Group of record files, for a client that runs as another user."""
    writers: Literal["process", "threads"] = "process"
    """Who writes records: a process of their own, or threads of the server's (docs/capture-contract.md)."""
    writer_threads: Annotated[int, Field(ge=1, le=64)] = 8
    """How many write at once."""
    arena_bytes: Bytes | None = None
    """Host memory through which states reach the writers, over all ranks, taken at start; default: 4 GiB on a GPU, 256
    MiB on a CPU, but room for two forwards and no more than `quota_bytes`."""
    sglang_version: str | None = None
    """Release that will run the command; default: the installed one."""
    python: str | None = None
    """Interpreter that has SGLang."""


class ExtractConfig(Section):
    """The extraction run."""

    engine: Literal["auto", "sglang", "hf", "dumpdir", "fake"] = "auto"
    """auto: dumpdir where a dump folder is named, sglang where a server is, else hf. fake: made-up states, to rehearse
    disks and resume."""
    window_requests: Annotated[int, Field(ge=1)] = 32
    """Rows in flight, per worker and server."""
    window_tokens: Annotated[int, Field(ge=1)] = 262_144
    """Tokens in flight, per worker and server; a longer row goes alone."""
    window_bytes: Bytes = 2 << 30
    """Bytes of states in flight, per worker and server; never more than its share of the server's spool quota."""
    attempts: Annotated[int, Field(ge=1, le=50)] = 3
    """Tries before a row is recorded as failed."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a row that failed for good means for the run."""
    drain_s: Annotated[float, Field(ge=0)] = 60.0
    """How long Ctrl-C waits for rows in flight; a second Ctrl-C does not wait."""
    device: str = "auto"
    """hf engine: torch device."""
    model_dtype: Literal["auto", "bf16", "f16", "f32"] = "auto"
    """hf engine: dtype the target runs in; auto is the checkpoint's own."""
    trust_remote_code: bool = False


class DumpdirConfig(Section):
    """A server that was patched to dump states into folders (docs/dumpdir.md)."""

    folder: Path | None = None
    """Where it makes them; `--dump-dir`."""
    last: Literal["pre-norm", "post-norm"] | None = None
    """Whether its last states are from before or after the final norm; `--last`. The store always holds those after."""
    pattern: str = "req_*"
    """Glob of the dump folders."""
    done: str = "done"
    """Marker file that it writes into a dump when that is complete."""
    num_tokens: str = "meta.json:num_tokens"
    """Where a dump's token count is: `FILE` or `FILE:KEY`, of JSON, plain text or a `.pt` file."""
    aux_file: str = "aux.pt"
    """Where the layers' states are: `FILE` or `FILE:KEY`; `{layer}` for files or keys by layer, `*` for the number of a
    chunk: `layer_{layer}.pt`, `chunk_*.pt:aux`. Shapes [T, A*H], [T, A, H], or a list of A times [T, H]."""
    last_file: str = "last.pt"
    """Where the last states are, likewise: [T, H]."""
    remove: bool = True
    """Remove a dump that was stored; others' dumps always stay."""
    check: Literal["content", "count"] = "content"
    """What tells dumps apart: the reply's log-probabilities against lm_head x last; or the token count alone, which
    cannot tell a foreign dump of equal length."""
    check_tokens: Annotated[int, Field(ge=0)] = 16
    """How many of the row's last tokens have their log-probabilities compared, besides those of 16 answers."""
    tolerance: Annotated[float, Field(gt=0)] | None = None
    """Nats by which a log-probability may differ; default: by dtype (docs/dumpdir.md)."""
    device: str = "cpu"
    """torch device of lm_head and the final norm, for the comparison."""


class StoreConfig(Section):
    """The store's layout."""

    shard_bytes: Bytes = 2 << 30
    """Largest shard; a row that is larger gets a shard of its own."""
    reserve_bytes: Annotated[int, BeforeValidator(_parse_bytes), Field(ge=0)] = 1 << 30
    """Disk space that must stay free."""


class FakeConfig(Section):
    """The made-up target of the `fake` engine."""

    hidden_size: Annotated[int, Field(ge=1)] = 64
    num_layers: Annotated[int, Field(ge=1)] = 12
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Time one capture takes."""
    seed: int = 0
    max_row_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest row it admits."""
    failing_rows: Ints = ()
    """Rows that fail at every attempt, to rehearse failures."""


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
