"""A pool of killable, confined processes, shared by all threads of a process.

Ours and other graders run in it: they evaluate text that a model wrote. It starts with the first
answer that needs it and ends with the process, in whatever way that ends: a script, a child of
`multiprocessing` (which runs no `atexit`, and joins its children), a worker of an executor, of
`multiprocessing.Pool`, joblib or Ray. Covered, each with a test: an answer that never ends, in
Python or in C; one that takes all memory or kills its worker; calls from many threads; a fork of
the process that uses it; a `__main__` that is not fit to be imported twice; a pool that breaks
down, which is replaced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import util
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from sg_rlhf.tasks.math.answers import sandbox, worker
from sg_rlhf.tasks.math.answers.reason import Reason

log = logging.getLogger(__name__)
T = TypeVar("T")

LIMIT_S = 2.0
WALL_FACTOR = 10.0
DEFAULT_WORKERS = 2
# Beyond this without a verdict for any answer, the pool itself is taken to be stuck: a worker that
# is killed from outside while it hands over a verdict takes pebble's lock along. A start takes 2 s.
STUCK_AFTER_S = 60.0
_BEFORE_THE_JOIN = 100


@contextlib.contextmanager
def _program_hidden() -> Iterator[None]:
    """Within this, a process that `multiprocessing` spawns does not import the parent's `__main__`.

    That would be Ray's worker program or an evaluation script with vLLM: seconds and gigabytes for
    each worker, and endless recursion for a script without a `__main__` guard.
    """
    program = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {
        name: program.pop(name) for name in ("__spec__", "__file__") if name in program
    }
    program["__spec__"] = None
    method = multiprocessing.get_start_method(allow_none=True)
    # A new process knows Python's own start methods, not joblib's.
    is_foreign = method not in (None, *multiprocessing.get_all_start_methods())
    if is_foreign:
        multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        program.update(hidden)
        if is_foreign:
            multiprocessing.set_start_method(method, force=True)


#: Two threads that hid the program at once would restore what the other one left.
_starting = threading.Lock()


class _Process(SpawnProcess):
    def start(self) -> None:
        """Start it, also from a daemonic process.

        `multiprocessing` refuses that since such a process is ended without a word to its children.
        A grading worker ends by itself when its pipe does.
        """
        parent = multiprocessing.current_process()
        daemonic = parent.daemon
        with _starting, _program_hidden():
            if daemonic:
                parent.daemon = False
            try:
                super().start()
            finally:
                if daemonic:
                    parent.daemon = True


class _Context(SpawnContext):
    Process = _Process


class WorkerPool:
    """`workers` processes, each of which is killed when one call takes longer than `limit_s`.

    The limit is processor time from the moment when a worker takes up the call, so that neither the
    start of the workers, nor a queue, nor a busy machine counts. pebble notices ten times a second
    that a worker is gone: add 0.2 s. `WALL_FACTOR` times the limit in wall time also ends a call,
    in case a worker sleeps or is starved.

    Args:
        prepare: called in each new worker, before it is confined (`sandbox`) and its output goes
            nowhere; by default it makes the worker ready for our grader.
    """

    def __init__(
        self,
        workers: int,
        limit_s: float = LIMIT_S,
        prepare: Callable[..., object] = worker.warm_up,
        *args: Any,
    ) -> None:
        if workers < 1 or limit_s <= 0:
            raise ValueError(
                f"a grading pool needs at least 1 worker and a limit above 0 s, "
                f"got workers={workers}, limit_s={limit_s}"
            )
        self.workers = workers
        self.limit_s = limit_s
        self._prepare = (prepare, *args)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._last_result = 0.0
        _pools.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> Callable[[], T | Reason]:
        """Queue a call; calling the result waits for its value, or `TIMEOUT` or `CRASH`."""
        first = self._schedule(function, args)

        def result() -> T | Reason:
            # The pool can break down without this call's doing: it gets a second try.
            for task in (first, None):
                found = self._wait(task or self._schedule(function, args))
                if found is not _BROKEN:
                    return found  # type: ignore[no-any-return]
            return Reason.CRASH

        return result

    def close(self) -> None:
        """Stop the workers. The next call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _stop(pool)

    def reset_after_fork(self) -> None:
        """In a forked child: the workers, and the threads that talk to them, are the parent's."""
        self._lock = threading.Lock()
        self._pool = None

    def _schedule(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Scheduled | None:
        with self._lock:
            for _ in range(2):
                if self._pool is None:
                    self._pool = self._start()
                try:
                    future = self._pool.schedule(
                        _limited,
                        args=(self.limit_s, function, *args),
                        timeout=WALL_FACTOR * self.limit_s,
                    )
                except RuntimeError as error:  # it broke down while idle, or does not start
                    log.warning("grading workers are replaced: %s", error)
                    broken, self._pool = self._pool, None
                    _stop(broken)
                    continue
                future.add_done_callback(self._note_result)
                return _Scheduled(self._pool, future, time.monotonic())
        return None

    def _start(self) -> ProcessPool:
        for module in ("math_verify", "sympy"):
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"grading mathematics needs {module}; is it installed?")
        # Before `multiprocessing` joins the children, as it does at the end of any process.
        util.Finalize(None, self.close, exitpriority=_BEFORE_THE_JOIN)
        return ProcessPool(
            max_workers=self.workers,
            initializer=_begin,
            initargs=self._prepare,
            context=_Context(),
        )

    def _note_result(self, future: Future[Any]) -> None:
        self._last_result = time.monotonic()

    def _wait(self, task: _Scheduled | None) -> Any:
        """The result, or `_BROKEN` if the pool broke down or got stuck before there was one."""
        if task is None:
            return _BROKEN
        while not futures.wait([task.future], timeout=5.0).done:
            if time.monotonic() - max(task.since, self._last_result) > STUCK_AFTER_S:
                return self._restart(task.pool, "no verdict for any answer")
        if task.future.cancelled():
            return _BROKEN
        error = task.future.exception()
        if error is None:
            return task.future.result()
        if isinstance(error, TimeoutError):
            return Reason.TIMEOUT
        if isinstance(error, ProcessExpired) and error.exitcode == -signal.SIGPROF:
            return Reason.TIMEOUT
        if isinstance(error, BrokenProcessPool):
            return self._restart(task.pool, str(error))
        return Reason.CRASH

    def _restart(self, pool: ProcessPool, why: str) -> object:
        with self._lock:
            if self._pool is not pool:  # another thread was first
                return _BROKEN
            self._pool = None
        log.warning("grading workers are replaced: %s", why)
        _stop(pool)
        return _BROKEN


_BROKEN = object()


@dataclass(frozen=True)
class _Scheduled:
    pool: ProcessPool
    future: ProcessFuture[Any]
    since: float


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def _begin(prepare: Callable[..., object], *args: Any) -> None:
    """Make this process a worker; the limit of its first call starts only after it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # pebble's handler waits for the running C call to end, and its kill follows 3 s later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    prepare(*args)
    # The parser prints, and the trainer's terminal is not the place for it.
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    # Last: the parser's tables may be written to a cache.
    sandbox.enter_sandbox()


def _limited(limit_s: float, function: Callable[..., T], *args: Any) -> T | Reason:
    """The call's value; `CRASH` stands for running out of memory.

    After `limit_s` seconds of processor time the kernel ends this process with SIGPROF, whatever C
    code it is in and whether or not the trainer still lives. Processor time, because a verdict must
    not depend on what else the machine is doing.
    """
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return function(*args)
    except MemoryError:
        return Reason.CRASH
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@lru_cache(maxsize=1)
def shared_pool() -> WorkerPool:
    """The pool of this process: `SG_MATH_WORKERS` workers (2), `SG_MATH_LIMIT_S` seconds (2).

    Raises:
        ValueError: a variable does not hold a positive number.
    """
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


def _reset_pools() -> None:
    global _starting
    _starting = threading.Lock()
    for pool in _pools:
        pool.reset_after_fork()


os.register_at_fork(after_in_child=_reset_pools)
