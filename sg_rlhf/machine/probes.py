"""Run probe programs in parallel, each with a time limit, so that none can hang the doctor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Question:
    """A program that is started now, in its own process group.

    A process and not a thread, because name resolution cannot be interrupted, and a faulty driver
    blocks its caller.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self.missing = False
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                list(argv),
                env={**environment, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError:
            self._process = None
            self.missing = True

    def answer(self, deadline: float) -> tuple[int | None, str]:
        """Wait for the program.

        Args:
            deadline: time of `time.monotonic`.

        Returns:
            (exit status, output). The status is None if the program is missing or too slow.
        """
        if self._process is None:
            return None, ""
        try:
            text, _ = self._process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            # Do not wait for it: a process inside a hanging driver cannot be killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for stream in (self._process.stdout,):
                if stream is not None:
                    stream.close()
            return None, ""
        return self._process.returncode, text


def python(code: str, *arguments: str) -> list[str]:
    """The command line that runs code with the standard library alone."""
    return [sys.executable, "-I", "-S", "-c", code, *arguments]
