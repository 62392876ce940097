"""Restarts of lost engines, and the monitors that notice a loss."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sg_rlhf.overlay.reporting.errors import EngineLost, RewardError, RunStopped
from sg_rlhf.overlay.rollout import core_errors, engine_monitor
from sg_rlhf.overlay.rollout.engine_pool import EngineInstance, EnginePool


class Engines(EnginePool):
    """Without Ray; starting another takes as long as the test says."""

    def __init__(self, count: int) -> None:
        self.joined = 0
        super().__init__([], 3, self.join)
        self.instances = [EngineInstance(f"first {n}", "", ()) for n in range(count)]
        self.replaced = [0] * count
        self.starting, self.may_start = threading.Event(), threading.Event()
        #: Lost while others are started.
        self.also: list[int] = []

    def join(self) -> None:
        self.joined += 1

    def _lost(self) -> list[int]:
        also, self.also = self.also, []
        return also

    def _restart(self, number: int) -> None:
        self.starting.set()
        assert self.may_start.wait(10)
        self.replaced[number] += 1
        name = f"{self.replaced[number]} after the first {number}"
        self.instances[number] = EngineInstance(name, "", ())


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
    with engines.trainer_lock:
        thread.start()
        assert not engines.starting.wait(0.2)
    thread.join(10)
    assert engines.replaced == [1]


class Reference:
    """Of a ping, with its result: None, an error, or no answer."""

    def __init__(self, result: Any) -> None:
        self.result = result


class Loading(Reference):
    """Of a rank, which has loaded once every engine was pinged five times."""

    def __init__(self, pings: list[int]) -> None:
        self.pings = pings

    @property
    def result(self) -> Any:
        return None if min(self.pings, default=5) >= 5 else "silent"

    @result.setter
    def result(self, _result: Any) -> None:
        """It is never set."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start engines with these ping results, and a rank that waits for all of them."""

    def run(*results: Any, timeout: float = 60.0, with_rank: bool = True) -> None:
        def wait(references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
            ready = [r for r in references if r.result != "silent"][:1]
            return ready, [r for r in references if r not in ready]

        def get(reference: Reference) -> None:
            if isinstance(reference.result, Exception):
                raise reference.result

        local = SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions)
        monkeypatch.setattr(engine_monitor, "ray", local)
        monkeypatch.setattr(engine_monitor, "POLL_INTERVAL", 0.0)
        # An engine has a list where its pings differ: the last result is that of all later ones.
        left = [list(result) if isinstance(result, list) else [result] for result in results]
        pings = [0] * len(left)

        def ping(index: int) -> Reference:
            pings[index] += 1
            return Reference(left[index].pop(0) if len(left[index]) > 1 else left[index][0])

        engines: list[Any] = [
            SimpleNamespace(ping=SimpleNamespace(remote=functools.partial(ping, index)))
            for index in range(len(left))
        ]
        loading: list[Any] = [Loading(pings)] if with_rank else []
        engine_monitor.wait_for_start(engines, timeout, loading)

    return run


def test_an_engine_that_fails_to_start_ends_the_wait_for_the_ranks(start: Any) -> None:
    """The first rank waits for it in the weight-sync rendezvous."""
    error = ray.exceptions.RaySystemError("the core died")
    with pytest.raises(EngineLost, match=r"^rollout engine 1 did not start: .*the core died"):
        start(None, error)


def test_an_engine_that_never_answers_ends_it_at_the_deadline(start: Any) -> None:
    line = r"^rollout engine 0 did not start within 0 s \(six times sg.engine_timeout; logs/\)$"
    with pytest.raises(EngineLost, match=line):
        start("silent", None, timeout=0.0)
    with pytest.raises(EngineLost, match=line):
        start("silent", None, timeout=0.0, with_rank=False)


def test_an_engine_that_dies_after_its_start_ends_it_too(start: Any) -> None:
    """Before the ranks have connected to it."""
    with pytest.raises(EngineLost, match=r"^rollout engine 1 did not start: .*the core died"):
        start(None, [None, None, ray.exceptions.RaySystemError("the core died")])


def test_an_error_that_stops_a_run_is_raised_as_it_is(start: Any) -> None:
    error = ray.exceptions.RaySystemError("an engine")
    error.__cause__ = RewardError("no such reward file")
    with pytest.raises(RunStopped, match="^no such reward file$"):
        start(error)


def test_engines_that_start_end_nothing(start: Any) -> None:
    start(None, None)
    start(None, None, with_rank=False)


CORES_LOG = """\
(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:1512]     raise ValueError(f"unsupported {size}")
(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:1512] ValueError: unsupported head size 24
(SGRolloutActor pid=5) ERROR 11-28 05:00:01 [async_llm.py:906] AsyncLLM output_handler failed.
(SGRolloutActor pid=5) ERROR 11-28 05:00:01 [async_llm.py:906] EngineDeadError: See stack trace
"""


@pytest.mark.parametrize(
    ("text", "error"), [(CORES_LOG, "ValueError: unsupported head size 24"), ("WARNING: w\n", "")]
)
def test_what_a_core_died_of_is_read_from_its_log(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert core_errors.last_error(str(tmp_path / "log")) == error
    assert core_errors.last_error(str(tmp_path / "none")) == ""
