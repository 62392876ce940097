"""Work in turns of the event loop: how long one is, who comes first, what becomes of errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from functools import partial

import pytest

from sg_rlhf.retrieval.turns import Turns


async def turns_of(turns: Turns, done: list[str]) -> list[int]:
    """How many pieces were done in each turn, until nothing more is."""
    counts = [len(done)]
    while True:
        await asyncio.sleep(0)
        if len(done) == counts[-1]:
            return [after - before for before, after in zip([0, *counts], counts, strict=False)]
        counts.append(len(done))


def test_what_is_free_is_done_at_once_and_the_rest_in_later_turns() -> None:
    async def scenario() -> None:
        turns, done = Turns(10), list[str]()
        for name in "abcdef":
            turns.call(partial(done.append, name), seconds=4)
        assert done == ["a", "b", "c"], "the third one exceeds the time"
        assert await turns_of(turns, done) == [3, 3]
        assert "".join(done) == "abcdef"

    asyncio.run(scenario())


def test_a_turn_ends_when_its_time_is_over() -> None:
    async def scenario() -> None:
        turns, done = Turns(0.01), list[str]()

        def work() -> None:
            time.sleep(0.002)
            done.append("")

        for _ in range(40):
            turns.call(work)
        assert max(await turns_of(turns, done)) <= 5
        assert len(done) == 40

    asyncio.run(scenario())


def test_what_is_urgent_goes_first_and_holds_nobody_up_for_ever() -> None:
    async def scenario() -> None:
        turns, done = Turns(10), list[str]()
        for number in range(4):
            turns.call(partial(done.append, f"other {number}"), seconds=10)
            turns.call(partial(done.append, f"urgent {number}"), urgent=True, seconds=10)
        await turns_of(turns, done)
        # The first is done at once; then one of the others a turn, whose time it takes.
        assert done[:2] == ["other 0", "other 1"]
        assert sorted(done) == sorted(f"{k} {n}" for n in range(4) for k in ("other", "urgent"))

    asyncio.run(scenario())


def test_results_errors_and_what_is_given_up() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    async def scenario() -> None:
        turns, done = Turns(10), list[str]()
        assert await turns.run(lambda: 5) == 5

        async def use_up() -> None:
            turns.call(lambda: None, seconds=10)

        first = asyncio.create_task(use_up())
        later = asyncio.create_task(turns.run(partial(done.append, "given up")))
        failing = asyncio.create_task(turns.run(fail))
        answer = asyncio.create_task(turns.run(lambda: 6))
        await asyncio.sleep(0)
        assert first.done() and not answer.done()
        later.cancel()
        with pytest.raises(ValueError, match="wrong"):
            await failing
        assert await answer == 6
        assert done == []

    asyncio.run(scenario())


def test_an_error_holds_nothing_that_a_collection_has_to_free() -> None:
    class Much:
        pass

    def fail(_: Much) -> None:
        raise ValueError("wrong")

    async def refused(turns: Turns) -> weakref.ref[Much]:
        much = Much()
        with contextlib.suppress(ValueError):
            await turns.run(partial(fail, much))
        return weakref.ref(much)

    async def scenario() -> None:
        turns = Turns(10)
        turns.call(lambda: None, seconds=10)
        much = await refused(turns)
        await asyncio.sleep(0)  # asyncio itself holds an error until its task waits again
        assert much() is None

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
