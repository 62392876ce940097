"""Parts of a benchmark that need a process of their own: their memory is theirs alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FLAG = "--child"


def child(script: str, *arguments: object) -> dict[str, Any]:
    """What a part of a script found, which it prints as JSON when it is called with the flag.

    Args:
        script: its ``__file__``.
        arguments: behind the flag.
    """
    done = subprocess.run(
        [sys.executable, script, FLAG, *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
