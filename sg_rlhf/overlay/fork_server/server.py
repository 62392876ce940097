"""A process that imports the modules of all workers once, and forks itself for each worker.

It has one thread and never joins Ray, so that no lock is held at a fork. If an import has started a
second thread, it refuses, and the workers start as plain interpreters. It ends with the driver,
which holds the other end of its standard input.
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
        with contextlib.suppress(ImportError):  # a worker that needs the module fails itself
            importlib.import_module(name)


def _locate_proctitle() -> None:
    """Let setproctitle find the title in memory, before the environment changes."""
    if "setproctitle" in sys.modules:
        sys.modules["setproctitle"].getproctitle()


def _fork_alone() -> int:
    """``os.fork``, or OSError if another thread runs: its locks would stay locked in the child."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"its imports have started threads ({threads} are running)")
    return os.fork()


def _request(connection: socket.socket) -> dict[str, Any]:
    """Read a launcher's request. "received" has its open files, at ``FD_OFFSET`` and above."""
    connection.settimeout(10.0)
    first, files, _, _ = socket.recv_fds(connection, 1, worker_launcher.MAX_FILES)
    if not first:
        raise ConnectionError("the other process has ended")
    received = []
    for file in files:
        received.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, worker_launcher.FD_OFFSET))
        os.close(file)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    connection.settimeout(None)
    request["received"] = received
    return request


def _apply_request(request: dict[str, Any], keep: set[int]) -> None:
    """Give a fork of this process the requested files, environment, folder, niceness and cores."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    numbers = dict(zip(request["received"], request["files"], strict=True))
    for file in worker_launcher.open_files():
        if file not in numbers and file not in keep:
            os.close(file)
    for received, number in numbers.items():
        os.dup2(received, number)
        os.close(received)
    for name in set(os.environ) - set(request["environment"]) - {worker_launcher.ENV_ANCHOR}:
        del os.environ[name]
    for name, value in request["environment"].items():
        if os.environ.get(name) != value:  # equal ones must not move: _locate_proctitle
            os.environ[name] = value
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):  # lower than the server's needs a privilege
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    os.sched_setaffinity(0, request["cores"])
    # Python's own generator seeds itself after a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run_python(arguments: list[str]) -> None:
    """Run what ``python ARGUMENTS`` would run: ``-c CODE``, ``-m MODULE`` or a file."""
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
    """Forks on request, passes on signals, and reports the exit status of each process."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._terminated: list[bool] = []
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._wakeup, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._terminated.append(True))
        signal.set_wakeup_fd(wakeup_writer)

    def serve(self) -> dict[str, Any] | None:
        """Serve until the driver ends; None in the server, the request in a forked process."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0 or self._terminated:
                    return None
                if key.fileobj == self._wakeup:
                    self._reap()
                elif key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                else:
                    self._forward(key.fileobj, key.data)

    def end_all(self) -> None:
        """Kill all forked processes that still run."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        """In a forked process: close the files of the server."""
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
                # In its own process group: Ray kills the whole group of a worker that died.
                os.setpgid(0, 0)
                connection.close()
                self._close()
                return request
            answer = worker_launcher.FORKED
        for file in request["received"]:
            os.close(file)
        with contextlib.suppress(OSError):  # the launcher may have ended; _forward notices
            connection.sendall(answer)
        if answer != worker_launcher.FORKED:
            connection.close()
            return None
        self._children[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _forward(self, connection: Any, pid: int) -> None:
        """Forward a launcher's signals to its process. Kill it if the launcher has ended."""
        if pid not in self._children:  # reaped just before
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
            os.read(self._wakeup, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self._children.pop(pid, None)
            if connection is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                connection.send(bytes([code if code >= 0 else 128 - code]))
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()


def main(listener: int, folder: str, modules: list[str]) -> None:
    """Run the server; in a forked process, run the requested program."""
    from sg_rlhf.overlay.patches import table

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    table.install()
    before = set(worker_launcher.open_files())
    _import(modules)
    _locate_proctitle()
    gc.collect()
    gc.freeze()  # a collection would copy shared pages
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
