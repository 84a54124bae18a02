"""Money: exact sums, and a limit that no order of events passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.regenerate.budget import ZERO, Budget, OverBudgetError, Prices, Totals, Usage, dollars

PRICES = Prices(Decimal("0.15") / 10**6, Decimal("0.6") / 10**6, Decimal("0.0001"))


def test_costs_are_exact_and_the_servers_word_goes_first() -> None:
    assert PRICES.cost(Usage(1_000_001, 3)) == Decimal("0.15") + Decimal("0.00000015") + Decimal("0.0000018") + Decimal(
        "0.0001"
    )
    assert PRICES.cost(Usage(1, 1, Decimal("0.5"))) == Decimal("0.5")


def test_the_worst_case_counts_bytes_tools_and_the_longest_answer() -> None:
    messages, tools = [{"role": "user", "content": "ü" * 500}], [{"function": {"name": "f" * 300}}]
    tokens_at_least = 1000 + 300
    bound = PRICES.worst(messages, tools, 100)
    assert bound >= PRICES.cost(Usage(tokens_at_least, 100))
    assert PRICES.worst(messages, tools, 200) - bound == 100 * PRICES.completion
    assert Prices().worst(messages, tools, 100) == ZERO


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from(["answer", "unknown", "free"]), st.integers(0, 3)), max_size=40
    ),
    st.integers(1, 200),
)
def test_no_order_of_events_passes_the_limit(asks: list[tuple[int, str, int]], limit: int) -> None:
    budget = Budget(Prices(Decimal(1), ZERO), Totals(), Decimal(limit))
    refused = 0

    async def ask(worst: int, end: str, steps: int) -> None:
        nonlocal refused
        try:
            reserved = await budget.reserve(Decimal(worst))
        except OverBudgetError:
            refused += 1
            return
        for _ in range(steps):
            await asyncio.sleep(0)
        usage = Usage(worst // 2, 0) if end == "answer" else None
        budget.settle(reserved, usage, charged=end != "free")
        assert budget.totals.cost + budget.totals.unknown <= limit

    async def all_asks() -> None:
        await asyncio.wait_for(asyncio.gather(*(ask(*one) for one in asks)), 10)

    asyncio.run(all_asks())
    totals = budget.totals
    assert totals.cost == sum(Decimal(0) for _ in ()) + totals.prompt_tokens
    if totals.cost + totals.unknown + max((worst for worst, _, _ in asks), default=0) <= limit:
        assert not refused  # nobody is refused what could be paid


def test_a_server_that_charged_more_than_the_worst_case_is_reserved_more_for() -> None:
    budget = Budget(Prices(Decimal(1), ZERO), Totals(), Decimal(100))

    async def asked() -> None:
        reserved = await budget.reserve(Decimal(10))
        budget.settle(reserved, Usage(1, 1, Decimal(40)), charged=True)
        assert (await budget.reserve(Decimal(10))).amount == 40
        with pytest.raises(TimeoutError):  # 40 + 40 + 40 would pass 100, and one is in flight
            await asyncio.wait_for(budget.reserve(Decimal(10)), 0.05)

    asyncio.run(asked())


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1), st.integers(1, 500))
def test_a_server_that_charges_too_much_passes_the_limit_with_no_more_than_its_first_reply(
    factor: int, asks: list[tuple[int, int]], limit: int
) -> None:
    budget, costs = Budget(Prices(Decimal(1), ZERO), Totals(), Decimal(limit)), list[int]()

    async def ask(worst: int, steps: int) -> None:
        with suppress(OverBudgetError):
            reserved = await budget.reserve(Decimal(worst))
            for _ in range(steps):
                await asyncio.sleep(0)
            costs.append(factor * worst)
            budget.settle(reserved, Usage(1, 1, Decimal(factor * worst)), charged=True)

    async def all_asks() -> None:
        await asyncio.wait_for(asyncio.gather(*(ask(*one) for one in asks)), 10)

    asyncio.run(all_asks())
    assert sum(costs) == budget.totals.cost
    assert sum(costs) <= max(limit, *costs[:1], 0)


def test_many_overcharged_at_once_are_not_multiplied() -> None:
    budget = Budget(Prices(Decimal(1), ZERO), Totals())

    async def asked() -> Decimal:
        for reserved in [await budget.reserve(Decimal(10)) for _ in range(20)]:
            budget.settle(reserved, Usage(1, 1, Decimal(20)), charged=True)
        return (await budget.reserve(Decimal(10))).amount

    assert asyncio.run(asked()) == 20


def test_sums_for_people() -> None:
    assert (dollars(Decimal("0.00123")), dollars(Decimal("1234.5"))) == ("$0.0012", "$1,234.50")
