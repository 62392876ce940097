"""``python`` whose process is forked from one that has already imported what a worker imports.

Run as a file, with the standard library alone: ``python -I -S stand_in.py SOCKET ARGUMENT...``
hands its arguments, environment, folder and open files to the server that listens there, passes on
the signals that it gets, and ends when the forked process does, with its exit status.
Where there is no server, or it refuses, this becomes the plain interpreter and says so.
"""

import json
import os
import signal
import socket
import sys

#: The server's answer when it has forked; anything else is the reason why it has not.
FORKED = b"\0"

#: The first variable of the server's environment, which nobody changes: a process's title is looked
#: for from where it is.
ENV_ANCHOR = "SG_FORK_SERVER_FIRST"

#: Linux sends at most this many open files in one message.
MAX_FILES = 253

#: The server holds them above the numbers that they are to have; a process may often open 1,024.
FD_OFFSET = 600

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def open_files() -> list[int]:
    """Numbers of this process's open files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        found.append(int(name))
    return sorted(found)


def main(address: str, arguments: list[str]) -> int:
    """Ask for a process and wait for its end; returns its exit status."""
    files = open_files()
    # From the fork on they are for the forked process: one before there is a handler waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = socket.socket(socket.AF_UNIX)
    try:
        if len(files) > MAX_FILES or files[-1] >= FD_OFFSET:
            raise OSError("too many open files to hand over")
        server.connect(address)
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": sorted(os.sched_getaffinity(0)),
            "blocked": [int(s) for s in before],
        }
        socket.send_fds(server, [b"?"], files)
        server.sendall(json.dumps(request).encode() + b"\n")
        answer = server.recv(1)
        if answer != FORKED:
            raise OSError((answer + server.recv(1024)).decode() or "it ended")
    except OSError as error:
        print(f"sg_rlhf: without the fork server: {error}", file=sys.stderr, flush=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.execv(sys.executable, [sys.executable, *arguments])

    def pass_on(number: int, _frame: object) -> None:
        server.send(bytes([number]))

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = server.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
