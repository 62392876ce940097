"""A grading process: it computes what its trainer asks for, and can do nothing else.

A model chooses the text that the parser and sympy get, and a fault in either would run what it
wrote. So a worker gives up, for good and before the first answer:

- by `setrlimit`, on any Unix: more than 2 GiB of addresses, core files, files that it writes;
- by a seccomp filter, on Linux and x86-64: every system call but those of `ALLOWED` and opening
  files to read.

A refused call is an `OSError`. Not covered: reading the files that its user may read (without a
way out but its verdict), and other systems than Linux on x86-64, where the limits alone hold.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import logging
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

#: Address space of one worker. sympy needs about 0.3 GiB; 9^{9^9} would take all there is.
MEMORY_BYTES = 2 * 2**30

#: System calls of x86-64 that computing and reading files need.
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99,
    "times": 100, "getuid": 102, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "getdents64": 217, "clock_gettime": 228, "clock_getres": 229,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "getrandom": 318, "statx": 332,
}  # fmt: skip
#: Calls that open files, and which of their arguments has the flags.
_OPENING = {"open": (2, 1), "openat": (257, 2)}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_X86_64 = 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


def serve() -> None:
    """Answer the calls of standard input, a line of JSON each, until it ends.

    A call is [module:function, arguments, limit]; the answer is [value], or null where it raised.
    After `limit` seconds of processor time the kernel ends the process with SIGPROF: a verdict must
    not depend on what else the machine does.
    """
    # An interrupt is for the trainer, which may still store this answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = os.fdopen(os.dup(0)), os.dup(1)
    # The parser prints, and what it prints is no answer.
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    logging.disable(logging.CRITICAL)
    confined = False
    for line in calls:
        answer = json.dumps(_call(*json.loads(line)))
        if not confined:
            enter_sandbox()
            confined = True
        os.write(answers, answer.encode())


def _call(name: str, arguments: list[Any], limit_s: float) -> list[Any] | None:
    module, _, function = name.partition(":")
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return [getattr(importlib.import_module(module), function)(*arguments)]
    except Exception:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def enter_sandbox() -> None:
    """Give up, in this process and for good, what a verdict does not need."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    cap = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (cap, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if is_supported():
        _filter_calls()


def is_supported() -> bool:
    """Whether system calls can be refused here."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _filter_calls() -> None:
    """Install the filter, as the kernel's classic BPF: (code, jump if true, jump if not, value)."""
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
    ]
    for number in ALLOWED.values():
        steps += [(_EQUAL, 0, 1, number), allow]
    for number, argument in _OPENING.values():
        flags = (_LOAD, 0, 0, 16 + 8 * argument)
        steps += [(_EQUAL, 0, 4, number), flags, (_ANY_BIT, 0, 1, _WRITING), refuse, allow]
    code = b"".join(struct.pack("<HBBI", *step) for step in [*steps, refuse])
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    # A kernel without filters, or a container that refuses them: the limits hold all the same.
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        prctl(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)
