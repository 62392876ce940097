"""The processes of one distributed job on this machine, for benchmarks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from sg_rlhf.overlay.patches.free_port import free_port


def outputs(command: Sequence[str], count: int, limit: float = 300.0) -> list[str]:
    """Run a command as each of ``count`` ranks; what each printed.

    Once one fails, or after ``limit`` seconds, the others are ended: they would wait for it.

    Raises:
        SystemExit: with the words of the rank that failed.
    """
    of_job = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
    }  # fmt: skip
    with contextlib.ExitStack() as files:
        said = [
            (files.enter_context(tempfile.TemporaryFile("w+")),
             files.enter_context(tempfile.TemporaryFile("w+")))
            for _ in range(count)
        ]  # fmt: skip
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **of_job, "RANK": str(index)}, stdout=out, stderr=errors
            )
            for index, (out, errors) in enumerate(said)
        ]
        until = time.monotonic() + limit
        try:
            while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
                if time.monotonic() > until:
                    sys.exit(f"{' '.join(command)}: not done after {limit:g} s")
                time.sleep(0.05)
        finally:
            failed = [index for index, rank in enumerate(ranks) if rank.poll()]
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed:
            _, errors = said[failed[0]]
            errors.seek(0)
            sys.exit(f"{' '.join(command)}, rank {failed[0]}: {errors.read().strip()}")
        found = []
        for out, _ in said:
            out.seek(0)
            found.append(out.read())
        return found
