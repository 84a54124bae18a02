"""Money: what replies cost, and what may still be asked without passing a limit. Dollars, exact decimals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

ZERO: Final = Decimal(0)
_PER_MESSAGE: Final = 64  # tokens a template may put around one message
_PER_REQUEST: Final = 1024  # and around all: a system prompt of its own, the date, how to call tools


@dataclass(frozen=True, slots=True)
class Usage:
    """What a reply says of itself: tokens, and dollars where the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per token, and per request."""

    prompt: Decimal = ZERO
    completion: Decimal = ZERO
    request: Decimal = ZERO

    def __bool__(self) -> bool:
        return bool(self.prompt or self.completion or self.request)

    def cost(self, usage: Usage) -> Decimal:
        """Dollars of one reply; the server's own word is believed."""
        if usage.cost is not None:
            return usage.cost
        return usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion + self.request

    def worst(self, messages: Sequence[Mapping[str, Any]], tools: object, max_tokens: int) -> Decimal:
        """The most a request can cost. A token is at least one byte, so bytes bound tokens."""
        if not self:
            return ZERO
        size = sum(_PER_MESSAGE + len(json.dumps(message, ensure_ascii=False).encode()) for message in messages)
        size += 2 * len(json.dumps(tools, ensure_ascii=False).encode()) if tools else 0
        return (size + _PER_REQUEST) * self.prompt + max_tokens * self.completion + self.request


@dataclass(slots=True)
class Totals:
    """What replies were charged, over all sessions.

    Attributes:
        cost: of replies that told their usage.
        unknown: the most that tries may have cost of which nobody knows (cut, never answered), `unknown_tries` of them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal = ZERO
    unknown: Decimal = ZERO
    unknown_tries: int = 0

    def add(self, usage: Usage | None, cost: Decimal) -> None:
        """One more try; without usage, `cost` is the most it can be."""
        if usage is None:
            self.unknown += cost
            self.unknown_tries += bool(cost)
        else:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
            self.cost += cost


class OverBudgetError(Exception):
    """The next request could pass the limit, and nothing is in flight that could still turn out cheaper."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Dollars set aside for a request whose worst case is known."""

    amount: Decimal
    worst: Decimal


@dataclass(slots=True)
class Budget:
    """Reserves the worst case of a request before it is sent, so that the limit cannot be passed.

    A server may charge more than the worst case: other prices, longer answers than asked for. With a limit the first
    request therefore goes alone, and more is set aside for those that follow.

    Args:
        totals: what was spent already; kept up to date.
        limit: dollars; None is no limit.
    """

    prices: Prices
    totals: Totals
    limit: Decimal | None = None
    _reserved: Decimal = ZERO
    _in_flight: int = 0
    _scale: Decimal = Decimal(1)  # the most that was charged, in worst cases
    _met: bool = False  # a request was charged: its server keeps to the worst case, or is known not to
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, worst: Decimal) -> Reserved:
        """Set `worst` dollars aside, or more, once that is possible.

        Raises:
            OverBudgetError: it never will be.
        """
        while self.limit is not None:
            amount = worst * self._scale
            fits = self.totals.cost + self.totals.unknown + self._reserved + amount <= self.limit
            if fits and (self._met or not self._in_flight):
                break
            if not self._in_flight:
                raise OverBudgetError
            self._news.clear()
            await self._news.wait()
        amount = worst * self._scale
        self._reserved += amount
        self._in_flight += 1
        return Reserved(amount, worst)

    def settle(self, reserved: Reserved, usage: Usage | None, *, charged: bool) -> Decimal:
        """What a try cost instead; without usage, one that may be charged keeps its reservation.

        Returns:
            dollars: the cost, or with `usage` None the most it may have been.
        """
        cost = self.prices.cost(usage) if usage else reserved.amount if charged else ZERO
        self._reserved -= reserved.amount
        self._in_flight -= 1
        self.totals.add(usage, cost)
        self._met |= charged or usage is not None
        if usage and reserved.worst:
            self._scale = max(self._scale, cost / reserved.worst)
        self._news.set()
        return cost


def dollars(amount: Decimal) -> str:
    """`$1.2345`, with as many digits as small sums need."""
    return f"${amount:,.2f}" if amount >= 100 else f"${amount:,.4f}"
