"""What a grading worker may still do once it is ready: compute, and talk to its trainer.

A model chooses the text that the parser and sympy get, and a fault in either would run what it
wrote. So a worker gives up, for good and before the first answer:

- by `setrlimit`, on any Unix: more than 2 GiB of addresses, core files, files that it writes;
- by a seccomp filter, on Linux and x86-64: sockets, other programs and processes, files to open for
  writing, to delete, to rename or to change in mode, times and attributes, shared memory, message
  queues, signals to others. It is a list of what is refused, with every call that is newer than the
  list: Python, numpy and the C library need too many calls for a list of what is allowed.

A refused call is an `OSError` in the worker. Not covered: reading the files that its user may read
(without a way out but its verdict, one word), time (`worker.check`), and other systems than
Linux on x86-64, where the limits alone hold.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

#: Address space of one worker. sympy needs about 0.3 GiB; 9^{9^9} would take all there is.
MEMORY_BYTES = 2 * 2**30

#: System calls of x86-64 that a verdict does not need.
REFUSED = {
    "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "sendmsg": 46, "bind": 49,
    "listen": 50, "socketpair": 53, "accept4": 288, "sendmmsg": 307,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "pidfd_open": 434,
    "pidfd_send_signal": 424, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
    "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "truncate": 76,
    "ftruncate": 77, "mknod": 133, "mkdirat": 258, "mknodat": 259, "fchownat": 260,
    "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fchmodat": 268,
    "renameat2": 316, "openat2": 437, "memfd_create": 319, "memfd_secret": 447, "fchmodat2": 452,
    "fallocate": 285, "copy_file_range": 326, "sendfile": 40, "splice": 275, "tee": 276,
    "vmsplice": 278, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
    "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66,
    "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
    "mq_unlink": 241, "mq_timedsend": 242, "mq_timedreceive": 243, "mq_notify": 244,
    "rt_tgsigqueueinfo": 297, "pidfd_getfd": 438, "process_madvise": 440, "kcmp": 312,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "swapon": 167, "swapoff": 168, "quotactl": 179,
    "quotactl_fd": 443, "acct": 163, "reboot": 169, "sethostname": 170, "setdomainname": 171,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "finit_module": 313,
    "kexec_load": 246, "kexec_file_load": 320, "settimeofday": 164, "clock_settime": 227,
    "adjtimex": 159, "clock_adjtime": 305, "perf_event_open": 298, "fanotify_init": 300,
    "io_uring_register": 427, "add_key": 248, "request_key": 249,
    "mount": 165, "umount2": 166, "chroot": 161, "pivot_root": 155, "setns": 308, "unshare": 272,
    "bpf": 321, "io_uring_setup": 425, "io_uring_enter": 426, "userfaultfd": 323, "keyctl": 250,
    "prlimit64": 302, "setrlimit": 160,
}  # fmt: skip
#: The first number that no kernel used when the list was made (mseal, Linux 6.10, is the last one).
_UNKNOWN = 463
_OPEN, _OPENAT, _CLONE, _CLONE3 = 2, 257, 56, 435
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x00010000
_X86_64 = 0xC000003E
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


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


def seccomp_program() -> bytes:
    """The filter: what each system call comes to, as the kernel's classic BPF."""
    refuse = [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32),  # the same calls under other numbers
        (_RETURN, 0, 0, _KILL),
        # As an older kernel answers: the C library then takes the call that was there before.
        (_AT_LEAST, 0, 1, _UNKNOWN),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in REFUSED.values():
        steps += [(_EQUAL, 0, 1, number), *refuse]
    # glibc falls back to clone, whose flags can be read: threads are allowed, processes are not.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number, argument, bits, when_set in (
        (_OPEN, 1, _WRITING, True), (_OPENAT, 2, _WRITING, True), (_CLONE, 0, _CLONE_THREAD, False),
    ):  # fmt: skip
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, 16 + 8 * argument),
            (_ANY_BIT, *((0, 1) if when_set else (1, 0)), bits),
            *refuse,
            (_RETURN, 0, 0, _ALLOW),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _filter_calls() -> None:
    code = seccomp_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    # A kernel without filters, or a container that refuses them: the limits hold all the same.
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        prctl(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)
