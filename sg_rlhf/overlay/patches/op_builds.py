"""DeepSpeed's C++ operators: compiled once per environment, surviving a killed build.

Recipes need none (:mod:`sg_rlhf.overlay.model.adam`); other optimizers and DeepCompile do.

torch guards such a build with a plain file named ``lock``. A process killed while it compiles
leaves that file behind, and every later run that needs the operator waits for its removal without
end and without a word. Here the kernel holds the lock instead, which dies with its process, and
each environment builds in a folder of its own: a file ``lock`` found under that lock is a dead
one. A user's own ``TORCH_EXTENSIONS_DIR`` may be shared with other programs and is left alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.reporting import activity

VARIABLE = "TORCH_EXTENSIONS_DIR"


def folder() -> Path:
    """Where this environment builds: beside its packages, so that two never share a build."""
    return Path(sys.prefix) / "torch_extensions"


def install() -> None:
    """Name the folder for the builds of this process; call it before anything is built."""
    if VARIABLE not in os.environ and os.access(sys.prefix, os.W_OK):
        os.environ[VARIABLE] = str(folder())


def enabled() -> bool:
    """Whether builds go to our folder, where no other program waits for torch's own lock."""
    return os.environ.get(VARIABLE) == str(folder())


def with_file_lock(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``cpp_extension.load`` that waits for the kernel's lock and clears a dead one."""
    from filelock import FileLock

    @functools.wraps(original)
    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        build = folder() / name
        build.mkdir(parents=True, exist_ok=True)
        # Debug symbols double the compiler's work (17 MB of them) and change no instruction.
        flags = [flag for flag in kwargs.get("extra_cflags") or [] if flag != "-g"]
        with activity.nested(f"DeepSpeed's operator {name}"), FileLock(build.with_suffix(".flock")):
            (build / "lock").unlink(missing_ok=True)
            return original(name, *args, **{**kwargs, "extra_cflags": flags})

    return load
