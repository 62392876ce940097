"""Programs that are asked something, all at once, each with a limit: none may hang the doctor."""

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
    """A program that runs from now on, in a process group of its own.

    A process and not a thread: name resolution cannot be told to stop, and a driver in trouble
    keeps whoever asks it.
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
        """Exit status and what was printed; status None when it was not there or not in time.

        Args:
            deadline: of `time.monotonic`.
        """
        if self._process is None:
            return None, ""
        try:
            text, _ = self._process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            # Not waited for: a process inside a hanging driver does not even die.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for stream in (self._process.stdout,):
                if stream is not None:
                    stream.close()
            return None, ""
        return self._process.returncode, text


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs code with nothing but the standard library."""
    return [sys.executable, "-I", "-S", "-c", code, *arguments]
