"""Whether the CUDA toolkit here can compile what ``ds.deepcompile`` needs.

DeepSpeed accepts a toolkit of torch's version, or of a minor version in its table. The table ends
at CUDA 12 and torch is built for 13.0, so it would refuse 13.1. CUDA is compatible within a major
version: a run turns DeepSpeed's check off (``DS_SKIP_CUDA_CHECK=1``), and this one takes its place.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sg_rlhf.common import cuda_home


def release(home: Path) -> tuple[int, int] | None:
    """The toolkit's version by its nvcc; None where that does not run."""
    try:
        output = subprocess.check_output([str(home / "bin" / "nvcc"), "-V"], text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else None


def unsupported_settings(value: Callable[[str], Any]) -> list[str]:
    """What this machine's toolkit cannot compile; nothing for a cluster, which has its own."""
    if "RAY_ADDRESS" in os.environ or not value("ds.deepcompile"):
        return []
    cuda_home.install()
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
        home, toolkit: the toolkit's folder, and its version by a nvcc that runs.
        torch_cuda: the version of CUDA that torch was built for; None for a build without.
    """
    if torch_cuda is None:
        return None
    major = torch_cuda.split(".")[0]
    if toolkit is not None and toolkit[0] == int(major):
        return None
    if toolkit is not None:
        found = f"{home} is {toolkit[0]}.{toolkit[1]}, and torch is built for {torch_cuda}"
    else:
        found = f"{home} has no nvcc that runs" if home else "there is none"
    return (
        f"ds.deepcompile=true: needs the CUDA toolkit, which compiles its operators, but {found}: "
        f"install one of {major}.x and set {cuda_home.HOME}; or "
        "set ds.deepcompile=false"
    )
