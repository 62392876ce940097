"""Chooses the ports of the process groups of the ranks and of the weight sync.

Upstream asks the kernel for a free port, and rank 0 listens on it seconds later. Until then the
kernel may give it to another program. It gives ports from one range: here one below is taken.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: The lowest port. Ray's workers use 10002 to 19999 by default.
FIRST = 20_000
#: Ports to try at most.
_TRIES = 100


def free_port(first_of_kernel: int | None = None) -> int:
    """A free port below the kernel's range; any free port if there is none."""
    if first_of_kernel is None:
        first_of_kernel = int(RANGE.read_text().split()[0]) if RANGE.is_file() else FIRST
    below = range(FIRST, first_of_kernel)
    # Not a seeded generator: two runs with one seed would choose the same ports.
    generator = random.SystemRandom()
    candidates = generator.sample(below, min(_TRIES, len(below)))
    for port in [*candidates, 0]:
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise OSError("no free port")


class OwnPort:
    """Mixed into upstream's ranks: rank 0 takes its port by :func:`free_port`."""

    def _get_free_port(self) -> int:
        return free_port()
