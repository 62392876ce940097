"""A pool of killable processes for comparing answers, shared by all threads of a process.

It starts with the first answer that needs it and ends with the process, in whatever way that ends:
a script, a child of `multiprocessing` (which runs no `atexit`, and joins its children), a worker of
an executor, of `multiprocessing.Pool`, joblib or Ray. Covered, each with a test: an answer that
never ends, in Python or in C; one that takes all memory or kills its worker; calls from many
threads; a fork of the process that uses it; a `__main__` that is not fit to be imported twice; a
pool that breaks down, which is replaced.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from sg_rlhf.tasks.math.answers import worker
from sg_rlhf.tasks.math.answers.reason import Reason

log = logging.getLogger(__name__)

LIMIT_S = 2.0
WALL_FACTOR = 10.0
DEFAULT_WORKERS = 2
# Beyond this without a verdict for any answer, the pool itself is taken to be stuck: a worker that
# is killed from outside while it hands over a verdict takes pebble's lock along. A start takes 2 s.
STUCK_AFTER_S = 60.0


_BEFORE_THE_JOIN = 100


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Popen(popen_spawn_posix.Popen):
    """A spawned process that does not import the parent's `__main__`.

    That would be Ray's worker program or an evaluation script with vLLM: seconds and gigabytes for
    each worker, and endless recursion for a script without a `__main__` guard. This is
    `popen_spawn_posix.Popen._launch` of Python 3.11 without those entries of `prep_data`.
    """

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None
        prep_data = spawn.get_preparation_data(process_obj.name)
        # The start method as well: an executor's own, such as joblib's loky, is unknown there.
        for entry in ("init_main_from_name", "init_main_from_path", "start_method"):
            prep_data.pop(entry, None)
        payload = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(prep_data, payload)
            reduction.dump(process_obj, payload)
        finally:
            set_spawning_popen(None)
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            descriptors = [*self._fds, tracker_fd, child_r, child_w]
            executable = os.fsencode(spawn.get_executable())
            self.pid = util.spawnv_passfds(executable, command, descriptors)
            self.sentinel = parent_r
            with open(parent_w, "wb", closefd=False) as pipe:
                pipe.write(payload.getbuffer())
        finally:
            self.finalizer = util.Finalize(self, _close, [parent_r, parent_w])
            os.close(child_r)
            os.close(child_w)


class _Process(SpawnProcess):
    def start(self) -> None:
        """Start it, also from a daemonic process.

        `multiprocessing` refuses that since such a process is ended without a word to its children.
        A grading worker ends by itself when its pipe does.
        """
        config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        daemonic = config.pop("daemon", None)
        try:
            super().start()
        finally:
            if daemonic is not None:
                config["daemon"] = daemonic

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


class WorkerPool:
    """`workers` processes, each of which is killed when one answer takes longer than `limit_s`.

    The limit is processor time from the moment when a worker takes up the answer, so that neither
    the start of the workers, nor a queue, nor a busy machine counts. pebble notices ten times a
    second that a worker is gone: add 0.2 s. `WALL_FACTOR` times the limit in wall time also ends an
    answer, in case a worker sleeps or is starved.
    """

    def __init__(self, workers: int, limit_s: float = LIMIT_S) -> None:
        if workers < 1 or limit_s <= 0:
            raise ValueError(
                f"a grading pool needs at least 1 worker and a limit above 0 s, "
                f"got workers={workers}, limit_s={limit_s}"
            )
        self.workers = workers
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._last_verdict = 0.0
        _pools.add(self)

    def submit(self, answer: str, golds: tuple[str, ...]) -> Callable[[], Reason]:
        """Queue one comparison of tidied texts; calling the result waits for its verdict."""
        first = self._schedule(answer, golds)

        def verdict() -> Reason:
            # The pool can break down without this answer's doing: it gets a second try.
            reason = self._wait(first) or self._wait(self._schedule(answer, golds))
            return reason or Reason.CRASH

        return verdict

    def close(self) -> None:
        """Stop the workers. The next answer starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _stop(pool)

    def reset_after_fork(self) -> None:
        """In a forked child: the workers, and the threads that talk to them, are the parent's."""
        self._lock = threading.Lock()
        self._pool = None

    def _schedule(self, answer: str, golds: tuple[str, ...]) -> _Scheduled | None:
        with self._lock:
            for _ in range(2):
                if self._pool is None:
                    self._pool = self._start()
                try:
                    future = self._pool.schedule(
                        worker.check,
                        args=(answer, golds, self.limit_s),
                        timeout=WALL_FACTOR * self.limit_s,
                    )
                except RuntimeError as error:  # it broke down while idle, or does not start
                    log.warning("grading workers are replaced: %s", error)
                    broken, self._pool = self._pool, None
                    _stop(broken)
                    continue
                future.add_done_callback(self._note_verdict)
                return _Scheduled(self._pool, future, time.monotonic())
        return None

    def _start(self) -> ProcessPool:
        for module in ("math_verify", "sympy"):
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"grading mathematics needs {module}; is it installed?")
        # Before `multiprocessing` joins the children, as it does at the end of any process.
        util.Finalize(None, self.close, exitpriority=_BEFORE_THE_JOIN)
        return ProcessPool(max_workers=self.workers, initializer=worker.warm_up, context=_Context())

    def _note_verdict(self, future: Future[Reason]) -> None:
        self._last_verdict = time.monotonic()

    def _wait(self, task: _Scheduled | None) -> Reason | None:
        """The verdict, or None if the pool broke down or got stuck before there was one."""
        if task is None:
            return None
        while not futures.wait([task.future], timeout=5.0).done:
            if time.monotonic() - max(task.since, self._last_verdict) > STUCK_AFTER_S:
                self._restart(task.pool, "no verdict for any answer")
                return None
        if task.future.cancelled():
            return None
        error = task.future.exception()
        if error is None:
            return task.future.result()
        if isinstance(error, TimeoutError):
            return Reason.TIMEOUT
        if isinstance(error, ProcessExpired) and error.exitcode == -signal.SIGPROF:
            return Reason.TIMEOUT
        if isinstance(error, BrokenProcessPool):
            self._restart(task.pool, str(error))
            return None
        return Reason.CRASH

    def _restart(self, pool: ProcessPool, why: str) -> None:
        with self._lock:
            if self._pool is not pool:  # another thread was first
                return
            self._pool = None
        log.warning("grading workers are replaced: %s", why)
        _stop(pool)


@dataclass(frozen=True)
class _Scheduled:
    pool: ProcessPool
    future: ProcessFuture[Reason]
    since: float


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


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
    for pool in _pools:
        pool.reset_after_fork()


os.register_at_fork(after_in_child=_reset_pools)
