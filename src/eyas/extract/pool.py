"""Several servers of one target as one engine: a row goes to the server with the least to do.

start     every server proves itself, and all of them serve the same
capture   the least loaded server that is proven; a row that one failed is tried again on another
          A server that smells of a restart gets no rows until it has proven itself again, in the background. One that
          came back as another never gets any. When none is left, the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from eyas.capture.contract import CaptureSpec, count_of
from eyas.config import Config, ServerConfig
from eyas.errors import ConfigError, EngineError
from eyas.extract.engine import Captured, CaptureRequest, EngineInfo, Failed, Retry
from eyas.extract.proof import Proof
from eyas.extract.sglang import SGLangEngine
from eyas.extract.sglang_client import ServerAway
from eyas.extract.window import Limits

_AWAY_PAUSE_S: Final = 5.0  # between proofs of a server that stayed away longer than a restart may take
_FIRST_REST_S, _LONGEST_REST_S = 0.05, 2.0


class _Standing(Enum):
    READY = "ready"
    PROVING = "proving"  # gets no rows until it has proven itself again
    AWAY = "away"  # stayed away longer than a restart may take; rows again if it comes back all the same
    LOST = "lost"  # is another now, or refuses us


@dataclass(frozen=True, slots=True)
class _Place:
    """Room for one row on one server."""

    server: _Server
    tokens: int
    size: int


@dataclass(slots=True, eq=False)
class _Server:
    engine: SGLangEngine
    standing: _Standing = _Standing.READY
    rows: int = 0
    tokens: int = 0  # in flight, as are rows and size
    size: int = 0
    sent: int = 0  # tokens ever
    rest_s: float = 0.0
    resting: bool = False  # it asked for time; more rows would be sent in vain
    error: EngineError | None = None

    @property
    def where(self) -> str:
        return self.engine.where

    def fits(self, tokens: int, size: int, limits: Limits) -> bool:
        return self.rows == 0 or limits.hold(self.rows + 1, self.tokens + tokens, self.size + size)

    def take(self, tokens: int, size: int) -> _Place:
        self.rows += 1
        self.tokens += tokens
        self.size += size
        self.sent += tokens
        return _Place(self, tokens, size)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    row: int
    tokens: int
    size: int
    future: asyncio.Future[_Place]


class ServerPool:
    """Client of several servers.

    Args:
        engines: one a server, not started; they share one `Proof`.
        limits: rows, tokens and bytes in flight on each of them.
        say: told when a server's standing changes, a line for the user.
    """

    def __init__(
        self, engines: Sequence[SGLangEngine], limits: Limits, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._servers = [_Server(engine) for engine in engines]
        self._limits = limits
        self._say = say
        self._waiting: deque[_Waiter] = deque()
        self._failed_on: dict[int, set[_Server]] = {}  # by row
        self._proofs: set[asyncio.Task[None]] = set()
        self._fatal: Exception | None = None

    async def start(self) -> EngineInfo:
        """Have every server prove itself.

        Raises:
            EngineError: one of them cannot, or two of them do not serve the same.
            ConfigError: two of them are one, or have one spool.
        """
        self._check_apart()
        starts = [asyncio.ensure_future(server.engine.start()) for server in self._servers]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in starts:
                if start.done():
                    start.result()
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        infos = [start.result() for start in starts]
        for server, info in zip(self._servers, infos, strict=True):
            if info.spec.spec_id != infos[0].spec.spec_id:
                told = "; ".join(infos[0].spec.differences(info.spec))
                where = f"{self._servers[0].where} and {server.where}"
                raise EngineError("the servers do not serve the same", where, f"{told}; one run has one target")
        longest = [info.max_row_tokens for info in infos if info.max_row_tokens is not None]
        quotas = [info.spool_bytes for info in infos if info.spool_bytes is not None]
        if quotas:
            self._limits = replace(self._limits, size=min(self._limits.size, *quotas))
        return EngineInfo(
            infos[0].spec,
            _joined(infos) | {"servers": ", ".join(server.where for server in self._servers)},
            min(longest, default=None),
            min(quotas, default=None),
            len(infos),
        )

    async def capture(self, request: CaptureRequest) -> Captured | Failed:
        place = await self._place(request)
        server, row = place.server, request.rid.row
        try:
            result = await server.engine.capture(request)
        except EngineError as error:  # it refuses us
            self._give_back(place)
            self._lose(server, error)
            return Failed("server-lost", str(error))
        except BaseException:
            self._give_back(place)
            raise
        if isinstance(result, Captured):
            self._failed_on.pop(row, None)
            server.rest_s = 0.0
            return replace(result, release=self._releasing(place, result.release))
        self._give_back(place)
        match result.retry:
            case Retry.WAIT:
                self._rest(server)
            case Retry.NEVER:
                self._failed_on.pop(row, None)
            case Retry.PROBE:
                self._failed_on.setdefault(row, set()).add(server)
                self._doubt(server, result.reason)
                result = replace(result, retry=Retry.ATTEMPT)  # the pool sees to the proof
            case Retry.ATTEMPT:
                self._failed_on.setdefault(row, set()).add(server)
        return replace(result, detail=f"{server.where}: {result.detail}" if result.detail else server.where)

    async def reprobe(self) -> None:
        """Prove every server again, in the background: the pool's own failures do not ask for it, a row's may."""
        for server in self._servers:
            self._doubt(server, "a row's states were lost")

    async def close(self) -> None:
        for proof in self._proofs:
            proof.cancel()
        await asyncio.gather(*self._proofs, return_exceptions=True)
        ends = await asyncio.gather(*(server.engine.close() for server in self._servers), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def spool_usage(self) -> int:
        """Bytes waiting in all spools, whoever asked for them."""
        return sum(server.engine.spool_usage() for server in self._servers)

    def clean_stale(self, run: str, is_alive: Callable[[str], bool]) -> int:
        """Remove records that dead sessions of a run left in the spools; returns how many files."""
        return sum(server.engine.clean_stale(run, is_alive) for server in self._servers)

    def _check_apart(self) -> None:
        """Raises ConfigError where two are one server, or two spools one folder, whatever they are called."""
        engines = [server.engine for server in self._servers]
        for one, other in itertools.combinations(engines, 2):
            if one.address == other.address:
                raise ConfigError("one server is named twice", f"{one.where} and {other.where}", "name each once")
            if _same_folder(one.spool, other.spool):
                hint = "each server writes to a folder of its own: name them in server.spools, in the servers' order"
                raise ConfigError(f"{one.where} and {other.where} have one spool", one.spool, hint)

    # --- who gets a row

    async def _place(self, request: CaptureRequest) -> _Place:
        """Wait for room on a server.

        Raises:
            EngineError: no server is left.
        """
        future: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        tokens, spec = len(request.tokens), self._servers[0].engine.spec
        size = spec.record_bytes(tokens, count_of(request.last_runs))
        self._waiting.append(_Waiter(request.rid.row, tokens, size, future))
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # cancelled in the moment it got one
            raise

    def _dispatch(self) -> None:
        """Give room to those who wait, in their order. Only a row that its free servers failed lets others pass."""
        if (error := self._end()) is not None:
            for waiter in self._waiting:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
            self._waiting.clear()
            return
        passed: list[_Waiter] = []
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.future.done():  # done: cancelled
                server = self._choose(waiter)
                if server is not None:
                    waiter.future.set_result(server.take(waiter.tokens, waiter.size))
                elif waiter.row in self._failed_on:
                    passed.append(waiter)
                else:
                    break
            self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))

    def _choose(self, waiter: _Waiter) -> _Server | None:
        ready = [server for server in self._servers if server.standing is _Standing.READY]
        admitting = [server for server in ready if server.engine.admits(waiter.tokens)] or ready
        failed = self._failed_on.get(waiter.row, ())
        others = [server for server in admitting if server not in failed] or admitting
        free = [s for s in others if not s.resting and s.fits(waiter.tokens, waiter.size, self._limits)]
        return min(free, key=lambda server: (server.tokens, server.sent), default=None)

    def _give_back(self, place: _Place) -> None:
        server = place.server
        server.rows -= 1
        server.tokens -= place.tokens
        server.size -= place.size
        self._dispatch()

    def _releasing(self, place: _Place, release: Callable[[], None]) -> Callable[[], None]:
        """Drops the record at its origin, and gives its place back once. Callable from any thread."""
        loop, places = asyncio.get_running_loop(), [place]

        def dropped() -> None:
            release()
            with contextlib.suppress(IndexError, RuntimeError):  # given back before; the loop has ended
                loop.call_soon_threadsafe(self._give_back, places.pop())

        return dropped

    def _rest(self, server: _Server) -> None:
        """It has no room: leave it alone for a moment, longer each time, or it would draw every row."""
        if server.resting:
            return
        server.rest_s = min(2 * server.rest_s, _LONGEST_REST_S) or _FIRST_REST_S
        server.resting = True

        def rested() -> None:
            server.resting = False
            self._dispatch()

        asyncio.get_running_loop().call_later(server.rest_s, rested)

    # --- who is to be believed

    def _doubt(self, server: _Server, reason: str) -> None:
        """No rows for it until it has proven itself again."""
        if server.standing is not _Standing.READY:
            return
        server.standing = _Standing.PROVING
        self._say(f"{server.where}: {reason}: no rows for it until it proves itself again")
        proof = asyncio.create_task(self._prove(server))
        self._proofs.add(proof)
        proof.add_done_callback(self._proofs.discard)

    async def _prove(self, server: _Server) -> None:
        try:
            while not await self._proven(server):
                await asyncio.sleep(_AWAY_PAUSE_S)
        except EngineError as error:
            self._lose(server, error)
        except Exception as error:  # noqa: BLE001  kept, and raised where rows are asked for
            self._fatal = error
            self._dispatch()

    async def _proven(self, server: _Server) -> bool:
        """Whether it is back. Raises EngineError when it is another."""
        try:
            await server.engine.reprobe()
        except ServerAway as error:
            server.error = error
            if server.standing is _Standing.PROVING:
                server.standing = _Standing.AWAY
                self._say(f"{server.where} stays away ({error.what}); rows again when it comes back")
                self._dispatch()
            return False
        if server.standing is not _Standing.LOST:
            server.standing, server.error = _Standing.READY, None
            self._say(f"{server.where} has proven itself again")
            self._dispatch()
        return True

    def _lose(self, server: _Server, error: EngineError) -> None:
        """No rows for it ever again."""
        if server.standing is not _Standing.LOST:
            server.standing, server.error = _Standing.LOST, error
            self._say(f"no further rows for {server.where}: {error}")
        self._dispatch()

    def _end(self) -> Exception | None:
        """Why no row can be captured any more; None while one can."""
        if self._fatal is not None:
            return self._fatal
        if any(server.standing in (_Standing.READY, _Standing.PROVING) for server in self._servers):
            return None
        where = ", ".join(server.where for server in self._servers)
        return EngineError("no server is left", where, "; ".join(f"{s.where}: {s.error}" for s in self._servers))


def open_servers(
    urls: Sequence[str],
    spec: CaptureSpec,
    cfg: Config,
    run: str,
    session: str,
    share: int = 1,
    *,
    proof: Proof | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SGLangEngine | ServerPool:
    """The engine of one server, or of several, not started; see `SGLangEngine` and `ServerPool`.

    Raises:
        ConfigError: as `SGLangEngine`, or spool folders that do not fit the servers.
    """
    proof = proof or Proof()
    engines = [
        SGLangEngine(url, spec, cfg.server.model_copy(update={"spool": spool}), run, session, share, proof=proof)
        for url, spool in zip(urls, spools_of(cfg.server, len(urls)), strict=True)
    ]
    if len(engines) == 1:
        return engines[0]
    extract = cfg.extract
    return ServerPool(engines, Limits(extract.window_requests, extract.window_tokens, extract.window_bytes), say)


def spools_of(cfg: ServerConfig, servers: int) -> Sequence[Path | None]:
    """The spool folder that the settings name for each server; None is the one that its port tells.

    Raises:
        ConfigError: one for several, or another number of folders than of servers.
    """
    if cfg.spool is not None and (cfg.spools or servers > 1):
        hint = "server.spools takes one folder a server, in the servers' order"
        if servers > 1:
            raise ConfigError(f"one spool folder is named for {servers} servers", "server.spool", hint)
        raise ConfigError("the spool is named twice", "server.spool and server.spools", "leave one of them out")
    if not cfg.spools:
        return [cfg.spool] * servers
    if len(cfg.spools) != servers:
        told = f"{len(cfg.spools)} spool folders are named for {servers} servers"
        raise ConfigError(told, "server.spools", "one folder a server, in the servers' order")
    return cfg.spools


def _same_folder(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    with contextlib.suppress(OSError):  # one is not there: its server's proof says so
        return one.samefile(other)
    return False


def _joined(infos: Sequence[EngineInfo]) -> dict[str, str]:
    """What each server says of itself, differing values beside each other."""
    keys = functools.reduce(lambda keys, info: keys | dict.fromkeys(info.provenance), infos, dict[str, None]())
    return {key: ", ".join(dict.fromkeys(i.provenance[key] for i in infos if key in i.provenance)) for key in keys}
