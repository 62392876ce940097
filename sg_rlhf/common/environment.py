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
    from types import TracebackType

_ROOT = Path(__file__).resolve().parents[2]
#: Failed imports in these folders get our own message.
_OURS = (str(_ROOT / "sg_rlhf") + os.sep, str(_ROOT / "eval") + os.sep)
_COMMAND = re.compile(r"(?<![\w./-])(?:python(?= -m (?:sg_rlhf|eval)\b)|sg-rlhf(?= [a-z]))")

#: Variables of NCCL, of gloo and of PyTorch's NCCL groups: interfaces, transports, limits.
NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


def network_variables() -> dict[str, str]:
    """The exported settings of NCCL and gloo, which every process of a run needs."""
    return {k: v for k, v in os.environ.items() if k.startswith(NETWORK_VARIABLES)}


def as_typed(text: str) -> str:
    """``text`` with its commands written so that they run in this environment.

    ``python -m sg_rlhf...``, ``python -m eval...`` and ``sg-rlhf ...`` get the path of this
    environment's program, unless PATH finds it.
    """
    return _COMMAND.sub(lambda found: script(found[0]), text)


def script(name: str) -> str:
    """How to type a program of this environment, such as ``python``, in the current folder.

    The bare name if PATH finds this environment's program, or if it has none.
    """
    folder = os.path.dirname(os.path.abspath(sys.executable))
    on_path = shutil.which(name)
    here = os.path.join(folder, name)
    if not os.path.exists(here) or (on_path and os.path.abspath(on_path) == here):
        return name
    return _short(here)


def explain_missing_packages() -> None:
    """Report a missing package in one line with exit status 2, for ``python -m MODULE``."""
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = _missing(error, trace) if isinstance(error, ModuleNotFoundError) else ""
    if not line:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)  # Python exits with this status, even from its hook


def _missing(error: ModuleNotFoundError, trace: TracebackType | None) -> str:
    """The missing package and the command that works; "" if no module of ours imported it."""
    importer = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen importlib"):
            importer = file
        trace = trace.tb_next
    package = (error.name or "").partition(".")[0]
    if package in ("", "sg_rlhf", "eval") or not importer.startswith(_OURS):
        return ""
    words = getattr(sys, "orig_argv", ["-m", "sg_rlhf"])
    remedy = with_packages(words[words.index("-m") :])
    return f"{package} is not installed for {sys.executable}; {remedy}"


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
