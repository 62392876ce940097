"""Errors that come through Ray, real ones of real processes, as one line."""

from __future__ import annotations

import errno
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import EngineLost
from sg_rlhf.overlay.rollout import engine_monitor
from sg_rlhf.overlay.rollout.engine_pool import EngineInstance, EnginePool

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0, max_restarts=0)
class SGRolloutActor:
    """By its name a rollout engine."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        if error is not None:
            raise error
        time.sleep(seconds)
        self.name = uuid.uuid4().hex
        self.error: Exception | None = None

    def process(self) -> int:
        return os.getpid()

    def fail(self, error: Exception) -> None:
        raise error

    def lose_its_core(self) -> None:
        self.error = RuntimeError("the core is gone")

    async def ping(self) -> None:
        if self.error is not None:
            raise self.error

    async def core_error(self) -> str:
        return "ValueError: no such kernel" if self.error is not None else ""

    async def instance(self) -> EngineInstance:
        process = (os.getpid(), psutil.Process().create_time())
        return EngineInstance(self.name, ray.get_runtime_context().get_node_id(), (process,))


@ray.remote(num_cpus=0, max_retries=0)
def controller(engine: Any, method: str, *args: Any) -> None:
    """Waits for an engine, as upstream's does: one nest more."""
    ray.get(getattr(engine, method).remote(*args))


def error_of(reference: Any) -> Exception:
    with pytest.raises(Exception) as raised:
        ray.get(reference)
    return raised.value


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such thing\nsecond line"), "ValueError: no such thing (in "),
        (RuntimeError(""), "RuntimeError: no message (in "),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"),
            "no space left on the disk of runs/a/metrics.jsonl; free some space (in ",
        ),
    ],
)
def test_what_a_worker_raised(error: Exception, line: str) -> None:
    engine = SGRolloutActor.remote()
    pid = ray.get(engine.process.remote())
    said = error_report.summarize(error_of(controller.remote(engine, "fail", error)))
    assert said.startswith(line) and "\n" not in said
    assert f"(in rollout engine, process {pid} on " in said


def test_a_worker_that_was_killed() -> None:
    engine = SGRolloutActor.remote()
    pid = ray.get(engine.process.remote())
    os.kill(pid, signal.SIGKILL)
    said = error_report.summarize(error_of(controller.remote(engine, "process")))
    assert said.startswith(f"rollout engine (process {pid} on ")
    assert said.endswith(" died (killed, or crashed)")


def test_a_worker_that_did_not_start() -> None:
    engine = SGRolloutActor.remote(OSError("no such port"))
    said = error_report.summarize(error_of(controller.remote(engine, "process")))
    assert said.startswith("rollout engine ") and "\n" not in said
    assert said.endswith("did not start: OSError: no such port")


def test_an_error_of_this_process() -> None:
    outer = RuntimeError("outer")
    outer.__cause__ = KeyError("inner")
    assert error_report.summarize(outer) == "KeyError: 'inner'"


def test_all_of_it_is_kept(tmp_path: Path) -> None:
    engine = SGRolloutActor.remote()
    error = error_of(controller.remote(engine, "fail", ValueError("first\nsecond")))
    file = error_report.save_traceback(error, tmp_path)
    assert file == tmp_path / error_report.FILE
    assert "second" in file.read_text() and "Traceback" in file.read_text()
    assert error_report.save_traceback(error, file) is None  # a folder cannot be below a file


@ray.remote(num_cpus=0, max_retries=0)
def watches(
    engines: list[Any], seconds: float, run_dir: Path, for_seconds: float, start: float = 600.0
) -> str:
    engine_monitor.START_TIMEOUT = start
    with engine_monitor.monitor(EnginePool(engines, 0, lambda: None), seconds, run_dir):
        (run_dir / "watching").touch()
        time.sleep(for_seconds)
    return "through"


def test_an_engine_that_is_stopped_ends_its_controller_with_a_line(tmp_path: Path) -> None:
    engines = [SGRolloutActor.remote() for _ in range(2)]
    pids = ray.get([engine.process.remote() for engine in engines])
    (tmp_path / engine_monitor.FILE.parent).mkdir()
    (tmp_path / engine_monitor.FILE).write_text("of an earlier run")
    reference = watches.remote(engines, 6.0, tmp_path, 3600.0)
    await_file(tmp_path / "watching")
    ready, _ = ray.wait([reference], timeout=2)
    assert not ready and engine_monitor.failure_message(tmp_path) is None
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(reference, timeout=1800)
    finally:
        os.kill(pids[1], signal.SIGKILL)
    said = engine_monitor.failure_message(tmp_path)
    assert said is not None and "\n" not in said
    assert said.startswith("rollout engine 1 did not answer for 6 s (sg.engine_timeout): ")


@pytest.mark.full
def test_an_engine_that_is_dead_and_that_nobody_misses_ends_it_too(tmp_path: Path) -> None:
    """Its process answers that its core is gone; the controller waits for something else of it."""
    engines = [SGRolloutActor.remote(), SGRolloutActor.options(max_restarts=0).remote()]
    ray.get(engines[1].lose_its_core.remote())
    reference = watches.remote(engines, 5.0, tmp_path, 3600.0, start=0.0)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(reference, timeout=1800)
    said = engine_monitor.failure_message(tmp_path)
    assert said is not None and said.startswith("rollout engine 1 did not answer for 5 s")


@pytest.mark.full  # it waits, 26 seconds
def test_engines_that_answer_or_die_end_nobody(tmp_path: Path) -> None:
    engines = [SGRolloutActor.remote() for _ in range(2)]
    pid = ray.get(engines[0].process.remote())
    reference = watches.remote(engines, 20.0, tmp_path, 26.0)
    await_file(tmp_path / "watching")
    os.kill(pid, signal.SIGKILL)
    assert ray.get(reference, timeout=1800) == "through"
    assert engine_monitor.failure_message(tmp_path) is None


def test_a_lost_engine_is_replaced_as_often_as_allowed() -> None:
    engine = SGRolloutActor.options(max_restarts=3).remote()
    joined: list[None] = []
    engines = EnginePool([engine], 2, lambda: joined.append(None))
    engines.answered.add(0)
    engines.check()
    assert not joined and engines.pop_replacement_count() == 0
    for harm in (signal.SIGKILL, signal.SIGSTOP):
        first = engines.instances[0]
        pid = first.processes[0][0]
        os.kill(pid, harm)
        if harm == signal.SIGKILL:
            wait_until(lambda pid=pid: not psutil.pid_exists(pid))
            engines.check()
        else:
            engines.replace(0, first.name)  # as after a watch that missed it
        assert engines.instances[0].name != first.name
        assert not psutil.pid_exists(pid)
    assert (
        len(joined) == 2
        and engines.pop_replacement_count() == 2
        and engines.pop_replacement_count() == 0
    )
    with pytest.raises(EngineLost, match=r"rollout engine 0 is lost .* replaced 2 times before"):
        engines.replace(0, engines.instances[0].name)


def test_an_engine_that_never_answered_is_not_replaced_and_says_what_its_core_died_of() -> None:
    engine = SGRolloutActor.options(max_restarts=3).remote()
    engines = EnginePool([engine], 3, lambda: None)
    ray.get(engine.lose_its_core.remote())
    line = r"engine 0 is lost \(ValueError: no such kernel\), and had not answered any request"
    with pytest.raises(EngineLost, match=line):
        engines.replace(0, engines.instances[0].name)
    assert engines.replaced == [0]


@pytest.mark.full
def test_engines_that_are_lost_together_are_all_there_before_any_is_connected() -> None:
    """As those of one machine are; a call to one that is still starting fails at once."""
    handles = [SGRolloutActor.options(max_restarts=3).remote(None, slow) for slow in (0.0, 3.0)]
    joined: list[list[str]] = []

    def rejoin() -> None:
        found = ray.get([handle.instance.remote() for handle in handles], timeout=2)
        joined.append([instance.name for instance in found])

    engines = EnginePool(handles, 3, rejoin)
    engines.answered |= {0, 1}
    first = list(engines.instances)
    for instance in first:
        os.kill(instance.processes[0][0], signal.SIGKILL)
    engines.replace(0, first[0].name)
    assert joined == [[instance.name for instance in engines.instances]]
    assert {i.name for i in first}.isdisjoint(joined[0]) and engines.replaced == [1, 1]
    engines.replace(1, first[1].name)  # who asked that one hears of its loss later
    assert len(joined) == 1 and engines.replaced == [1, 1]


def await_file(path: Path) -> None:
    wait_until(path.exists)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 1800
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
