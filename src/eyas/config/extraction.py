"""Settings of what makes a store: capture, servers, the extraction run, the store's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from eyas.config.fields import Bytes, Ints, Section, check_mode, parse_bytes


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
    spool_mode: Annotated[str, AfterValidator(check_mode)] = "600"
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
    """Interpreter that has SGLang; with `--draft`, or that has vLLM."""
    engine: Literal["sglang", "vllm"] = "sglang"
    """With `--draft`: whose command; `--engine`."""
    draft_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """With `--draft`: tokens drafted one after another in a cycle."""
    draft_topk: Annotated[int, Field(ge=1, le=32)] = 1
    """With `--draft`: branches at each step; 1 is a chain, which is all that vLLM drafts."""
    draft_tokens: Annotated[int, Field(ge=2)] | None = None
    """With `--draft` and branches: tokens that the target verifies in a cycle, the root included; default: 4 for each
    step and the root, or the whole tree where that is smaller."""


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
    disk_budget: Bytes | None = None
    """Begin no shard that would take the store beyond so many bytes: wait until a training run beside it has removed
    shards that it used (`train.disk_budget`)."""
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
    reserve_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)] = 1 << 30
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
