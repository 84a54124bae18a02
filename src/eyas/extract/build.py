"""From settings to a run's parts: which engine, which agreement, which identity."""

from __future__ import annotations

import hashlib
import secrets
import socket
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import extract as adapters
from eyas.capture.contract import CaptureSpec, default_layers
from eyas.config import Config
from eyas.data.corpus import Corpus
from eyas.errors import ConfigError
from eyas.events import EVENTS_DIR
from eyas.extract.dumpdir.flags import missing
from eyas.extract.engine import Engine, EngineInfo, Failed
from eyas.extract.proof import PROOF_FILE, Proof
from eyas.positions import kept_counts
from eyas.store.writer import StoreWriter

if TYPE_CHECKING:
    from eyas.target.checkpoint import Target

_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker process needs to know; picklable.

    Attributes:
        corpus, store: their paths.
        model: the target's folder or hub id.
        servers: their URLs, for the sglang engine; the dumpdir engine takes one. Empty: what the settings name.
        session: see `RequestId`.
        tokenizer: what is known of the target's, for the store's provenance.
    """

    corpus: Path
    store: Path
    model: str
    servers: tuple[str, ...]
    cfg: Config
    session: str
    tokenizer: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers asked, from the flags or else the settings."""
        return self.servers or self.cfg.server.urls

    @property
    def engine(self) -> str:
        """The engine's name, `auto` resolved.

        Raises:
            ConfigError: a server or a dump folder is named for an engine that has none, or one is missing.
        """
        folder = self.cfg.dumpdir.folder
        if (named := self.cfg.extract.engine) != "auto":
            if self.urls and named not in ("sglang", "dumpdir"):
                hint = "leave out --server or extract.engine"
                raise ConfigError(f"the {named} engine has no server", ", ".join(map(_shown, self.urls)), hint)
            if folder and named != "dumpdir":
                raise ConfigError(
                    f"the {named} engine reads no dumps", folder, "leave out --dump-dir or extract.engine"
                )
            return named
        if folder:
            return "dumpdir"
        if self.cfg.dumpdir.last:
            raise ConfigError(
                "--last says what dumps hold, and no dump folder is named", "--last", "add --dump-dir, or leave it out"
            )
        return "sglang" if self.urls else "hf"

    @property
    def run(self) -> str:
        """8 characters that name this store on this host: the `run` of its request ids."""
        text = f"{socket.gethostname()}\0{self.store.resolve()}"
        return _short(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _shown(url: str) -> str:
    """A URL without the user and password in it."""
    scheme, sign, rest = url.rpartition("://")
    return scheme + sign + rest.rpartition("@")[2]


def new_session() -> str:
    """8 random characters naming one process's life."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(8))


def _short(number: int) -> str:
    digits = []
    for _ in range(8):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def check_corpus(job: Job, corpus: Corpus) -> tuple[Job, str]:
    """The job, knowing whether the corpus was made with its target's tokenizer; and a warning, or nothing.

    Raises:
        ConfigError: it was made with another one.
    """
    if job.engine == "fake":
        return job, ""
    trusted = job.cfg.extract.trust_remote_code
    known, warning = adapters.check_tokenizer(corpus, job.model, trust_remote_code=trusted)
    return replace(job, tokenizer=known), warning


def make_engine(job: Job, share: int = 1, say: Callable[[str], None] = lambda text: None) -> Engine:
    """The engine a job names, not yet started.

    Args:
        job: what to run.
        share: how many workers share each server's spool quota.
        say: takes what the engine has to tell the user.

    Raises:
        ConfigError: the target cannot be found, or the settings do not fit it.
    """
    cfg = job.cfg
    match job.engine:
        case "fake":
            return adapters.FakeEngine(
                fake_spec(cfg, Corpus.open(job.corpus)),
                seed=cfg.fake.seed,
                delay_s=cfg.fake.delay_s,
                faults={row: Failed("made-to-fail", "fake.failing_rows names it") for row in cfg.fake.failing_rows},
                max_row_tokens=cfg.fake.max_row_tokens,
            )
        case "hf":
            target = _target(job)
            return adapters.HFEngine(
                target, target_spec(target, cfg), device=cfg.extract.device, dtype=cfg.extract.model_dtype
            )
        case "dumpdir":
            check_dumps(job, share)
            target, spec = _dumped(job)
            return adapters.DumpDirEngine(job.urls[0], target, spec, cfg.dumpdir, cfg.server, job.run, job.session)
        case _:
            if not job.urls:
                raise ConfigError("the sglang engine needs a server", "extract.engine", "add --server URL")
            spec = target_spec(_target(job, weights=False), cfg)
            proof = Proof(job.store / EVENTS_DIR / PROOF_FILE)
            return adapters.open_servers(job.urls, spec, cfg, job.run, job.session, share, proof=proof, say=say)


def check_dumps(job: Job, workers: int) -> None:
    """Raises ConfigError for a dump folder without its server, or with several workers, who would swap their rows."""
    if job.engine != "dumpdir":
        return
    if not job.urls:
        raise missing("--server")
    if len(job.urls) > 1:
        hint = "only `eyas serve` servers can share the rows of one run"
        raise ConfigError("a dump folder has one server", ", ".join(map(_shown, job.urls)), hint)
    if workers > 1:
        hint = "leave it out: one worker keeps up to extract.window_requests rows of different lengths in flight"
        raise ConfigError("dumps have no identity, so one worker alone may read a dump folder", "--workers", hint)


def static_info(job: Job) -> EngineInfo | None:
    """What an engine will deliver where that is known without starting it.

    None for a server, and for weights whose fingerprint only the loaded model tells.
    """
    match job.engine:
        case "hf":
            target = _target(job)
            spec = target_spec(target, job.cfg)
            longest = target.config.get("max_position_embeddings")
            return EngineInfo(spec, max_row_tokens=longest or None) if spec.model else None
        case "dumpdir":
            return EngineInfo(_dumped(job)[1])
        case "fake":
            spec = fake_spec(job.cfg, Corpus.open(job.corpus))
            return EngineInfo(spec, max_row_tokens=job.cfg.fake.max_row_tokens)
        case _:
            return None


def open_store(job: Job, corpus: Corpus, info: EngineInfo, *, dry: bool = False) -> StoreWriter:
    """The store of this corpus and spec, made or resumed; `dry` writes nothing.

    Raises:
        StoreError: the folder holds something else, or a store for something else.
    """
    return StoreWriter.open(
        job.store,
        spec=info.spec,
        corpus={
            "digest": corpus.digest,
            "tokenizer": corpus.meta.tokenizer_hash,
            "template": corpus.meta.template_hash,
            "rows": len(corpus),
            "tokens": int(corpus.n_tokens.sum()),
        },
        tokens_N=corpus.n_tokens,
        positions_N=kept_counts(corpus.n_tokens, corpus.n_positions, info.spec.last),
        shard_bytes=job.cfg.store.shard_bytes,
        provenance=dict(info.provenance) | ({"tokenizer": job.tokenizer} if job.tokenizer else {}),
        dry=dry,
    )


def log_path(store: Path, session: str) -> Path:
    """Where a session of a store's run writes its events."""
    return store / EVENTS_DIR / f"{session}.jsonl"


def target_spec(target: Target, cfg: Config) -> CaptureSpec:
    """The agreement that the settings ask for."""
    return target.spec(cfg.capture.layers, cfg.capture.last, cfg.capture.dtype)


def fake_spec(cfg: Config, corpus: Corpus) -> CaptureSpec:
    """The made-up target of a rehearsal; its fingerprint is no real model's."""
    fake, capture = cfg.fake, cfg.capture
    try:
        return CaptureSpec(
            layers=capture.layers or default_layers(fake.num_layers),
            last=capture.last,
            dtype=capture.dtype,
            hidden_size=fake.hidden_size,
            vocab_size=corpus.meta.vocab_size,
            num_layers=fake.num_layers,
            model=hashlib.sha256(f"fake {fake.seed}".encode()).hexdigest()[:32],
        )
    except ValueError as error:
        raise ConfigError(str(error), "fake", "set capture.layers, or fake.num_layers to 7 or more") from error


def _dumped(job: Job) -> tuple[Target, CaptureSpec]:
    """The target behind a dump folder and the agreement, from settings and checkpoint alone.

    Raises:
        ConfigError: a setting that dumps do not tell is not given, or the checkpoint has no weights here.
    """
    cfg = job.cfg
    if cfg.dumpdir.folder is None:
        raise missing("--dump-dir")
    if cfg.capture.layers is None:
        raise missing("--layers")
    if cfg.dumpdir.last is None:
        raise missing("--last")
    target = _target(job, weights=False)
    spec = target_spec(target, cfg)
    if not spec.model:
        hint = "name a folder of safetensors with --target: norms and lm_head are read, the model is not loaded"
        raise ConfigError("the target's weights are not here", job.model, hint)
    return target, spec


def _target(job: Job, *, weights: bool = True) -> Target:
    return adapters.Target.load(job.model, trust_remote_code=job.cfg.extract.trust_remote_code, weights=weights)
