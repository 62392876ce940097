"""Runs instead of ``python``: the fork server makes the process.

Run as a file, with the standard library alone: ``python -I -S worker_launcher.py SOCKET
ARGUMENT...``. It sends its arguments, environment, folder and open files to the server, forwards
signals to the forked process and ends with its exit status. If there is no server, or it refuses,
it becomes the plain interpreter and says so.
"""

import json
import os
import signal
import socket
import sys

#: The server's answer when it has forked. Any other answer is the reason why it has not.
FORKED = b"\0"

#: The first variable of the server's environment, which nobody changes. setproctitle looks for the
#: title of a process in memory from there.
ENV_ANCHOR = "SG_FORK_SERVER_FIRST"

#: Linux sends at most this many open files in one message.
MAX_FILES = 253

#: The server keeps received files at this number and above, so that their final numbers stay free.
#: A process may often open 1,024 files.
FD_OFFSET = 600

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def open_files() -> list[int]:
    """The numbers of this process's open files, sorted."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the file of the listing itself
            continue
        numbers.append(int(name))
    return sorted(numbers)


def main(address: str, arguments: list[str]) -> int:
    """Request a process and wait for its end."""
    files = open_files()
    # Signals after the fork are for the forked process, so they wait until there is a handler.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    server = socket.socket(socket.AF_UNIX)
    try:
        if len(files) > MAX_FILES or files[-1] >= FD_OFFSET:
            raise OSError("too many open files to pass on")
        server.connect(address)
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": sorted(os.sched_getaffinity(0)),
            "blocked": [int(s) for s in blocked],
        }
        socket.send_fds(server, [b"?"], files)
        server.sendall(json.dumps(request).encode() + b"\n")
        answer = server.recv(1)
        if answer != FORKED:
            raise OSError((answer + server.recv(1024)).decode() or "it ended")
    except OSError as error:
        print(f"sg_rlhf: without the fork server: {error}", file=sys.stderr, flush=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execv(sys.executable, [sys.executable, *arguments])

    def forward(number: int, _frame: object) -> None:
        server.send(bytes([number]))

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    status = server.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
