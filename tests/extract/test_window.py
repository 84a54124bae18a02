from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from eyas.extract.window import Window

costs = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 500)), min_size=1, max_size=40)


@given(costs, st.integers(1, 5), st.integers(1, 100), st.integers(1, 1000))
def test_never_over_any_limit_and_everything_passes(
    rows: list[tuple[int, int]], n: int, tokens: int, size: int
) -> None:
    peak: list[tuple[int, int, int]] = []

    async def main() -> int:
        window = Window(n, tokens, size)
        flying: list[tuple[int, int]] = []
        passed = 0

        async def fly(cost: tuple[int, int]) -> None:
            nonlocal passed
            assert await window.acquire(*cost)
            flying.append(cost)
            peak.append((len(flying), sum(c[0] for c in flying), sum(c[1] for c in flying)))
            await asyncio.sleep(0)
            flying.remove(cost)
            await window.release(*cost)
            passed += 1

        await asyncio.gather(*(fly(cost) for cost in rows))
        assert window.in_flight == 0
        return passed

    assert asyncio.run(main()) == len(rows)
    for count, t, b in peak:
        assert count == 1 or (count <= n and t <= tokens and b <= size)


def test_closing_turns_waiters_away() -> None:
    async def main() -> list[bool]:
        window = Window(1, 10, 10)
        first = await window.acquire(1, 1)
        waiting = asyncio.create_task(window.acquire(1, 1))
        await asyncio.sleep(0)
        await window.close()
        return [first, await waiting, await window.acquire(1, 1)]

    assert asyncio.run(main()) == [True, False, False]
