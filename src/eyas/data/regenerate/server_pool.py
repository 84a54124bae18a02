"""Several servers of one model: the one with the fewest in flight is asked next; one in trouble is rested.

A server that is away gets one request at a time until it answers. One that is busy (429, 502, 503, ...) gets no more at
once than it held when it said so, and slowly more as it answers; while it answers none, pauses grow. The pause is the
server's, not the row's: rows that wait for it use up no attempts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from eyas.data.regenerate.openai_client import Listing, OpenAIClient, Reply, Request
from eyas.data.regenerate.openai_faults import Fault, ServerAway
from eyas.errors import ConfigError, EngineError

_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 15.0
_LONGEST_PAUSE_S: Final = 60.0
_MORE: Final = 0.25  # requests at once, for each answer of a server that was busy
_LOOK_AGAIN_S: Final = 0.2


@dataclass(slots=True, eq=False)
class _Server:
    client: OpenAIClient
    in_flight: int = 0
    rest_until_s: float = -math.inf
    rest_s: float = 0.0  # of the last rest, while it is in trouble
    away_since_s: float | None = None
    busy_since_s: float | None = None
    most: float = math.inf  # requests that it takes at once
    probing: bool = False  # a request is finding out whether it is back


class ServerPool:
    """Asks one of `clients`, whichever is there.

    Args:
        away_s: how long all may be in trouble before asking raises.
        note: is told of servers that go and come back.
        pause_s: first pause of a busy server that names none.

    Attributes:
        asking: tasks that have a request at a server now.
    """

    def __init__(
        self, clients: Sequence[OpenAIClient], away_s: float, note: Callable[[str], None], pause_s: float = 1.0
    ) -> None:
        self._servers = [_Server(client) for client in clients]
        self._away_s, self._note, self._pause_s = away_s, note, pause_s
        self.asking: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()

    async def listing(self) -> Listing:
        """What the servers list, those that answer now; each must list the same names to make one.

        Raises:
            EngineError: none answers, or one refuses us.
        """
        found: list[Listing] = []
        away: list[ServerAway] = []
        for answer in await asyncio.gather(
            *(server.client.models() for server in self._servers), return_exceptions=True
        ):
            match answer:
                case Listing():
                    found.append(answer)
                case ServerAway():
                    away.append(answer)
                case BaseException():
                    raise answer
        if not found:
            raise away[0]
        for gone in away:
            self._note(f"{gone.where} does not answer ({gone.hint}); going on without it")
        named = [listing for listing in found if listing.names]
        if any(set(listing.names) != set(named[0].names) for listing in named):
            common = set(named[0].names).intersection(*(listing.names for listing in named))
            if not common:
                told = "; ".join(", ".join(listing.names[:3]) for listing in named)
                raise ConfigError("the servers serve different models", told, "name servers of one model")
            return Listing(tuple(name for name in named[0].names if name in common), named[0].prices)
        return named[0] if named else Listing()

    async def ask(self, request: Request) -> Reply:
        """One answer, from whichever server is there; waits for one.

        Raises:
            Fault: the try failed.
            EngineError: all servers have been in trouble for too long; or no row would fare better.
        """
        task = asyncio.current_task()
        while True:
            server = await self._pick()
            server.in_flight += 1
            began = _now()
            probe = server.away_since_s is not None
            server.probing |= probe
            if task:
                self.asking.add(task)
            try:
                reply = await server.client.ask(request)
            except ServerAway as away:
                self._rest(server, away)
                continue
            except Fault as fault:
                self._is_back(server)
                if fault.busy:
                    self._ease(server, fault.retry_after_s or 0.0, began)
                raise
            else:
                self._is_back(server)
                server.busy_since_s, server.rest_s = None, 0.0
                server.most += _MORE
                return reply
            finally:
                server.in_flight -= 1
                server.probing &= not probe
                if task:
                    self.asking.discard(task)

    def has_free(self) -> bool:
        """Whether some server is neither away nor resting."""
        return any(server.away_since_s is None and server.rest_until_s <= _now() for server in self._servers)

    async def _pick(self) -> _Server:
        while True:
            now = _now()
            ready = [server for server in self._servers if self._is_ready(server, now)]
            if ready:
                return min(ready, key=lambda server: server.in_flight)
            self._check_patience(now)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _is_ready(self, server: _Server, now: float) -> bool:
        if server.rest_until_s > now or server.in_flight + 1 > server.most:
            return False
        # One request finds out whether a server is back; the others wait for what it meets.
        return server.away_since_s is None or not server.probing

    def _check_patience(self, now: float) -> None:
        if all(self._is_hopeless(server, now) for server in self._servers):
            where = ", ".join(server.client.url for server in self._servers)
            raise EngineError(
                f"no server has answered for {self._away_s:g} s", where, "start one again; the same command goes on"
            )

    def _is_hopeless(self, server: _Server, now: float) -> bool:
        if server.away_since_s is not None:
            return now - server.away_since_s > self._away_s
        if server.busy_since_s is None or server.in_flight:
            return False
        return now - server.busy_since_s > self._away_s

    def _ease(self, server: _Server, asked_s: float, began: float) -> None:
        """A busy server is given less to do, and a pause; `began` is when it was asked."""
        now = _now()
        server.most = max(1, server.in_flight - 1)
        if began >= server.rest_until_s:  # else this is one more of those that were sent before the pause
            server.rest_s = min(max(self._pause_s, 2 * server.rest_s), _LONGEST_PAUSE_S)
            server.rest_until_s = now + server.rest_s
        server.rest_until_s = max(server.rest_until_s, now + asked_s)
        if server.busy_since_s is None:
            server.busy_since_s = server.rest_until_s

    def _rest(self, server: _Server, away: ServerAway) -> None:
        now = _now()
        if server.away_since_s is None:
            server.away_since_s = now
            self._note(f"{away.where} is away ({away.hint}); trying again while the others go on")
        server.rest_s = min(max(_FIRST_REST_S, 2 * server.rest_s), _LONGEST_REST_S, max(self._away_s, 0.1))
        server.rest_until_s = max(server.rest_until_s, now + server.rest_s)

    def _is_back(self, server: _Server) -> None:
        if server.away_since_s is not None:
            server.away_since_s, server.rest_s = None, 0.0
            self._note(f"{server.client.url} is back")


def _now() -> float:
    return asyncio.get_running_loop().time()
