"""Restarts of lost engines, and the monitors that notice a loss."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sg_rlhf.overlay.reporting.errors import EngineLost
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


def test_an_error_of_the_monitor_itself_is_printed_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stopped, calls = threading.Event(), []

    def monitor(engines: Any, seconds: float, run_dir: Path, stopped: threading.Event) -> None:
        calls.append(engines)
        if len(calls) == 1:
            raise RuntimeError("what nobody expected")
        stopped.set()

    monkeypatch.setattr(engine_monitor, "_monitor", monitor)
    engine_monitor._monitor_forever("engines", 0.01, tmp_path, stopped)  # type: ignore[arg-type]
    assert calls == ["engines", "engines"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("was restarted: RuntimeError: what nobody expected")


class Reference:
    """Of a ping, with its result: None, an error, or no answer."""

    def __init__(self, result: Any) -> None:
        self.result = result


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Start engines with these ping results; returns the killed ranks and the message."""

    def run(*results: Any, timeout: float = 60.0) -> tuple[list[str], str | None]:
        killed: list[str] = []

        def wait(references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
            ready = [r for r in references if r.result != "silent"][:1]
            return ready, [r for r in references if r not in ready]

        def get(reference: Reference) -> None:
            if isinstance(reference.result, Exception):
                raise reference.result

        local = SimpleNamespace(wait=wait, get=get, kill=killed.append, exceptions=ray.exceptions)
        monkeypatch.setattr(engine_monitor, "ray", local)
        monkeypatch.setattr(engine_monitor, "POLL_INTERVAL", 0.0)
        # An engine has a list where its pings differ: the last result is that of all later ones.
        left = [list(result) if isinstance(result, list) else [result] for result in results]
        pings = [0] * len(left)

        def ping(index: int) -> Reference:
            pings[index] += 1
            return Reference(left[index].pop(0) if len(left[index]) > 1 else left[index][0])

        handles = [
            SimpleNamespace(ping=SimpleNamespace(remote=functools.partial(ping, index)))
            for index in range(len(left))
        ]
        (tmp_path / "logs").mkdir(exist_ok=True)
        started = engine_monitor.StartMonitor(handles, ["rank 0", "rank 1"], tmp_path, timeout)
        while started._thread.is_alive() and min(pings) < 5:
            started._thread.join(0.01)
        started.stop()
        return killed, engine_monitor.failure_message(tmp_path)

    return run


def test_an_engine_that_fails_to_start_ends_the_wait_of_the_ranks(start: Any) -> None:
    """The first rank waits for it in the weight-sync rendezvous."""
    error = ray.exceptions.RaySystemError("the core died")
    killed, message = start(None, error)
    assert killed == ["rank 0", "rank 1"]
    assert message is not None and message.startswith("rollout engine 1 did not start: ")
    assert "\n" not in message and "the core died" in message


def test_an_engine_that_never_answers_ends_it_at_the_deadline(start: Any) -> None:
    killed, message = start("silent", None, timeout=0.0)
    assert killed == ["rank 0", "rank 1"]
    line = "rollout engine 0 did not start within 0 s (six times sg.engine_timeout; logs/)"
    assert message == line


def test_an_engine_that_dies_after_its_start_ends_it_too(start: Any) -> None:
    """Before the ranks have connected to it."""
    killed, message = start(None, [None, None, ray.exceptions.RaySystemError("the core died")])
    assert killed == ["rank 0", "rank 1"]
    assert message is not None and message.startswith("rollout engine 1 did not start: ")


def test_engines_that_start_end_nothing(start: Any) -> None:
    assert start(None, None) == ([], None)


def test_colocated_engines_start_within_the_deadline_before_they_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pings = [Reference(None), Reference("silent")]
    local = SimpleNamespace(
        wait=lambda pending, **_: ([r for r in pending if r.result is None], []),
        get=lambda _reference: None,
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(engine_monitor, "ray", local)
    handles = [SimpleNamespace(ping=SimpleNamespace(remote=lambda p=p: p)) for p in pings]
    with pytest.raises(EngineLost, match="engine 1 did not start within 0 s "):
        engine_monitor.wait_for_start(handles, 0.0)
    pings[1].result = None
    engine_monitor.wait_for_start(handles, 0.0)


def test_an_engine_that_fails_to_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_reference: Reference) -> None:
        raise ray.exceptions.RaySystemError("no such model")

    local = SimpleNamespace(
        wait=lambda pending, **_: (pending, []), get=get, exceptions=ray.exceptions
    )
    monkeypatch.setattr(engine_monitor, "ray", local)
    handle = SimpleNamespace(ping=SimpleNamespace(remote=lambda: Reference(None)))
    with pytest.raises(ray.exceptions.RaySystemError, match="no such model"):
        engine_monitor.wait_for_start([handle], 60.0)


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
