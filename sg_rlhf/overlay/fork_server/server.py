"""A process that imports what every worker of a run imports, once, and is forked for each of them.

It has one thread and never joins Ray, so that nothing is running or locked at a fork: where an
import has started a second thread it refuses, and the workers start as they do without it. It ends
when the driver does, whatever ends that one: the driver holds the other end of its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.fork_server import worker_launcher


def _import(modules: list[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):  # a worker that needs it says so itself
            importlib.import_module(name)


def _locate_proctitle() -> None:
    """Have a process's title found in memory while the first variable is where it was at the start.

    It is looked for from there, once; Ray has a copy of the code that does it.
    """
    if "setproctitle" in sys.modules:
        sys.modules["setproctitle"].getproctitle()


def _fork_alone() -> int:
    """``os.fork`` where no other thread runs, whose locks would stay locked in the child.

    Raises:
        OSError: one runs, or the machine has no room for a process.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"its imports have started threads ({threads} are running)")
    return os.fork()


def _request(connection: socket.socket) -> dict[str, Any]:
    """What a stand-in sends; its files are open above :data:`stand_in.HIGH`."""
    connection.settimeout(10.0)
    first, files, _, _ = socket.recv_fds(connection, 1, worker_launcher.MAX_FILES)
    if not first:
        raise ConnectionError("the other side is gone")
    held = []
    for file in files:
        held.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, worker_launcher.FD_OFFSET))
        os.close(file)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    connection.settimeout(None)
    request["held"] = held
    return request


def _apply_request(request: dict[str, Any], keep: set[int]) -> None:
    """Turn a fork of this process into what the request describes, up to running its code.

    Args:
        request: see :func:`_request`.
        keep: open files of the server that its imports opened, which the child may need.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    asked = dict(zip(request["held"], request["files"], strict=True))
    for file in worker_launcher.open_files():
        if file not in asked and file not in keep:
            os.close(file)
    for held, number in asked.items():
        os.dup2(held, number)
        os.close(held)
    for name in set(os.environ) - set(request["environment"]) - {worker_launcher.ENV_ANCHOR}:
        del os.environ[name]
    for name, value in request["environment"].items():
        if os.environ.get(name) != value:  # the others stay where they are: see _find_title
            os.environ[name] = value
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):  # less nice than the server needs a privilege
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    os.sched_setaffinity(0, request["cores"])
    # Python's own generator seeds itself anew.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run_python(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` runs: ``-c CODE``, ``-m MODULE`` or a file."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        option = rest.pop(0)
        if option in ("-W", "-X"):
            rest.pop(0)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        code = compile(rest[1], "<string>", "exec")
    else:
        sys.argv = rest
        main.__file__ = rest[0]
        code = compile(Path(rest[0]).read_bytes(), rest[0], "exec")
    exec(code, main.__dict__)


class _Server:
    """Forks on request, passes signals on, and reports how each process ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._over: list[bool] = []
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._over.append(True))
        signal.set_wakeup_fd(wake)

    def serve(self) -> dict[str, Any] | None:
        """Until the driver is gone; in a forked process: what it is to be."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0 or self._over:
                    return None
                if key.fileobj == self._woken:
                    self._reap()
                elif key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                else:
                    self._pass_on(key.fileobj, key.data)

    def end_all(self) -> None:
        """Kill what is still there."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _forget(self) -> None:
        """In a forked process: close what is the server's."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for connection in (self._listener, *self._children.values()):
            connection.close()

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        try:
            request = _request(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        try:
            pid = _fork_alone()
        except OSError as error:
            answer = str(error).encode()
        else:
            if pid == 0:
                # Ray kills the whole process group of a worker that died.
                os.setpgid(0, 0)
                connection.close()
                self._forget()
                return request
            answer = worker_launcher.FORKED
        for file in request["held"]:
            os.close(file)
        with contextlib.suppress(OSError):  # it may be gone, as is noticed in its turn
            connection.sendall(answer)
        if answer != worker_launcher.FORKED:
            connection.close()
            return None
        self._children[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _pass_on(self, connection: Any, pid: int) -> None:
        """A signal for the process; or its stand-in is gone, and with it the process's purpose."""
        if pid not in self._children:  # reaped in this turn
            return
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        with contextlib.suppress(ProcessLookupError):
            for number in signals or [signal.SIGKILL]:
                os.kill(pid, number)
        if not signals:
            self._selector.unregister(connection)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self._children.pop(pid, None)
            if connection is None:
                continue
            code = os.waitstatus_to_exitcode(how)
            with contextlib.suppress(OSError):
                connection.send(bytes([code if code >= 0 else 128 - code]))
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()


def main(listener: int, folder: str, modules: list[str]) -> None:
    """The server, and whatever is forked of it."""
    from sg_rlhf.overlay.patches import table

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    table.install()
    before = set(worker_launcher.open_files())
    _import(modules)
    _locate_proctitle()
    gc.collect()
    gc.freeze()  # a collection would copy the pages that are shared
    opened = set(worker_launcher.open_files()) - before
    server = _Server(socket.socket(fileno=listener))
    request = None
    try:
        request = server.serve()
    finally:
        if request is None:
            server.end_all()
            shutil.rmtree(folder, ignore_errors=True)
    if request is None:
        return
    _apply_request(request, opened)
    _run_python(request["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
