"""What a core of vLLM died of, from the log that it shares with its engine's process."""

from __future__ import annotations

import os
import re

#: Where this process and its core write to.
OWN_LOGS = ("/proc/self/fd/1", "/proc/self/fd/2")
#: Bytes at the end of a log that are searched: the tracebacks of a core and of its engine.
_TAIL = 2**18
#: A line that the core logs as an error: "(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:9] ...".
_find_lines = re.compile(r"EngineCore.*? ERROR .*?\[core\.py:\d+\] (.*)").findall
_is_error = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b").match
_MAX_LENGTH = 300


def last_error(log: str) -> str:
    """The last line of a core's tracebacks in a log that names an error; "" without one."""
    try:
        with open(log, "rb") as file:
            if not os.path.isfile(log):
                return ""
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    errors = [line.strip() for line in _find_lines(text) if _is_error(line)]
    return errors[-1][:_MAX_LENGTH] if errors else ""
