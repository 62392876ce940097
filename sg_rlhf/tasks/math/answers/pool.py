"""A pool of killable, confined processes (`answers.worker`), shared by all threads of a process.

Ours and other graders run in it: they evaluate text that a model wrote. It starts with the first
answer that needs it; a worker ends with its trainer. It speaks JSON: nothing is unpickled.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from sg_rlhf.tasks.math.answers.rules import Reason

log = logging.getLogger(__name__)

LIMIT_S = 2.0
WALL_FACTOR = 10.0
DEFAULT_WORKERS = 2
#: Wall time to start a worker; it takes 1 s on a machine that has nothing else to do.
_START_S = 300.0
_MAX_ANSWER_BYTES = 4096
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]\n"
    "from sg_rlhf.tasks.math.answers.worker import serve; serve()"
)
_WARM_UP = "sg_rlhf.tasks.math.answers.compare:warm_up"


class _Worker:
    """One process, ready to be called."""

    def __init__(self, prepare: str, arguments: tuple[Any, ...]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._calls, self._answers = self.process.stdin, self.process.stdout
        if isinstance(self.call([prepare, arguments, 0.0], _START_S), Reason):
            log.warning("a grading worker does not start")
            self.end()

    def call(self, call: list[Any], wall_s: float) -> Any:
        """The value, or `TIMEOUT` or `CRASH`."""
        waiting = memoryview(json.dumps(call).encode() + b"\n")
        try:
            while waiting:
                waiting = waiting[self._calls.write(waiting) :]
        except BrokenPipeError:
            return Reason.CRASH
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if not poll.poll(1000 * wall_s):
            self.end()
            return Reason.TIMEOUT
        try:
            value = json.loads(os.read(self._answers.fileno(), _MAX_ANSWER_BYTES))
        except ValueError:  # nothing: it ended
            return Reason.TIMEOUT if self.end() == -signal.SIGPROF else Reason.CRASH
        return Reason.CRASH if value is None else value[0]

    def end(self) -> int:
        """Kill the process, unless it has ended already; the signal that ended it, negative."""
        self.process.kill()
        return self.process.wait()

    def forget(self) -> None:
        """In a forked child: close its copy of the pipes, which keep the parent's worker alive."""
        self._calls.close()
        self._answers.close()


class WorkerPool:
    """`workers` processes, each of which is killed when one call takes longer than `limit_s`.

    The limit is processor time of the call, so that a queue or a busy machine does not count.
    `WALL_FACTOR` times the limit in wall time also ends a call.

    Args:
        prepare: called in each new worker before it is confined, "module:function"; by default it
            makes the worker ready for our grader.
        arguments: of `prepare`, as JSON has them.
    """

    def __init__(
        self, workers: int, limit_s: float = LIMIT_S, prepare: str = _WARM_UP, *arguments: Any
    ) -> None:
        if workers < 1 or limit_s <= 0:
            raise ValueError(
                f"a grading pool needs at least 1 worker and a limit above 0 s, "
                f"got workers={workers}, limit_s={limit_s}"
            )
        self.workers = workers
        self.limit_s = limit_s
        self._prepare = (prepare, arguments)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._reset()
        _pools.add(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call on JSON values; its result is the value, or `TIMEOUT` or `CRASH`."""
        name = f"{function.__module__}:{function.__qualname__}"
        with self._lock:
            if self._threads is None:
                for module in ("math_verify", "sympy"):
                    if importlib.util.find_spec(module) is None:
                        raise ModuleNotFoundError(
                            f"grading mathematics needs {module}; is it installed?"
                        )
                self._threads = ThreadPoolExecutor(self.workers, "grading")
            return self._threads.submit(self._call, self._idle, [name, arguments, self.limit_s])

    def close(self) -> None:
        """Stop the workers. The next call starts new ones."""
        with self._lock:
            threads, started = self._threads, list(self._started)
            self._reset()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.end()

    def forget(self) -> None:
        """In a forked child: the workers, and the threads that talk to them, are the parent's."""
        for worker in list(self._started):
            worker.forget()
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._threads = None
        self._started: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def _call(self, idle: SimpleQueue[_Worker | None], call: list[Any]) -> Any:
        worker = idle.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = _Worker(*self._prepare)
                self._started.add(worker)
            return worker.call(call, WALL_FACTOR * self.limit_s)
        finally:
            idle.put(worker)


@lru_cache(maxsize=1)
def shared_pool() -> WorkerPool:
    """This process's, by `SG_MATH_WORKERS` and `SG_MATH_LIMIT_S`; a bad value: `ValueError`."""
    return WorkerPool(
        int(_from_environment("SG_MATH_WORKERS", DEFAULT_WORKERS)),
        _from_environment("SG_MATH_LIMIT_S", LIMIT_S),
    )


def _from_environment(name: str, default: float) -> float:
    value = os.environ.get(name, str(default))
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    whole = name != "SG_MATH_WORKERS" or parsed.is_integer()
    if not (0 < parsed < math.inf and whole):
        raise ValueError(f"{name}={value!r}: expected a positive number")
    return parsed


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_pools() -> None:
    for pool in _pools:
        pool.forget()


os.register_at_fork(after_in_child=_forget_pools)
