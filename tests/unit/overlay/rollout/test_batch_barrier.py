"""Requests of a batch enter together and in one order, whatever comes first or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.rollout.batch_barrier import BatchBarrier


class Engine:
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def add(self, key: Any) -> Any:
        await asyncio.sleep(0)
        self.log.append(key)
        return f"output of {key}"


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_requests_enter_in_their_order_when_all_are_there(
    arrivals: list[int], skipped: set[int]
) -> None:
    engine = Engine()

    async def batch() -> list[Any]:
        barrier = BatchBarrier(6, engine.pause, engine.resume)

        async def request(key: int) -> Any:
            for _ in range(arrivals.index(key)):
                await asyncio.sleep(0)
            if key in skipped:
                barrier.skip()
                return None
            return await barrier.arrive(key, lambda: engine.add(key))

        return await asyncio.wait_for(asyncio.gather(*map(request, range(6))), 300)

    outputs = asyncio.run(batch())
    entered = sorted(set(range(6)) - skipped)
    assert engine.log == (["pause", *entered, "resume"] if entered else [])
    assert outputs == [None if key in skipped else f"output of {key}" for key in range(6)]


def test_nothing_is_computed_before_the_last_request_is_there() -> None:
    engine = Engine()

    async def batch() -> None:
        barrier = BatchBarrier(2, engine.pause, engine.resume)
        first = asyncio.create_task(barrier.arrive(0, lambda: engine.add(0)))
        await asyncio.sleep(0.05)
        assert engine.log == ["pause"] and not first.done()
        await barrier.arrive(1, lambda: engine.add(1))
        assert await first == "output of 0"

    asyncio.run(batch())


def test_one_refused_request_holds_nobody_up_and_a_dead_engine_is_told_to_all() -> None:
    engine = Engine()

    async def refused() -> str:
        raise ValueError("a prompt without room")

    async def dead() -> None:
        raise ConnectionError("the engine is dead")

    async def batch(barrier: BatchBarrier) -> list[Any]:
        requests = [barrier.arrive(0, refused), barrier.arrive(1, lambda: engine.add(1))]
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 300)

    first, second = asyncio.run(batch(BatchBarrier(2, engine.pause, engine.resume)))
    assert isinstance(first, ValueError) and second == "output of 1"
    found = asyncio.run(batch(BatchBarrier(2, dead, engine.resume)))
    assert [type(error) for error in found] == [ConnectionError, ConnectionError]


def test_who_comes_after_the_engine_died_hears_of_it() -> None:
    async def dead() -> None:
        raise ConnectionError("the engine is dead")

    async def batch() -> None:
        barrier = BatchBarrier(3, dead, Engine().resume)
        for key in range(3):  # the first one's task has found out when the second comes
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(barrier.arrive(key, dead), 300)

    asyncio.run(batch())


@pytest.mark.parametrize("missing", [1, 2])
def test_all_may_be_excused(missing: int) -> None:
    barrier = BatchBarrier(missing, Engine().pause, Engine().resume)
    for _ in range(missing):
        barrier.skip()
