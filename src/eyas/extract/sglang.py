"""Engine over an unmodified SGLang server with our plugin: a request out, a word back, a record in the spool.

start     who is there, what its plugin agreed to, and one row through the whole path as proof
capture   POST /generate -> "accepted" -> the record appears in the spool -> read, every claim checked
reprobe   the proof again, after anything that smells of a restart; one at a time, waiting for the server
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import string
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import stamina
import torch

from eyas.capture.contract import (
    PROBE_ROW,
    CaptureReply,
    CaptureSpec,
    Refusal,
    RequestId,
    ServerHello,
    token_hash,
)
from eyas.capture.encoding import decode
from eyas.config import ServerConfig
from eyas.errors import EngineError
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.inbox import RECORD_LATE, Inbox
from eyas.extract.proof import Proof
from eyas.extract.record import open_record, read_record, refused
from eyas.extract.sglang_client import DUPLICATE_RID, ServerAway, SGLangClient

_PROBE_TOKENS: Final = 4
_MODEL_FIELDS: Final = ("model", "hidden_size", "vocab_size", "num_layers")
#: Refusals of a probe that the next one may not meet.
_PASSING: Final = (Refusal.PLUGIN_ERROR, Refusal.WRITE_FAILED, Refusal.CHUNK_GAP, Refusal.RETRACTED)
_PROBE_ATTEMPTS: Final = 3
_SPEC_FIELDS_HINT: Final = "serve and extract with the same capture settings"


class ProbeFailed(EngineError):
    """The plugin answered the probe with a failure that need not be the next one's too."""


class SGLangEngine:
    """Client of one server; many captures may be in flight.

    Args:
        url: the server.
        spec: what to capture. An empty `model` (no weights here to fingerprint) takes the server's word for it.
        cfg: the server section of the settings.
        run, session: the identity of this run's requests, see RequestId.
        share: clients that divide the server's spool quota.
        proof: the first probe's states; engines of one run share it. None is one of its own.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: not a URL, an unreadable certificate file, or a spool owner who does not exist.
    """

    def __init__(
        self,
        url: str,
        spec: CaptureSpec,
        cfg: ServerConfig,
        run: str,
        session: str,
        share: int = 1,
        *,
        proof: Proof | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = SGLangClient(url, cfg, transport)
        self._spec = spec
        self._cfg = cfg
        self._run, self._session, self._share = run, session, share
        self._inbox = Inbox(cfg.spool or Path(f"/dev/shm/eyas-{self._client.port}"), cfg.spool_owner)
        self._max_row_tokens: int | None = None
        self._proving = asyncio.Lock()
        self._proofs = 0
        self._proof = proof or Proof()
        self._proven_ns: int | None = None  # start of the server that the latest probe proved

    @property
    def where(self) -> str:
        """The server's URL, without what is secret in it."""
        return self._client.where

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port and path: those of two URLs of one server are equal."""
        return self._client.address

    @property
    def spool(self) -> Path:
        """Where records are expected."""
        return self._inbox.folder

    @property
    def spec(self) -> CaptureSpec:
        """What is captured; as the server told it once it has proven itself."""
        return self._spec

    def admits(self, tokens: int) -> bool:
        """Whether the server takes a row of so many tokens."""
        return self._max_row_tokens is None or tokens <= self._max_row_tokens

    async def start(self) -> EngineInfo:
        """Prove server, plugin, agreement and spool by one row through all of them.

        Raises:
            EngineError: which of them is missing or different, and what to do.
        """
        async with self._proving:
            hello = await self._prove_patiently()
        checked = "fingerprint" if self._spec.model else "unchecked: no weights here to compare with"
        self._spec = CaptureSpec.from_dict(hello.spec)
        provenance = {**hello.provenance, "engine": "sglang", "model_check": checked}
        return EngineInfo(self._spec, provenance, hello.max_row_tokens, hello.quota_bytes // self._share)

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        if not request.tokens:
            return Failed("empty-row", retry=Retry.NEVER)
        if not self.admits(len(request.tokens)):
            detail = f"{len(request.tokens)} tokens, the server admits {self._max_row_tokens}"
            return Failed("row-too-long", detail, Retry.NEVER)
        try:
            return await self._capture(request)
        except asyncio.CancelledError:
            self._inbox.abandon(str(request.rid))
            raise

    async def reprobe(self) -> None:
        """Prove everything again, waiting up to `restart_timeout_s` for a server that restarts.

        Callers that fail together share one proof.

        Raises:
            EngineError: the server stayed away, or what came back is not what was agreed.
        """
        seen = self._proofs
        async with self._proving:
            if self._proofs != seen:
                return
            patience_s = self._cfg.restart_timeout_s
            attempts = None if patience_s else 1
            async for attempt in stamina.retry_context(ServerAway, attempts, patience_s or None, 0.2, 5.0, 0.5):
                with attempt:
                    await self._prove_patiently()

    async def close(self) -> None:
        await self._inbox.close()
        await self._client.close()

    def spool_usage(self) -> int:
        """Bytes waiting in the spool, whoever asked for them."""
        return self._inbox.usage_bytes()

    def clean_stale(self, run: str, is_alive: Callable[[str], bool]) -> int:
        """Remove records that dead sessions of a run left in the spool; returns how many files."""
        return self._inbox.clean_stale(run, is_alive)

    async def _capture(self, request: CaptureRequest) -> Captured | Failed:
        rid = str(request.rid)
        reply = await self._client.generate(request, self._spec.spec_id)
        failure = reply if isinstance(reply, Failed) else check_reply(reply, request, self._spec)
        if failure is not None:
            accepted = isinstance(reply, CaptureReply) and reply.status == "accepted"
            if accepted or failure.retry is Retry.PROBE or failure.reason == DUPLICATE_RID:
                self._inbox.abandon(rid)  # a record may come all the same
            return failure
        path = await self._inbox.wait(rid, self._cfg.record_deadline_s)
        if isinstance(path, Failed):
            result = path
        else:
            result = await asyncio.to_thread(self._read, path, request)
        if isinstance(result, Failed):
            self._inbox.abandon(rid)
        return result

    def _read(self, path: Path, request: CaptureRequest) -> Captured | Failed:
        """The record, if it is the answer and of the server that was proven. Blocks."""
        result = open_record(path, request, self._spec, self._remover(str(request.rid)), self._inbox.owners)
        # Asked only now: who wrote it had written its spec.json long before. Nothing else tells of a server that
        # restarted between two requests, and it may have come back with other weights.
        if isinstance(result, Captured) and self._inbox.started_ns() != self._proven_ns:
            return Failed("server-restarted", "it has not proven itself since", Retry.PROBE)
        return result

    def _remover(self, rid: str) -> Callable[[], None]:
        def remove() -> None:
            # The row is safe; a spool that nothing can be removed from is the next probe's to name.
            with contextlib.suppress(OSError):
                self._inbox.remove(rid)

        return remove

    async def _prove_patiently(self) -> ServerHello:
        async for attempt in stamina.retry_context(ProbeFailed, _PROBE_ATTEMPTS, None, 0.2, 1.0, 0.2):
            with attempt:
                return await self._prove()
        raise AssertionError("unreachable: the last attempt raises")

    async def _prove(self) -> ServerHello:
        await self._client.identify()
        started_ns = (
            self._inbox.started_ns()
        )  # before all else: a restart meanwhile is then one too many, not one too few
        try:
            hello, no_spool = self._inbox.hello(), None
        except EngineError as error:
            hello, no_spool = None, error
        live = CaptureSpec.from_dict(hello.spec) if hello else self._spec
        tokens = [i % live.vocab_size for i in range(1, 1 + _PROBE_TOKENS)]
        # A session of its own: workers share theirs, and two probes under one id would be taken for each other.
        session = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        rid = RequestId(self._run, session, PROBE_ROW, 0)
        request = CaptureRequest(rid, tokens, [0, _PROBE_TOKENS])
        try:
            reply = self._probe_reply(await self._client.generate(request, live.spec_id))
            if hello is None and reply.reason == Refusal.PLUGIN_ERROR:  # it has a better word than a missing file
                raise EngineError(f"the plugin refuses the probe: {reply.reason}", self._client.where, reply.detail)
            if hello is None:
                raise no_spool or AssertionError("neither hello nor error")
            self._check_agreement(live, reply)
            await self._check_record(request, live)
        finally:
            self._inbox.abandon(str(rid))
        self._proofs += 1
        self._proven_ns = started_ns
        self._max_row_tokens = hello.max_row_tokens
        return hello

    def _probe_reply(self, reply: CaptureReply | Failed) -> CaptureReply:
        """The plugin's word, or the error that its absence is."""
        if isinstance(reply, CaptureReply):
            return reply
        where = self._client.where
        match reply.reason:
            case "no-plugin-reply":  # once may be an accident of this reply
                hint = "install eyas in the server's environment and start it with `eyas serve MODEL`"
                raise ProbeFailed("the server runs without the capture plugin", where, hint)
            case "bad-reply":
                hint = "install the same eyas on both sides"
                raise EngineError(f"cannot understand the plugin ({reply.detail})", where, hint)
            case "connection-lost" | "reply-late" | "server-busy" | "server-error" | Refusal.ABORTED:
                raise ServerAway(f"the probe failed: {reply.reason}", where, reply.detail)
            case _:
                raise EngineError(f"the server refuses the probe: {reply.reason}", where, reply.detail)

    def _check_agreement(self, live: CaptureSpec, reply: CaptureReply) -> None:
        """Raises EngineError unless plugin, spool and we mean the same capture."""
        where = self._client.where
        if reply.reason == Refusal.SPEC_DIFFERS or (reply.spec_id and reply.spec_id != live.spec_id):
            hint = f"set server.spool to the folder of the server at {where}, or restart that server"
            raise EngineError("the spool belongs to another server", self.spool, hint)
        if reply.status != "accepted":
            if reply.reason == Refusal.SPOOL_FULL:
                raise ServerAway("the spool is full", self.spool, f"{reply.detail}; is another client using it?")
            kind = ProbeFailed if reply.reason in _PASSING else EngineError
            raise kind(f"the plugin refuses the probe: {reply.reason}", where, reply.detail)
        wanted = self._spec if self._spec.model else dataclasses.replace(self._spec, model=live.model)
        differences = wanted.differences(live)
        if not differences:
            return
        told = "; ".join(differences)
        fields = {difference.partition(":")[0] for difference in differences}
        if fields & set(_MODEL_FIELDS):
            raise EngineError("the server serves another model", where, f"wanted != served: {told}")
        if "layers" in fields:
            hint = f"wanted != served: {told}; {_SPEC_FIELDS_HINT}"
            raise EngineError("the server captures other layers", where, hint)
        hint = f"wanted != served: {told}; {_SPEC_FIELDS_HINT}"
        raise EngineError("the server captures with other settings", where, hint)

    async def _check_record(self, request: CaptureRequest, live: CaptureSpec) -> None:
        """Raises EngineError unless the probe's record comes, is right, and can be removed."""
        path = await self._inbox.wait(str(request.rid), self._cfg.record_deadline_s)
        if isinstance(path, Failed):
            hint = f"{path.reason}: {path.detail}; is this the spool of {self._client.where}?"
            # At the start it is the wrong spool; later a writer that is behind.
            kind = EngineError if path.reason == RECORD_LATE and not self._proofs else ProbeFailed
            raise kind("the probe's record did not come", self.spool, hint)
        result = await asyncio.to_thread(read_record, path, request, live, owners=self._inbox.owners)
        if isinstance(result, Failed):
            if result.reason == "record-unreadable":
                hint = "run as the server's user, or serve with a spool mode and group that you belong to"
                raise EngineError(f"may not read records ({result.detail})", path, hint)
            raise EngineError(f"the probe's record is wrong: {result.reason}", path, result.detail)
        aux, last = result
        stored = torch.cat([aux, last.unsqueeze(1)], dim=1)
        states = decode(stored, live.dtype, live.hidden_size)
        await asyncio.to_thread(self._proof.check, states, live.spec_id, self._client.where)
        try:
            self._inbox.remove(str(request.rid))
        except OSError as error:
            hint = "records that cannot be removed would fill the spool; give this user write access to the folder"
            raise EngineError(f"may not remove records ({error.strerror})", self.spool, hint) from error


def check_reply(reply: CaptureReply, request: CaptureRequest, spec: CaptureSpec) -> Failed | None:
    """Whether the plugin accepted this very request; None when it did."""
    if reply.status == "refused":
        return refused(reply.reason, reply.detail)
    if reply.status != "accepted":
        return Failed("bad-reply", f"status {reply.status!r}", Retry.PROBE)
    if reply.spec_id != spec.spec_id:
        return Failed(str(Refusal.SPEC_DIFFERS), f"{reply.spec_id}, agreed on {spec.spec_id}", Retry.PROBE)
    if reply.tokens != token_hash(request.tokens):
        return Failed(str(Refusal.TOKENS_DIFFER), "the server saw other token ids")
    if reply.rows != len(request.tokens):
        return Failed("rows-differ", f"{reply.rows} rows for {len(request.tokens)} tokens")
    return None
