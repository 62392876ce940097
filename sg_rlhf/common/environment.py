"""The running Python environment: commands that work in it, missing packages, versions.

Standard library and Python 3.8 only: it is imported before any package is known to be installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"(?<![\w./-])(?:python(?= -m (?:sg_rlhf|eval)\b)|sg-rlhf(?= [a-z]))")

#: Variables of NCCL, of gloo and of PyTorch's NCCL groups: interfaces, transports, limits.
NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


def network_variables() -> dict[str, str]:
    """The exported settings of NCCL and gloo, which every process of a run needs."""
    return {k: v for k, v in os.environ.items() if k.startswith(NETWORK_VARIABLES)}


def as_typed(text: str) -> str:
    """``text`` with its commands as they are typed here: with this environment's path if needed."""
    return _COMMAND.sub(lambda found: script(found[0]), text)


def script(name: str) -> str:
    """How to type a program of this environment here; its bare name if PATH finds it."""
    folder = os.path.dirname(os.path.abspath(sys.executable))
    on_path = shutil.which(name)
    here = os.path.join(folder, name)
    if not os.path.exists(here) or (on_path and os.path.abspath(on_path) == here):
        return name
    return _short(here)


def with_packages(words: Sequence[str]) -> str:
    """How to run a Python command line with the packages that it needs."""
    bootstrap, python = _ROOT / "scripts" / "bootstrap.sh", _ROOT / ".venv" / "bin" / "python"
    if not bootstrap.is_file():
        return "see docs/commands.md for what each command needs"
    command = shlex.join([_short(str(python)), *words])
    if python.is_file() and os.path.abspath(sys.executable) != str(python):
        return f"run {command}"
    return f"run {_short(str(bootstrap))}, then {command}"


def _short(path: str) -> str:
    """Relative to the current folder if inside it, else absolute."""
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> its version here, of those that are installed."""
    from importlib import metadata  # takes 20 ms, and few commands need it

    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
