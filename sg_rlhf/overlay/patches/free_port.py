"""A port for a meeting point that is opened long after it is chosen: the ranks', the weight sync's.

Upstream asks the kernel for a free port, closes it, and rank 0 listens there once its model's
process is up: seconds in which the kernel hands the same port to anybody who asks for one, vLLM and
Ray among them, and the run ends with "address already in use". The kernel hands out ports of one
range by itself; those below it go to who names them.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Ray's workers have the ports from 10002 to 19999 unless told otherwise.
FIRST = 20_000
_TRIES = 100


def free_port(_actor: Any = None, first_of_kernel: int | None = None) -> int:
    """A free port below those that the kernel hands out; any free one if there are none.

    Args:
        first_of_kernel: the first of the kernel's range; by default what this machine says.
    """
    if first_of_kernel is None:
        first_of_kernel = int(RANGE.read_text().split()[0]) if RANGE.is_file() else FIRST
    below = range(FIRST, first_of_kernel)
    # Not from torch's or Python's seeded generators: two runs of one seed would meet here.
    chosen = random.SystemRandom()
    candidates = chosen.sample(below, min(_TRIES, len(below)))
    for port in [*candidates, 0]:
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise OSError("no free port")
