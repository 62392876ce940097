"""Whether the CUDA toolkit here can compile what ``ds.deepcompile`` needs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = "CUDA_HOME"
#: Where a toolkit is installed that nothing names.
DEFAULT = Path("/usr/local/cuda")


def install(default: Path = DEFAULT) -> None:
    """Name the toolkit in this process, as scripts/bootstrap.sh does; before torch looks for one.

    torch takes the folder above the first nvcc on the path, which is wrong where that is a link or
    a wrapper. In every worker: nodes of a cluster differ.
    """
    if not os.environ.get(HOME) and os.access(default / "bin" / "nvcc", os.X_OK):
        os.environ[HOME] = str(default)


def release(home: Path) -> tuple[int, int] | None:
    """The toolkit's version by its nvcc; None where that does not run."""
    try:
        output = subprocess.check_output([str(home / "bin" / "nvcc"), "-V"], text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else None


def unsupported_settings(value: Callable[[str], Any]) -> list[str]:
    """What this machine's toolkit cannot compile; nothing for a cluster, which has its own.

    Args:
        value: a function from a dotted key to its resolved value.
    """
    if "RAY_ADDRESS" in os.environ or not value("ds.deepcompile"):
        return []
    install()
    import torch
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    found = problem(home, release(Path(home)) if home else None, torch.version.cuda)
    return [found] if found else []


def problem(
    home: str | None, toolkit: tuple[int, int] | None, torch_cuda: str | None
) -> str | None:
    """A sentence if DeepSpeed cannot compile what ``ds.deepcompile`` needs.

    Args:
        home: the toolkit's folder; None without one.
        toolkit: its version; None without a nvcc that runs.
        torch_cuda: the version of CUDA that torch was built for; None for a build without.
    """
    if torch_cuda is None or (toolkit is not None and same_major(toolkit, torch_cuda)):
        return None
    if toolkit is not None:
        found = f"{home} is {toolkit[0]}.{toolkit[1]}, and torch is built for {torch_cuda}"
    else:
        found = f"{home} has no nvcc that runs" if home else "there is none"
    return (
        f"ds.deepcompile=true: needs the CUDA toolkit, which compiles its operators, but {found}: "
        f"install one of {torch_cuda.split('.')[0]}.x and set {HOME}; or set ds.deepcompile=false"
    )


def same_major(toolkit: tuple[int, int], torch_cuda: str) -> bool:
    """Whether code compiled by the toolkit runs with the libraries that torch brings."""
    return toolkit[0] == int(torch_cuda.split(".")[0])
