"""Which engine of several gets which request: all are answered, and no engine waits for nothing."""

import heapq
import os
import random

import pytest

from sg_rlhf.eval.engines.base import Request
from sg_rlhf.eval.engines.replicas import MAX_IN_FLIGHT, Shares, _Worker, hub_variables


def request(key: str) -> Request:
    return Request(key, "", (), 0.0, 1.0, 1, 0)


class World:
    """Engines that answer some of their requests per call, in the order that chance gives."""

    def __init__(self, engines: int, rng: random.Random) -> None:
        self.shares, self.rng = Shares(engines), rng
        self.open: list[list[Request]] = [[] for _ in range(engines)]
        self.running: set[int] = set()

    def add(self, requests: list[Request]) -> None:
        self.shares.add(requests)
        for engine in set(range(len(self.open))) - self.running:
            self.feed(engine)

    def feed(self, engine: int) -> None:
        self.open[engine] += self.shares.take(engine)
        assert self.shares.held[engine] == len(self.open[engine]) <= MAX_IN_FLIGHT
        if self.open[engine]:
            self.running.add(engine)

    def step(self) -> list[Request]:
        assert self.running, "requests are open and no engine works"
        engine = self.rng.choice(sorted(self.running))
        self.running.remove(engine)
        held = self.open[engine]
        count = self.rng.randint(1, max(1, len(held) // 3))
        done, self.open[engine] = held[:count], held[count:]
        self.shares.finished(engine, count)
        self.feed(engine)
        return done


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_of_dialogues_is_answered(seed: int) -> None:
    """Turns come a few at a time: what an engine may hold falls while it holds more."""
    rng = random.Random(seed)
    world = World(4, rng)
    turns = {f"d{i}": rng.randint(1, 5) for i in range(1500)}
    world.add([request(key) for key in turns])
    running, now, later = len(turns), 0, []
    while running or later:
        due = []
        while later and (later[0][0] <= now or not (running or due)):
            due.append(request(heapq.heappop(later)[1]))
        if due:
            world.add(due)
        done = world.step()
        running += len(due) - len(done)
        now += 1
        for answered in done:
            turns[answered.key] -= 1
            if turns[answered.key]:
                heapq.heappush(later, (now + rng.randint(1, 6), answered.key))
    assert set(turns.values()) == {0}


def test_requests_given_at_once_are_shared_and_some_are_kept_for_whoever_is_first() -> None:
    world = World(4, random.Random(0))
    world.add([request(str(i)) for i in range(600)])
    assert [len(held) for held in world.open] == [100] * 4
    answered = 0
    while answered < 600:
        answered += len(world.step())
    assert world.shares.held == [0] * 4


def test_an_engine_in_another_process_finds_the_hubs_variables(monkeypatch) -> None:
    """On a machine that joined a cluster they are not in the environment."""
    wanted = {"HF_HOME": "/disk/hub", "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER", "x")
    given = hub_variables()
    assert given.items() >= wanted.items() and "OTHER" not in given
    found: dict[str, str] = {}
    with monkeypatch.context() as there:
        there.setattr(os, "environ", {})
        _Worker(None, lambda _: found.update(os.environ), given)
    assert found == given
