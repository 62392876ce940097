"""Join a Ray cluster, or start a local one and end all of its processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import ray
from ray._private import services

from sg_rlhf.common.text import notice_if_slow, single_line
from sg_rlhf.ray_session import auth_token

#: Since Ray 2.60 a cluster may require a token that the user did not configure.
TOKEN_NEEDED = (
    f" (if the cluster asks for a token, set {auth_token.MODE}=token, and {auth_token.TOKEN} or "
    "~/.ray/auth_token to the cluster's)"
)


class ClusterError(ValueError):
    """No Ray cluster, or one that is too small; the message says what to change."""


def join(address: str, setting: str = "RAY_ADDRESS", **options: Any) -> None:
    """Connect to a running cluster.

    Args:
        address: as for `ray.init`.
        setting: the setting that has the address, for the message.
        options: options of `ray.init`.

    Raises:
        ClusterError: nothing answers there.
    """
    try:
        _check_that_someone_listens(address)
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises bare exceptions
        # For a missing token Ray only says that it failed to connect.
        token = TOKEN_NEEDED
        if isinstance(error, OSError) or auth_token.MODE in os.environ:
            token = ""
        raise ClusterError(
            f"{setting}: Ray at {address}: cannot join: {single_line(error)}{token}"
        ) from error


def _check_that_someone_listens(address: str, timeout_seconds: float = 10.0) -> None:
    """Refuse a `host:port` that does not answer: Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        notice = notice_if_slow(f"waiting for Ray at {address} (up to {timeout_seconds:g} s)")
        with notice, socket.create_connection((host.strip("[]"), int(port)), timeout_seconds):
            pass


def start(*, attempts: int = 3, seconds: float = 180.0, **options: Any) -> None:
    """Start a local Ray. Retry if the machine is too busy for the 30 seconds that Ray waits.

    Args:
        attempts: number of attempts.
        seconds: limit of each attempt, because Ray sometimes waits forever for a process.
        options: options of `ray.init`.

    Raises:
        ClusterError: it did not start, or the options are wrong.
    """
    for attempt in range(1, attempts + 1):
        before = psutil.Process().children(recursive=True)
        try:
            with _in_own_session():
                _call_within(seconds, ray.init, address="local", include_dashboard=False, **options)
            return
        except Exception as error:  # Ray raises bare exceptions
            started = {*psutil.Process().children(recursive=True)}
            with contextlib.suppress(TimeoutError):
                _call_within(30.0, ray.shutdown)
            started |= {*psutil.Process().children(recursive=True)}
            kill_all([process for process in started if process not in before], grace_seconds=0.0)
            address = ray.util.get_node_ip_address()
            if ":" in address:
                raise ClusterError(
                    f"Ray did not start on {address}: give this machine an IPv4 address, which "
                    f"Ray needs ({single_line(error)})"
                ) from error
            if attempt == attempts or isinstance(error, ValueError):
                raise ClusterError(
                    f"Ray did not start (attempt {attempt}): {single_line(error)} (load average "
                    f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
                ) from error


@contextlib.contextmanager
def _in_own_session() -> Iterator[None]:
    """Ray's processes get a session of their own, which a signal to our process group spares.

    Else ``timeout``, ``kill -- -GROUP`` and a closed terminal end them before the run has saved.
    They still end with this process: Ray asks Linux for that.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _call_within(seconds: float, function: Callable[..., object], **options: Any) -> None:
    """Call a function, with a time limit if this is the main thread.

    The alarm repeats, because the first error may be caught by code that catches all errors.

    Raises:
        TimeoutError: the function has not returned in time.
    """
    has_ended = False

    def raise_timeout(_signum: int, _frame: Any) -> None:
        if not has_ended:
            raise TimeoutError(f"it was not there after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        function(**options)
        return
    previous = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 4)
        function(**options)
    finally:
        # An alarm on the way must not raise any more. Python runs signal handlers after calls and
        # jumps, so none can run before this assignment. A context manager has calls in between.
        has_ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def kill_all(processes: list[psutil.Process], grace_seconds: float) -> None:
    """Kill the processes that are alive after the grace period."""
    deadline = time.time() + grace_seconds
    alive = _alive(processes)
    while alive and time.time() < deadline:
        time.sleep(0.1)
        alive = _alive(alive)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
