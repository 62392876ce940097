"""Who replaces a lost engine, where several notice its loss."""

from __future__ import annotations

import threading

from sg_rlhf.overlay.rollout.dispatch import EngineInstance
from sg_rlhf.overlay.rollout.engine_pool import EnginePool


class Engines(EnginePool):
    """Without Ray; starting another takes as long as the test says."""

    def __init__(self, count: int) -> None:
        self.joined = 0
        super().__init__([], 3, self.join)
        self.incarnations = [EngineInstance(f"first {n}", "", ()) for n in range(count)]
        self.replaced = [0] * count
        self.starting, self.may_start = threading.Event(), threading.Event()
        #: Lost while others are started.
        self.also: list[int] = []

    def join(self) -> None:
        self.joined += 1

    def _lost(self) -> list[int]:
        also, self.also = self.also, []
        return also

    def _start_another(self, number: int) -> None:
        self.starting.set()
        assert self.may_start.wait(10)
        self.replaced[number] += 1
        name = f"{self.replaced[number]} after the first {number}"
        self.incarnations[number] = EngineInstance(name, "", ())


def test_an_engine_that_two_threads_miss_is_replaced_once() -> None:
    """An evaluation asks it, and so does a thread that samples ahead."""
    engines = Engines(2)
    threads = [threading.Thread(target=engines.replace, args=(1, "first 1")) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert engines.starting.wait(10)
    engines.may_start.set()
    for thread in threads:
        thread.join(10)
    assert engines.replaced == [0, 1] and engines.joined == 1


def test_those_lost_meanwhile_are_replaced_before_any_is_connected() -> None:
    engines = Engines(3)
    engines.may_start.set()
    engines.also = [0, 2]
    engines.replace(1, "first 1")
    assert engines.replaced == [1, 1, 1] and engines.joined == 1
    engines.replace(2, "first 2")
    assert engines.replaced == [1, 1, 1] and engines.joined == 1


def test_nobody_replaces_one_while_the_ranks_have_work() -> None:
    engines = Engines(1)
    engines.may_start.set()
    thread = threading.Thread(target=engines.replace, args=(0, "first 0"))
    with engines.ranks:
        thread.start()
        assert not engines.starting.wait(0.2)
    thread.join(10)
    assert engines.replaced == [1]
