"""Engine over a server that was patched to dump states into folders, as `req_N/` with a marker and a token count.

start     lock the folder, and one row through the whole path as proof of --last, hidden size, layers and vocabulary
capture   look at the folder, POST /generate, and look until the one dump is there that can only be this row's
reprobe   the proof again, after anything that smells of a restart; one at a time, waiting for the server
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import string
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import stamina
import torch

from eyas.capture.contract import PROBE_ROW, CaptureSpec, RequestId
from eyas.capture.encoding import encode
from eyas.config import DumpdirConfig, ServerConfig
from eyas.errors import ConfigError, EngineError
from eyas.extract.dumpdir.content import ALTERNATIVES, Evidence, Judge, alike, asked_for, read_evidence
from eyas.extract.dumpdir.desk import Counts, Desk, digest
from eyas.extract.dumpdir.flags import missing
from eyas.extract.dumpdir.folder import DumpFolder, Fresh
from eyas.extract.dumpdir.gate import LengthGate
from eyas.extract.dumpdir.layout import Layout
from eyas.extract.dumpdir.loading import Dump
from eyas.extract.dumpdir.matching import AMBIGUOUS, Fit, Vigil
from eyas.extract.dumpdir.words import COUNT_HINT, probe_error
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.sglang_client import ServerAway, SGLangClient, aborted, prefill_body, vocabulary_guard
from eyas.target.checkpoint import Target
from eyas.target.head import Head
from eyas.target.norm import FinalNorm

_SHORTEST_POLL_S: Final = 0.002
_LONGEST_POLL_S: Final = 0.1
_POLL_GROWTH: Final = 1.5
_PROBE_TOKENS: Final = (41, 97)  # between these, drawn anew each time: of a length that is rare
#: How often a probe may fail so: a foreign request of its length is bad luck, not a bad server.
_PROBES: Final[Mapping[str, int]] = {
    AMBIGUOUS: 4,
    "content-differs": 2,
    "dump-late": 2,
    "dump-unfinished": 2,
    "dump-marked-early": 4,
}


@dataclass(frozen=True, slots=True)
class _Found:
    """The dump that was taken, its last states after the norm: [T, H]."""

    fresh: Fresh
    dump: Dump
    last: torch.Tensor


@dataclass(slots=True, eq=False)
class _Owed:
    """A request whose dump was not taken, and may still come; evidence is None where no reply came."""

    tokens: list[int]
    evidence: Evidence | None = None


class DumpDirEngine:
    """Client of one patched server, and the only one that reads its dump folder.

    Args:
        url: the server.
        target: its model's checkpoint; lm_head and the final norm are read from it.
        spec: what to store.
        cfg: the dumpdir section of the settings; `folder` and `last` are given.
        server: the server section.
        run, session: the identity of this run's requests, see RequestId.
        transport: what carries the requests; None is the network.

    Raises:
        ConfigError: settings that cannot be, or a checkpoint without what the checks need.
    """

    def __init__(
        self,
        url: str,
        target: Target,
        spec: CaptureSpec,
        cfg: DumpdirConfig,
        server: ServerConfig,
        run: str,
        session: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if cfg.folder is None or cfg.last is None:
            raise missing("--dump-dir" if cfg.folder is None else "--last")
        self._client = SGLangClient(url, server, transport)
        self._target, self._spec, self._cfg, self._server = target, spec, cfg, server
        self._run, self._session = run, session
        self._layout = Layout.of(cfg, spec.layers, spec.hidden_size)
        self._folder = DumpFolder(cfg.folder, cfg.pattern)
        self._gate = LengthGate()
        self._judge: Judge | None = None
        self._alone: set[int] = set()  # rows that met several dumps
        self._owed: dict[int, list[_Owed]] = {}  # by length
        self._counts: Counts = {}
        self._dumped = torch.float32
        self._proving = asyncio.Lock()
        self._proofs = 0

    async def start(self) -> EngineInfo:
        """Lock the folder, and prove server, folder, layout and `--last` by one row.

        Raises:
            EngineError: which of them is missing or different, and what to do.
            ConfigError: the checkpoint does not have what is needed.
        """
        self._folder.lock()
        self._judge = await asyncio.to_thread(self._load_judge)
        async with self._proving:
            await self._prove()
        return EngineInfo(self._spec, self._provenance())

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        if not request.tokens:
            return Failed("empty-row", retry=Retry.NEVER)
        if min(request.tokens) < 0 or max(request.tokens) >= self._spec.vocab_size:
            return Failed("bad-token", f"token ids outside [0, {self._spec.vocab_size})", Retry.NEVER)
        row = request.rid.row
        found = await self._find(request, alone=row in self._alone)
        if isinstance(found, Failed):
            if found.reason == AMBIGUOUS:
                self._alone.add(row)
            return found
        return await asyncio.to_thread(self._captured, request, found)

    async def reprobe(self) -> None:
        """Prove everything again, waiting up to `restart_timeout_s` for a server that restarts.

        Callers that fail together share one proof.

        Raises:
            EngineError: the server stayed away, or what came back is not what was proven.
        """
        seen = self._proofs
        async with self._proving:
            if self._proofs != seen:
                return
            patience_s = self._server.restart_timeout_s
            attempts = None if patience_s else 1
            async for attempt in stamina.retry_context(ServerAway, attempts, patience_s or None, 0.2, 5.0, 0.5):
                with attempt:
                    await self._prove()

    async def close(self) -> None:
        self._folder.unlock()
        await self._client.close()

    # --- one row ------------------------------------------------------------------------------------------------------

    async def _find(self, request: CaptureRequest, *, alone: bool) -> _Found | Failed:
        tokens, length = request.tokens, len(request.tokens)
        async with self._gate.hold(length, alone=alone):
            owed = self._owed.setdefault(length, [])
            others = [one for one in owed if one.tokens != tokens]
            if self._cfg.check == "count" and others:
                detail = f"the dump of an earlier row of {length} tokens may still come, and nothing tells them apart"
                return Failed("late-dump-possible", detail, Retry.NEVER)
            owed.append(ours := _Owed(tokens))
            found = await self._ask(request, ours, alone)
            if isinstance(found, _Found) and await asyncio.to_thread(self._may_be_of_any, others, tokens, found.last):
                text = f"it fits an earlier row of {length} tokens as well, whose dump was not taken"
                return Failed("late-dump-possible", f"{found.fresh.name}: {text}")
            if isinstance(found, _Found) or found.retry in (Retry.NEVER, Retry.WAIT):
                owed.remove(ours)  # it came, or the server did not take the request
            return found

    def _may_be_of_any(self, others: list[_Owed], tokens: list[int], last_TH: torch.Tensor) -> bool:
        """Whether a dump that fits its row may be another's, late: of rows that end alike, each fits the other too."""
        for other in others:
            if other.evidence is None:
                if alike(tokens, other.tokens, self._cfg.check_tokens):
                    return True
            elif self._judge_of_dumps().fit(last_TH, other.evidence)[0] is not Fit.OTHER:
                return True
        return False

    async def _ask(self, request: CaptureRequest, ours: _Owed, alone: bool) -> _Found | Failed:
        try:
            before = await self._folder.look()
            body = prefill_body(request)
            if request.rid.row == PROBE_ROW:
                body["sampling_params"] |= vocabulary_guard(self._spec.vocab_size)
            if self._cfg.check == "content":
                body |= asked_for(len(request.tokens), self._cfg.check_tokens)
            answer = await self._client.post(body)
            evidence = answer if isinstance(answer, Failed) else self._evidence(answer, request)
            if isinstance(evidence, Failed):
                return evidence
            ours.evidence = evidence
            return await self._wait(request, evidence, before, alone)
        except OSError as error:
            return Failed("dump-folder-gone", error.strerror or str(error), Retry.PROBE)

    def _evidence(self, answer: Mapping[str, Any], request: CaptureRequest) -> Evidence | Failed | None:
        """What the reply proves; None where contents are not compared."""
        tokens = len(request.tokens)
        meta = answer.get("meta_info")
        meta = meta if isinstance(meta, dict) else {}
        if (failure := aborted(meta)) is not None:
            return failure
        if (seen := meta.get("prompt_tokens")) not in (None, tokens):
            return Failed("rows-differ", f"the server saw {seen} tokens of {tokens}")
        if cached := meta.get("cached_tokens"):
            detail = f"{cached} tokens were not computed, so not dumped: start the server with --disable-radix-cache"
            return Failed("prefix-cached", detail)
        if self._cfg.check == "count":
            return None
        evidence = read_evidence(meta, request.tokens, self._spec.vocab_size, self._cfg.check_tokens)
        return Failed("no-logprobs", evidence, Retry.PROBE) if isinstance(evidence, str) else evidence

    async def _wait(
        self, request: CaptureRequest, evidence: Evidence | None, before: int, alone: bool
    ) -> _Found | Failed:
        """Look until one dump can only be this row's, or the deadline passes."""
        vigil = Vigil(alone)
        desk = Desk(self._folder.path, self._layout, self._judge_of_dumps(), self._counts)
        deadline_s = time.monotonic() + self._server.record_deadline_s
        pause_s = _SHORTEST_POLL_S
        while True:
            late = time.monotonic() >= deadline_s  # read first: what came by the deadline counts
            await self._folder.look()
            fresh = self._folder.since(before)
            candidates, unfinished = await asyncio.to_thread(desk.read, fresh, len(request.tokens), evidence)
            decision = vigil.decide(candidates, unfinished, late)
            if isinstance(decision, Failed):
                return desk.explained(decision)
            if decision is not None:
                return _Found(*desk.taken(decision))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _LONGEST_POLL_S)

    def _judge_of_dumps(self) -> Judge:
        if self._judge is None:
            raise EngineError("the engine is not started", self._client.where)
        return self._judge

    def _captured(self, request: CaptureRequest, found: _Found) -> Captured:
        """The states as the spec stores them, `last` after the norm and where it is asked for."""
        pairs = zip(request.last_runs[0::2], request.last_runs[1::2], strict=True)
        kept = torch.cat([found.last[start:stop] for start, stop in pairs] or [found.last[:0]])
        aux, last = encode(found.dump.aux, self._spec.dtype), encode(kept, self._spec.dtype)
        release = functools.partial(self._folder.remove, found.fresh) if self._cfg.remove else lambda: None
        return Captured(aux, last, digest(aux), digest(last), release)

    # --- the proof ----------------------------------------------------------------------------------------------------

    def _load_judge(self) -> Judge:
        """What contents are compared with; raises ConfigError where the checkpoint does not have it."""
        cfg, device = self._cfg, self._cfg.device
        head = norm = None
        try:
            head = Head.load(self._target, device) if cfg.check == "content" else None
        except ConfigError as error:
            error.hint = f"{error.hint}; {COUNT_HINT}" if error.hint else COUNT_HINT
            raise
        try:
            norm = FinalNorm.load(self._target, device)
        except ConfigError:
            if cfg.last == "pre-norm":
                raise
        return Judge(head, norm, pre_norm=cfg.last == "pre-norm", tolerance=cfg.tolerance)

    async def _prove(self) -> None:
        """One row through the whole path.

        Raises:
            EngineError: what is wrong; ServerAway where that may pass.
        """
        await self._client.identify()
        failures: Counter[str] = Counter()
        while True:
            found = await self._find(self._probe(), alone=True)
            if isinstance(found, _Found):
                break
            failures[found.reason] += 1
            if self._proofs and found.reason in _PROBES:  # it was right before: give it time
                raise ServerAway(f"the probe failed: {found.reason}", self._client.where, found.detail)
            if failures[found.reason] >= _PROBES.get(found.reason, 1):
                raise probe_error(found, self._client.where, self._folder.path)
        if self._cfg.remove:
            await asyncio.to_thread(self._folder.remove, found.fresh)
        self._dumped = found.last.dtype
        self._proofs += 1

    def _probe(self) -> CaptureRequest:
        """A random row. Ids from the middle of the vocabulary: special ones, images' above all, are at its ends."""
        random = secrets.SystemRandom()
        vocab_size = self._spec.vocab_size
        tokens = random.choices(range(vocab_size // 8, max(vocab_size // 2, 1)), k=random.randint(*_PROBE_TOKENS))
        session = "".join(random.choices(string.ascii_lowercase + string.digits, k=8))
        return CaptureRequest(RequestId(self._run, session, PROBE_ROW, 0), tokens, [])

    def _provenance(self) -> dict[str, str]:
        cfg = self._cfg
        compared = f"token count, and log-probabilities of {cfg.check_tokens} prompt tokens and {ALTERNATIVES} answers"
        content = cfg.check == "content"
        return {
            "engine": "dumpdir",
            "host": socket.gethostname(),
            "dtype": str(self._dumped).removeprefix("torch."),
            "dumped": f"{cfg.last}" + (", the norm was applied by the client" if cfg.last == "pre-norm" else ""),
            "identity": compared if content else "token count only: foreign dumps of equal length were not told apart",
            "model_check": "log-probabilities" if content else "unchecked",
        }
